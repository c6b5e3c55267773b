import math
from pathlib import Path

import pytest
import torch
from einops import rearrange, repeat
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from tiny_driving import SIZE, write_driving
from tiny_refiner import tiny_refiner, tiny_refiner_config
from torch.nn import functional as F

from decoder.refiner import Refiner, RefinerConfig, RefinerDecoder
from decoder.video import to_unit_range
from terra.errors import ConfigError, DatasetError
from terra.metrics.flicker import compare_flicker, flicker, summarize_flicker
from terra.training.data import load_driving
from terra.training.processes import start_processes
from terra.training.randomness import step_random
from terra.training.refiner import FOLDER, LOG_SIGMA, DenoisingObjective, train_refiner
from terra.training.settings import LoopConfig

# diffusers' scheduler, with NumPy 2.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning:diffusers.*"),
]

SHADES = 5
STEPS = {"final_learning_rate": 0.1, "warmup_steps": 5, "ema_decay": 0.9, "log_every_seconds": 1e6}


class CoarseTokenizer:
    """A token is the shade of 2 x 2 pixels, one of 5 a color: what moves smoothly jumps from shade to shade."""

    def encode(self, frames):
        patches = rearrange(F.avg_pool2d(frames, 2), "f c r k -> c f r k")
        red, green, blue = ((patches + 1) / 2 * (SHADES - 1)).round().long()
        return (red * SHADES + green) * SHADES + blue

    def decode(self, tokens):
        colors = torch.stack([tokens // SHADES**2, tokens // SHADES % SHADES, tokens % SHADES], dim=1)
        return repeat(2 * colors / (SHADES - 1) - 1, "f c r k -> f c (r a) (k b)", a=2, b=2)


def test_flicker_is_what_changes_beside_the_recording():
    truth = torch.rand(6, 3, 4, 5) - 0.5
    assert flicker(truth, truth) == 0
    # A constant error is no flicker.
    assert flicker(truth + 0.25, truth) == pytest.approx(0, abs=1e-4)
    blinking = truth + torch.tensor([0.1, -0.1] * 3)[:, None, None, None]
    assert flicker(blinking, truth) == pytest.approx(0.2 * 127.5, rel=1e-4)
    assert compare_flicker({"a": truth, "b": blinking}, truth)["a"] == {"flicker": 0.0, "psnr": 100.0}


def test_the_loss_is_0_for_the_velocity_that_the_sampler_takes_for_the_latents():
    refiner = tiny_refiner()
    latents, condition = torch.randn(2, 12, 4, 6, 10)
    objective = DenoisingObjective(refiner, latents, condition, torch.tensor([0, 5, 12]), LOG_SIGMA)
    batch = objective.draw(step_random(0, 0, torch.device("cpu")), 3, 1.0)
    starts = [int((latents == clip[0]).flatten(1).all(dim=1).nonzero()) for clip in batch["latents"]]
    assert set(starts) <= {0, 5, 6, 7}
    assert torch.equal(batch["condition"][1], condition[starts[1] : starts[1] + 5])

    def predict(scaled, given, timestep, unet=None):
        sigma = (4 * timestep).exp()[:, None, None, None, None]
        noised = scaled * (sigma**2 + 1).sqrt()
        return (noised / (sigma**2 + 1) - batch["latents"]) * (sigma**2 + 1).sqrt() / sigma

    refiner.predict = predict
    assert objective.loss(batch, 0.0)["loss"].item() < 1e-6
    assert batch["sigma"].log().mean().abs() < 4
    with pytest.raises(DatasetError, match="expected an episode of 5 frames or more, got none"):
        DenoisingObjective(refiner, latents, condition, torch.tensor([0, 4, 8, 12]), LOG_SIGMA)


def test_a_small_refiner_flickers_less_than_framewise_decoding(tmp_path):
    write_driving(tmp_path / "data", shards=2, episodes=2, num_frames=20, held_out=1)
    driving, held_out = (load_driving(tmp_path / "data", split) for split in ("train", "held_out"))
    tokenizer = CoarseTokenizer()
    config = tiny_refiner_config(image_size=SIZE, num_steps=6, sigma_max=80.0)
    loops = [
        LoopConfig(output=tmp_path / name, max_steps=steps, batch_size=size, learning_rate=rate, **STEPS)
        for name, steps, size, rate in (("autoencoder", 50, 4, 3e-3), ("denoiser", 45, 3, 4e-3))
    ]
    refiner = train_refiner(driving, tokenizer, config, *loops, start_processes("cpu"), crop=SIZE)
    truth = to_unit_range(held_out.frames[:14])
    tokens = tokenizer.encode(truth)
    videos = {"framewise": tokenizer.decode(tokens), "refined": RefinerDecoder(tokenizer, refiner).decode(tokens)}
    results = compare_flicker(videos, truth)
    assert results["refined"]["flicker"] < 0.8 * results["framewise"]["flicker"]
    stored = Refiner.from_pretrained(tmp_path / "denoiser" / FOLDER)
    assert math.isclose(stored.vae.config["scaling_factor"], refiner.vae.config["scaling_factor"])
    assert torch.equal(RefinerDecoder(tokenizer, stored).decode(tokens), videos["refined"])


def test_a_residual_refiner_begins_with_the_frames_that_it_is_given(tmp_path):
    write_driving(tmp_path / "data", shards=1, episodes=1, num_frames=10)
    driving = load_driving(tmp_path / "data", "train")
    tokenizer = CoarseTokenizer()
    config = tiny_refiner_config(image_size=SIZE, num_steps=1, sigma_max=80.0, residual=True)
    steps = STEPS | {"max_steps": 1, "batch_size": 1, "learning_rate": 1e-6}
    loops = [LoopConfig(output=tmp_path / name, **steps) for name in ("autoencoder", "denoiser")]
    log_sigma = (math.log(config.sigma_max), 0.0)
    accelerator = start_processes("cpu")
    refiner = train_refiner(driving, tokenizer, config, *loops, accelerator, crop=SIZE, log_sigma=log_sigma)
    truth = to_unit_range(driving.frames)
    tokens = tokenizer.encode(truth)
    decoded = tokenizer.decode(tokens)
    with torch.no_grad():
        difference = refiner.encode(truth) - refiner.encode(decoded)
    assert refiner.vae.config["scaling_factor"] == pytest.approx(1 / difference.std().item(), rel=1e-3)
    assert (RefinerDecoder(tokenizer, refiner).decode(tokens) - decoded).abs().mean() < 1e-3
    stored = Refiner.from_pretrained(tmp_path / "denoiser" / FOLDER)
    assert stored.config.residual


def test_clips_are_summarized_with_intervals():
    clips = [
        {"framewise": {"flicker": 5.0, "psnr": 30.0}, "refined": {"flicker": 5.0 - gain, "psnr": 31.0}}
        for gain in (1.0, 2.0, 3.0, -1.0)
    ]
    found = summarize_flicker(clips, "framewise")
    assert found["framewise"]["won"] == 0
    assert found["refined"]["won"] == 0.75
    less = found["refined"]["less_than_baseline"]
    assert less["value"] == pytest.approx(1.25)
    assert -1 <= less["low"] < 1.25 < less["high"] <= 3
    assert found["refined"]["psnr"] == {"value": 31.0, "low": 31.0, "high": 31.0, "count": 4, "units": 4}


def test_the_first_episodes_alone_can_be_loaded(tmp_path):
    write_driving(tmp_path, shards=2, episodes=2, num_frames=4)
    driving, first = load_driving(tmp_path, "train"), load_driving(tmp_path, "train", max_episodes=3)
    assert first.episode_start.tolist() == [0, 4, 8, 12]
    assert torch.equal(first.frames, driving.frames[:12])
    assert torch.equal(first.actions, driving.actions[:12])
    assert len(load_driving(tmp_path, "train", max_episodes=9).frames) == 16
    with pytest.raises(ConfigError, match="max_episodes: expected at least 1 or null, got 0"):
        load_driving(tmp_path, "train", max_episodes=0)


def test_the_recipe_for_a_gpu_builds():
    with initialize_config_dir(str(Path(__file__).parent.parent / "conf"), version_base="1.3"):
        config = compose("train_refiner", ["recipe=refiner_town", "data=data", "output=output"])
    values = OmegaConf.to_container(config)
    for part in ("autoencoder", "denoiser"):
        assert LoopConfig(**values[part], output=Path("output")).schedule == "time"
    with torch.device("meta"):
        refiner = Refiner(RefinerConfig(**values["refiner"]))
    assert refiner.latent_shape == (12, 72, 128)
    assert values["num_steps"][0] == refiner.config.num_steps
    # A sampler of one step asks at one level: what training is for.
    assert values["log_sigma"] == [pytest.approx(math.log(refiner.config.sigma_max), abs=1e-3), 0.0]


def test_one_step_of_the_sampler_gives_what_the_network_expects_of_the_latents():
    refiner = tiny_refiner(num_steps=1, sigma_max=80.0)
    latents = torch.randn(5, *refiner.latent_shape)
    # The velocity for these latents: (noise - sigma x latents) / sqrt(sigma^2 + 1).
    noise = torch.randn_like(latents)
    refiner.predict = lambda scaled, condition, timestep: ((noise - 80 * latents) / math.sqrt(6401))[None]
    found = refiner.denoise(noise, torch.zeros_like(latents), torch.ones(5))
    assert torch.allclose(found, latents, atol=0.05)
