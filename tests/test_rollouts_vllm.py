"""Batches through vLLM: the same tokens as through Hugging Face, whose sessions take turns."""

import pytest
import torch
from entry import read_settings
from tiny_rollouts import Batch

from decoder import FramewiseDecoder
from terra.pipeline import Pipeline
from terra.rollouts.folder import RolloutFolder
from terra.rollouts.manifest import count_rollouts
from terra.rollouts.runner import BatchRunner
from terra.rollouts.source import Tally
from tokenizer import LFQTokenizer

pytestmark = pytest.mark.slow


def test_batches_are_the_same_on_both_engines(tmp_path, tiny_model, tiny_tokenizer, vllm_engine, hf_engine):
    batch = Batch(tmp_path, tiny_model, tiny_tokenizer)
    batch.write(*(batch.line(index, num_frames=10 + index) for index in range(6)))
    tokenizer = LFQTokenizer.from_pretrained(tiny_tokenizer)
    outputs = {"vllm": vllm_engine, "hf": hf_engine}
    for name, engine in outputs.items():
        settings = read_settings("rollout", batch.overrides(output=tmp_path / name, num_samples=2))
        pipeline = Pipeline(tokenizer, engine, FramewiseDecoder(tokenizer), overlap=2)
        folder = RolloutFolder(settings.output, {"made_with": {"engine": name}}, "refuse")
        tally = Tally(count_rollouts(settings))
        with folder.open():
            assert BatchRunner(pipeline, folder, settings, tally, lambda: None).run() is None
        assert (tally.done, tally.failed) == (12, 0)
        assert tally.frames == tally.frames_due == sum(2 * (7 + index) for index in range(6))
    assert vllm_engine.counters.cached > 0
    for path in (tmp_path / "hf" / "rollouts").iterdir():
        made = batch.tokens(path.name, tmp_path / "vllm")
        assert torch.equal(made, batch.tokens(path.name, tmp_path / "hf"))
