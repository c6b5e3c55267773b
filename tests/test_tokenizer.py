import itertools
import json
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings, strategies as st
from jaxtyping import TypeCheckError
from torch import nn

import tokenizer as tokenizer_package
from tokenizer import EncoderDecoderConfig, LFQTokenizer, LFQTokenizerConfig, LossWeights, QuantizerConfig
from tokenizer.config import BitOrder
from tokenizer.errors import CheckpointError, ConfigError
from tokenizer.losses import (
    commitment_loss,
    gradient_loss,
    lfq_entropy_loss,
    pixel_loss,
    reconstruction_loss,
    tokenizer_loss,
)
from tokenizer.model import MAX_FRAMES_AT_ONCE, frames_at_once
from tokenizer.networks import Upsample
from tokenizer.quantizer import quantize, signs_from_tokens, straight_through, tokens_from_signs

PUBLISHED = json.loads("""
{
  "auto_map": {
    "AutoConfig": "configuration_lfq_tokenizer.LFQTokenizerConfig",
    "AutoModel": "modeling_lfq_tokenizer.LFQTokenizer"
  },
  "encoder_decoder_config": {
    "ch": 128, "ch_mult": [1, 1, 2, 2, 4], "in_channels": 3, "num_res_blocks": 2, "out_ch": 3, "z_channels": 18
  },
  "model_type": "lfq_tokenizer",
  "quantizer_config": {
    "batch_maximization_weight": 1.0, "codebook_size": 262144, "dim": 18, "sample_minimization_weight": 1.0
  },
  "transformers_version": "4.39.3"
}
""")


def make_config(
    dim: int = 8,
    ch_mult: tuple[int, ...] = (1, 1, 2),
    image_size: tuple[int, int] = (32, 64),
    bit_order: BitOrder = "msb_first",
) -> LFQTokenizerConfig:
    return LFQTokenizerConfig(
        encoder_decoder_config=EncoderDecoderConfig(ch=32, z_channels=dim, num_res_blocks=1, ch_mult=ch_mult),
        quantizer_config=QuantizerConfig(dim=dim, codebook_size=2**dim, bit_order=bit_order),
        image_size=image_size,
    )


@pytest.fixture(scope="module")
def small() -> LFQTokenizer:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LFQTokenizer(make_config()).eval()


def random_frames(num_frames: int, height: int = 32, width: int = 64, seed: int = 0) -> torch.Tensor:
    return torch.rand(num_frames, 3, height, width, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def changed(section: str | None, **values: object) -> dict:
    data = json.loads(json.dumps(PUBLISHED))
    (data[section] if section else data).update(values)
    return data


def test_published_architecture_has_the_published_names_and_shapes():
    with torch.device("meta"):
        state = LFQTokenizer(LFQTokenizerConfig()).state_dict()
    encoder = {name: tensor for name, tensor in state.items() if name.startswith("encoder.")}
    decoder = {name: tensor for name, tensor in state.items() if name.startswith("decoder.")}
    assert (len(state), len(encoder), len(decoder)) == (175, 87, 88)
    assert sum(tensor.numel() for tensor in encoder.values()) == 24_964_498
    assert sum(tensor.numel() for tensor in decoder.values()) == 40_526_211
    shapes = {
        "encoder.conv_in.weight": (128, 3, 3, 3),
        "encoder.down.0.block.1.conv2.weight": (128, 128, 3, 3),
        "encoder.down.2.block.0.norm1.weight": (128,),
        "encoder.down.2.block.0.nin_shortcut.weight": (256, 128, 1, 1),
        "encoder.down.4.block.0.nin_shortcut.weight": (512, 256, 1, 1),
        "encoder.down.3.downsample.weight": (256, 256, 3, 3),
        "encoder.down.3.downsample.bias": (256,),
        "encoder.mid_block.1.conv1.weight": (512, 512, 3, 3),
        "encoder.norm_out.bias": (512,),
        "encoder.conv_out.weight": (18, 512, 1, 1),
        "encoder.conv_out.bias": (18,),
        "decoder.conv_in.weight": (512, 18, 3, 3),
        "decoder.conv_in.bias": (512,),
        "decoder.up.3.block.0.nin_shortcut.weight": (256, 512, 1, 1),
        "decoder.up.1.block.0.nin_shortcut.weight": (128, 256, 1, 1),
        "decoder.up.4.upsample.conv1.weight": (2048, 512, 3, 3),
        "decoder.up.2.upsample.conv1.bias": (1024,),
        "decoder.up.1.upsample.conv1.weight": (512, 128, 3, 3),
        "decoder.norm_out.weight": (128,),
        "decoder.conv_out.weight": (3, 128, 3, 3),
        "decoder.conv_out.bias": (3,),
    }
    assert {name: tuple(state[name].shape) for name in shapes} == shapes
    absent = ("encoder.conv_in.bias", "encoder.down.4.downsample.weight", "decoder.up.0.upsample.conv1.weight")
    assert not state.keys() & set(absent)


def test_published_config_round_trip():
    config = LFQTokenizerConfig.from_dict(PUBLISHED)
    assert config == LFQTokenizerConfig()
    assert (config.downsample, config.rows, config.cols, config.num_tokens) == (16, 18, 32, 576)
    written = json.loads(json.dumps(config.to_dict()))
    assert LFQTokenizerConfig.from_dict(written) == config
    assert written.pop("image_size") == [288, 512]
    assert written["quantizer_config"].pop("bit_order") == "msb_first"
    assert written == {key: PUBLISHED[key] for key in written}
    assert PUBLISHED.keys() - written.keys() == {"auto_map", "transformers_version"}


def test_optional_config_keys_are_read():
    data = changed("quantizer_config", bit_order="lsb_first") | {"image_size": [160, 256]}
    config = LFQTokenizerConfig.from_dict(data)
    assert config.quantizer_config.bit_order == "lsb_first"
    assert (config.rows, config.cols) == (10, 16)
    assert "same_tokens_as" not in config.to_dict()
    child = LFQTokenizerConfig.from_dict(data | {"same_tokens_as": "a" * 64})
    assert child.same_tokens_as == child.to_dict()["same_tokens_as"] == "a" * 64


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (changed(None, model_type="vq"), ["model_type", "'vq'"]),
        (changed(None, use_text=False), ["expected encoder_decoder_config, quantizer_config", "use_text"]),
        (changed("quantizer_config", entropy=1), ["quantizer_config: expected dim, ", "'entropy'"]),
        ({key: value for key, value in PUBLISHED.items() if key != "quantizer_config"}, ["quantizer_config", "none"]),
        (changed(None, quantizer_config=[]), ["quantizer_config: expected settings", "[]"]),
        (changed("quantizer_config", codebook_size=4096), ["262144", "4096"]),
        (changed("quantizer_config", dim=17, codebook_size=2**17), ["18", "17"]),
        (
            changed("quantizer_config", dim=63, codebook_size=2**63),
            ["quantizer_config.dim: expected a whole number from 1 to 62", "63"],
        ),
        (changed("quantizer_config", dim="18"), ["quantizer_config.dim: expected a whole number", "'18'"]),
        (changed("quantizer_config", bit_order="big"), ["msb_first", "lsb_first", "'big'"]),
        (changed("quantizer_config", batch_maximization_weight=-1.0), ["batch_maximization_weight", "-1.0"]),
        (changed("quantizer_config", sample_minimization_weight=True), ["sample_minimization_weight", "True"]),
        (changed("encoder_decoder_config", ch=True), ["encoder_decoder_config.ch: expected a whole number", "True"]),
        (changed("encoder_decoder_config", ch=48), ["divisible by 32", "48"]),
        (changed("encoder_decoder_config", in_channels=1), ["in_channels: expected 3", "1"]),
        (
            changed("encoder_decoder_config", num_res_blocks=0),
            ["num_res_blocks: expected a whole number from 1 to 32", "0"],
        ),
        (changed("encoder_decoder_config", ch_mult=[]), ["ch_mult: expected a list of 1 to 10", "[]"]),
        (changed("encoder_decoder_config", ch_mult=4), ["ch_mult: expected a list", "4"]),
        (changed(None, image_size=[288, 500]), ["divisible by 16", "[288, 500]"]),
        (changed(None, image_size=[288]), ["[height, width]", "[288]"]),
        (changed(None, same_tokens_as="3fd4"), ["same_tokens_as: expected 64 hexadecimal digits", "'3fd4'"]),
        (changed(None, same_tokens_as=4), ["same_tokens_as: expected 64 hexadecimal digits or null", "got 4"]),
        (changed("quantizer_config", batch_maximization_weight=math.inf), ["a finite number", "inf"]),
        (changed("encoder_decoder_config", num_res_block=2), ["did you mean encoder_decoder_config.num_res_blocks?"]),
    ],
)
def test_bad_config_is_refused_in_one_line(data, words):
    with pytest.raises(CheckpointError) as caught:
        LFQTokenizerConfig.from_dict(data, source="somewhere/config.json")
    message = str(caught.value)
    assert message.startswith("somewhere/config.json: ")
    assert "\n" not in message
    assert all(word in message for word in words)


@given(st.data(), st.integers(1, 62), st.sampled_from(["msb_first", "lsb_first"]))
@settings(max_examples=50)
def test_ids_and_bits_are_inverse(data, dim, bit_order):
    ids = [0, 2**dim - 1, *data.draw(st.lists(st.integers(0, 2**dim - 1), max_size=6))]
    tokens = torch.tensor(ids).reshape(1, 1, -1)
    signs = signs_from_tokens(tokens, dim, bit_order)
    assert signs.shape == (1, dim, 1, len(ids))
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    assert torch.equal(tokens_from_signs(signs, bit_order), tokens)
    binary = [format(token, f"0{dim}b") for token in ids]
    first_channel = [2.0 * int(bits[0 if bit_order == "msb_first" else -1]) - 1.0 for bits in binary]
    assert signs[0, 0, 0].tolist() == first_channel


@given(st.lists(st.integers(0, 2**18 - 1), min_size=1, max_size=8))
def test_bit_orders_are_reversals_of_each_other(ids):
    signs = signs_from_tokens(torch.tensor(ids).reshape(1, 1, -1), 18, "msb_first")
    reversed_ids = [int(format(token, "018b")[::-1], 2) for token in ids]
    assert tokens_from_signs(signs, "lsb_first").flatten().tolist() == reversed_ids


def test_zero_counts_as_negative_and_the_gradient_goes_straight_through():
    z = torch.tensor([-2.5, -0.0, 0.0, 1e-30, 7.3], requires_grad=True)
    assert quantize(z).tolist() == [-1, -1, -1, 1, 1]
    signs = straight_through(z)
    assert signs.tolist() == [-1, -1, -1, 1, 1]
    signs.backward(torch.arange(5.0))
    assert z.grad is not None
    assert z.grad.tolist() == [0, 1, 2, 3, 4]


def test_upsampling_places_channel_groups_as_subpixels():
    layer = Upsample(2)
    assert layer.conv1.bias is not None
    nn.init.zeros_(layer.conv1.weight)
    layer.conv1.bias.data = torch.arange(8.0)
    # Groups of two channels in the order up-left, up-right, down-left, down-right.
    assert layer(torch.zeros(1, 2, 1, 1)).tolist() == [[[[0, 2], [4, 6]], [[1, 3], [5, 7]]]]


def test_encode_reads_the_signs_of_the_encoder(small):
    frames = random_frames(2)
    tokens = small.encode(frames)
    assert tokens.shape == (2, small.rows, small.cols) == (2, 8, 16)
    assert tokens.dtype == torch.int64
    with torch.no_grad():
        z = small.encoder(frames)
    bits = (z[1, :, 3, 5] > 0).int().tolist()
    assert tokens[1, 3, 5].item() == int("".join(map(str, bits)), 2)


def test_bit_order_permutes_ids_but_not_pictures(small):
    other = LFQTokenizer(make_config(bit_order="lsb_first")).eval()
    other.load_state_dict(small.state_dict())
    frames = random_frames(1)
    tokens, other_tokens = small.encode(frames), other.encode(frames)
    assert other_tokens.flatten().tolist() == [int(format(t, "08b")[::-1], 2) for t in tokens.flatten().tolist()]
    assert torch.equal(small.decode(tokens), other.decode(other_tokens))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16])
def test_decode_takes_every_id_including_zero_and_the_last(small, dtype):
    tokens = torch.zeros(2, 8, 16, dtype=dtype)
    tokens[1] = small.codebook_size - 1
    frames = small.decode(tokens)
    assert frames.shape == (2, 3, 32, 64)
    assert frames.dtype == torch.float32
    assert frames.abs().max() <= 1
    assert not torch.equal(frames[0], frames[1])


def test_decode_clamps(small):
    tokenizer = LFQTokenizer(make_config())
    tokenizer.load_state_dict(small.state_dict())
    assert tokenizer.decoder.conv_out.bias is not None
    nn.init.constant_(tokenizer.decoder.conv_out.bias, 5.0)
    assert torch.equal(tokenizer.decode(torch.zeros(1, 8, 16, dtype=torch.int64)), torch.ones(1, 3, 32, 64))


def test_chunks_equal_the_whole(small, monkeypatch):
    monkeypatch.setattr("tokenizer.model.frames_at_once", lambda device: MAX_FRAMES_AT_ONCE)  # as on a GPU
    num_frames = 2 * MAX_FRAMES_AT_ONCE + 1
    sizes = []
    hook = small.encoder.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    frames = random_frames(num_frames)
    tokens = small.encode(frames)
    hook.remove()
    assert sizes == [MAX_FRAMES_AT_ONCE, MAX_FRAMES_AT_ONCE, 1]
    with torch.no_grad():
        z = small.encoder(frames)
        whole = small.decoder(quantize(z)).clamp(-1, 1)
    is_clear = (z.abs() > 1e-4).all(dim=1)
    assert torch.equal(tokens[is_clear], tokens_from_signs(z, "msb_first")[is_clear])
    assert torch.allclose(small.decode(tokens_from_signs(z, "msb_first")), whole, atol=1e-5)


def test_on_a_cpu_a_frame_does_not_depend_on_the_others(small):
    frames = random_frames(5)
    tokens = small.encode(frames)
    assert torch.equal(tokens, torch.cat([small.encode(frame) for frame in frames.split(1)]))
    assert torch.equal(small.decode(tokens)[2:3], small.decode(tokens[2:3]))
    assert frames_at_once(torch.device("cuda")) == MAX_FRAMES_AT_ONCE


def test_forward_is_the_unclamped_round_trip_and_takes_crops(small):
    frames = random_frames(2, 16, 24)
    reconstruction, z = small(frames)
    assert reconstruction.shape == frames.shape
    assert z.shape == (2, 8, 4, 6)
    assert torch.equal(reconstruction, small.decoder(quantize(z)))
    reconstruction.mean().backward()
    gradient = small.encoder.conv_in.weight.grad
    assert gradient.abs().sum() > 0
    small.zero_grad()


def test_bfloat16_weights_take_and_give_float32_frames(small):
    tokenizer = LFQTokenizer(make_config()).bfloat16().eval()
    tokens = tokenizer.encode(random_frames(1))
    assert tokens.dtype == torch.int64
    assert tokenizer.decode(tokens).dtype == torch.float32
    assert tokenizer.encode(random_frames(1).bfloat16()).equal(tokens)


def test_channels_last_equals_contiguous(small):
    other = LFQTokenizer(make_config()).eval()
    other.load_state_dict(small.state_dict())
    other.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue] (torch's stub lacks it)
    tokens = torch.arange(128).reshape(1, 8, 16)
    assert torch.allclose(small.decode(tokens), other.decode(tokens), atol=1e-5)


def test_forward_depends_on_shapes_alone():
    # What torch.compile needs to make one graph of it: the meta device has no values to branch on.
    with torch.device("meta"):
        reconstruction, z = LFQTokenizer(LFQTokenizerConfig())(torch.empty(2, 3, 288, 512))
    assert reconstruction.shape == (2, 3, 288, 512)
    assert z.shape == (2, 18, 18, 32)


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        (random_frames(1, 32, 32), ["32, 64", "32, 32"]),
        (torch.zeros(1, 4, 32, 64), ["3, 32, 64", "4, 32, 64"]),
        (torch.zeros(3, 32, 64), ["frames, 3, 32, 64", "(3, 32, 64)"]),
        (torch.zeros(1, 3, 32, 64, dtype=torch.uint8), ["floating", "uint8"]),
        (torch.zeros(0, 3, 32, 64), ["at least one", "none"]),
        (random_frames(1) * 255, ["[-1, 1]", "-25"]),
        (torch.full((1, 3, 32, 64), math.nan), ["[-1, 1]", "nan"]),
    ],
)
def test_bad_frames_are_refused(small, frames, words):
    # Under jaxtyping's import hook a wrong rank, channel count or dtype is refused before the call.
    with pytest.raises((ValueError, TypeCheckError)) as caught:
        small.encode(frames)
    if caught.type is ValueError:
        assert all(word in str(caught.value) for word in ["expected", "got", *words])


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (torch.zeros(1, 16, 8, dtype=torch.int64), ["8, 16", "16, 8"]),
        (torch.zeros(128, dtype=torch.int64), ["8, 16", "(128,)"]),
        (torch.zeros(1, 8, 16), ["integer", "float32"]),
        (torch.zeros(0, 8, 16, dtype=torch.int64), ["at least one", "none"]),
        (torch.full((1, 8, 16), 256), ["[0, 256)", "256"]),
        (torch.full((1, 8, 16), -1), ["[0, 256)", "-1"]),
    ],
)
def test_bad_tokens_are_refused(small, tokens, words):
    with pytest.raises((ValueError, TypeCheckError)) as caught:
        small.decode(tokens)
    if caught.type is ValueError:
        assert all(word in str(caught.value) for word in ["expected", "got", *words])


def test_forward_refuses_sizes_between_tokens(small):
    with pytest.raises(ValueError, match=r"divisible by 4, got \(1, 3, 32, 62\)"):
        small(random_frames(1, 32, 62))


def brute_force_entropies(z: torch.Tensor, temperature: float) -> tuple[float, float]:
    dim = z.shape[1]
    codebook = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=dim)), dtype=torch.float64)
    vectors = z.double().movedim(1, -1).reshape(-1, dim)
    q = torch.softmax(2 * vectors @ codebook.T / temperature, dim=1)
    per_sample = torch.special.entr(q).sum(dim=1).mean()
    return per_sample.item(), torch.special.entr(q.mean(dim=0)).sum().item()


@given(st.integers(1, 7), st.sampled_from([0.05, 0.3, 1.0, 5.0]), st.integers(0, 2**16))
@settings(max_examples=40)
def test_entropy_equals_the_sum_over_the_codebook(dim, temperature, seed):
    z = torch.randn(2, dim, 3, 2, generator=torch.Generator().manual_seed(seed)) * 0.5
    terms = lfq_entropy_loss(z, temperature=temperature, sample_weight=0.5, batch_weight=2.0)
    per_sample, batch = brute_force_entropies(z, temperature)
    assert terms.per_sample.item() == pytest.approx(per_sample, abs=1e-5)
    assert terms.batch.item() == pytest.approx(batch, abs=1e-5)
    assert terms.loss.item() == pytest.approx(0.5 * per_sample - 2.0 * batch, abs=1e-4)


def test_entropy_by_groups_bounds_the_exact_one_and_is_exact_for_independent_groups():
    z = torch.randn(3, 6, 4, 4, generator=torch.Generator().manual_seed(1)) * 0.5
    exact = lfq_entropy_loss(z, temperature=1.0).batch
    grouped = lfq_entropy_loss(z, temperature=1.0, max_group_bits=2).batch
    assert exact < grouped <= 6 * math.log(2) + 1e-5
    every = signs_from_tokens(torch.arange(64).reshape(1, 8, 8), 6, "msb_first")
    assert lfq_entropy_loss(every, max_group_bits=4).batch.item() == pytest.approx(6 * math.log(2), rel=1e-5)


def test_entropy_of_the_published_width_is_finite_where_it_saturates():
    z = torch.randn(2, 18, 4, 4, generator=torch.Generator().manual_seed(2)).requires_grad_()
    terms = lfq_entropy_loss(z)
    terms.loss.backward()
    assert z.grad is not None
    assert z.grad.isfinite().all()
    # 32 different certain vectors: no doubt about each, log 32 over all.
    assert terms.per_sample.item() < 0.7
    assert terms.batch.item() == pytest.approx(math.log(32), abs=0.7)
    certain = lfq_entropy_loss(quantize(z.detach()))
    assert certain.per_sample.item() == pytest.approx(0.0, abs=1e-6)
    assert certain.batch.item() == pytest.approx(math.log(32), rel=1e-5)


def test_commitment_is_the_squared_distance_to_the_signs():
    z = torch.tensor([0.5, -2.0]).reshape(1, 2, 1, 1).requires_grad_()
    loss = commitment_loss(z)
    assert loss.item() == pytest.approx((0.25 + 1.0) / 2)
    loss.backward()
    assert z.grad is not None
    assert z.grad.flatten().tolist() == pytest.approx([-0.5, -1.0])


def test_reconstruction_terms():
    frames = random_frames(1, 16, 16)
    assert reconstruction_loss(frames, frames, LossWeights()).loss.item() == 0
    # A uniform offset is all pixel error and no gradient error.
    assert pixel_loss(frames + 0.25, frames).item() == pytest.approx(0.25, rel=1e-5)
    assert gradient_loss(frames + 0.25, frames).item() == pytest.approx(0.0, abs=1e-6)
    # A horizontal ramp has slope 1, 2 and 4 at the three scales, and none vertically.
    ramp = torch.arange(16.0).expand(1, 3, 16, 16)
    assert gradient_loss(ramp, torch.zeros_like(ramp)).item() == pytest.approx((1 + 2 + 4) / 6)
    terms = reconstruction_loss(ramp, torch.zeros_like(ramp), LossWeights(pixel=2.0, gradient=3.0))
    assert terms.loss.item() == pytest.approx(2 * 7.5 + 3 * 7 / 6)
    with pytest.raises(ValueError, match="at least 8, got"):
        gradient_loss(ramp[..., :4], ramp[..., :4])


@given(st.integers(2, 5), st.floats(0.1, 10), st.integers(0, 2**16))
@settings(max_examples=20)
def test_foreground_weights_pixels_by_their_distance_from_the_mean_picture(count, foreground, seed):
    random = torch.Generator().manual_seed(seed)
    frames, made = (torch.rand(count, 3, 4, 5, generator=random) * 2 - 1 for _ in range(2))
    total = 0.0
    for row in range(4):
        for col in range(5):
            pixels, errors = frames[:, :, row, col], (made - frames)[:, :, row, col].abs()
            for one, error in zip(pixels, errors, strict=True):
                total += error.sum().item() * (1 + foreground * (one - pixels.mean(0)).abs().mean().item())
    assert pixel_loss(made, frames, foreground).item() == pytest.approx(total / frames.numel(), rel=1e-4)
    same = frames[:1].expand_as(made)  # a batch without any foreground
    assert pixel_loss(made, same, foreground).item() == pytest.approx(pixel_loss(made, same).item(), rel=1e-4)


@pytest.mark.parametrize("values", [{"pixel": -1.0}, {"entropy": math.nan}, {"temperature": 0.0}])
def test_bad_loss_weights_are_refused(values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        LossWeights(**values)


def test_training_reduces_the_loss_and_total_is_the_weighted_sum():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tokenizer = LFQTokenizer(make_config(dim=6, ch_mult=(1, 1), image_size=(16, 32)))
    frames = torch.nn.functional.interpolate(random_frames(4, 4, 8), size=(16, 32), mode="bilinear")
    weights = LossWeights(temperature=1.0)
    optimizer = torch.optim.Adam(tokenizer.parameters(), lr=2e-3)
    history = []
    for _ in range(20):
        parts = tokenizer_loss(*tokenizer(frames), frames, tokenizer.config.quantizer_config, weights)
        optimizer.zero_grad()
        parts["total"].backward()
        optimizer.step()
        history.append({name: value.item() for name, value in parts.items()})
    assert history[-1]["total"] < history[0]["total"]
    assert history[-1]["pixel"] < 0.8 * history[0]["pixel"]
    for parts in history:
        entropy = parts["sample_entropy"] - parts["batch_entropy"]
        total = parts["pixel"] + parts["gradient"] + 0.1 * entropy + 0.25 * parts["commitment"]
        assert parts["total"] == pytest.approx(total, rel=1e-4)
        assert 1 / 64 <= parts["codebook_usage"] <= 1


def test_only_the_total_carries_gradients_and_usage_counts_ids(small):
    frames = random_frames(1).expand(2, -1, -1, -1)
    parts = tokenizer_loss(*small(frames), frames, small.config.quantizer_config, LossWeights())
    assert [name for name, value in parts.items() if value.requires_grad] == ["total"]
    distinct = small.encode(frames).unique().numel()
    assert parts["codebook_usage"].item() == pytest.approx(distinct / 256)


def test_loss_under_bfloat16_autocast_is_float32_and_close(small):
    frames = random_frames(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        parts = tokenizer_loss(*small(frames), frames, small.config.quantizer_config, LossWeights(temperature=1.0))
    plain = tokenizer_loss(*small(frames), frames, small.config.quantizer_config, LossWeights(temperature=1.0))
    assert {value.dtype for value in parts.values()} == {torch.float32}
    assert parts["sample_entropy"].item() == pytest.approx(plain["sample_entropy"].item(), rel=0.02)
    parts["total"].backward()
    assert all(parameter.grad is not None for parameter in small.parameters())
    small.zero_grad()


def test_package_names_import_lazily_and_exist():
    assert all(getattr(tokenizer_package, name) is not None for name in tokenizer_package.__all__)
    assert sorted(tokenizer_package.__all__) == tokenizer_package.__all__
    with pytest.raises(AttributeError, match="no attribute 'Missing'"):
        _ = tokenizer_package.Missing  # pyright: ignore[reportAttributeAccessIssue]
    check = "import sys, tokenizer.errors; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
