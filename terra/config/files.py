"""Finds and composes the YAML files of conf/, and checks overrides and paths. Imports nothing heavy."""

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from terra.errors import ConfigError
from terra.locations import DEMO, PACKAGE, worlds_folder
from terra.worlds.places import archive_of, missing_world, unpacked_worlds

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_FOUND = ("${terra_adapters:", "${terra_worlds:")  # defaults: folders by name, any of them
_GLOB = re.compile(r"[*?\[]")


def config_dir() -> Path:
    """The folder of YAML files: `terra/conf` in an installed package, `conf` in a checkout."""
    return PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"


def register_resolvers(*, list_settings: bool = False) -> None:
    """Make `${terra_demo:NAME}` in YAML the path of a file or folder that ships with Terra.

    `${terra_world:NAME}` is the folder of a world that is not in the package, whether it is there or not, and
    `${terra_scenes:PRETRAINED}` the folder of a model's scenes: contexts/ beside it, else the shipped ones.
    `${terra_model_name:PRETRAINED}` is what clients call a model: "terra-demo", or its folder's or Hub id's name.
    `${terra_adapters:PRETRAINED}` are the folders of adapters that ship with a model, by name; none but for the demo's.
    `${terra_worlds:PRETRAINED}` are the folders of the worlds in `worlds_folder`, by name; none but beside the demo.
    `${terra_choices:CHOICES}` is the part of a help page that lists the options of a command's groups, and
    `${terra_settings:APP,NAME,CHOICES}` its end: the settings of conf/NAME.yaml with their comments, if
    `list_settings`, else how the program APP lists them.
    """
    OmegaConf.register_new_resolver("terra_demo", lambda name: str(DEMO / name), replace=True)
    OmegaConf.register_new_resolver("terra_world", lambda name: str(worlds_folder() / name), replace=True)
    OmegaConf.register_new_resolver("terra_scenes", _scenes, replace=True)
    OmegaConf.register_new_resolver("terra_model_name", _model_name, replace=True)
    OmegaConf.register_new_resolver("terra_adapters", _shipped_adapters, replace=True)
    OmegaConf.register_new_resolver("terra_worlds", _unpacked_worlds, replace=True)
    OmegaConf.register_new_resolver("terra_choices", _list_choices, replace=True)
    end = _list_settings if list_settings else _how_to_list_settings
    OmegaConf.register_new_resolver("terra_settings", end, replace=True)


def _model_name(pretrained: object) -> str:
    return "terra-demo" if _is_shipped(pretrained) else Path(str(pretrained)).resolve().name or "terra"


def _scenes(pretrained: object) -> str:
    own = Path(str(pretrained)) / "contexts"
    return str(own if own.is_dir() else DEMO / "contexts")


def _shipped_adapters(pretrained: object) -> dict[str, str]:
    """The folders in terra/demo/adapters/ that hold an adapter, for the model that ships with Terra."""
    found = sorted((DEMO / "adapters").glob("*")) if _is_shipped(pretrained) else []
    return {path.name: str(path) for path in found if (path / "adapter_config.json").is_file()}


def _unpacked_worlds(pretrained: object) -> dict[str, str]:
    """The folders of worlds in `worlds_folder`, for the model that ships with Terra."""
    return {name: str(path) for name, path in unpacked_worlds().items()} if _is_shipped(pretrained) else {}


def _is_shipped(pretrained: object) -> bool:
    return Path(str(pretrained)) == DEMO / "world_model"


def compose(config_name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """Compose the settings of conf/CONFIG_NAME.yaml with `key=value` overrides, as a command line does.

    Raises:
        HydraException: no such configuration, choice or key.
    """
    import hydra

    register_resolvers()
    with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
        return hydra.compose(config_name, list(overrides))


def choices(group: str) -> list[str]:
    """The names of a group's choices, such as those of `engine`."""
    return sorted(path.stem for path in (config_dir() / group).glob("*.yaml"))


def model_names() -> list[str]:
    """The names of models: the choices of the group `model`, but for that of a folder."""
    return [name for name in choices("model") if name != "folder"]


def compose_groups(groups: Mapping[str, str], values: Mapping[str, Any], *, resolve: bool = True) -> dict[str, Any]:
    """Compose settings from one choice of each group, as plain values.

    Args:
        groups: names of choices by names of groups.
        values: further settings, which the choices may refer to.
        resolve: replace `${...}` by values.

    Raises:
        ConfigError: no such choice.
    """
    register_resolvers()
    config = OmegaConf.create(dict(values))
    for group, name in groups.items():
        path = config_dir() / group / f"{name}.yaml"
        if not path.is_file():
            raise ConfigError(f"{group}: expected one of {', '.join(choices(group))}, got {name!r}")
        is_global = path.read_text(encoding="utf-8").startswith("# @package _global_")
        node = OmegaConf.load(path)
        config = OmegaConf.merge(node, config) if is_global else OmegaConf.merge(config, {group: node})
    plain: Any = OmegaConf.to_container(config, resolve=resolve)
    return plain


def plain(config: DictConfig) -> dict[str, Any]:
    """The settings as dictionaries and lists. Raises MissingMandatoryValue."""
    values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    return values


def check_keys(config_name: str, overrides: Sequence[str]) -> None:
    """Raise ConfigError for overrides of unknown settings, also for those with a + before their key.

    Keys below a setting whose value is an empty dictionary, such as `engine.engine_args`, or what `terra_adapters`
    or `terra_worlds` finds, are free.

    Raises:
        ConfigError: an unknown key; names the most similar one, or those of the key's group.
        HydraException: no such choice of a group.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_overrides(list(overrides))
    parsed = [each for each in parsed if re.split("[./]", each.key_or_group)[0] != "hydra"]
    groups = _groups(config_name)
    choices = [each for each in parsed if each.key_or_group in groups and not each.is_add()]
    # A choice decides which settings there are; one that is swept over can't be looked up.
    lines = [each.input_line for each in choices if not each.is_sweep_override()]
    known, free = _settings(compose(config_name, [line for line in lines if line]))
    for override in parsed:
        key = override.key_or_group
        if key in known or override in choices or any(key.startswith(f"{name}.") for name in free):
            continue
        raise ConfigError(f"{key}: no such setting{_hint(key, known | groups)}")


def check_paths(config: DictConfig, inputs: Sequence[str], models: Sequence[str] = ()) -> None:
    """Raise ConfigError for settings without a value and for missing input paths, before anything heavy is imported.

    Args:
        config: the settings.
        inputs: names of the settings that are input paths.
        models: names of the settings that are a model: a choice of the group `model`, a folder, or a Hub id. A setting
            called `pretrained` is a folder or a Hub id.

    Raises:
        ConfigError: names the setting.
    """
    if missing := sorted(OmegaConf.missing_keys(config)):
        given = " ".join(f"{name}=..." for name in missing)
        hint = _scenes_hint(config) if "context" in missing else ""
        raise ConfigError(f"{', '.join(missing)}: expected a value, got nothing: {given} is needed{hint}")
    values: Any = OmegaConf.to_container(config, resolve=True)
    for name, value in _leaves(values):
        is_model = name in models or name.rpartition(".")[2] == "pretrained"
        # Path.exists raises for names that are too long, os.path.exists does not.
        if not (is_model or name in inputs) or not isinstance(value, str) or os.path.exists(value):  # noqa: PTH110
            continue
        if is_model and archive_of(value) is not None:
            continue
        if is_model and not _HUB_ID.fullmatch(value) and not (name in models and value in model_names()):
            nothing = f"{name}: expected a checkpoint folder or a Hub id owner/name, found no folder {value}"
            raise ConfigError(missing_world(value) or nothing)
        if not is_model and not _GLOB.search(value):
            raise ConfigError(f"{name}: expected a file or folder, found nothing at {value}")


def _scenes_hint(config: DictConfig) -> str:
    """Where the model's own scenes are, as the end of a line; empty for a model without any."""
    pretrained = str(OmegaConf.select(config, "world_model.pretrained"))
    scenes = Path(_scenes(pretrained))
    if not scenes.is_dir() or (scenes == DEMO / "contexts" and Path(pretrained) != DEMO / "world_model"):
        return ""
    return f"; the model's scenes are in {scenes}"


def worlds_to_unpack(config: DictConfig) -> dict[Path, Path]:
    """The archives of the models that settings name by name and that are not unpacked, by the folders to be made."""
    if OmegaConf.missing_keys(config):
        return {}
    values: Any = OmegaConf.to_container(config, resolve=True)
    named = {str(value) for name, value in _leaves(values) if name.rpartition(".")[2] == "pretrained"}
    return {Path(each): archive for each in sorted(named) if (archive := archive_of(each)) is not None}


def _groups(config_name: str) -> set[str]:
    """Names of the configuration's groups, including the groups that are null."""
    import hydra

    with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
        config = hydra.compose(config_name, return_hydra_config=True)
    return {name for name in config.hydra.runtime.choices if not name.startswith("hydra/")}


def _settings(config: DictConfig) -> tuple[set[str], set[str]]:
    """Names of all settings and groups of settings, and the names of those below which any key may be."""
    values: Any = OmegaConf.to_container(config, resolve=False)
    leaves = dict(_leaves(values))
    known = {".".join(name.split(".")[: end + 1]) for name in leaves for end in range(name.count(".") + 1)}
    return known, {name for name, value in leaves.items() if value == {} or str(value).startswith(_FOUND)}


def _leaves(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _hint(key: str, known: set[str]) -> str:
    """What the user may have meant by an unknown key: below a known group one of its settings, else a similar name."""
    group, _, name = key.rpartition(".")
    own = sorted(each.rpartition(".")[2] for each in known if group and each.rpartition(".")[0] == group)
    if not own:
        similar = _most_like(key, known)
        return f"; did you mean {similar}?" if similar else ""
    if close := difflib.get_close_matches(name, own, n=1, cutoff=0.7):
        return f"; did you mean {group}.{close[0]}?"
    return f"; {group} has {', '.join(each for each in own if not each.startswith('_'))}"


def _most_like(key: str, known: set[str]) -> str | None:
    """The setting whose name, or whose name's last part, is most similar to that of `key`."""
    if close := difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.7):
        return close[0]
    lasts = {name.rpartition(".")[2]: name for name in sorted(known, reverse=True)}
    close = difflib.get_close_matches(key.rpartition(".")[2], sorted(lasts), n=1, cutoff=0.7)
    return lasts[close[0]] if close else None


def _list_choices(choices: Mapping[str, str]) -> str:
    lines = []
    for group in sorted(name for name in choices if not name.startswith("hydra/")):
        options = sorted(path.stem for path in (config_dir() / group).glob("*.yaml"))
        lines.append(f"{group}: {', '.join(options)}")
    return "\n".join(["CHOICES (choice=option)", *lines, ""]) if lines else ""


def _how_to_list_settings(app: str, _config_name: str, _choices: object) -> str:
    return f"{app} --help all       lists all settings, with their values"


def _list_settings(_app: str, config_name: str, choices: Mapping[str, str | None]) -> str:
    """The text of a configuration's file and of the files of its chosen groups, as YAML with comments."""
    parts = ["\nALL SETTINGS (setting=value)\n" + "".join(_sections(config_name).values()).strip()]
    for group, name in sorted(choices.items()):
        if group.startswith("hydra/") or name is None:
            continue
        text = _text(f"{group}/{name}.yaml")
        indented = "\n".join(f"  {line}" if line else "" for line in text.splitlines())
        is_global = text.startswith("# @package _global_\n")
        parts.append(text.partition("\n")[2].strip() if is_global else f"{group}:\n{indented}")
    return "\n\n".join(parts).replace("$", "$$")  # Hydra reads $NAME as a variable of the page


def _sections(config_name: str) -> dict[str, str]:
    """The lines of a configuration's file by top-level key; those of a configuration that it extends come first."""
    lines = re.findall(r"^(\w+):(.*\n(?:(?:[ #].*)?\n)*)", _text(f"{config_name}.yaml"), flags=re.MULTILINE)
    sections = {key: f"{key}:{rest}" for key, rest in lines}
    extended = re.findall(r"^  - (?!_self_)(\w+) *(?:#.*)?$", sections.pop("defaults"), flags=re.MULTILINE)
    for name in extended:
        sections = _sections(name) | sections
    return sections


def _text(name: str) -> str:
    return (config_dir() / name).read_text(encoding="utf-8")
