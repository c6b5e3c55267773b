import json
import math
from itertools import pairwise

import pytest
import torch
from entry import compose
from hypothesis import given, strategies as st
from tiny import COLS, ROWS
from tiny_refiner import SIZE, tiny_refiner
from torch.nn import functional as F

from decoder import Decoder
from decoder.refiner import Refiner, RefinerDecoder
from decoder.refiner.windows import frame_noise, refined_windows
from terra.config.files import plain
from terra.config.groups import build_part
from terra.engine.base import EngineSpec
from terra.engine.persistence import PersistenceEngine
from terra.errors import CheckpointError, ConfigError
from terra.pipeline import Pipeline, RolloutRequest
from terra.sampling import SamplingParams
from terra.world_model import load_config
from tokenizer import LFQTokenizer

# diffusers' scheduler, with NumPy 2.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning:diffusers.*"),
]


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer):
    return LFQTokenizer.from_pretrained(tiny_tokenizer)


@pytest.fixture(scope="module")
def refiner():
    return tiny_refiner()


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(0, 64, (11, ROWS, COLS), generator=torch.Generator().manual_seed(0))


# Windows and noise


@given(num_frames=st.integers(1, 200), size=st.integers(1, 30), data=st.data())
def test_windows_keep_every_frame_once(num_frames, size, data):
    overlap = data.draw(st.integers(0, size - 1))
    windows = refined_windows(num_frames, size, overlap)
    kept = [frame for window in windows for frame in range(window.keep_from, window.stop)]
    assert kept == list(range(num_frames))
    assert {window.stop - window.start for window in windows} == {min(size, num_frames)}
    for window in windows[1:]:
        assert window.keep_from - window.start >= overlap
    for window in windows[1:-1]:
        assert window.keep_from - window.start == overlap


def test_47_frames_are_refined_as_published():
    assert [(window.start, window.stop) for window in refined_windows(47, 25, 3)] == [(0, 25), (22, 47)]
    assert [(window.start, window.stop) for window in refined_windows(50, 25, 3)] == [(0, 25), (22, 47), (25, 50)]


def test_noise_depends_on_seed_and_frame_alone():
    noise = frame_noise(7, range(10), (4, 30, 40))
    assert torch.equal(frame_noise(7, range(3, 6), (4, 30, 40)), noise[3:6])
    assert noise.std().item() == pytest.approx(1, abs=0.01)
    assert noise.mean().item() == pytest.approx(0, abs=0.01)
    correlation = torch.corrcoef(torch.cat([noise.flatten(1), frame_noise(8, range(3), (4, 30, 40)).flatten(1)]))
    assert (correlation - torch.eye(13)).abs().max() < 0.06


# Decoding


@pytest.mark.parametrize("num_frames", [1, 2, 5, 6, 11])
def test_any_number_of_frames_is_refined(tokenizer, refiner, tokens, num_frames):
    decoder = RefinerDecoder(tokenizer, refiner)
    assert isinstance(decoder, Decoder)
    frames = decoder.decode(tokens[:num_frames])
    assert frames.shape == (num_frames, 3, *SIZE)
    assert frames.dtype == torch.float32
    assert frames.abs().max() <= 1
    assert frames.std() > 0.05
    assert torch.equal(decoder.decode(tokens[:num_frames]), frames)
    with pytest.raises(ValueError, match="at least one frame"):
        decoder.decode(tokens[:0])


@pytest.mark.slow
def test_a_frame_depends_on_its_window_and_the_seed(tokenizer, refiner, tokens):
    # Windows of 5 that share 2: 0 to 5, 3 to 8, 6 to 11.
    frames = RefinerDecoder(tokenizer, refiner, seed=3).decode(tokens)
    changed = tokens.clone()
    changed[4] = 63 - changed[4]
    differs = (RefinerDecoder(tokenizer, refiner, seed=3).decode(changed) - frames).abs().amax((1, 2, 3))
    assert (differs[:8] > 1e-3).all()
    assert (differs[8:] == 0).all()
    assert torch.equal(RefinerDecoder(tokenizer, refiner, seed=3).decode(tokens[:8]), frames[:8])
    other = RefinerDecoder(tokenizer, refiner, seed=4).decode(tokens)
    assert ((other - frames).abs().amax((1, 2, 3)) > 1e-3).all()


def test_no_more_than_a_window_is_held(tokenizer, tokens):
    refiner, seen = tiny_refiner(), []

    class Watched:
        def decode(self, tokens):
            seen.append(("tokenizer", len(tokens)))
            return tokenizer.decode(tokens)

    refiner.vae.decoder.register_forward_pre_hook(lambda _, inputs: seen.append(("vae", len(inputs[0]))))
    refiner.unet.register_forward_pre_hook(lambda _, inputs: seen.append(("unet", inputs[0].shape[:2])))
    RefinerDecoder(Watched(), refiner).decode(tokens)
    assert seen.count(("tokenizer", 5)) == 3
    assert seen.count(("vae", 1)) == 11
    assert seen.count(("unet", (1, 5))) == 3 * 3
    assert len(seen) == 3 + 11 + 9
    seen.clear()
    # The prediction without the condition is another pass, not a larger one.
    RefinerDecoder(Watched(), refiner, guidance=(1.5, 3.0)).decode(tokens[:5])
    assert seen.count(("unet", (1, 5))) == 2 * 3


def edm_sampler(refiner, noise, condition, scale, steps):
    """Euler steps of EDM (Karras et al. 2022, rho 7) with v-scaling, guided on the denoised latents; in float64."""
    ramp = torch.linspace(0, 1, steps, dtype=torch.float64)
    low, high = 0.002 ** (1 / 7), 700.0 ** (1 / 7)
    sigmas = [*((high + ramp * (low - high)) ** 7).tolist(), 0.0]
    x = noise.double() * math.sqrt(1 + sigmas[0] ** 2)
    for sigma, following in pairwise(sigmas):

        def denoised(given, x=x, sigma=sigma):
            scaled = (x / math.sqrt(sigma**2 + 1)).float()
            timestep = torch.tensor([0.25 * math.log(sigma)])
            velocity = refiner.predict(scaled[None], given[None], timestep)[0].double()
            return x / (sigma**2 + 1) - velocity * sigma / math.sqrt(sigma**2 + 1)

        without = denoised(torch.zeros_like(condition))
        guided = without + scale.double()[:, None, None, None] * (denoised(condition) - without)
        x = x + (following - sigma) * (x - guided) / sigma
    return x.float()


@pytest.mark.slow
@pytest.mark.parametrize("guidance", [(1.0, 1.0), (1.5, 3.0)])
def test_the_sampler_is_edms_with_guidance_rising_over_the_window(tokenizer, tokens, guidance):
    refiner = tiny_refiner(num_steps=15)
    frames = RefinerDecoder(tokenizer, refiner, guidance=guidance, seed=5).decode(tokens[:4])
    fitted = F.interpolate(tokenizer.decode(tokens[:4]), SIZE, mode="bilinear", antialias=True)
    noise = frame_noise(5, range(4), (4, SIZE[0] // 2, SIZE[1] // 2))
    scale = guidance[0] + (guidance[1] - guidance[0]) * torch.arange(4) / 3
    latents = edm_sampler(refiner, noise, refiner.encode(fitted), scale, 15)
    torch.testing.assert_close(frames, refiner.decode(latents, fitted, fitted), atol=1e-4, rtol=0)


def test_frames_are_those_of_the_tokenizer_where_the_network_is_certain(tokenizer, tokens):
    """A stand-in for the UNet that predicts the condition itself: what comes out is the VAE's view of the frames."""
    refiner = tiny_refiner(num_steps=15)
    scaling = refiner.vae.config["scaling_factor"]

    def predict(scaled, condition, timestep, unet=None):
        sigma = math.exp(4 * timestep.item())
        # v for which the denoised latents are the condition's, scaled.
        return (scaled / math.sqrt(sigma**2 + 1) - scaling * condition) * math.sqrt(sigma**2 + 1) / sigma

    refiner.predict = predict
    frames = RefinerDecoder(tokenizer, refiner).decode(tokens)
    fitted = F.interpolate(tokenizer.decode(tokens), SIZE, mode="bilinear", antialias=True)
    reconstructed = refiner.reconstruct(refiner.encode(fitted)).clamp(-1, 1)
    torch.testing.assert_close(frames, reconstructed, atol=1e-3, rtol=0)


def test_a_residual_refiner_changes_the_frames_as_its_latents_change_the_vaes_pictures(tokenizer, tokens):
    refiner = tiny_refiner(residual=True)
    fitted = refiner.fit(tokenizer.decode(tokens))
    refiner.denoise = lambda noise, condition, guidance: torch.zeros_like(condition)
    assert torch.equal(RefinerDecoder(tokenizer, refiner).decode(tokens), fitted)
    refiner.denoise = lambda noise, condition, guidance: torch.full_like(condition, 0.1)
    condition = refiner.encode(fitted)
    changed = condition + 0.1 / refiner.vae.config["scaling_factor"]
    expected = (fitted + refiner.reconstruct(changed) - refiner.reconstruct(condition)).clamp(-1, 1)
    assert (expected - fitted).abs().mean() > 1e-3
    torch.testing.assert_close(RefinerDecoder(tokenizer, refiner).decode(tokens), expected)


# Checkpoints and configuration


@pytest.mark.slow
def test_a_saved_refiner_is_the_same(tokenizer, refiner, tokens, tmp_path):
    refiner.save_pretrained(tmp_path)
    again = Refiner.from_pretrained(tmp_path)
    assert again.config.to_dict() == json.loads(json.dumps(refiner.config.to_dict())) | {
        name: getattr(refiner.config, name) for name in ("image_size", "guidance", "time_ids")
    }
    frames = RefinerDecoder(tokenizer, refiner).decode(tokens)
    assert torch.equal(RefinerDecoder(tokenizer, again).decode(tokens), frames)
    half = RefinerDecoder.from_pretrained(tokenizer, tmp_path, dtype="bfloat16").decode(tokens)
    assert half.dtype == torch.float32
    assert (half - frames).abs().mean() < 0.02


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "expected the configuration of a video_refiner"),
        ({"color": 1}, "differs in color"),
        ({"num_steps": 0}, "num_steps: expected a whole number from 1 to 10000, got 0"),
        ({"overlap": 5}, "overlap: expected 0 to 4, got 5"),
        ({"guidance": [1.5]}, "guidance: expected two finite numbers"),
        ({"image_size": [11, 20]}, r"image_size: expected two multiples of 2, got \[11, 20\]"),
        ({"sigma_max": 0.001}, "sigma_min: expected less than sigma_max=0.001, got 0.002"),
        ({"unet": {"color": 1}}, "unet: expected sample_size, .*, got 'color'"),
        ({"unet": {}}, "of another shape"),
        ({"vae": {}}, "block_out_channels"),
    ],
)
def test_a_bad_configuration_is_one_line(refiner, tmp_path, change, message):
    refiner.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=message) as caught:
        Refiner.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)


def test_damaged_weights_are_one_line(refiner, tmp_path):
    refiner.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="bytes of tensor data"):
        Refiner.from_pretrained(tmp_path)


def test_a_pipeline_decodes_with_it(tokenizer, refiner, tiny_model, tmp_path):
    refiner.save_pretrained(tmp_path)
    overrides = ["dtype=float32", "device=cpu", "decoder=refiner", f"decoder.pretrained={tmp_path}", "decoder.seed=3"]
    config = compose("generate", [*overrides, "context=a", "trajectory=b"])
    decoder = build_part("decoder", plain(config)["decoder"], tokenizer=tokenizer)
    assert isinstance(decoder, RefinerDecoder)
    generator = torch.Generator().manual_seed(0)
    context = torch.rand(3, 3, 4 * ROWS, 4 * COLS, generator=generator) * 2 - 1
    engine = PersistenceEngine(EngineSpec.of(load_config(tiny_model)))
    with Pipeline(tokenizer, engine, decoder) as pipeline:
        request = RolloutRequest(context, torch.zeros(6, 6, 3), seed=0)
        (rollout,) = pipeline.generate([request], SamplingParams())
    assert torch.equal(rollout.frames, RefinerDecoder(tokenizer, refiner, seed=3).decode(rollout.tokens))
    for change, message in (
        ("decoder.dtype=int8", "dtype: expected one of float32, bfloat16, float16, got 'int8'"),
        ("decoder.guidance=[2]", r"decoder\.guidance\[1\]: expected a number, got none"),
        ("decoder.seed=-1", "seed: expected 0 to"),
        ("+decoder.steps=3", "decoder: .*steps"),
    ):
        bad = compose("generate", [*overrides, "context=a", "trajectory=b", change])
        with pytest.raises(ConfigError, match=message):
            build_part("decoder", plain(bad)["decoder"], tokenizer=tokenizer)
