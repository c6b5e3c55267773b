"""Trains LeWM (Maes et al. 2026) on a recording of PushT, to be compared with Terra's planner; needs the extra pusht.

    python scripts/pusht_lewm.py --data data/pusht --output outputs/lewm --max-seconds 480
    python -m torch.distributed.run --nproc_per_node 2 scripts/pusht_lewm.py ...

The model is stable-worldmodel's, with the sizes and the loss that its authors publish for PushT: a ViT-Tiny, windows of
four frames that lie five apart, the ten numbers between two of them as one action, a predictor of six layers, and
SIGReg with the weight 0.09. Their learning rate of 5e-5 is for 100 epochs; the one here is for minutes. The loop is
Terra's, so that a run goes on where it was stopped. Written: lewm.safetensors, lewm.json, metrics.json, state/.
"""

import argparse
import logging
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, UInt8
from safetensors.torch import load_file, save_file
from stable_worldmodel.wm.lewm import LeWM  # pyright: ignore[reportMissingImports]
from stable_worldmodel.wm.lewm.module import (  # pyright: ignore[reportMissingImports]
    MLP,
    Embedder,
    Predictor,
)
from stable_worldmodel.wm.loss import SIGReg  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn
from transformers import ViTConfig, ViTModel

from decoder.video import to_unit_range
from terra.evaluation.estimator_training import Recordings, load_recordings
from terra.training.loop import Batch, train
from terra.training.processes import start_processes
from terra.training.randomness import StepRandom, draw_indices
from terra.training.settings import LoopConfig
from terra.training.state import Ema
from tokenizer.errors import CheckpointError
from tokenizer.files import read_json, write_json

HISTORY, BLOCK = 3, 5  # frames that a prediction sees; steps of the environment between two frames
WINDOW = HISTORY * BLOCK + 1
SIGREG_WEIGHT = 0.09
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
WEIGHTS, CONFIG = "lewm.safetensors", "lewm.json"

# Sizes of ViT-Tiny and of the predictor; a test takes smaller ones.
SIZES: dict[str, Any] = {"image": 224, "patch": 14, "width": 192, "layers": 12, "heads": 3, "depth": 6, "mlp": 2048}


def build_lewm(sizes: dict[str, Any]) -> LeWM:
    """A LeWM of random weights for two numbers a step, see `SIZES`."""
    width = sizes["width"]
    encoder = ViTModel(
        ViTConfig(
            hidden_size=width,
            num_hidden_layers=sizes["layers"],
            num_attention_heads=sizes["heads"],
            intermediate_size=4 * width,
            image_size=sizes["image"],
            patch_size=sizes["patch"],
        ),
        add_pooling_layer=False,
    )
    heads = [MLP(input_dim=width, hidden_dim=sizes["mlp"], output_dim=width, norm_fn=nn.BatchNorm1d) for _ in range(2)]
    predictor = Predictor(
        num_frames=HISTORY,
        depth=sizes["depth"],
        heads=16,
        mlp_dim=sizes["mlp"],
        input_dim=width,
        hidden_dim=width,
        dropout=0.1,
    )
    return LeWM(encoder, predictor, Embedder(input_dim=2 * BLOCK, emb_dim=width), *heads)


def load_lewm(folder: Path) -> tuple[LeWM, dict[str, Any]]:
    """The trained model, in eval mode, and lewm.json: its sizes, and mean and std of the actions. CheckpointError."""
    facts = read_json(folder / CONFIG, CheckpointError)
    model = build_lewm(facts["sizes"])
    model.load_state_dict(load_file(folder / WEIGHTS))
    return model.eval(), facts


def normalized(frames: UInt8[Tensor, "frames 3 height width"]) -> Float[Tensor, "frames 3 height width"]:
    """8-bit frames as the encoder takes them: ImageNet's mean and standard deviation become 0 and 1."""
    mean, std = (torch.tensor(each, device=frames.device)[:, None, None] for each in (IMAGENET_MEAN, IMAGENET_STD))
    return ((to_unit_range(frames) + 1) / 2 - mean) / std


class _Losses(nn.Module):
    """LeWM with its loss in `forward`, so that the loop's wrappers see one call; SIGReg's buffers go along."""

    def __init__(self, model: LeWM) -> None:
        super().__init__()
        self.lewm, self.sigreg = model, SIGReg(knots=17, num_proj=1024)

    def forward(
        self, pixels: Float[Tensor, "batch 4 3 height width"], actions: Float[Tensor, "batch 4 numbers"]
    ) -> dict[str, Tensor]:
        """The prediction error of the next frame's embedding, and how far embeddings are from a normal distribution."""
        seen = self.lewm.encode({"pixels": pixels, "action": actions})
        predicted = self.lewm.predict(seen["emb"][:, :HISTORY], seen["act_emb"][:, :HISTORY])
        prediction = (predicted - seen["emb"][:, 1:]).square().mean()
        regularizer = self.sigreg(seen["emb"].transpose(0, 1))
        return {"loss": prediction + SIGREG_WEIGHT * regularizer, "prediction": prediction, "sigreg": regularizer}


class LeWMObjective:
    """LeWM's training objective, see `terra.training.loop.Objective`."""

    discriminator: nn.Module | None = None
    samples = "windows"
    tokens_per_sample: int | None = None
    flops_per_sample: float | None = None

    def __init__(self, model: LeWM, recordings: Recordings, facts: dict[str, Any]) -> None:
        self.model: nn.Module = _Losses(model)
        self._recordings = recordings
        device = recordings.frames.device
        self._mean, self._std = (torch.tensor(facts[name], device=device) for name in ("action_mean", "action_std"))

    def draw(self, random: StepRandom, batch_size: int, progress: float) -> Batch:
        """Windows of four frames, and the ten normalized numbers after each."""
        device = self._recordings.frames.device
        picks = draw_indices(random, len(self._recordings.starts), batch_size, torch.device("cpu"))
        starts = self._recordings.starts[picks].to(device)
        at = starts[:, None] + BLOCK * torch.arange(HISTORY + 1, device=device)
        frames = self._recordings.frames[0, at]
        # The last frame's actions lead out of the window: no prediction reads them.
        steps = (at[..., None] + torch.arange(BLOCK, device=device)).clamp(max=len(self._recordings.steps) - 1)
        actions = (self._recordings.steps[steps] - self._mean) / self._std
        return {"frames": frames, "actions": rearrange(actions, "batch frames block n -> batch frames (block n)")}

    def loss(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """LeWM's loss and its two terms."""
        pixels = normalized(rearrange(batch["frames"], "batch frames ... -> (batch frames) ..."))
        pixels = rearrange(pixels, "(batch frames) ... -> batch frames ...", frames=HISTORY + 1)
        return self.model(pixels, batch["actions"].float())

    def discriminator_loss(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """There is no discriminator."""
        raise NotImplementedError

    def previews(self, ema: Ema) -> dict[str, Tensor]:
        """Nothing to look at: LeWM has no decoder."""
        return {}


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="recording of PushT (terra record)")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--max-seconds", type=float, default=480.0)
    parser.add_argument("--max-frames", type=int, default=200_000, help="kept on the device: 150 kB each")
    parser.add_argument("--batch-size", type=int, default=128, help="of each process")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--device", default=None)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--sizes", default="", help="image=64,patch=8: other sizes than ViT-Tiny's")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    changes = (each.partition("=") for each in given.sizes.split(",") if each)
    sizes = SIZES | {name: int(value) for name, _, value in changes}
    accelerator = start_processes(given.device)
    side = (sizes["image"], sizes["image"])
    recordings = load_recordings(
        given.data,
        "train",
        side,
        window=WINDOW,
        max_frames=given.max_frames,
        workers=given.workers,
        tokenizer=None,
        device=accelerator.device,
    )
    # The rows that Terra's model takes are in the units of the environment: -1 to 1.
    std, mean = torch.std_mean(recordings.steps.double(), dim=0)
    facts = {"sizes": sizes, "action_mean": mean.tolist(), "action_std": std.tolist()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_lewm(sizes)
    config = LoopConfig(
        output=given.output,
        batch_size=given.batch_size,
        max_seconds=given.max_seconds,
        schedule="time",
        learning_rate=given.learning_rate,
        weight_decay=1e-3,
        warmup_steps=200,
        ema_decay=0.99,
        compile_model=accelerator.device.type == "cuda",
    )
    result = train(LeWMObjective(model, recordings, facts), config, accelerator)
    if result.stopped_by == "sigterm" or not accelerator.is_main_process:
        return
    # The last weights, not their average: BatchNorm's running statistics belong to them.
    save_file({name: tensor.contiguous().cpu() for name, tensor in model.state_dict().items()}, given.output / WEIGHTS)
    write_json(given.output / CONFIG, facts)
    write_json(given.output / "metrics.json", {"step": result.step, "seconds": result.elapsed_seconds})


if __name__ == "__main__":
    main()
