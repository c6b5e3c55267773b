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


def experiment(config: DictConfig) -> None:
    """Train, decode, compare."""
    values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    import torch
    from einops import rearrange
    from torch.nn import functional as F

    from decoder import to_uint8, write_video
    from decoder.refiner import RefinerConfig, RefinerDecoder
    from terra.config import checkpoint_folder
    from terra.evaluation.flicker import compare_flicker
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
    driving, held_out = (
        load_driving(Path(values["data"]), split, device=accelerator.device) for split in ("train", "held_out")
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
        RefinerConfig(**values["refiner"]),
        autoencoder,
        denoiser,
        accelerator,
        crop=values["crop"],
    )
    decoder = RefinerDecoder(tokenizer, refiner, seed=values["seed"])
    parts: dict[str, list[torch.Tensor]] = {}
    for start, end in pairwise(held_out.episode_start.tolist()):
        recorded = to_unit_range(held_out.frames[start : min(end, start + values["frames"])])
        tokens = tokenizer.encode(recorded)
        truth, decoded = refiner.fit(recorded).cpu(), refiner.fit(tokenizer.decode(tokens)).cpu()
        mean = F.avg_pool1d(F.pad(rearrange(decoded, "f c h w -> (c h w) 1 f"), (1, 1), mode="replicate"), 3, 1)
        through_vae = refiner.decode(refiner.encode(decoded) * refiner.vae.config["scaling_factor"])
        videos = {
            "recording": truth,
            "framewise": decoded,
            "framewise, mean of 3 frames": rearrange(mean, "(c h w) 1 f -> f c h w", c=3, h=truth.shape[2]),
            "framewise through the VAE": through_vae,
            "refined": decoder.decode(tokens),
        }
        for name, frames in videos.items():
            parts.setdefault(name, []).append(frames)
    comparisons = [
        compare_flicker({name: videos[episode] for name, videos in parts.items()}, parts["recording"][episode])
        for episode in range(len(parts["recording"]))
    ]
    means = {
        name: {metric: sum(c[name][metric] for c in comparisons) / len(comparisons) for metric in ("flicker", "psnr")}
        for name in parts
    }
    write_json(output / "metrics.json", {"means": means, "episodes": comparisons})
    for name, metrics in means.items():
        print(f"{name:28} flicker {metrics['flicker']:6.3f} levels  PSNR {metrics['psnr']:6.2f} dB")
    shown = torch.cat([torch.cat(parts[name]) for name in ("recording", "framewise", "refined")], dim=2)
    write_video(to_uint8(shown), output / "comparison.mp4", fps=held_out.fps)


if __name__ == "__main__":
    command("refiner_experiment", experiment)
