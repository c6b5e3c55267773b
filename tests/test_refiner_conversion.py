"""The published refiner's layout, written down from its architecture, against the names and shapes of diffusers'."""

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from entry import read_settings
from tiny_refiner import tiny_refiner, tiny_refiner_config

from decoder.refiner import Refiner
from decoder.refiner.published import PUBLISHED, convert_state_dict, strip_prefix
from terra.check.convert import run
from terra.errors import CheckpointError

pytestmark = pytest.mark.slow

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def parameters(name: str, *weight: int) -> Shapes:
    yield f"{name}.weight", weight
    yield f"{name}.bias", weight[:1]


def residual(name: str, channels: int, out: int, embedding: int, kernel: tuple[int, ...] = (3, 3)) -> Shapes:
    """ResBlock of openaimodel.py."""
    yield from parameters(f"{name}.in_layers.0", channels)
    yield from parameters(f"{name}.in_layers.2", out, channels, *kernel)
    if embedding:
        yield from parameters(f"{name}.emb_layers.1", out, embedding)
    yield from parameters(f"{name}.out_layers.0", out)
    yield from parameters(f"{name}.out_layers.3", out, out, *kernel)
    if channels != out:
        yield from parameters(f"{name}.skip_connection", out, channels, 1, 1)


def video_residual(name: str, channels: int, out: int, embedding: int) -> Shapes:
    yield from residual(name, channels, out, embedding)
    yield from residual(f"{name}.time_stack", out, out, embedding, (3, 1, 1))
    yield f"{name}.time_mixer.mix_factor", (1,)


def attention(name: str, channels: int, context: int) -> Shapes:
    yield f"{name}.to_q.weight", (channels, channels)
    yield f"{name}.to_k.weight", (channels, context)
    yield f"{name}.to_v.weight", (channels, context)
    yield from parameters(f"{name}.to_out.0", channels, channels)


def feed_forward(name: str, channels: int) -> Shapes:
    yield from parameters(f"{name}.net.0.proj", 8 * channels, channels)
    yield from parameters(f"{name}.net.2", channels, 4 * channels)


def transformer(name: str, channels: int, context: int) -> Shapes:
    """SpatialVideoTransformer of video_attention.py, with linear projections."""
    yield from parameters(f"{name}.norm", channels)
    for part in ("proj_in", "proj_out"):
        yield from parameters(f"{name}.{part}", channels, channels)
    for stack in ("transformer_blocks", "time_stack"):
        block = f"{name}.{stack}.0"
        yield from attention(f"{block}.attn1", channels, channels)
        yield from attention(f"{block}.attn2", channels, context)
        yield from feed_forward(f"{block}.ff", channels)
        for part in ("norm1", "norm2", "norm3"):
            yield from parameters(f"{block}.{part}", channels)
    yield from feed_forward(f"{name}.time_stack.0.ff_in", channels)
    yield from parameters(f"{name}.time_stack.0.norm_in", channels)
    yield from parameters(f"{name}.time_pos_embed.0", 4 * channels, channels)
    yield from parameters(f"{name}.time_pos_embed.2", channels, 4 * channels)
    yield f"{name}.time_mixer.mix_factor", (1,)


def video_unet(widths: tuple[int, ...], layers: int, attended: int, context: int, told: int) -> Shapes:
    """VideoUNet of video_model.py; the first `attended` levels have attention."""
    first, embedding = widths[0], 4 * widths[0]
    for name, width in {"time_embed": first, "cond_time_stack_embed": first, "label_emb.0": told}.items():
        yield from parameters(f"{name}.0", embedding, width)
        yield from parameters(f"{name}.2", embedding, embedding)
    yield from parameters("input_blocks.0.0", first, 8, 3, 3)
    block, channels, skips = 1, first, [first]
    for level, width in enumerate(widths):
        for _ in range(layers):
            yield from video_residual(f"input_blocks.{block}.0", channels, width, embedding)
            if level < attended:
                yield from transformer(f"input_blocks.{block}.1", width, context)
            block, channels, skips = block + 1, width, [*skips, width]
        if level < len(widths) - 1:
            yield from parameters(f"input_blocks.{block}.0.op", width, width, 3, 3)
            block, skips = block + 1, [*skips, width]
    for part in (0, 2):
        yield from video_residual(f"middle_block.{part}", channels, channels, embedding)
    yield from transformer("middle_block.1", channels, context)
    block = 0
    for level, width in reversed(list(enumerate(widths))):
        for layer in range(layers + 1):
            yield from video_residual(f"output_blocks.{block}.0", channels + skips.pop(), width, embedding)
            if level < attended:
                yield from transformer(f"output_blocks.{block}.1", width, context)
            if level and layer == layers:
                part = 2 if level < attended else 1
                yield from parameters(f"output_blocks.{block}.{part}.conv", width, width, 3, 3)
            block, channels = block + 1, width
    yield from parameters("out.0", first)
    yield from parameters("out.2", 4, first, 3, 3)


def vae_residual(name: str, channels: int, out: int, temporal: bool) -> Shapes:
    """ResnetBlock of model.py, and the VideoResBlock of temporal_ae.py over it."""
    yield from parameters(f"{name}.norm1", channels)
    yield from parameters(f"{name}.conv1", out, channels, 3, 3)
    yield from parameters(f"{name}.norm2", out)
    yield from parameters(f"{name}.conv2", out, out, 3, 3)
    if channels != out:
        yield from parameters(f"{name}.nin_shortcut", out, channels, 1, 1)
    if temporal:
        yield from residual(f"{name}.time_stack", out, out, 0, (3, 1, 1))
        yield f"{name}.mix_factor", (1,)


def vae_middle(name: str, channels: int, temporal: bool) -> Shapes:
    for number in (1, 2):
        yield from vae_residual(f"{name}.block_{number}", channels, channels, temporal)
    yield from parameters(f"{name}.attn_1.norm", channels)
    for part in ("q", "k", "v", "proj_out"):
        yield from parameters(f"{name}.attn_1.{part}", channels, channels, 1, 1)


def vae_encoder(widths: tuple[int, ...], layers: int) -> Shapes:
    channels = widths[0]
    yield from parameters("conv_in", channels, 3, 3, 3)
    for level, width in enumerate(widths):
        for layer in range(layers):
            yield from vae_residual(f"down.{level}.block.{layer}", channels, width, False)
            channels = width
        if level < len(widths) - 1:
            yield from parameters(f"down.{level}.downsample.conv", width, width, 3, 3)
    yield from vae_middle("mid", channels, False)
    yield from parameters("norm_out", channels)
    yield from parameters("conv_out", 8, channels, 3, 3)


def vae_decoder(widths: tuple[int, ...], layers: int, temporal: bool) -> Shapes:
    channels = widths[-1]
    yield from parameters("conv_in", channels, 4, 3, 3)
    yield from vae_middle("mid", channels, temporal)
    for level, width in reversed(list(enumerate(widths))):
        for layer in range(layers + 1):
            yield from vae_residual(f"up.{level}.block.{layer}", channels, width, temporal)
            channels = width
        if level:
            yield from parameters(f"up.{level}.upsample.conv", width, width, 3, 3)
    yield from parameters("norm_out", channels)
    yield from parameters("conv_out", 3, channels, 3, 3)
    if temporal:
        yield from parameters("conv_out.time_mix_conv", 3, 3, 3, 1, 1)


def published_layout(unet: Shapes, widths: tuple[int, ...], layers: int) -> dict[str, tuple[int, ...]]:
    conditioner = "conditioner.embedders.3.encoder"
    parts = {
        "model.diffusion_model": unet,
        "first_stage_model.encoder": vae_encoder(widths, layers),
        "first_stage_model.decoder": vae_decoder(widths, layers, True),
        f"{conditioner}.encoder": vae_encoder(widths, layers),
        f"{conditioner}.decoder": vae_decoder(widths, layers, False),
        f"{conditioner}.quant_conv": iter([("weight", (8, 8, 1, 1)), ("bias", (8,))]),
        f"{conditioner}.post_quant_conv": iter([("weight", (4, 4, 1, 1)), ("bias", (4,))]),
        "token_decoder.decoder": iter([("conv_in.weight", (512, 18, 3, 3))]),
    }
    return {f"{part}.{name}": shape for part, shapes in parts.items() for name, shape in shapes}


FULL = published_layout(video_unet((320, 640, 1280, 1280), 2, 3, 1024, 768), (128, 256, 512, 512), 2)
TINY = published_layout(video_unet((32, 32), 1, 1, 8, 24), (32, 32), 2)


def synthetic(layout) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in layout.items()}


def test_the_published_layout_is_that_of_stable_video_diffusion():
    with torch.device("meta"):
        state = {name: torch.empty(shape) for name, shape in FULL.items()}
    refiner, left_out = convert_state_dict(state, PUBLISHED)
    # The count of stabilityai/stable-video-diffusion-img2vid's UNet.
    assert sum(tensor.numel() for tensor in refiner.unet.parameters()) == 1_524_623_082
    assert len(refiner.state_dict()) + len(left_out) == len(FULL)
    parts = {name.split(".")[0] for name in left_out}
    assert parts == {"model", "first_stage_model", "conditioner", "token_decoder"}
    assert {name for name in left_out if name.startswith("model.")} == {
        f"model.diffusion_model.cond_time_stack_embed.{part}" for part in ("0.weight", "0.bias", "2.weight", "2.bias")
    }


def test_every_tensor_keeps_its_numbers():
    state = synthetic(TINY)
    refiner, left_out = convert_state_dict(state, tiny_refiner_config())
    tensors = refiner.state_dict()
    taken = [tensor for name, tensor in state.items() if name not in left_out]
    assert sorted(map(fingerprint, taken)) == sorted(map(fingerprint, tensors.values()))
    unet, decoder = "model.diffusion_model", "first_stage_model.decoder"
    for ours, theirs in {
        "unet.down_blocks.0.resnets.0.temporal_res_block.conv1.weight": (
            f"{unet}.input_blocks.1.0.time_stack.in_layers.2.weight"
        ),
        "unet.up_blocks.1.attentions.1.temporal_transformer_blocks.0.ff_in.net.2.bias": (
            f"{unet}.output_blocks.3.1.time_stack.0.ff_in.net.2.bias"
        ),
        "unet.up_blocks.0.upsamplers.0.conv.weight": f"{unet}.output_blocks.1.1.conv.weight",
        "vae.decoder.up_blocks.0.resnets.1.time_mixer.mix_factor": f"{decoder}.up.1.block.1.mix_factor",
        "vae.decoder.time_conv_out.bias": f"{decoder}.conv_out.time_mix_conv.bias",
        "vae.encoder.down_blocks.0.downsamplers.0.conv.bias": (
            "conditioner.embedders.3.encoder.encoder.down.0.downsample.conv.bias"
        ),
    }.items():
        assert torch.equal(tensors[ours], state[theirs]), ours


def fingerprint(tensor: torch.Tensor) -> tuple[int, float]:
    return tensor.numel(), tensor.double().sum().item()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state | {"optimizer.step": torch.zeros(1)}, "got 1 others, optimizer.step first"),
        (lambda state: state | {"model.diffusion_model.new.0.weight": torch.zeros(1)}, r"model.diffusion_model.new.0"),
        (
            lambda state: state | {"model.diffusion_model.input_blocks.9.0.op.weight": torch.zeros(1)},
            r"1 unexpected: unet\.down_blocks\.4\.downsamplers",
        ),
        (
            lambda state: {name: tensor for name, tensor in state.items() if "quant_conv" not in name},
            r"2 missing: vae\.quant_conv\.weight, vae\.quant_conv\.bias",
        ),
        (
            lambda state: state | {"model.diffusion_model.out.2.bias": torch.zeros(3)},
            r"unet\.conv_out\.bias expected \(4,\) got \(3,\)",
        ),
    ],
)
def test_a_strange_tensor_is_refused(change, message):
    with pytest.raises(CheckpointError, match=message):
        convert_state_dict(change(synthetic(TINY)), tiny_refiner_config())


def test_deepspeeds_prefix_is_taken_off():
    state = {"_forward_module.model.a": torch.zeros(1), "callbacks.b": torch.zeros(2)}
    assert strip_prefix(state) == ({"model.a": torch.zeros(1)}, ["callbacks.b"])
    assert strip_prefix({"model.a": torch.zeros(1)}) == ({"model.a": torch.zeros(1)}, [])


def test_the_command_converts_a_pickle_without_executing_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("decoder.refiner.published.PUBLISHED", tiny_refiner_config())
    state = {f"_forward_module.{name}": tensor.bfloat16() for name, tensor in synthetic(TINY).items()}
    torch.save({"module": state | {"metric.total": torch.zeros(1)}, "ds_version": "0.15"}, tmp_path / "model.pt")
    overrides = [f"input={tmp_path / 'model.pt'}", f"output={tmp_path / 'refiner'}"]
    run(read_settings("convert", ["kind=refiner", *overrides]))
    assert "1 beside it" in capsys.readouterr().out
    refiner = Refiner.from_pretrained(tmp_path / "refiner")
    assert refiner.state_dict().keys() == tiny_refiner().state_dict().keys()
    weight = state["_forward_module.model.diffusion_model.out.2.weight"]
    assert torch.equal(refiner.unet.conv_out.weight, weight.float())

    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / "sprung",)

    torch.save({"module": Trap()}, tmp_path / "trap.pt")
    overrides = ["kind=refiner", f"input={tmp_path / 'trap.pt'}", f"output={tmp_path / 'other'}"]
    with pytest.raises(CheckpointError, match=r"trap\.pt: expected tensors and plain values, got a pickle that names"):
        run(read_settings("convert", overrides))
    assert not (tmp_path / "sprung").exists()
    assert pickle.dumps(Trap())  # the trap is one
