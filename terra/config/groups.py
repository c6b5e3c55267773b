"""Defines the settings that several commands share, and builds the parts that their `_target_` names."""

import dataclasses
import importlib
import inspect
import json
import reprlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, create_model, model_validator

from terra.errors import CheckpointError, ConfigError
from terra.extras import extras_named, install_hint
from terra.sampling import SamplingParams
from terra.worlds.places import archive_of, missing_world
from tokenizer.checkpoint import resolve_checkpoint
from tokenizer.limits import MAP_METERS
from tokenizer.settings import Count, Device, Dtype, FilePath, Natural, Settings, Text, expecting, first_problem


def read_sampling(values: object) -> SamplingParams:
    """The sampling parameters of a mapping. Raises ValueError that names the field."""
    if isinstance(values, SamplingParams):
        return values
    expected = "expected temperature, top_k and top_p"
    if not isinstance(values, Mapping):
        raise ValueError(f"{expected}, got {values!r}")
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    if unknown := [key for key in values if key not in known]:
        raise ValueError(f"{expected}, got {reprlib.repr(unknown[0])}")
    return SamplingParams(**values)


Sampling = Annotated[SamplingParams, BeforeValidator(read_sampling)]


FolderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$")]
"""The name by which clients choose an adapter or a world: letters, digits, ".", "_" and "-", at most 64 of them."""

Folders = Annotated[
    dict[FolderName, FilePath],
    Field(default_factory=dict, max_length=32),
    expecting("at most 32 folders by name, the names of letters, digits, '.', '_' and '-'"),
]
"""Folders of adapters or worlds by name."""


MemoryFrames = Annotated[Literal["auto"] | Natural, expecting("auto, or a number of frames, 0 or more")]
"""Memory frames of a window; "auto" takes as many as the model was trained with."""


_Coordinate = Annotated[float, Field(ge=-MAP_METERS, le=MAP_METERS)]
MapPose = Annotated[
    tuple[_Coordinate, _Coordinate, _Coordinate],
    Field(strict=False),
    expecting("[x, y, heading] in meters and radians"),
]
"""Where a rollout's first frame is, in a map's axes."""


class CheckpointSettings(Settings):
    """The location of a checkpoint.

    Attributes:
        pretrained: a folder, or the Hub id (owner/name) of a repository.
        subfolder: folder within `pretrained`; None for `pretrained` itself.
        revision: branch, tag or commit of the repository; None for its main branch.
    """

    pretrained: Text
    subfolder: Text | None = None
    revision: Text | None = None

    def folder(self) -> Path:
        """The checkpoint's local folder; a Hub repository's is downloaded first, and a world's at hand unpacked.

        Raises:
            OutputError: a world can't be unpacked.
            CheckpointError: see `tokenizer.checkpoint.resolve_checkpoint`; for a world that is not there, the line says
                where it is to be had.
        """
        if (archive := archive_of(self.pretrained)) is not None:
            from terra.worlds.archive import unpack_once

            unpack_once(archive, Path(self.pretrained))
        if (problem := missing_world(self.pretrained)) is not None:
            raise CheckpointError(problem)
        return resolve_checkpoint(self.pretrained, self.subfolder, self.revision)


class TokenizerSettings(CheckpointSettings):
    """A tokenizer's checkpoint, and the device where the tokenizer computes; None takes a GPU if there is one."""

    device: Annotated[str, Field(min_length=1)] | None = None


class ModelFolder(Settings):
    """The location of a tokenizer and its world model.

    Attributes:
        path: a folder, or the Hub id (owner/name) of a repository, that holds the tokenizer's and the world model's
            folder; with model=folder they are called tokenizer/ and world_model/.
        revision: see `CheckpointSettings`.
    """

    path: Text
    revision: Text | None = None


_OWN = ("terra.", "decoder.", "tokenizer.")
_MODELS = {"demo": "demo", "terra": "terra_v1", "terra_ema": "terra_v2", "terra_v1": "terra_v1", "terra_v2": "terra_v2"}


class PairSettings(Settings):
    """A tokenizer, the world model that was trained with it, and where they compute: the group `model` sets both.

    Attributes:
        model: the folder of both; None for the pair that ships with Terra.
        tokenizer, world_model: the checkpoints.
        device: device of all parts that name none; None takes a GPU if there is one.
        dtype: element type of all parts that name none; None takes bfloat16 on a GPU and float32 on a CPU.
    """

    model: ModelFolder | None = None
    tokenizer: TokenizerSettings
    world_model: CheckpointSettings
    device: Device | None = None
    dtype: Dtype | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_choice(cls, values: Any) -> Any:
        """Refuse the two groups that chose tokenizer and world model before the group `model` existed."""
        if isinstance(values, Mapping):
            for name in ("tokenizer", "world_model"):
                if isinstance(values.get(name), str):
                    meant = _MODELS.get(values[name], "folder model.path=DIR")
                    raise ValueError(
                        f"{name}={values[name]}: one choice sets tokenizer and world model together: model={meant}"
                    )
        return values


class PipelineSettings(PairSettings):
    """Settings of every command that makes rollouts.

    Attributes:
        engine: the engine's `_target_`, "auto" or a name that can be imported, and its arguments.
        decoder: the decoder's `_target_` and arguments.
        overlap: frames read again when the window slides.
        memory: earlier frames that a window reads besides, see `terra.memory`.
        adapter: folder of a LoRA adapter of the world model, see `terra.world_model.adapter`; None for none.
        adapters: folders of further adapters by name, of which each session may name one in place of `adapter`.
    """

    engine: dict[str, Any]
    decoder: dict[str, Any]
    overlap: Count
    memory: MemoryFrames = "auto"
    adapter: FilePath | None = None
    adapters: Folders


class _Arguments(Settings):
    model_config = ConfigDict(arbitrary_types_allowed=True)


def build_part(group: str, part: Mapping[str, Any], **given: Any) -> Any:
    """Call a part's `_target_` with the part's arguments and those in `given`.

    Raises:
        ConfigError: see `check_part`.
        TerraError: what the target raises.
    """
    arguments = check_part(group, part, given)
    target = locate(group, part["_target_"])
    if str(part["_target_"]).startswith(_OWN):
        return target(**given, **arguments)
    try:
        return target(**given, **arguments)
    except TypeError as error:  # a user's own target that is none
        raise ConfigError(f"{group}._target_={part['_target_']}: expected one to call, got: {error}") from error


def check_part(group: str, part: Mapping[str, Any], given: Iterable[str] = ()) -> dict[str, Any]:
    """Check a part's arguments against the annotations of its `_target_`, before any weight loads.

    Args:
        group: the name of the part in the settings.
        part: `_target_` and arguments.
        given: names of the arguments that `build_part` adds.

    Raises:
        ConfigError: a target that can't be imported, with the extra that brings a missing package, or that does not
            take what it is given; an argument that the target does not take, or of another type.
    """
    target = locate(group, part.get("_target_"))
    arguments = {name: value for name, value in part.items() if name != "_target_"}
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):  # no function, or one of C that does not say
        parameters = {}
    if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()) and not {*given} <= parameters.keys():
        expected = f"a class or function that takes {', '.join(given)}"
        raise ConfigError(f"{group}._target_: expected {expected}, got {part.get('_target_')!r}")
    fields: dict[str, Any] = {}
    for parameter in parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            return arguments
        if parameter.name not in given:
            annotation = Any if parameter.annotation is parameter.empty else parameter.annotation
            fields[parameter.name] = (annotation, ... if parameter.default is parameter.empty else parameter.default)
    model: Any = create_model("Arguments", __base__=_Arguments, **fields)
    part_field: dict[str, Any] = {group: (model, ...)}
    whole, values = create_model("Part", __base__=_Arguments, **part_field), {group: arguments}
    try:
        whole.model_validate_json(json.dumps(values))  # YAML's lists may be tuples, and its text paths, as in JSON
    except ValidationError as error:
        raise ConfigError(first_problem(error, whole, values)) from None
    return arguments


def takes(part: Mapping[str, Any], name: str) -> bool:
    """Whether an engine's `_target_` names the argument `name`. Raises ConfigError, see `locate`."""
    try:
        return name in inspect.signature(locate("engine", part.get("_target_"))).parameters
    except (TypeError, ValueError):  # no function, or one of C that does not say
        return False


def locate(group: str, path: object) -> Callable[..., Any]:
    """The class or function of a dotted name.

    Raises:
        ConfigError: no such name, or a missing package.
    """
    module = path if isinstance(path, str) else ""
    names: list[str] = []
    while module:
        module, _, name = module.rpartition(".")
        names.insert(0, name)
        try:
            with extras_named(f"{group}={path}"):
                found: Any = importlib.import_module(module) if module else None
            for name in names:
                found = getattr(found, name)
        except ModuleNotFoundError as error:
            if error.name and module.startswith(error.name):
                continue  # a class, or a part of the path that does not exist
            package = (error.name or "").partition(".")[0]
            raise ConfigError(f"{path}: needs the package {package}: {install_hint(package)}") from None
        except AttributeError:
            break
        return found
    raise ConfigError(f"{group}._target_: expected the name of a class or function, got {path!r}")
