"""The state of an interrupted training run on disk: a safetensors file for the tensors, a JSON file for the rest."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from terra.errors import CheckpointError
from tokenizer.checkpoint import read_json, write_json, write_tensors

STATE_FILE = "state.json"

Scalars = dict[str, int | float | str]


class Ema:
    """An exponential moving average of a model's parameters, kept in float32.

    The decay grows as min(decay, (1 + step) / (10 + step)), so that the average soon forgets the random start
    (the warm-up of TensorFlow's ExponentialMovingAverage with num_updates).
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self._parameters = dict(model.named_parameters())
        self.weights = {name: p.detach().float().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the parameters after step `step` (from 0)."""
        keep = min(self.decay, (1 + step) / (10 + step))
        parameters = [p.detach().float() for p in self._parameters.values()]
        get_ema_multi_avg_fn(keep)(list(self.weights.values()), parameters, step)

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Overwrite the model's parameters with the average."""
        for name, parameter in self._parameters.items():
            parameter.copy_(self.weights[name])


def save_state(folder: Path, model: nn.Module, optimizer: Optimizer, ema: Ema, scalars: Scalars) -> None:
    """Write the state so that a crash at any moment leaves the previous one readable.

    `scalars` must hold "step", "elapsed_seconds" and "seed". The tensor file's name carries the step; `state.json`
    names that file and is replaced last.

    Raises:
        OutputError: the folder can't be written.
    """
    tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    tensors |= {f"ema.{name}": weight for name, weight in ema.weights.items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{key}.{name}"] = torch.as_tensor(value)
    tensor_path = folder / f"state-{scalars['step']:08d}.safetensors"
    write_tensors(tensor_path, tensors)
    write_json(folder / STATE_FILE, {**scalars, "tensors": tensor_path.name})
    for old in folder.glob("state-*.safetensors"):
        if old != tensor_path:
            old.unlink()


def load_state(folder: Path, model: nn.Module, optimizer: Optimizer, ema: Ema) -> Scalars | None:
    """Restore what `save_state` wrote and return its scalars; None if nothing was saved in `folder`.

    Raises:
        CheckpointError: the files are damaged, or belong to a model with other parameters.
    """
    path = folder / STATE_FILE
    if not path.exists():
        return None
    scalars = read_json(path)
    missing = {"tensors", "step", "elapsed_seconds", "seed"} - scalars.keys()
    if missing:
        raise CheckpointError(f"{path}: expected the state of a training run, got none of {sorted(missing)}")
    tensors = read_tensors(folder / scalars.pop("tensors"))
    _restore_tensors(tensors, model, optimizer, ema, folder)
    return scalars


@torch.no_grad()
def _restore_tensors(tensors: dict[str, Tensor], model: nn.Module, optimizer: Optimizer, ema: Ema, where: Path) -> None:
    parameters = dict(model.named_parameters())
    _expect_names(tensors, (f"{part}.{name}" for part in ("model", "ema") for name in parameters), where)
    for name, parameter in parameters.items():
        for target, source in ((parameter, tensors[f"model.{name}"]), (ema.weights[name], tensors[f"ema.{name}"])):
            if target.shape != source.shape:
                raise CheckpointError(
                    f"{where}: {name}: expected shape {tuple(target.shape)}, got {tuple(source.shape)}"
                )
            target.copy_(source)
    fused = bool(optimizer.param_groups[0].get("fused"))
    for key_and_name in (name for name in tensors if name.startswith("optimizer.")):
        _, key, name = key_and_name.split(".", 2)
        value, parameter = tensors[key_and_name], parameters[name]
        if value.ndim == 0:
            # AdamW keeps its step counter on the host unless it is fused.
            restored = value.to(parameter.device if fused else "cpu")
        else:
            # empty_like keeps channels_last strides, which the fused update needs to be those of the parameter.
            restored = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        optimizer.state[parameter][key] = restored


def _expect_names(tensors: Mapping[str, Tensor], expected: Iterable[str], where: Path) -> None:
    wanted = set(expected)
    got = {name for name in tensors if not name.startswith("optimizer.")}
    if wanted != got:
        missing, unexpected = sorted(wanted - got), sorted(got - wanted)
        raise CheckpointError(
            f"{where}: expected the state of this model, got {len(missing)} missing {missing[:3]} and "
            f"{len(unexpected)} unexpected tensors {unexpected[:3]}"
        )


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, on the CPU.

    Raises:
        CheckpointError: the file is missing, truncated or no safetensors file.
    """
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: expected a complete safetensors file, got: {error}") from None
