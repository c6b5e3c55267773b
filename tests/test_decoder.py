from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from einops import rearrange, repeat

from decoder import Decoder, FramewiseDecoder, framewise
from decoder.framewise import padded_batches
from tokenizer import LFQTokenizer
from tokenizer.errors import ConfigError

SHADES = 16


class ShadeCodec(torch.nn.Module):
    """Token k is a 4 x 4 patch of shade 2 k / 15 - 1; stands in for a tokenizer."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(()))

    def encode(self, frames):
        patches = rearrange(frames, "f c (r a) (k b) -> f r k (c a b)", a=4, b=4).mean(-1)
        return ((patches + 1) / 2 * (SHADES - 1)).round().long()

    def decode(self, tokens):
        shades = self.gain * (2 * tokens / (SHADES - 1) - 1)
        return repeat(shades, "f r k -> f c (r a) (k b)", c=3, a=4, b=4)


@pytest.fixture
def tokens():
    return torch.randint(0, SHADES, (5, 3, 4), generator=torch.Generator().manual_seed(0))


def test_decoders_are_recognized_by_what_they_do():
    assert isinstance(FramewiseDecoder(ShadeCodec()), Decoder)
    assert not isinstance(ShadeCodec(), Decoder)  # it decodes, and does not say how
    assert not isinstance(object(), Decoder)


def test_tokens_become_frames_and_come_back(tokens):
    codec = ShadeCodec()
    frames = FramewiseDecoder(codec).decode(tokens)
    assert frames.shape == (5, 3, 12, 16)
    assert frames.abs().max() <= 1
    assert torch.equal(codec.encode(frames), tokens)


def test_a_frame_is_the_same_alone_and_among_others(tokens):
    decoder = FramewiseDecoder(ShadeCodec())
    together = decoder.decode(tokens)
    for index in range(len(tokens)):
        assert torch.equal(decoder.decode(tokens[index : index + 1])[0], together[index])


def test_decoding_keeps_no_graph(tokens):
    codec = ShadeCodec()
    assert codec.decode(tokens).requires_grad
    assert not FramewiseDecoder(codec).decode(tokens).requires_grad


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_shows_nearly_the_same_and_leaves_the_tokenizer_alone(tiny_tokenizer, dtype):
    tokenizer = LFQTokenizer.from_pretrained(tiny_tokenizer)
    shape = (2, tokenizer.rows, tokenizer.cols)
    tokens = torch.randint(0, tokenizer.codebook_size, shape, generator=torch.Generator().manual_seed(0))
    full, half = FramewiseDecoder(tokenizer).decode(tokens), FramewiseDecoder(tokenizer, dtype).decode(tokens)
    assert half.dtype == torch.float32
    assert 0 < (half - full).abs().max() < 0.05
    assert {parameter.dtype for parameter in tokenizer.parameters()} == {torch.float32}


def test_another_type_is_refused():
    with pytest.raises(ConfigError, match=r"decoder\.dtype: expected one of float32, bfloat16, float16, got 'int8'"):
        FramewiseDecoder(ShadeCodec(), "int8")


def test_a_compiled_decoder_shows_the_same_and_leaves_the_tokenizer_alone(tiny_tokenizer, monkeypatch):
    tokenizer, compiled = LFQTokenizer.from_pretrained(tiny_tokenizer), []
    monkeypatch.setattr(torch, "compile", lambda work, **_: compiled.append(type(work.__self__).__name__) or work)
    decoder = FramewiseDecoder(tokenizer, compiled=True)
    assert compiled == ["Decoder"]
    assert decoder.tokenizer is not tokenizer
    tokens = torch.zeros(1, tokenizer.rows, tokenizer.cols, dtype=torch.int64)
    assert torch.equal(decoder.decode(tokens), tokenizer.decode(tokens))
    with pytest.raises(ConfigError, match=r"decoder\.compiled: ShadeCodec has no module `decoder` to compile"):
        FramewiseDecoder(ShadeCodec(), compiled=True)


@pytest.mark.parametrize(
    ("num", "batches"),
    [
        (1, [(1, 1)]),
        (2, [(1, 1)] * 2),
        (3, [(4, 3)]),
        (5, [(4, 4), (1, 1)]),
        (8, [(4, 4)] * 2),
        (9, [(4, 4)] * 2 + [(1, 1)]),
        (12, [(16, 12)]),
        (33, [(16, 16)] * 2 + [(1, 1)]),
    ],
)
def test_batches_for_a_compiled_decoder_have_few_sizes_and_lose_nothing(num, batches):
    grids = torch.arange(num)[:, None, None].expand(num, 3, 4)
    found = list(padded_batches(grids, [1, 4, 16]))
    assert [(len(batch), count) for batch, count in found] == batches
    assert torch.equal(torch.cat([batch[:count] for batch, count in found]), grids)


def test_a_gpus_compiled_decoder_decodes_all_frames_in_batches(tiny_tokenizer, monkeypatch):
    tokenizer = LFQTokenizer.from_pretrained(tiny_tokenizer)
    monkeypatch.setattr(torch, "compile", lambda work, **_: work)
    monkeypatch.setattr(framewise, "_CudaGraphs", lambda work, device: work)
    monkeypatch.setattr(FramewiseDecoder, "device", torch.device("cuda"))
    shape = (7, tokenizer.rows, tokenizer.cols)
    tokens = torch.randint(0, tokenizer.codebook_size, shape, generator=torch.Generator().manual_seed(0))
    decoder = FramewiseDecoder(tokenizer, compiled=True)
    assert torch.equal(decoder.decode(tokens), tokenizer.decode(tokens))
    for wrong in (tokens[:0], tokens[0], tokens.float(), tokens[:, :1]):
        with pytest.raises(ValueError, match="expected"):
            decoder.decode(wrong)


@pytest.mark.needs_cuda
def test_a_gpus_compiled_decoder_replays_graphs_from_any_thread(tiny_tokenizer):
    tokenizer = LFQTokenizer.from_pretrained(tiny_tokenizer).to("cuda")
    decoder = FramewiseDecoder(tokenizer, compiled=True)
    shape = (21, tokenizer.rows, tokenizer.cols)
    tokens = torch.randint(0, tokenizer.codebook_size, shape, generator=torch.Generator().manual_seed(0))
    sizes = [tokens[:1], tokens[:4], tokens, tokens[5:6]]
    expected = [tokenizer.decode(some) for some in sizes]
    for _ in range(2):  # captured, replayed
        torch.testing.assert_close([decoder.decode(some) for some in sizes], expected, rtol=0.01, atol=0.01)
    own = [decoder.decode(some).cpu() for some in sizes]
    another = FramewiseDecoder(tokenizer, compiled=True)

    def on_a_stream(some: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(torch.cuda.Stream()):
            return another.decode(some).cpu()

    with ThreadPoolExecutor(4) as threads:  # which capture, too
        for given, frames in zip(own * 8, threads.map(on_a_stream, sizes * 8), strict=True):
            assert torch.equal(frames, given)
