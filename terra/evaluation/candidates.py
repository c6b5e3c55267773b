"""The models that one command evaluates side by side: the command's own, called base, and those of `compare=`."""

from collections import Counter
from pathlib import Path

from terra.config.groups import CheckpointSettings
from terra.config.spec import PipelineSpec
from terra.errors import ConfigError, TerraError
from terra.evaluation.plan import EvaluationPlan, make_plan
from terra.evaluation.settings import EvaluationSettings
from terra.world_model.adapter import ADAPTER_CONFIG
from tokenizer.checkpoint import CONFIG_NAME

BASE = "base"

_PARTS = ("adapter", "world_model")  # what `terra train` writes to its output folder


def make_plans(settings: EvaluationSettings) -> dict[str, tuple[PipelineSpec, EvaluationPlan]]:
    """Check the data and every model, and choose what to generate, by the model's name; `base` comes first.

    With others to compare, each model has a folder of its own in the command's `output`.

    Raises:
        TerraError: anything wrong with the data, the checkpoints or the configuration; a model that can't be compared
            with the base.
    """
    base = settings.replace(compare=[], output=settings.output / BASE) if settings.compare else settings
    spec = _spec(base)
    plans = {BASE: (spec, make_plan(base, spec.tokenizer, spec.world_model, spec.adapter))}
    names = [name_of(each) for each in settings.compare]
    name, count = Counter([BASE, *names]).most_common(1)[0]
    if count > 1:
        raise ConfigError(f"compare: expected folders of different names and none called {BASE}, got {name} twice")
    for name, folder in zip(names, settings.compare, strict=True):
        try:
            others = base.replace(output=settings.output / name, **_model(folder))
            spec = _spec(others)
            plans[name] = spec, plans[BASE][1].of_model(others, spec.world_model, spec.adapter)
        except TerraError as error:
            raise type(error)(f"compare: {folder}: {error}") from None
    return plans


def name_of(folder: str) -> str:
    """What a model is called: its folder, or the folder of the training that wrote it."""
    path = Path(folder).absolute()
    return path.parent.name if path.name in _PARTS else path.name


def _spec(settings: EvaluationSettings) -> PipelineSpec:
    return PipelineSpec.from_settings(settings, sessions=settings.at_once)


def _model(folder: str) -> dict[str, Path | CheckpointSettings | None]:
    """The settings of a model that differ from the base's; a name that is no folder may be the Hub's.

    Raises:
        ConfigError: a folder without a model, or with two.
    """
    path = Path(folder)
    if (path / ADAPTER_CONFIG).is_file():
        return {"adapter": path}
    if path.is_dir() and not (path / CONFIG_NAME).is_file():
        parts = [part for part in _PARTS if (path / part).is_dir()]
        if len(parts) != 1:
            expected = "an adapter, a world model, or a training's folder with one of them"
            raise ConfigError(f"expected {expected}, got {' and '.join(parts) or 'neither'}")
        return _model(str(path / parts[0]))
    return {"adapter": None, "world_model": CheckpointSettings(pretrained=folder)}
