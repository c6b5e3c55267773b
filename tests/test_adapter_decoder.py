"""An adapter's own decoder: frames of its rollouts are decoded by it, those of the others are not."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_adapter import change_tensors, save_adapter, save_decoder

import terra
from terra.errors import CheckpointError
from terra.world_model.adapter import adapter_sha256
from tokenizer import LFQTokenizer

pytestmark = pytest.mark.slow

FRAMES = torch.rand(2, 3, 12, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
ACTIONS = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def pair(tmp_path, tiny_model, tiny_tokenizer) -> Path:
    (tmp_path / "world_model").symlink_to(tiny_model)
    (tmp_path / "tokenizer").symlink_to(tiny_tokenizer)
    return tmp_path


@pytest.fixture
def adapter(tmp_path, tiny_model, tiny_tokenizer) -> Path:
    """An adapter with another decoder of the same tokens."""
    folder = save_adapter(tmp_path / "snow", tiny_model, seed=1)
    save_decoder(folder, tiny_tokenizer)
    return folder


def rollouts(pair: Path, *names: str | None, **adapters) -> list[terra.Rollout]:
    requests = [terra.RolloutRequest(FRAMES, ACTIONS, 5, name) for name in names]
    with terra.Pipeline.from_pretrained(pair, engine="hf", device="cpu", **adapters) as pipeline:
        return pipeline.generate(requests, terra.SamplingParams())


def test_each_rollout_is_decoded_by_its_adapters_decoder(pair, adapter, tmp_path, tiny_model):
    plain = save_adapter(tmp_path / "plain", tiny_model, seed=2)
    made = rollouts(pair, None, "snow", "plain", adapters={"snow": adapter, "plain": plain})
    shown = [LFQTokenizer.from_pretrained(folder) for folder in (pair / "tokenizer", adapter / "decoder")]
    for rollout, tokenizer in zip(made, (shown[0], shown[1], shown[0]), strict=True):
        assert torch.equal(rollout.frames, tokenizer.decode(rollout.tokens))
    assert torch.equal(made[0].tokens[:2], made[1].tokens[:2])
    (alone,) = rollouts(pair, None, adapter=adapter)
    assert torch.equal(alone.frames, made[1].frames)
    named = rollouts(pair, "plain", adapter=adapter, adapters={"plain": plain})
    assert torch.equal(named[0].frames, made[2].frames)


def test_live_frames_too(pair, adapter):
    with terra.Pipeline.from_pretrained(pair, engine="hf", device="cpu", adapters={"snow": adapter}) as pipeline:
        shown = {}
        for name in (None, "snow"):
            drive = pipeline.drive(FRAMES, ACTIONS[:1], terra.SamplingParams(), 5, adapter=name)
            shown[name] = drive.step(ACTIONS[1])
            drive.close()
        made = pipeline.generate([terra.RolloutRequest(FRAMES, ACTIONS, 5, "snow")], terra.SamplingParams())[0]
    assert torch.equal(shown["snow"], made.frames[2])
    assert not torch.equal(shown[None], shown["snow"])


def test_the_encoder_may_be_left_out_and_the_hash_counts_the_decoder(pair, adapter):
    before = rollouts(pair, None, adapter=adapter)[0].frames
    whole = adapter_sha256(adapter)
    path = adapter / "decoder" / "model.safetensors"
    tensors = load_file(path)
    save_file({name: each for name, each in tensors.items() if name.startswith("decoder.")}, path)
    assert torch.equal(rollouts(pair, None, adapter=adapter)[0].frames, before)
    assert adapter_sha256(adapter) != whole


def test_a_decoder_of_no_numbers_is_named(pair, adapter):
    weights = adapter / "decoder/model.safetensors"
    change_tensors(weights, lambda tensors: tensors["decoder.conv_out.weight"].view(-1)[0].fill_(torch.nan))
    message = rf"^{weights}: decoder\.conv_out\.weight: expected finite numbers, got nan to nan$"
    with pytest.raises(CheckpointError, match=message):
        rollouts(pair, "snow", adapters={"snow": adapter})


def test_a_decoder_that_does_not_fit_is_one_line(pair, adapter):
    def refused(message: str) -> None:
        with pytest.raises(CheckpointError, match=message) as caught:
            terra.Pipeline.from_pretrained(pair, engine="hf", device="cpu", adapter=adapter)
        assert "\n" not in str(caught.value)

    path = adapter / "decoder" / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"same_tokens_as": "e" * 64}))
    refused(r"decoder: same_tokens_as: expected the tokenizer \w{12}, got eeeeeeeeeeee")
    path.write_text(json.dumps(content | {"image_size": [24, 32]}))
    refused("expected the sizes of")
    path.write_text(json.dumps(content))
    weights = adapter / "decoder" / "model.safetensors"
    tensors = load_file(weights)
    tensors.pop("decoder.conv_out.bias")
    save_file(tensors, weights)
    refused("1 missing: decoder.conv_out.bias")
    weights.unlink()
    refused("decoder")
