import asyncio
import shutil
import threading
from contextlib import aclosing
from dataclasses import replace

import pytest
import torch
from tiny import COLS, ROWS, tiny_tokenizer_config

from decoder import FramewiseDecoder
from terra.engine.persistence import PersistenceEngine
from terra.errors import CheckpointError, ConfigError, EngineError
from terra.pipeline import Pipeline, RolloutRequest
from terra.sampling import SamplingParams
from terra.windows import SlidingSession
from tokenizer import LFQTokenizer, LFQTokenizerConfig
from tokenizer.checkpoint import checkpoint_sha256

SAMPLING = SamplingParams(temperature=1.0)


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer):
    return LFQTokenizer.from_pretrained(tiny_tokenizer)


@pytest.fixture
def pipeline(tokenizer, hf_engine):
    return Pipeline(tokenizer, hf_engine, FramewiseDecoder(tokenizer), overlap=2)


def request(seed: int = 0, num_frames: int = 18, num_context: int = 3) -> RolloutRequest:
    generator = torch.Generator().manual_seed(seed)
    context = torch.rand(num_context, 3, 4 * ROWS, 4 * COLS, generator=generator) * 2 - 1
    return RolloutRequest(context, torch.randn(num_frames - 1, 6, 3, generator=generator), seed)


def test_a_rollout_is_context_and_generated_frames(pipeline, tokenizer):
    seen, shown = [], []
    wanted = request()
    (rollout,) = pipeline.generate(
        [wanted],
        SAMPLING,
        lambda index, frame: seen.append((index, frame)),
        on_pixels=lambda index, frames: shown.append((index, frames)),
    )
    assert rollout.tokens.shape == (18, ROWS, COLS)
    assert rollout.frames.shape == (18, 3, 4 * ROWS, 4 * COLS)
    assert rollout.frames.abs().max() <= 1.0
    assert torch.equal(rollout.tokens[:3], tokenizer.encode(wanted.context_frames))
    assert torch.equal(rollout.frames, tokenizer.decode(rollout.tokens))
    assert seen == [(0, frame) for frame in range(3, 18)]
    assert {index for index, _ in shown} == {0}
    assert len(shown) > 1  # while the rollout is generated
    assert torch.equal(torch.cat([frames for _, frames in shown]), rollout.frames)
    assert set(rollout.seconds) == {"encode", "generate", "decode"}


def test_frames_decoded_while_others_are_generated_are_the_same(pipeline, tokenizer, hf_engine, monkeypatch):
    order = []

    class Beside(FramewiseDecoder):
        device = torch.device("cuda")  # where a decoder is in nobody's way

        def decode(self, tokens):
            order.append(len(tokens))
            return super().decode(tokens)

    requests = [request(seed) for seed in range(2)]
    expected = pipeline.generate(requests, SAMPLING)
    beside = Pipeline(tokenizer, hf_engine, Beside(tokenizer), overlap=2)
    made_when_decoded, shown = [], ([], [])
    made = beside.generate(
        requests,
        SAMPLING,
        lambda *_: made_when_decoded.append(len(order)),
        on_pixels=lambda index, frames: shown[index].append(frames),
    )
    for rollout, other, pieces in zip(made, expected, shown, strict=True):
        assert torch.equal(rollout.tokens, other.tokens)
        torch.testing.assert_close(rollout.frames, other.frames, atol=1e-5, rtol=1e-5)
        assert torch.equal(torch.cat(pieces), rollout.frames)
    assert sum(order) == 36
    assert made_when_decoded[-1] > 0  # not all at the end
    monkeypatch.setattr(tokenizer, "decode", lambda tokens: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        beside.generate(requests, SAMPLING)


def test_several_rollouts_are_those_made_alone(pipeline):
    requests = [request(seed) for seed in range(3)]
    together = pipeline.generate(requests, SAMPLING)
    for wanted, rollout in zip(requests, together, strict=True):
        assert torch.equal(pipeline.generate([wanted], SAMPLING)[0].tokens, rollout.tokens)


def test_driving_step_by_step_gives_the_same_frames(pipeline):
    wanted = request(4)
    (rollout,) = pipeline.generate([wanted], SAMPLING)
    drive = pipeline.drive(wanted.context_frames, wanted.actions[:2], SAMPLING, wanted.seed)
    frames = [drive.step(action) for action in wanted.actions[2:]]
    drive.close()
    drive.close()
    torch.testing.assert_close(torch.stack(frames), rollout.frames[3:], atol=1e-5, rtol=1e-5)
    with pytest.raises(EngineError, match="closed"):
        drive.step(wanted.actions[0])


@pytest.mark.slow
def test_engines_agree_across_windows(tokenizer, hf_engine, vllm_engine):
    decoder = FramewiseDecoder(tokenizer)
    requests = [request(seed) for seed in range(2)]
    with_hf = Pipeline(tokenizer, hf_engine, decoder, overlap=2).generate(requests, SAMPLING)
    with_vllm = Pipeline(tokenizer, vllm_engine, decoder, overlap=2).generate(requests, SAMPLING)
    for first, second in zip(with_hf, with_vllm, strict=True):
        assert torch.equal(first.tokens, second.tokens)


def test_works_within_a_running_loop(pipeline):
    async def notebook():
        return pipeline.generate([request(num_frames=4)], SAMPLING)

    assert asyncio.run(notebook())[0].tokens.shape[0] == 4


def test_windows_do_not_repeat_each_other(tokenizer, hf_engine):
    pipeline = Pipeline(tokenizer, hf_engine, FramewiseDecoder(tokenizer), overlap=1)
    still = RolloutRequest(request().context_frames[:1], torch.zeros(29, 6, 3), 0)
    tokens = pipeline.generate([still], SAMPLING)[0].tokens
    assert not torch.equal(tokens[1:8], tokens[8:15])


@pytest.mark.parametrize(
    ("num_frames", "num_context", "message"),
    [(3, 3, "num_frames: expected more than num_context=3"), (12, 8, "num_context: expected 1 to 7")],
)
def test_impossible_lengths_are_refused(pipeline, num_frames, num_context, message):
    with pytest.raises(ConfigError, match=message):
        pipeline.generate([request(num_frames=num_frames, num_context=num_context)], SAMPLING)


def test_mismatched_tokenizer_is_refused(hf_engine):
    values = tiny_tokenizer_config().to_dict()
    values["quantizer_config"] |= {"dim": 5, "codebook_size": 32}
    values["encoder_decoder_config"] |= {"z_channels": 5}
    small = LFQTokenizer(LFQTokenizerConfig.from_dict(values, "small"))
    with pytest.raises(CheckpointError, match="12 tokens a frame of a codebook of 64, got 12 of 32"):
        Pipeline(small, hf_engine, FramewiseDecoder(small))


def test_a_tokenizer_that_is_not_the_world_model_s_own_is_refused(tokenizer, tiny_tokenizer, hf_engine, tmp_path):
    def pair(folder, **changes):
        loaded = LFQTokenizer.from_pretrained(folder)
        engine = PersistenceEngine(replace(hf_engine.spec, **changes))
        Pipeline(loaded, engine, FramewiseDecoder(loaded)).close()

    own = checkpoint_sha256(tiny_tokenizer)
    pair(tiny_tokenizer, tokenizer_sha256=own)
    with pytest.raises(CheckpointError, match=f"was trained with tokenizer 000000000000, got {own[:12]}"):
        pair(tiny_tokenizer, tokenizer_sha256="0" * 64)
    published = shutil.copytree(tiny_tokenizer, tmp_path / "lfq_tokenizer_B_256_ema")
    pair(published, architecture="LlamaActionV2ForCausalLM")
    with pytest.raises(CheckpointError, match=r"LlamaActionForCausalLM was trained with lfq_tokenizer_B_256$"):
        pair(published, architecture="LlamaActionForCausalLM")


def test_stream_tokens_and_rollout_are_one(pipeline):
    wanted = request(5)

    async def streamed():
        context = await pipeline.encode(wanted.context_frames)
        given = context, wanted.actions, SAMPLING, wanted.seed
        seen = []
        tokens = await pipeline.rollout_tokens(*given, seen.append)
        return torch.stack([frame async for frame in pipeline.stream(*given)]), tokens, seen

    frames, tokens, seen = pipeline.wait(streamed())
    (rollout,) = pipeline.generate([wanted], SAMPLING)
    assert torch.equal(tokens, rollout.tokens)
    assert torch.equal(frames, rollout.tokens[3:])
    assert seen == list(range(3, 18))


def test_a_stream_that_is_left_closes_its_session(pipeline, monkeypatch):
    closed, close = [], SlidingSession.close
    monkeypatch.setattr(SlidingSession, "close", lambda self: closed.append(self) or close(self))
    wanted = request(num_frames=6)

    async def leave():
        context = await pipeline.encode(wanted.context_frames)
        async with aclosing(pipeline.stream(context, wanted.actions, SAMPLING, 0)) as frames:
            async for _ in frames:
                break
        assert len(closed) == 1

    pipeline.wait(leave())


def test_neither_encoding_nor_decoding_runs_in_the_event_loop(pipeline, tokenizer, monkeypatch):
    threads = []
    for name in ("encode", "decode"):
        work = getattr(LFQTokenizer, name)
        note = lambda self, given, work=work: threads.append(threading.current_thread().name) or work(self, given)  # noqa: E731
        monkeypatch.setattr(LFQTokenizer, name, note)
    pipeline.generate([request(num_frames=4)], SAMPLING)
    # Each of the four frames is decoded by itself.
    assert [name.rpartition("_")[0] for name in threads] == ["terra-cores"] * 5
