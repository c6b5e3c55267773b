"""Small objectives for tests of training: numbers, two networks against each other, a tokenizer's decoder and a world
model of tiny tokens; and what processes of their own do with them."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

from terra.actions import Waypoints
from terra.dataset.tokens import TokenizedDriving
from terra.training.adapter import add_adapter
from terra.training.autoencoding import DecoderObjective
from terra.training.bit_vectors import add_bit_vectors
from terra.training.loop import Batch, Objective, train
from terra.training.processes import start_processes
from terra.training.randomness import StepRandom
from terra.training.settings import LoopConfig
from terra.training.terms import Terms
from terra.training.tokenizer import small_config
from terra.training.tokenizer_settings import AdversarialConfig, EntropyAnneal
from terra.training.world_model import WorldModelObjective, build_config
from terra.training.world_model_settings import AdapterSettings, WorldModelSize, WorldModelTraining
from terra.world_model import LlamaActionV2ForCausalLM
from tokenizer import LFQTokenizer, LossWeights

TINY_SIZE = WorldModelSize(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1
)
WINDOW = 4
CPU = torch.device("cpu")


def read_log(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def read_state(folder: Path) -> dict[str, torch.Tensor]:
    name = json.loads((folder / "state" / "state.json").read_text())["tensors"]
    return load_file(folder / "state" / name)


def config(output: Path, **changes: object) -> LoopConfig:
    values = {"batch_size": 4, "max_steps": 6, "warmup_steps": 1, "ema_decay": 0.9, "output": output}
    return LoopConfig(**values | changes)


class Numbers:
    """The smallest objective: a line that is trained towards 0."""

    samples = "numbers"
    tokens_per_sample: int | None = 3
    flops_per_sample: float | None = None
    discriminator: nn.Module | None = None

    def __init__(self, scale: float = 1.0):
        self.model: nn.Module = nn.Linear(1, 1)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(1.0)
        self.scale = scale
        self.previewed = 0

    def draw(self, random: StepRandom, batch_size: int, progress: float) -> Batch:
        return {"x": torch.rand(batch_size, 1, generator=random.host)}

    def loss(self, batch: Batch, progress: float) -> Batch:
        return {"loss": self.scale * self.model(batch["x"]).square().mean(), "progress": torch.tensor(progress)}

    def discriminator_loss(self, batch: Batch, progress: float) -> Batch:
        raise NotImplementedError

    def previews(self, ema: object) -> Batch:
        self.previewed += 1
        return {}


class Judge(nn.Module):
    """A discriminator of numbers with a moving average of its scores in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        self.average: torch.Tensor
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Contest(Numbers):
    """An adversarial objective: a line that imitates numbers from [2, 3), and a `Judge` as discriminator."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.discriminator = Judge()
        self.judge = self.discriminator

    def loss(self, batch: Batch, progress: float) -> Batch:
        made = self.model(batch["x"])
        self.made = made.detach()
        assert not any(parameter.requires_grad for parameter in self.judge.parameters())
        return {"loss": -self.discriminator(made).mean()}

    def discriminator_loss(self, batch: Batch, progress: float) -> Batch:
        real, made = self.discriminator(batch["x"] + 2), self.discriminator(self.made)
        loss = (1 - real).relu().mean() + (1 + made).relu().mean() + (real - self.judge.average).square().mean()
        self.judge.average.lerp_(real.mean().detach(), 0.1)
        return {"discriminator_loss": loss}


def tokenized(lengths: tuple[int, ...] = (7, 9), seed: int = 0) -> TokenizedDriving:
    """Predictable tokenized drives: each frame is the one before it with 1 added to every id."""
    bounds = torch.tensor([0, *np.cumsum(lengths)])
    count = int(bounds[-1])
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(16, (1, 2, 4), generator=generator)
    tokens = (start + torch.arange(count)[:, None, None]) % 16
    actions = torch.randn(count, 6, 3, generator=generator)
    return TokenizedDriving(tokens.to(torch.uint8), actions, bounds, 10.0, 16, "f" * 64, Waypoints())


def placed(lengths: tuple[int, ...] = (40, 44), seed: int = 0) -> TokenizedDriving:
    """Tokenized drives around one circle; the first two have one place, the next two another one."""
    data = tokenized(lengths, seed)
    turns = torch.cat([torch.arange(length) * 0.3 for length in lengths]).double()
    poses = torch.stack([6 * turns.sin(), 6 - 6 * turns.cos(), turns], dim=1)
    return replace(data, poses=poses, place=torch.arange(len(lengths)) // 2)


def world_model_objective(data: TokenizedDriving | None = None, **training: object) -> WorldModelObjective:
    data = data or tokenized()
    settings = WorldModelTraining(**{"window": WINDOW, "max_corruption": 0.2} | training)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaActionV2ForCausalLM(build_config(data, settings.window, TINY_SIZE))
        if settings.bit_vectors:
            add_bit_vectors(model)
    return WorldModelObjective(model, data, settings, CPU)


def bit_vectors_objective() -> WorldModelObjective:
    """A world model whose tables have bit vectors."""
    return world_model_objective(bit_vectors=True)


def memory_objective() -> WorldModelObjective:
    """A world model whose windows hold memory frames."""
    return world_model_objective(placed(), window=9, memory={"frames": 2})


def adapter_objective() -> WorldModelObjective:
    """A frozen world model with a LoRA adapter in it."""
    objective = world_model_objective()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        add_adapter(objective.model, Path("none"), AdapterSettings(rank=2), new_actions=False)
    return objective


def decoder_objective() -> DecoderObjective:
    """A frozen encoder, a decoder and a discriminator, without what looks at a process's whole batch."""
    terms = Terms(
        weights=LossWeights(),
        anneal=EntropyAnneal(),
        adversarial=AdversarialConfig(weight=0.1, start=0.0, adaptive=False, width=8),
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tokenizer = LFQTokenizer(small_config(image_size=(32, 32), ch=32, ch_mult=[1, 1], num_res_blocks=1, dim=6))
        frames = torch.randint(256, (8, 3, 32, 32), dtype=torch.uint8)
        return DecoderObjective(tokenizer, frames, terms)


OBJECTIVES = {
    "numbers": Numbers,
    "contest": Contest,
    "decoder": decoder_objective,
    "world_model": world_model_objective,
    "bit_vectors": bit_vectors_objective,
    "memory": memory_objective,
    "adapter": adapter_objective,
}


def terminate_at(objective: Objective, draws: int) -> None:
    """Let the objective's n-th draw send SIGTERM to its own process."""
    draw, count = objective.draw, iter(range(1, 1_000_000))

    def drawing(random: StepRandom, batch_size: int, progress: float) -> Batch:
        if next(count) == draws:
            os.kill(os.getpid(), signal.SIGTERM)
        return draw(random, batch_size, progress)

    objective.draw = drawing


KILLS = ("in the tensors", "before state.json", "in state.json", "before the old state goes")
"""Moments of a save at which `train_until_killed` dies."""


def train_until_killed(output: Path, moment: str) -> None:
    """Train, save after every step, and die by SIGKILL in the third save; the target of a process of its own."""
    import safetensors.torch

    from terra.training import state

    count, save, write, unlink = iter(range(1_000)), safetensors.torch.save_file, Path.write_text, Path.unlink
    saving = [0]

    def die() -> None:
        if saving[0] == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    def save_file(tensors: dict, path: Path, metadata: object) -> None:
        saving[0] = next(count) + 1
        save(tensors, path, metadata)
        if moment == KILLS[0] and saving[0] == 3:
            path.write_bytes(path.read_bytes()[:-100])
            die()

    def write_json(path: Path, content: dict) -> None:
        if moment == KILLS[1]:
            die()
        original_json(path, content)

    def write_text(path: Path, text: str, **options: str) -> None:
        write(path, text[:20] if moment == KILLS[2] and saving[0] == 3 else text, **options)
        if moment == KILLS[2]:
            die()

    def remove(path: Path, missing_ok: bool = False) -> None:
        if moment == KILLS[3] and path.name.startswith("state-"):
            die()
        unlink(path, missing_ok)

    original_json = state.write_json
    safetensors.torch.save_file, state.write_json = save_file, write_json  # pyright: ignore[reportAttributeAccessIssue]
    Path.write_text, Path.unlink = write_text, remove  # pyright: ignore[reportAttributeAccessIssue]
    train(OBJECTIVES["numbers"](), config(output, save_every_seconds=1e-9), start_processes("cpu"))


def train_as_one_of_two(rank: int, port: int, output: Path) -> None:
    """Train all objectives together with the process of the other rank; the target of a process of its own."""
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    accelerator = start_processes("cpu")
    for name, make in OBJECTIVES.items():
        train(make(), config(output / name, batch_size=2, accumulate=2), accelerator)
    stopped = Numbers()
    if accelerator.process_index == 1:
        terminate_at(stopped, 3)
    result = train(stopped, config(output / "stopped", max_steps=10_000_000), accelerator)
    assert result.stopped_by == "sigterm"
    clocked = train(
        Numbers(), config(output / "clocked", max_steps=None, max_seconds=0.5, schedule="time"), accelerator
    )
    assert clocked.stopped_by == "time"
    weights = torch.stack([parameter.detach().flatten() for parameter in clocked.ema.model.parameters()])
    gathered = accelerator.gather(weights[None])
    assert torch.equal(gathered[0], gathered[1])
    accelerator.end_training()
