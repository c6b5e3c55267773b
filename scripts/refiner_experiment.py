"""Does a refiner flicker less than framewise decoding? `python scripts/refiner_experiment.py data=DIR output=DIR`.

Trains a small one on recorded driving, then decodes held-out driving with it, without it, and in other cheap ways, all
compared in the refiner's size. Writes metrics.json and comparison.mp4 (the recording, framewise, refined). Settings:
conf/refiner_experiment.yaml. The same command goes on where it was stopped.
"""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from terra.cli import command

SHOWN = 4  # clips in comparison.mp4


def experiment(config: DictConfig) -> None:
    """Train, decode, compare."""
    values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    import torch
    from einops import rearrange
    from torch.nn import functional as F

    from decoder import to_uint8, write_video
    from decoder.refiner import RefinerConfig, RefinerDecoder
    from terra.config import checkpoint_folder
    from terra.metrics.flicker import compare_flicker, summarize_flicker
    from terra.training.data import load_driving, to_unit_range
    from terra.training.processes import start_processes
    from terra.training.refiner import train_refiner
    from terra.training.settings import LoopConfig
    from tokenizer import LFQTokenizer
    from tokenizer.files import write_json

    accelerator, output = start_processes(values["device"]), Path(values["output"])
    autoencoder, denoiser = (
        LoopConfig(**values[part], output=output / part, seed=values["seed"]) for part in ("autoencoder", "denoiser")
    )
    refiner_config = RefinerConfig(**{**values["refiner"], "image_size": tuple(values["refiner"]["image_size"])})
    samplers = {steps: replace(refiner_config, num_steps=steps) for steps in values["num_steps"]}
    data, device, workers = Path(values["data"]), accelerator.device, values["workers"]
    driving, held_out = (
        load_driving(data, split, device=device, workers=workers, max_episodes=most)
        for split, most in (("train", values["episodes"]), ("held_out", values["clips"]))
    )
    trained = LFQTokenizer.from_pretrained(checkpoint_folder(config.tokenizer))
    # Its nets are convolutional, and work at the data's size too, if not as well as at their own.
    height, width = driving.frames.shape[2:]
    tokenizer = LFQTokenizer(replace(trained.config, image_size=(height, width))).eval().requires_grad_(False)
    tokenizer.load_state_dict(trained.state_dict())
    tokenizer.to(accelerator.device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    refiner = train_refiner(
        driving,
        tokenizer,
        refiner_config,
        autoencoder,
        denoiser,
        accelerator,
        crop=tuple(values["crop"]),
        log_sigma=tuple(values["log_sigma"]),
    )
    clips, shown = [], []
    for start, end in pairwise(held_out.episode_start.tolist()):
        recorded = to_unit_range(held_out.frames[start : min(end, start + values["frames"])])
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
        for steps, sampler in samplers.items():
            refiner.config = replace(sampler, vae=refiner.config.vae)
            videos[f"refined, {steps} steps"] = RefinerDecoder(tokenizer, refiner, seed=values["seed"]).decode(tokens)
        clips.append(compare_flicker(videos, truth))
        if len(shown) < SHOWN:
            shown.append(torch.cat([truth, decoded, videos[f"refined, {values['num_steps'][0]} steps"]], dim=2))
    means = summarize_flicker(clips, "framewise")
    write_json(output / "metrics.json", {"means": means, "clips": clips})
    for name, of in means.items():
        flicker, less = of["flicker"], of["less_than_baseline"]
        print(
            f"{name:28} flicker {flicker['value']:6.3f} [{flicker['low']:.3f}, {flicker['high']:.3f}] levels, "
            f"less than framewise {less['value']:6.3f} [{less['low']:.3f}, {less['high']:.3f}], "
            f"in {of['won']:.0%} of {len(clips)} clips  PSNR {of['psnr']['value']:5.2f} dB"
        )
    write_video(to_uint8(torch.cat(shown)), output / "comparison.mp4", fps=held_out.fps)


if __name__ == "__main__":
    command("refiner_experiment", experiment)
