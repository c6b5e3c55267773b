"""Does a refiner flicker less than framewise decoding? Trained on recordings, judged on held-out ones."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch.nn import functional as F

from decoder import to_uint8, write_video
from decoder.refiner import Refiner, RefinerConfig, RefinerDecoder
from decoder.video import to_unit_range
from terra.evaluation.training_settings import TrainRefinerSettings
from terra.metrics.flicker import compare_flicker, summarize_flicker
from terra.training.data import load_driving
from terra.training.processes import start_processes
from terra.training.refiner import train_refiner
from terra.training.settings import LoopConfig
from tokenizer import Frames, LFQTokenizer
from tokenizer.files import write_json

_SHOWN = 4  # clips in comparison.mp4


def run(settings: TrainRefinerSettings) -> None:
    """Train a refiner as conf/train_refiner.yaml says, then compare its videos with others of the same tokens.

    Held-out frames are decoded with the refiner, without it, and in other cheap ways, all compared in the refiner's
    size. Writes metrics.json and comparison.mp4 (the recording, framewise, refined). The same command goes on where it
    was stopped.

    Raises:
        ConfigError, CheckpointError, DatasetError, OutputError: see `load_driving` and `train_refiner`.
    """
    accelerator, output = start_processes(settings.device), settings.output
    autoencoder, denoiser = (
        LoopConfig(**vars(part) | {"output": output / name, "seed": settings.seed})
        for name, part in (("autoencoder", settings.autoencoder), ("denoiser", settings.denoiser))
    )
    refiner_config = settings.refiner
    data, device, workers = settings.data, accelerator.device, settings.workers
    driving, held_out = (
        load_driving(data, split, device=device, workers=workers, max_episodes=most)
        for split, most in (("train", settings.episodes), ("held_out", settings.clips))
    )
    tokenizer = _tokenizer(settings.tokenizer.folder(), driving.frames.shape[2:], device)
    refiner = train_refiner(
        driving,
        tokenizer,
        refiner_config,
        autoencoder,
        denoiser,
        accelerator,
        crop=settings.crop,
        log_sigma=settings.log_sigma,
    )
    clips, shown = [], []
    for start, end in pairwise(held_out.episode_start.tolist()):
        recorded = to_unit_range(held_out.frames[start : min(end, start + settings.frames)])
        truth, videos = _videos(recorded, tokenizer, refiner, refiner_config, settings.num_steps, settings.seed)
        clips.append(compare_flicker(videos, truth))
        if len(shown) < _SHOWN:
            refined = videos[f"refined, {settings.num_steps[0]} steps"]
            shown.append(torch.cat([truth, videos["framewise"], refined], dim=2))
    means = summarize_flicker(clips, "framewise")
    write_json(output / "metrics.json", {"means": means, "clips": clips})
    _report(means, len(clips))
    write_video(to_uint8(torch.cat(shown)), output / "comparison.mp4", fps=held_out.fps)


def _tokenizer(checkpoint: Path, image_size: torch.Size, device: torch.device) -> LFQTokenizer:
    trained = LFQTokenizer.from_pretrained(checkpoint)
    # Its nets are convolutional, and work at the data's size too, if not as well as at their own.
    height, width = image_size
    tokenizer = LFQTokenizer(trained.config.replace(image_size=(height, width))).eval().requires_grad_(False)
    tokenizer.load_state_dict(trained.state_dict())
    return tokenizer.to(device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def _videos(
    recorded: Frames,
    tokenizer: LFQTokenizer,
    refiner: Refiner,
    config: RefinerConfig,
    num_steps: Sequence[int],
    seed: int,
) -> tuple[Frames, dict[str, Frames]]:
    """The recording in the refiner's size, and the videos that are compared with it."""
    tokens = tokenizer.encode(recorded)
    truth, decoded = refiner.fit(recorded).cpu(), refiner.fit(tokenizer.decode(tokens)).cpu()
    mean = F.avg_pool1d(F.pad(rearrange(decoded, "f c h w -> (c h w) 1 f"), (1, 1), mode="replicate"), 3, 1)
    with torch.no_grad():
        through_vae = [refiner.reconstruct(refiner.encode(video)).clamp(-1.0, 1.0) for video in (truth, decoded)]
    videos = {
        "framewise": decoded,
        "framewise, mean of 3 frames": rearrange(mean, "(c h w) 1 f -> f c h w", c=3, h=truth.shape[2]),
        "recorded through the VAE": through_vae[0],
        "framewise through the VAE": through_vae[1],
    }
    for steps in num_steps:
        refiner.config = config.replace(num_steps=steps, vae=refiner.config.vae)
        videos[f"refined, {steps} steps"] = RefinerDecoder(tokenizer, refiner, seed=seed).decode(tokens)
    return truth, videos


def _report(means: dict[str, Any], num_clips: int) -> None:
    for name, found in means.items():
        flicker, less = found["flicker"], found["less_than_rival"]
        print(
            f"{name:28} flicker {flicker['value']:6.3f} [{flicker['low']:.3f}, {flicker['high']:.3f}] levels, "
            f"less than framewise {less['value']:6.3f} [{less['low']:.3f}, {less['high']:.3f}], "
            f"in {found['won']:.0%} of {num_clips} clips  PSNR {found['psnr']['value']:5.2f} dB"
        )
