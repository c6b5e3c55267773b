import asyncio
import threading
from concurrent.futures import CancelledError, Future

import numpy as np
import pytest
import torch

from decoder import FramewiseDecoder
from decoder.thread import DecodedFrames, DecodingThread, RolloutDecoding
from decoder.video import to_uint8
from tokenizer.cores import on_cores
from tokenizer.errors import VideoError


class Gated(FramewiseDecoder):
    """Shows a token as its number, when the gate is open."""

    def __init__(self, device: str = "cuda") -> None:
        self.sizes, self.gate, self.at_work = [], threading.Event(), threading.Event()
        self._device = torch.device(device)

    @property
    def device(self) -> torch.device:
        return self._device

    def decode(self, tokens):
        self.sizes.append(len(tokens))
        self.at_work.set()
        assert self.gate.wait(10)
        if (tokens < 0).any():
            raise VideoError("no memory")
        return tokens[:, None].float()


def grids(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)[:, None, None]


def numbers(decoded: DecodedFrames, _seconds: float) -> list[int]:
    return decoded.frames.flatten().int().tolist()


@pytest.mark.parametrize(("device", "sizes"), [("cuda", [1, 16, 5]), ("cpu", [1, 3, *[1] * 18])])
def test_what_waits_is_decoded_together_and_given_back_in_parts(device, sizes):
    decoder = Gated(device)
    threads = DecodingThread(decoder)
    made = [threads.decode(grids(0), numbers)]
    assert decoder.at_work.wait(10)
    made.append(threads.decode(grids(1, 2, 3), numbers))
    made += [threads.decode(grids(index), numbers) for index in range(4, 22)]
    decoder.gate.set()
    assert [piece.result(10) for piece in made] == [[0], [1, 2, 3], *([index] for index in range(4, 22))]
    assert decoder.sizes == sizes
    threads.close()


@pytest.mark.parametrize(("device", "sizes"), [("cuda", [1, 4, 16]), ("cpu", [])])
def test_a_warm_up_decodes_a_batch_of_each_size_on_a_gpu(device, sizes):
    decoders = [Gated(device), Gated(device)]
    for each in decoders:
        each.gate.set()
    decoding = RolloutDecoding(decoders[0], {"snow": decoders[1]})
    asyncio.run(decoding.warm_up(1, 1))
    decoding.close()
    assert [each.sizes for each in decoders] == [sizes, sizes]


def test_each_gets_its_share_of_the_seconds():
    decoder = Gated()
    threads = DecodingThread(decoder)
    first = threads.decode(grids(0), numbers)
    assert decoder.at_work.wait(10)
    shares = [threads.decode(grids(*range(size)), lambda _frames, seconds: seconds) for size in (1, 3)]
    decoder.gate.set()
    assert first.result(10) == [0]
    assert shares[1].result(10) == pytest.approx(3 * shares[0].result(10))
    threads.close()


def test_a_failure_is_that_of_what_was_decoded_then():
    decoder = Gated()
    threads = DecodingThread(decoder)
    first = threads.decode(grids(-1), numbers)
    assert decoder.at_work.wait(10)
    others = [threads.decode(grids(1), lambda *_: 1 / 0), threads.decode(grids(2), numbers)]
    decoder.gate.set()
    with pytest.raises(VideoError, match="no memory"):
        first.result(10)
    with pytest.raises(ZeroDivisionError):
        others[0].result(10)
    assert others[1].result(10) == [2]
    threads.close()


def test_pixels_of_what_is_decoded_together_are_rounded_together(monkeypatch):
    """Each gets its own, as if it were alone, and only a rollout whose frames are not finite fails."""
    calls = []

    def noted(frames: torch.Tensor) -> np.ndarray:
        calls.append(len(frames))
        return to_uint8(frames)

    monkeypatch.setattr("decoder.thread.to_uint8", noted)
    decoder = Gated()
    threads = DecodingThread(decoder)

    def waiting(*given: torch.Tensor) -> list[Future]:
        decoder.gate.clear()
        decoder.at_work.clear()
        first = threads.decode(grids(0), numbers)
        assert decoder.at_work.wait(10)
        made = [threads.decode(each, lambda decoded, _: decoded.pixels()) for each in given]
        made.append(threads.decode(grids(1), numbers))
        decoder.gate.set()
        assert first.result(10) == [0]
        assert made.pop().result(10) == [1]
        return made

    two, one = waiting(grids(0, 1), grids(1))
    assert two.result(10).flatten().tolist() == [128, 255]
    assert one.result(10).flatten().tolist() == [255]
    assert calls == [4]
    frames = Gated.decode
    monkeypatch.setattr(
        Gated, "decode", lambda self, tokens: frames(self, tokens).where(tokens[:, None] < 9, torch.nan)
    )
    two, one = waiting(grids(0, 9), grids(1))
    with pytest.raises(VideoError, match="not finite"):
        two.result(10)
    assert one.result(10).flatten().tolist() == [255]
    threads.close()


def test_what_is_given_up_is_not_decoded():
    decoder = Gated()
    threads = DecodingThread(decoder)
    made = [threads.decode(grids(0), numbers)]
    assert decoder.at_work.wait(10)
    made += [threads.decode(grids(index), numbers) for index in (1, 2)]
    assert made[1].cancel()
    decoder.gate.set()
    assert made[2].result(10) == [2]
    assert decoder.sizes == [1, 1]
    with pytest.raises(CancelledError):
        made[1].result(10)
    threads.close()


def test_closing_waits_for_what_is_being_decoded_and_gives_up_the_rest():
    decoder = Gated("cpu")
    threads = DecodingThread(decoder)
    made = [threads.decode(grids(index), numbers) for index in range(3)]
    assert decoder.at_work.wait(10)
    closing = threading.Thread(target=threads.close)
    closing.start()
    decoder.gate.set()
    closing.join(10)
    assert made[0].result(10) == [0]
    assert all(piece.done() for piece in made)


@pytest.mark.parametrize(
    ("device", "framewise", "sizes"),
    [("cuda", True, [1, 5]), ("cpu", True, [1, 3, 2]), ("cuda", False, [3, 3])],
    ids=["framewise on a GPU", "framewise on a CPU", "windowed"],
)
def test_when_a_rollout_is_decoded(device, framewise, sizes):
    """At once and with frames of other rollouts, or when all its tokens are there and alone."""
    decoder = Gated(device)
    decoder.framewise = framewise
    decoding = RolloutDecoding(decoder)

    async def two() -> list[list[list[int]]]:
        rollouts = [decoding.start(lambda frames: numbers(frames, 0.0)) for _ in range(2)]
        rollouts[0].add(grids(0))
        assert decoder.at_work.wait(10 if sizes[0] == 1 else 0) == (sizes[0] == 1)
        rollouts[1].add(grids(5, 6, 7))
        rollouts[0].add(grids(1, 2))
        decoder.gate.set()
        return list(await asyncio.gather(*(each.finish() for each in rollouts)))

    made = asyncio.run(two())
    assert [[number for piece in pieces for number in piece] for pieces in made] == [[0, 1, 2], [5, 6, 7]]
    assert decoder.sizes == sizes
    decoding.close()


def test_on_a_cpu_a_rollout_s_frames_leave_turns_to_others():
    """The engine's next frame waits for one frame of the decoder, not for a rollout."""
    order, begun, waiting = [], threading.Event(), threading.Event()

    class Noting:
        def decode(self, tokens):
            begun.set()
            assert waiting.wait(10)
            order.append(int(tokens[0, 0, 0]))
            return tokens[:, None].float()

    thread = DecodingThread(FramewiseDecoder(Noting()))
    made = thread.decode(grids(0, 1, 2), numbers)
    assert begun.wait(10)
    engine = on_cores(lambda: order.append("engine"))
    waiting.set()
    assert made.result(10) == [0, 1, 2]
    engine.result(10)
    assert order == [0, "engine", 1, 2]
    thread.close()


def test_work_in_turn_is_called_in_one_thread_also_from_within_and_raises_what_it_raises():
    outer, inner = on_cores(lambda: (threading.get_ident(), on_cores(threading.get_ident).result())).result()
    assert outer == inner == on_cores(threading.get_ident).result() != threading.get_ident()
    for work in (lambda: 1 // 0, lambda: on_cores(lambda: 1 // 0).result()):
        with pytest.raises(ZeroDivisionError):
            on_cores(work).result()
