"""How well a context is reconstructed: the file with the expectation, the line, and the warning."""

from pathlib import Path

import pytest
import torch

import terra
from terra.context import load_context
from terra.errors import CheckpointError
from terra.reconstruction import FILE, MARGIN, Reconstruction, expected_psnr, write_expected
from tokenizer import LFQTokenizer
from tokenizer.checkpoint import checkpoint_sha256

DEMO = Path(terra.__file__).parent / "demo"


def shown(name: str) -> Reconstruction:
    """How the shipped tokenizer shows the first three frames of a folder."""
    tokenizer = LFQTokenizer.from_pretrained(DEMO / "tokenizer")
    frames = load_context(DEMO / name, num_frames=3, image_size=tokenizer.config.image_size, fps=10.0)
    with torch.inference_mode():
        decoded = tokenizer.decode(tokenizer.encode(frames))
    return Reconstruction.of(decoded, frames, expected_psnr(DEMO / "tokenizer"))


def test_photographs_are_warned_of_and_the_models_own_world_is_not():
    assert shown("contexts/night").warning is None  # the darkest, and the worst of the shipped ones
    warning = shown("photographs").warning
    assert warning is not None
    assert "\n" not in warning
    assert "15.0 dB PSNR (held-out frames: 26.7 dB)" in warning


def test_warning_begins_below_the_margin():
    assert Reconstruction(27.0 - MARGIN, 27.0).warning is None
    assert Reconstruction(26.99 - MARGIN, 27.0).warning is not None
    assert Reconstruction(1.0, None).warning is None
    assert Reconstruction(1.0, None).line == "the model shows the context at 1.0 dB PSNR"


def test_equal_frames_have_the_largest_value():
    frames = torch.zeros(2, 3, 4, 4)
    assert Reconstruction.of(frames, frames, None).psnr == 100.0


def test_expectation_is_no_part_of_the_checkpoints_hash(tmp_path, tiny_tokenizer):
    before = checkpoint_sha256(Path(tiny_tokenizer))
    for path in Path(tiny_tokenizer).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert expected_psnr(tmp_path) is None
    write_expected(tmp_path, 26.123)
    assert expected_psnr(tmp_path) == 26.12
    assert checkpoint_sha256(tmp_path) == before


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"psnr": null}', '{"psnr": NaN}', '{"psnr": -1}', '{"psnr": "26"}'])
def test_damaged_expectation_is_one_line(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(CheckpointError, match=r"reconstruction\.json") as error:
        expected_psnr(tmp_path)
    assert "\n" not in str(error.value)
