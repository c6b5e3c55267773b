"""The state of an interrupted training run on disk: a safetensors file for the tensors, a JSON file for the rest."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
from pydantic import ConfigDict, Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from terra.errors import CheckpointError
from terra.training.optimizer import Optimizers
from tokenizer.checkpoint import read_json, write_json, write_tensors
from tokenizer.settings import Natural, NonNegative, Settings, checked, expecting

STATE_FILE = "state.json"

Scalars = dict[str, int | float | str]
Networks = Mapping[str, tuple[nn.Module, Optimizers]]
"""Networks under training, by the names that their tensors have in the file."""


class _State(Settings):
    """What state.json has at least."""

    model_config = ConfigDict(extra="ignore")

    tensors: Annotated[str, Field(pattern=r"^state-\d+\.safetensors$"), expecting("the name of a state's file")]
    step: Natural
    seed: Natural
    elapsed_seconds: NonNegative
    starting_seconds: NonNegative


def trained_parameters(network: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a network that are trained, by name: all that are not frozen."""
    return {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}


class Ema:
    """An exponential moving average of a model's trained parameters, kept in float32.

    The decay at a step is min(decay, (1 + step) / (10 + step)), so that the average soon forgets the random start
    (the warm-up of TensorFlow's ExponentialMovingAverage with num_updates).
    """

    def __init__(self, model: nn.Module, decay: float, every_steps: int = 1):
        self.model, self.decay, self.every_steps = model, decay, every_steps
        self._parameters = trained_parameters(model)
        self.weights = {name: p.detach().float().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Average in the parameters after step `step` (from 0), if `every_steps` divides the number of steps done."""
        if (step + 1) % self.every_steps:
            return
        keep = min(self.decay, (1 + step) / (10 + step)) ** self.every_steps
        parameters = [p.detach().float() for p in self._parameters.values()]
        torch._foreach_lerp_(list(self.weights.values()), parameters, 1 - keep)  # pyright: ignore[reportPrivateImportUsage]

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Overwrite the model's parameters with the average."""
        for name, parameter in self._parameters.items():
            parameter.copy_(self.weights[name])

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """Give the model its averaged weights inside the context, and its own weights, bit for bit, afterwards."""
        own = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self.copy_to_model()
        try:
            yield self.model
        finally:
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    parameter.copy_(own[name])


class BestWeights:
    """The averaged weights of the save at which a run's held-out loss was lowest, in a file beside its state.

    Args:
        folder: the run's `state/`; what an interrupted run left there counts.

    Raises:
        CheckpointError: the file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self.lowest = folder / "best.safetensors", math.inf
        if self._path.exists():
            read_tensors(self._path)
            with safe_open(self._path, framework="pt") as file:
                self.lowest = float((file.metadata() or {}).get("held_out", math.inf))

    def offer(self, held_out: float, ema: Ema) -> None:
        """Keep the averaged weights if their held-out loss is the lowest so far. Raises OutputError."""
        if held_out < self.lowest:
            self.lowest = held_out
            write_tensors(self._path, ema.weights, {"held_out": repr(held_out)})

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """Overwrite the model's trained parameters with the kept weights. Raises CheckpointError."""
        _restore(trained_parameters(model), read_tensors(self._path), self._path)


def save_state(folder: Path, networks: Networks, ema: Ema, scalars: Scalars) -> None:
    """Write the state so that a crash at any moment leaves the previous one readable.

    `networks` must hold "model", whose moving average is `ema`; `scalars` must hold "step", "seed", "elapsed_seconds"
    and "starting_seconds". The tensor file's name carries the step; `state.json` names that file and is replaced last.

    Frozen parameters are not written.

    What an earlier save left half-written, because its process was killed, is removed.

    Raises:
        OutputError: the folder can't be written; the previous state is still there.
    """
    for unfinished in folder.glob(".state*.tmp"):  # see `tokenizer.files.temporary_name`
        unfinished.unlink(missing_ok=True)
    tensors = {f"ema.{name}": weight for name, weight in ema.weights.items()}
    for part, (network, optimizer) in networks.items():
        tensors |= {f"{part}.{name}": tensor.detach() for name, tensor in _changing(network).items()}
        for name, parameter in trained_parameters(network).items():
            for key, value in optimizer.state[parameter].items():
                tensors[f"{part}_optimizer.{key}.{name}"] = torch.as_tensor(value)
    tensor_path = folder / f"state-{scalars['step']:08d}.safetensors"
    write_tensors(tensor_path, tensors)
    write_json(folder / STATE_FILE, {**scalars, "tensors": tensor_path.name})
    for old in folder.glob("state-*.safetensors"):
        if old != tensor_path:
            old.unlink()


def load_state(folder: Path, networks: Networks, ema: Ema) -> Scalars | None:
    """Restore what `save_state` wrote and return its scalars; None if nothing was saved in `folder`.

    Raises:
        CheckpointError: the files are damaged, or belong to networks with other parameters.
    """
    path = folder / STATE_FILE
    if not path.exists():
        return None
    scalars = read_json(path)
    missing = {"tensors", "step", "seed", "elapsed_seconds", "starting_seconds"} - scalars.keys()
    if missing:
        raise CheckpointError(f"{path}: expected the state of a training run, got none of {sorted(missing)}")
    checked(_State, scalars, str(path), CheckpointError)
    tensors = read_tensors(folder / scalars.pop("tensors"))
    targets = {f"ema.{name}": weight for name, weight in ema.weights.items()}
    for part, (network, _) in networks.items():
        targets |= {f"{part}.{name}": tensor for name, tensor in _changing(network).items()}
    _restore(targets, tensors, folder)
    for part, (network, optimizer) in networks.items():
        _restore_optimizer(tensors, f"{part}_optimizer.", network, optimizer)
    return scalars


def _changing(network: nn.Module) -> dict[str, Tensor]:
    """The tensors that training changes: parameters that are not frozen, and buffers."""
    frozen = {name for name, parameter in network.named_parameters() if not parameter.requires_grad}
    return {name: tensor for name, tensor in network.state_dict().items() if name not in frozen}


@torch.no_grad()
def _restore(targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor], where: Path) -> None:
    """Copy tensors into the targets of the same names; raise CheckpointError if names or shapes differ."""
    got = {name for name in tensors if "_optimizer." not in name.partition(".")[0] + "."}
    if targets.keys() != got:
        missing, unexpected = sorted(targets.keys() - got), sorted(got - targets.keys())
        raise CheckpointError(
            f"{where}: expected the state of this model, got {len(missing)} missing {missing[:3]} and "
            f"{len(unexpected)} unexpected tensors {unexpected[:3]}"
        )
    for name, target in targets.items():
        if target.shape != tensors[name].shape:
            raise CheckpointError(
                f"{where}: {name}: expected shape {tuple(target.shape)}, got {tuple(tensors[name].shape)}"
            )
        target.copy_(tensors[name])


def _restore_optimizer(tensors: Mapping[str, Tensor], prefix: str, network: nn.Module, optimizer: Optimizers) -> None:
    parameters = dict(network.named_parameters())
    fused = bool(optimizer.param_groups[0].get("fused"))
    for key_and_name in (name.removeprefix(prefix) for name in tensors if name.startswith(prefix)):
        key, name = key_and_name.split(".", 1)
        value, parameter = tensors[prefix + key_and_name], parameters[name]
        if value.ndim == 0:
            # AdamW keeps its step counter on the host unless it is fused.
            restored = value.to(parameter.device if fused else "cpu")
        else:
            # empty_like keeps channels_last strides, which the fused update needs to be those of the parameter.
            restored = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        optimizer.state[parameter][key] = restored


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a safetensors file, on the CPU.

    Raises:
        CheckpointError: the file is missing, truncated or no safetensors file.
    """
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: expected a complete safetensors file, got: {error}") from None
