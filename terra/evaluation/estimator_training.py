"""Training of an estimator on recorded and re-encoded video, and its error on held-out recordings.

A dataset of driving trains the estimator of motion; any other one the inverse-dynamics model, which reads actions back.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from einops import rearrange
from jaxtyping import Float, Float32, Int, UInt8
from torch import Tensor, nn
from torch.nn import functional as F

from decoder.video import to_8_bit, to_unit_range
from terra.actions import ActionSpace, Waypoints
from terra.dataset import Episode, read_split
from terra.device import torch_dtype
from terra.errors import ConfigError, DatasetError
from terra.evaluation.action_estimator import ActionEstimator, ActionEstimatorConfig, action_loss
from terra.evaluation.estimator import EstimatorConfig, MotionEstimator, resize, step_scale
from terra.evaluation.fidelity import motion_errors
from terra.evaluation.measures import Bootstrap
from terra.evaluation.motion import Steps, steps_of
from terra.evaluation.recovered import compare, majority
from terra.evaluation.training_settings import TrainEstimatorSettings
from terra.progress import ProgressLine
from terra.training.data import decode_episodes, same_kind, spread_episodes
from terra.training.loop import Batch, TrainingResult, train
from terra.training.processes import start_processes
from terra.training.randomness import StepRandom, draw_indices
from terra.training.settings import LoopConfig
from terra.training.state import Ema
from tokenizer import LFQTokenizer
from tokenizer.files import write_json

logger = logging.getLogger(__name__)

FOLDER = "estimator"
_FRAMES_AT_ONCE = 128
_PATH_WEIGHT = 0.2  # weight of the path's displacement (m) in the loss, beside the steps' loss


def run(settings: TrainEstimatorSettings) -> None:
    """Train the dataset's estimator as conf/train_estimator.yaml says. The same command resumes an interrupted run.

    Raises:
        ConfigError, CheckpointError, DatasetError, OutputError: see `load_recordings` and `train_estimator`.
    """
    accelerator = start_processes(settings.device)
    tokenizer = None
    if settings.checkpoint is not None:
        # bfloat16 changes 0.2 % of the tokens (`terra.training.tokenize.FrameEncoder`), fewer than `corruption` does.
        device, dtype = accelerator.device, torch_dtype(None, accelerator.device)
        tokenizer = LFQTokenizer.from_pretrained(settings.checkpoint)
        tokenizer.to(device=device, dtype=dtype, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    recordings, held_out = (
        load_recordings(
            settings.data,
            split,
            settings.estimator.image_size,
            window=settings.window,
            tokenizer=tokenizer,
            corruption=corruption,
            max_frames=count,
            device=accelerator.device,
            workers=settings.workers,
        )
        for split, count, corruption in (
            (settings.train_split, settings.max_frames, settings.corruption),
            (settings.held_out_split, settings.held_out_frames, 0.0),
        )
    )
    size = {"fps": recordings.fps, **vars(settings.estimator)}
    if isinstance(recordings.space, Waypoints):
        config = EstimatorConfig(**size)
    else:
        config = ActionEstimatorConfig(**size, action_space=recordings.space.model_dump(mode="json"))
    train_estimator(
        recordings,
        held_out,
        config,
        settings,
        accelerator,
        window=settings.window,
        evaluation_windows=settings.evaluation_windows,
    )


@dataclass(frozen=True)
class Recordings:
    """Frames of several episodes, one episode after another, at the estimator's size, and what leads to the next.

    Attributes:
        frames: 8-bit frames on one device; the variants are the recorded frames and, if there is a tokenizer, the
            re-encoded frames.
        steps: of driving, forward movement (m) and heading change (rad) to the next frame; of any other world, the
            rows of its actions. At an episode's last frame they lead nowhere.
        starts: first frames of all windows that lie inside one episode.
        fps: frames per second.
        space: what the recorded actions mean.
    """

    frames: UInt8[Tensor, "variants frames 3 height width"]
    steps: Float[Tensor, "frames outputs"]
    starts: Int[Tensor, " windows"]
    fps: float
    space: ActionSpace


@torch.no_grad()
def load_recordings(
    folder: Path,
    split: str,
    image_size: tuple[int, int],
    *,
    window: int,
    max_frames: int,
    workers: int,
    tokenizer: LFQTokenizer | None,
    device: torch.device,
    corruption: float = 0.0,
) -> Recordings:
    """Decode whole episodes, evenly spread over the split, up to `max_frames` frames.

    Args:
        tokenizer: a tokenizer on `device` that makes the second variant of each frame; None makes no second variant.
        corruption: largest share of a re-encoded frame's tokens that is replaced by random ids, to imitate a world
            model's errors.

    Raises:
        DatasetError: no dataset, no such split, or no readable episode of `window` frames.
        ConfigError: the tokenizer takes frames of another size.
    """
    episodes, _ = same_kind(read_split(folder, split).episodes)
    chosen = spread_episodes([episode for episode in episodes if episode.num_frames >= window], max_frames)
    if not chosen:
        raise DatasetError(f"{folder}: expected an episode of {window} frames or more in split {split}, got none")
    if tokenizer is not None and tuple(tokenizer.image_size) != chosen[0].image_size:
        raise ConfigError(f"{folder}: expected frames of {tokenizer.image_size} pixels, got {chosen[0].image_size}")
    random = torch.Generator(device).manual_seed(0)
    frames: list[Tensor] = []
    steps: list[Float32[np.ndarray, "frames outputs"]] = []
    starts, count = [], 0
    with ProgressLine(f"reading {split}", len(chosen)) as line:
        decoded = decode_episodes(chosen, workers)
        for index, (episode, result) in enumerate(zip(chosen, decoded, strict=True)):
            if isinstance(result, str):
                logger.warning("left out: %s", result)
                continue
            frames.append(_see(torch.from_numpy(result.frames).to(device), image_size, tokenizer, corruption, random))
            steps.append(_steps(episode, result.actions))
            starts.append(torch.arange(count, count + episode.num_frames - window + 1))
            count += episode.num_frames
            line.show(index + 1, f"{count} frames")
    if not frames:
        raise DatasetError(f"{folder}: expected a readable episode in split {split}, got {len(chosen)} damaged")
    targets = torch.from_numpy(np.concatenate(steps)).to(device)
    return Recordings(torch.cat(frames, dim=1), targets, torch.cat(starts), chosen[0].fps, chosen[0].space)


def _steps(
    episode: Episode, actions: Float32[np.ndarray, "frames slots action_dim"]
) -> Float32[np.ndarray, "frames outputs"]:
    if isinstance(episode.space, Waypoints):
        return np.pad(steps_of(episode.poses, 0, episode.num_frames), ((0, 1), (0, 0))).astype(np.float32)
    return rearrange(actions, "frames slots dim -> frames (slots dim)")


def _see(
    pixels: UInt8[Tensor, "frames height width 3"],
    image_size: tuple[int, int],
    tokenizer: LFQTokenizer | None,
    corruption: float,
    random: torch.Generator,
) -> UInt8[Tensor, "variants frames 3 small_height small_width"]:
    parts = []
    for part in rearrange(pixels, "frames height width rgb -> frames rgb height width").split(_FRAMES_AT_ONCE):
        frames = to_unit_range(part)
        variants = [frames]
        if tokenizer is not None:
            tokens = tokenizer.encode(frames)
            rate = corruption * torch.rand((len(tokens), 1, 1), generator=random, device=tokens.device)
            hit = torch.rand(tokens.shape, generator=random, device=tokens.device) < rate
            ids = torch.randint(tokenizer.codebook_size, tokens.shape, generator=random, device=tokens.device)
            variants.append(tokenizer.decode(torch.where(hit, ids, tokens)).to(frames.device))
        small = torch.stack([resize(each, image_size) for each in variants])
        parts.append(to_8_bit(small))
    return torch.cat(parts, dim=1)


class _WindowsObjective:
    """Random windows of either variant."""

    samples = "windows"
    tokens_per_sample: int | None = None
    flops_per_sample: float | None = None
    discriminator: nn.Module | None = None

    def __init__(self, model: nn.Module, recordings: Recordings, window: int) -> None:
        self.model = model
        self._recordings, self._window = recordings, window

    def _draw(
        self, random: StepRandom, batch_size: int
    ) -> tuple[UInt8[Tensor, "batch window 3 height width"], Float[Tensor, "batch steps outputs"]]:
        """Draw windows of frames, and their steps as the recordings have them."""
        recordings, device = self._recordings, self._recordings.frames.device
        chosen = draw_indices(random, len(recordings.starts), batch_size, torch.device("cpu"))
        frames = recordings.starts[chosen][:, None] + torch.arange(self._window)
        frames = frames.to(device)
        variant = torch.randint(len(recordings.frames), (batch_size, 1), generator=random.host).to(device)
        return recordings.frames[variant, frames], recordings.steps[frames[:, :-1]]

    def discriminator_loss(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """There is no discriminator."""
        raise NotImplementedError("an estimator has no discriminator")

    def previews(self, ema: Ema) -> dict[str, Tensor]:
        """Return no previews."""
        return {}


class EstimatorObjective(_WindowsObjective):
    """Motion of random windows, with random mirroring, standstill, light, blur and noise."""

    def draw(self, random: StepRandom, batch_size: int, progress: float) -> Batch:
        """Draw augmented frames in [-1, 1], and their steps in units of `step_scale`."""
        seen, steps = self._draw(random, batch_size)
        steps = steps / step_scale().to(steps.device, torch.float32)
        seen, steps = _hold_and_mirror(seen, steps, random.device)
        return {"frames": change_look(_unit_range(seen), random.device), "steps": steps}

    def loss(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """The Huber loss of the steps, plus the weighted mean distance (m) between the integrated paths."""
        ours = self.model(batch["frames"]).float()
        steps = F.smooth_l1_loss(ours, batch["steps"], beta=0.1)
        scale = step_scale().to(ours.device, torch.float32)
        path = (positions(ours * scale) - positions(batch["steps"] * scale)).square().sum(dim=-1)
        displacement = (path + 1e-6).sqrt().mean()
        loss = steps + _PATH_WEIGHT * displacement
        return {"loss": loss, "steps": steps.detach(), "displacement": displacement.detach()}


class ActionObjective(_WindowsObjective):
    """Actions of random windows, with random light, blur and noise: a mirrored world would have other actions."""

    def draw(self, random: StepRandom, batch_size: int, progress: float) -> Batch:
        """Draw augmented frames in [-1, 1], and the rows of the actions between them."""
        seen, rows = self._draw(random, batch_size)
        return {"frames": change_look(_unit_range(seen), random.device), "rows": rows}

    def loss(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """The mean loss of the steps, see `action_loss`."""
        return {"loss": action_loss(self.model(batch["frames"]), batch["rows"], self._recordings.space)}


def _unit_range(seen: UInt8[Tensor, "batch window 3 height width"]) -> Float[Tensor, "batch window 3 height width"]:
    return rearrange(to_unit_range(seen.flatten(0, 1)), "(b f) c h w -> b f c h w", b=len(seen))


def positions(steps: Float[Tensor, "batch steps 2"]) -> Float[Tensor, "batch steps 2"]:
    """x forward and y left (m) after each step: a differentiable `terra.evaluation.motion.integrate`."""
    middle = steps[..., 1].cumsum(dim=1) - steps[..., 1] / 2
    moves = steps[..., :1] * torch.stack([middle.cos(), middle.sin()], dim=-1)
    return moves.cumsum(dim=1)


def _hold_and_mirror(
    frames: UInt8[Tensor, "batch frames 3 height width"], steps: Float[Tensor, "batch steps 2"], random: torch.Generator
) -> tuple[UInt8[Tensor, "batch frames 3 height width"], Float[Tensor, "batch steps 2"]]:
    """Freeze one window in seven at a frame until its end (a video may get stuck), and mirror every other window."""
    batch, num_frames = frames.shape[:2]
    device = frames.device
    last = torch.randint(num_frames, (batch, 1), generator=random, device=device)
    last = torch.where(torch.rand((batch, 1), generator=random, device=device) < 1 / 7, last, num_frames)
    order = torch.minimum(torch.arange(num_frames, device=device), last)
    frames = frames[torch.arange(batch, device=device)[:, None], order]
    steps = torch.where((torch.arange(num_frames - 1, device=device) < last)[..., None], steps, 0.0)
    mirrored = torch.rand((batch, 1), generator=random, device=device) < 0.5
    frames = torch.where(mirrored[..., None, None, None], frames.flip(-1), frames)
    return frames, torch.where(mirrored[..., None], steps * steps.new_tensor([1.0, -1.0]), steps)


def change_look(
    frames: Float[Tensor, "batch frames 3 height width"], random: torch.Generator
) -> Float[Tensor, "batch frames 3 height width"]:
    """Change each window's contrast (0.75 to 1.25) and brightness (+-0.15), add flicker; blur or add noise to some."""

    def uniform(*shape: int) -> Tensor:
        return torch.rand((*shape, 1, 1, 1), generator=random, device=frames.device)

    batch, count = frames.shape[:2]
    frames = frames * (0.75 + 0.5 * uniform(batch, 1)) + 0.3 * (uniform(batch, 1) - 0.5)
    frames = frames + 0.04 * (uniform(batch, count) - 0.5)
    blurred = F.avg_pool2d(frames.flatten(0, 1), 3, stride=1, padding=1, count_include_pad=False).view_as(frames)
    frames = torch.where(uniform(batch, 1) < 0.3, blurred, frames)
    strength = 0.06 * uniform(batch, 1) * (uniform(batch, 1) < 0.5)
    noise = torch.randn(frames.shape, generator=random, device=frames.device)
    return (frames + strength * noise).clamp(-1.0, 1.0)


@torch.no_grad()
def evaluate_estimator(
    model: MotionEstimator, recordings: Recordings, *, window: int, num_windows: int
) -> dict[str, dict[str, float]]:
    """Errors on evenly spread windows, by variant ("recorded", "re-encoded"), over the last `window` - 3 steps.

    The errors are ADE and FDE (m), heading error at the end (degrees) and speed error (m/s), as in
    `terra.evaluation.fidelity`; "still" has the errors of the guess that nothing moves.
    """
    num_windows = min(num_windows, len(recordings.starts))
    starts = recordings.starts[torch.linspace(0, len(recordings.starts) - 1, num_windows).round().long()].tolist()
    true = [recordings.steps[start + 2 : start + window - 1].double().cpu().numpy() for start in starts]
    recovered = {
        name: [model.estimate(to_unit_range(frames[start : start + window]))[2:].numpy() for start in starts]
        for name, frames in zip(("recorded", "re-encoded"), recordings.frames, strict=False)
    }
    recovered["still"] = [np.zeros_like(steps) for steps in true]
    return {name: _mean_errors(steps, true, recordings.fps) for name, steps in recovered.items()}


def _mean_errors(recovered: Sequence[Steps], true: Sequence[Steps], fps: float) -> dict[str, float]:
    errors = [motion_errors(ours, theirs, fps) for ours, theirs in zip(recovered, true, strict=True)]
    by_name = {
        "ADE": [each["displacement"].mean() for each in errors],
        "FDE": [each["displacement"][-1] for each in errors],
        "heading_error": [each["heading"][-1] for each in errors],
        "speed_error": [each["speed"].mean() for each in errors],
    }
    return {name: float(np.mean(values)) for name, values in by_name.items()}


@torch.no_grad()
def evaluate_actions(
    model: ActionEstimator, recordings: Recordings, *, window: int, num_windows: int
) -> dict[str, dict[str, float]]:
    """Agreement of recovered actions with the recorded ones on evenly spread windows, over the last `window` - 3 steps.

    By variant ("recorded", "re-encoded"), as `terra.evaluation.recovered.compare` has it; "commonest" has the figures
    of always the commonest answer.
    """
    num_windows = min(num_windows, len(recordings.starts))
    starts = recordings.starts[torch.linspace(0, len(recordings.starts) - 1, num_windows).round().long()].tolist()
    rows = recordings.steps.cpu().numpy()[:, None]
    true = [model.space.values(rows[start + 2 : start + window - 1]) for start in starts]
    places, bootstrap = ["held out"] * len(starts), Bootstrap(0, 0, 0)
    found: dict[str, dict[str, float]] = {}
    for name, frames in zip(("recorded", "re-encoded"), recordings.frames, strict=False):
        ours = [model.estimate(to_unit_range(frames[start : start + window]))[2:] for start in starts]
        estimates = compare(ours, true, model.space, places, bootstrap)
        found[name] = {metric: estimate.value for metric, estimate in estimates.items()}
    return {**found, "commonest": majority(true, model.space)}


def train_estimator(
    recordings: Recordings,
    held_out: Recordings,
    model: EstimatorConfig | ActionEstimatorConfig,
    config: LoopConfig,
    accelerator: Accelerator,
    *,
    window: int,
    evaluation_windows: int,
) -> TrainingResult:
    """Train, then write `estimator/` (averaged weights, float16) and those weights' errors as `metrics.json`.

    Raises:
        ConfigError: a window of fewer than 4 frames; see also `terra.training.loop.train`.
        DatasetError: held-out recordings of another action space.
        CheckpointError, OutputError: see `terra.training.loop.train`.
    """
    if window < 4:
        raise ConfigError(f"window: expected 4 frames or more, got {window}")
    if held_out.space != recordings.space:
        raise DatasetError(
            f"expected held-out actions of {recordings.space.title} as in training, got those of {held_out.space.title}"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        if isinstance(model, EstimatorConfig):
            estimator = MotionEstimator(model)
            objective = EstimatorObjective(estimator, recordings, window)
        else:
            estimator = ActionEstimator(model)
            objective = ActionObjective(estimator, recordings, window)
    result = train(objective, config, accelerator)
    if result.stopped_by == "sigterm" or not accelerator.is_main_process:
        return result
    result.ema.copy_to_model()
    estimator.save_pretrained(config.output / FOLDER)
    stored = type(estimator).from_pretrained(config.output / FOLDER).to(accelerator.device)
    evaluated = {"window": window, "num_windows": evaluation_windows}
    if isinstance(stored, MotionEstimator):
        metrics = evaluate_estimator(stored, held_out, **evaluated)
    else:
        metrics = evaluate_actions(stored, held_out, **evaluated)
    write_json(config.output / "metrics.json", {**metrics, "step": result.step, "seconds": result.elapsed_seconds})
    logger.info("held out: %s", metrics)
    return result
