"""Tokenizers of Open-MAGVIT2 and 1X: converted to the same pictures, or refused in one line and never executed."""

import pickle
import sys

import pytest
import torch
from torch import nn
from trap import Trap

from terra.cli import main
from tokenizer import EncoderDecoderConfig, LFQTokenizer, LFQTokenizerConfig, QuantizerConfig
from tokenizer.conversion import convert_state_dict, read_state_dict
from tokenizer.errors import CheckpointError

pytestmark = pytest.mark.slow

CONFIG = LFQTokenizerConfig(
    encoder_decoder_config=EncoderDecoderConfig(ch=32, z_channels=6, num_res_blocks=2, ch_mult=(1, 1, 2, 2, 4)),
    quantizer_config=QuantizerConfig(dim=6, codebook_size=64, bit_order="lsb_first"),
    image_size=(32, 64),
)
SETTINGS = {"image_size": (32, 64), "bit_order": "lsb_first"}


def make_tokenizer(seed: int, config: LFQTokenizerConfig = CONFIG) -> LFQTokenizer:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LFQTokenizer(config).eval()


class Lightning(nn.Module):
    """What the module of Open-MAGVIT2 has in its state dict: the nets, the losses' networks, and their averages."""

    def __init__(self, live: LFQTokenizer, averaged: LFQTokenizer) -> None:
        super().__init__()
        self.encoder, self.decoder = live.encoder, live.decoder
        self.loss = nn.ModuleDict({"discriminator": nn.Conv2d(3, 8, 4)})
        self.model_ema = nn.Module()
        self.model_ema.register_buffer("decay", torch.tensor(0.999))
        self.model_ema.register_buffer("num_updates", torch.tensor(100))
        averages = {**averaged.state_dict(), **self.loss.state_dict(prefix="loss.")}
        for name, tensor in averages.items():
            self.model_ema.register_buffer(name.replace(".", ""), tensor)


LIVE, AVERAGED = make_tokenizer(0), make_tokenizer(1)


def checkpoint() -> dict:
    """All that Lightning writes around the state dict of a manual optimization."""
    state = Lightning(LIVE, AVERAGED).state_dict()
    moments = {"state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 1e-4}]}
    loops = {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 1}}}}
    around = {"epoch": 1, "global_step": 100, "pytorch-lightning_version": "2.2.0", "loops": loops}
    callbacks = {"ModelCheckpoint": {"best_model_score": torch.tensor(1.53), "best_k_models": {}, "kth_value": None}}
    return {**around, "state_dict": state, "callbacks": callbacks, "optimizer_states": [moments], "lr_schedulers": []}


@pytest.mark.parametrize(("weights", "original"), [("live", LIVE), ("ema", AVERAGED)])
def test_converted_weights_make_the_same_tokens_and_pictures(tmp_path, weights, original):
    torch.save(checkpoint(), tmp_path / "b.ckpt")
    converted = convert_state_dict(read_state_dict(tmp_path / "b.ckpt"), weights=weights, **SETTINGS)
    assert converted.config == CONFIG
    converted.save_pretrained(tmp_path / "tokenizer")
    loaded = LFQTokenizer.from_pretrained(tmp_path / "tokenizer")
    frames = torch.rand(2, 3, 32, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    tokens = loaded.encode(frames)
    assert torch.equal(tokens, original.encode(frames))
    assert torch.equal(loaded.decode(tokens), original.to(memory_format=torch.channels_last).decode(tokens))


def test_the_published_width_is_read_from_the_shapes():
    with torch.device("meta"):
        published = LFQTokenizer(LFQTokenizerConfig())
    converted = convert_state_dict(published.state_dict(), weights="live", image_size=(288, 512), bit_order="msb_first")
    assert converted.config == LFQTokenizerConfig()
    assert len(converted.state_dict()) == 175


def changed(**tensors: torch.Tensor | None) -> dict[str, torch.Tensor]:
    state = checkpoint()["state_dict"] | tensors
    return {name: tensor for name, tensor in state.items() if tensor is not None}


NORM = "decoder.up.4.block.0.norm1.weight"


@pytest.mark.parametrize(
    ("tensors", "weights", "message"),
    [
        ({NORM: None}, "live", f"got 174 with 1 missing: {NORM}$"),
        ({NORM: torch.ones(5)}, "live", rf"1 of another shape: {NORM} expected \(128,\) got \(5,\)"),
        ({"decoder.adaptive.0.gamma.weight": torch.ones(5)}, "live", r"1 unexpected: decoder\.adaptive\.0\.gamma"),
        ({"quantize.embedding.weight": torch.ones(8, 6)}, "live", r"1 others, quantize\.embedding\.weight first"),
        ({"encoder.conv_in.weight": None}, "live", "found no such encoder"),
        ({"model_ema." + NORM.replace(".", ""): None}, "ema", r"1 are missing, model_ema\.decoderup4block0norm1weight"),
        (
            {"encoder.conv_in.weight": torch.ones(33, 3, 3, 3)},
            "live",
            r"ch_mult\[0\]: expected a whole number from 1 to 64, got 0",
        ),
    ],
)
def test_every_tensor_must_be_accounted_for(tensors, weights, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        convert_state_dict(changed(**tensors), weights=weights, **SETTINGS)
    assert "\n" not in str(caught.value)


def test_pickles_with_code_are_refused_and_nothing_is_executed(tmp_path):
    path, sprung = tmp_path / "b.ckpt", tmp_path / "sprung"
    torch.save(checkpoint() | {"callbacks": Trap(sprung)}, path)
    with pytest.raises(CheckpointError, match=r"a pickle that names .*mkdir.*: refused, nothing of it was executed"):
        read_state_dict(path)
    torch.save(checkpoint() | {"callbacks": Trap(sprung)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"expected a whole file of torch\.save"):
        read_state_dict(path)
    path.write_bytes(pickle.dumps(Trap(sprung)))
    with pytest.raises(CheckpointError, match=r"expected a whole file of torch\.save"):
        read_state_dict(path)
    assert not sprung.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected a whole file of torch.save"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
            "expected weights, got a Git LFS pointer",
        ),
        (None, "expected a checkpoint file, found none"),
    ],
)
def test_what_is_no_checkpoint_is_one_line(tmp_path, content, message):
    if content is not None:
        (tmp_path / "b.ckpt").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"b\.ckpt: {message}") as caught:
        read_state_dict(tmp_path / "b.ckpt")
    assert "\n" not in str(caught.value)


def test_damaged_archives_are_one_line(tmp_path):
    torch.save(checkpoint(), tmp_path / "whole.ckpt")
    content = (tmp_path / "whole.ckpt").read_bytes()
    path = tmp_path / "b.ckpt"
    for kept in (content[: len(content) // 2], content[len(content) // 2 :], b"PK" + content[100:]):
        path.write_bytes(kept)
        with pytest.raises(CheckpointError, match=r"b\.ckpt: expected a (whole )?file of torch\.save") as caught:
            read_state_dict(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [{"model": {}}, {"state_dict": [1]}, {"state_dict": {"epoch": 1}}, [1]])
def test_a_file_without_a_state_dict_is_one_line(tmp_path, content):
    torch.save(content, tmp_path / "b.ckpt")
    with pytest.raises(CheckpointError, match="expected tensors under 'state_dict'"):
        read_state_dict(tmp_path / "b.ckpt")


def test_the_command_writes_a_tokenizer_and_says_the_bit_order(tmp_path, monkeypatch, capsys):
    torch.save(checkpoint(), tmp_path / "b.ckpt")
    settings = [f"input={tmp_path / 'b.ckpt'}", f"output={tmp_path / 'tokenizer'}", "image_size=[32,64]"]
    settings = ["convert", "kind=tokenizer", *settings]
    monkeypatch.setattr(sys, "argv", ["terra", *settings, "bit_order=msb_first"])
    main()
    assert capsys.readouterr().out == (
        f"{tmp_path / 'tokenizer'}: 175 tensors, 4,103,113 parameters; ema weights, 2 x 4 tokens of 6 bits, msb_first\n"
    )
    loaded = LFQTokenizer.from_pretrained(tmp_path / "tokenizer")
    assert torch.equal(loaded.encoder.conv_in.weight, AVERAGED.encoder.conv_in.weight)
    assert loaded.config.quantizer_config.bit_order == "msb_first"
    for more, message in (
        ([], "bit_order: expected msb_first or lsb_first, got nothing"),
        (["bit_order=big"], "bit_order: expected msb_first or lsb_first or null, got 'big'"),
        (["bit_order=msb_first", "image_size=256"], "image_size: expected [height, width], got 256"),
        (["bit_order=msb_first", "weights=best"], "weights: expected live or ema, got 'best'"),
    ):
        monkeypatch.setattr(sys, "argv", ["terra", *settings, *more])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 2
        assert capsys.readouterr().err == f"error: {message}\n"
