import io
import os
import struct
import zlib

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from PIL import Image

from decoder.video import write_video
from terra.context import load_context
from terra.errors import ConfigError, ContextError, TerraError, VideoError

SIZE = (18, 32)


def pixels(value=0, height=18, width=32):
    rng = np.random.default_rng(value)
    return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)


def save(path, array, **options):
    Image.fromarray(array).save(path, **options)
    return path


def load(source, num_frames=1, image_size=SIZE, fps=10.0):
    return load_context(source, num_frames=num_frames, image_size=image_size, fps=fps)


def refused(source, **options) -> str:
    with pytest.raises(ContextError) as caught:
        load(source, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def levels(frames):
    """The 0-255 level of each frame's center, back from [-1, 1]."""
    return ((frames[:, :, frames.shape[2] // 2, frames.shape[3] // 2].mean(dim=1) + 1) * 127.5).tolist()


def ramp_video(path, num_frames, fps, height=36, width=64):
    """A video in which frame k is a flat gray of level 8 k."""
    frames = np.broadcast_to(
        np.arange(num_frames, dtype=np.uint8)[:, None, None, None] * 8, (num_frames, height, width, 3)
    )
    write_video(np.ascontiguousarray(frames), path, fps)
    return path


def png_header(width, height):
    """A PNG that claims a size and holds no pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))


class TestPictures:
    def test_pixels_of_the_right_size_are_exact(self, tmp_path):
        arrays = [pixels(value) for value in range(3)]
        for index, array in enumerate(arrays):
            save(tmp_path / f"frame_{index:04}.png", array)
        frames = load(tmp_path, num_frames=2)
        assert frames.dtype == torch.float32
        assert frames.shape == (2, 3, *SIZE)
        expected = torch.from_numpy(np.stack(arrays[:2])).permute(0, 3, 1, 2).float() / 127.5 - 1
        assert torch.equal(frames, expected)

    def test_range_reaches_both_ends(self, tmp_path):
        array = np.zeros((18, 32, 3), np.uint8)
        array[:, 16:] = 255
        frames = load(save(tmp_path / "a.png", array))
        assert frames.min() == -1.0
        assert frames.max() == 1.0

    def test_natural_order_and_other_files(self, tmp_path):
        for index in (8, 9, 11):
            save(tmp_path / f"frame_{index}.png", np.full((18, 32, 3), index, np.uint8))
        save(tmp_path / "frame_10.JPG", np.full((18, 32, 3), 10, np.uint8), quality=100)
        (tmp_path / "actions.json").write_text("{}")
        (tmp_path / ".hidden.png").write_text("no picture")
        (tmp_path / "folder.png").mkdir()
        assert levels(load(tmp_path, num_frames=4)) == pytest.approx([8, 9, 10, 11], abs=0.51)
        (tmp_path / "frame_10.JPG").unlink()
        save(tmp_path / "frame_12.png", pixels())
        assert "pictures that follow one another, got frame_11.png after frame_9.png" in refused(tmp_path, num_frames=4)
        assert load(tmp_path, num_frames=2).shape[0] == 2
        save(tmp_path / "frame_8.jpg", pixels())
        assert "expected one picture of a name, got frame_8.jpg and frame_8.png" in refused(tmp_path, num_frames=2)

    def test_glob_over_folders(self, tmp_path):
        for index in (2, 10):
            (tmp_path / f"take_{index}").mkdir()
            save(tmp_path / f"take_{index}" / "a.png", np.full((18, 32, 3), index, np.uint8))
        assert levels(load(f"{tmp_path}/take_*/*.png", num_frames=2)) == pytest.approx([2, 10], abs=1e-4)
        with pytest.raises(ContextError, match=r"expected a glob without \*\*, which goes through whole trees"):
            load(tmp_path / "**" / "*.png", num_frames=2)

    def test_a_jpeg_of_thousands_of_scans_is_refused_before_it_is_decoded(self, tmp_path):
        path = tmp_path / "a.jpg"
        Image.fromarray(pixels()).save(path, progressive=True)
        assert load(path).shape == (1, 3, *SIZE)
        data = path.read_bytes()
        path.write_bytes(data[:-2] + data[data.rindex(b"\xff\xda") : -2] * 5000 + b"\xff\xd9")
        with pytest.raises(ContextError, match=r"a JPEG of 50\d\d scans, above the 100 that are read"):
            load(path)

    def test_folder_whose_name_looks_like_a_glob(self, tmp_path):
        (tmp_path / "drive[1]").mkdir()
        save(tmp_path / "drive[1]" / "a.png", pixels())
        assert load(tmp_path / "drive[1]").shape == (1, 3, *SIZE)

    @given(red=st.integers(0, 255), height=st.integers(9, 60))
    @settings(max_examples=15)
    def test_resize_keeps_a_flat_color_and_the_sides(self, red, height, tmp_path_factory):
        width = round(height * 32 / 18)
        array = np.zeros((height, width, 3), np.uint8)
        array[..., 0] = red
        array[:, width // 2 :, 2] = 255
        path = tmp_path_factory.mktemp("resize") / "a.png"
        assume(abs(width / height / (32 / 18) - 1) < 0.02)
        frames = load(save(path, array))
        assert frames.shape == (1, 3, *SIZE)
        assert torch.allclose(frames[0, 0], torch.tensor(red / 127.5 - 1), atol=1e-6)
        assert (frames[0, 2, :, :8] == -1).all()
        assert (frames[0, 2, :, -8:] == 1).all()

    def test_exif_rotation_is_honoured(self, tmp_path):
        upright = np.zeros((18, 32, 3), np.uint8)
        upright[:9] = 255
        exif = Image.Exif()
        exif[0x0112] = 6  # shown rotated by 90 degrees clockwise
        path = save(tmp_path / "a.jpg", np.rot90(upright).copy(), exif=exif, quality=100)
        frames = load(path)
        assert (frames[0, :, :7] > 0.9).all()
        assert (frames[0, :, -7:] < -0.9).all()


class TestPictureErrors:
    def test_nothing_there(self, tmp_path):
        assert "got no such path" in refused(tmp_path / "missing")
        assert "expected 1 or more PNG or JPEG pictures, got 0" in refused(tmp_path)
        assert "got 0" in refused(f"{tmp_path}/*.png")

    def test_other_kinds(self, tmp_path):
        (tmp_path / "notes.txt").write_text("a")
        assert ".ts, .webm, got '.txt'" in refused(tmp_path / "notes.txt")
        assert "notes.txt" in refused(f"{tmp_path}/*")
        os.mkfifo(tmp_path / "pipe.png")
        assert "got 0" in refused(tmp_path)

    def test_too_few(self, tmp_path):
        save(tmp_path / "a.png", pixels())
        assert "expected 3 or more PNG or JPEG pictures, got 1" in refused(tmp_path, num_frames=3)
        assert "got 1" in refused(tmp_path / "a.png", num_frames=2)

    @pytest.mark.parametrize("suffix", ["png", "jpg"])
    def test_damaged(self, tmp_path, suffix):
        path = save(tmp_path / f"a.{suffix}", pixels(height=180, width=320))
        content = path.read_bytes()
        for damaged in (b"", content[:8], content[: len(content) // 2], b"text" + content):
            path.write_bytes(damaged)
            message = refused(tmp_path, image_size=(180, 320))
            assert message.startswith(f"{path}: expected a whole PNG, JPEG or WebP picture")

    @pytest.mark.parametrize("kind", ["PNG", "JPEG"])
    @given(data=st.data())
    @settings(max_examples=60)
    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_flipped_bytes_never_give_another_error(self, data, kind, tmp_path_factory):
        buffer = io.BytesIO()
        exif = Image.Exif()
        exif[0x0112] = 3
        Image.fromarray(pixels()).save(buffer, format=kind, exif=exif)
        content = bytearray(buffer.getvalue())
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, min(200, len(content) - 1)))] = data.draw(st.integers(0, 255))
        path = tmp_path_factory.mktemp("damage") / ("a.png" if kind == "PNG" else "a.jpg")
        path.write_bytes(content)
        try:
            frames = load(path)
        except ContextError as error:
            assert "\n" not in str(error)  # noqa: PT017 - damage that hits no content may load
        else:
            assert frames.shape == (1, 3, *SIZE)

    def test_gray_and_opaque_pictures_become_rgb(self, tmp_path):
        gray = pixels()[..., 0]
        picture = Image.fromarray(gray)
        expected = np.stack([gray] * 3)[None] / 127.5 - 1
        opaque = Image.merge("LA", [picture, Image.new("L", picture.size, 255)])
        for name, shown in {"gray": picture, "opaque": opaque, "colors": opaque.convert("RGBA")}.items():
            shown.save(tmp_path / f"{name}.png")
            np.testing.assert_allclose(load(tmp_path / f"{name}.png").numpy(), expected, atol=1e-6, err_msg=name)

    def test_what_can_not_be_shown_rightly(self, tmp_path):
        cases = {"I;16": "depth is no picture", "LA": "transparent pixels", "RGBA": "transparent pixels"}
        for mode, reason in cases.items():
            Image.new(mode, (32, 18)).save(tmp_path / "a.png")
            assert reason in refused(tmp_path)

    def test_cmyk(self, tmp_path):
        Image.new("CMYK", (32, 18)).save(tmp_path / "a.jpg")
        assert "'CMYK'" in refused(tmp_path)

    def test_another_format_under_the_name(self, tmp_path):
        Image.fromarray(pixels()).save(tmp_path / "a.png", format="GIF")
        assert "expected a whole PNG, JPEG or WebP picture" in refused(tmp_path)

    def test_sizes_that_differ(self, tmp_path):
        save(tmp_path / "a.png", pixels())
        save(tmp_path / "b.png", pixels(height=36, width=64))
        assert "b.png: expected 32x18 pixels like a.png, got 64x36" in refused(tmp_path, num_frames=2)

    def test_aspect(self, tmp_path):
        save(tmp_path / "a.png", pixels(height=24))
        assert "expected an aspect ratio of 1.778 (32x18), got 1.333 (32x24)" in refused(tmp_path)
        save(tmp_path / "a.png", pixels(height=180, width=323))
        assert load(tmp_path).shape == (1, 3, *SIZE)
        save(tmp_path / "a.png", pixels(height=180, width=328))
        assert "aspect" in refused(tmp_path)

    def test_too_small(self, tmp_path):
        save(tmp_path / "a.png", pixels(height=9, width=16))
        assert load(tmp_path).shape == (1, 3, *SIZE)
        assert "expected 17x10 pixels or more, got 16x9" in refused(tmp_path, image_size=(19, 34))

    @pytest.mark.parametrize("size", [(10_000, 8_000), (12_000, 8_000), (60_000, 40_000)])
    def test_absurdly_large(self, tmp_path, size):
        path = tmp_path / "bomb.png"
        path.write_bytes(png_header(*size))
        assert str(path) in refused(tmp_path)

    @pytest.mark.parametrize(
        "options", [{"num_frames": 0}, {"image_size": (0, 32)}, {"fps": 0.0}, {"fps": float("nan")}]
    )
    def test_settings(self, tmp_path, options):
        with pytest.raises(ConfigError, match="positive"):
            load(tmp_path, **options)


class TestVideo:
    def test_same_rate_takes_the_first_frames(self, tmp_path):
        path = ramp_video(tmp_path / "a.mp4", 12, 10.0)
        frames = load(path, num_frames=3)
        assert frames.shape == (3, 3, *SIZE)
        assert frames.dtype == torch.float32
        assert levels(frames) == pytest.approx([0, 8, 16], abs=3)

    @pytest.mark.parametrize(
        ("fps", "expected"), [(30.0, [0, 24, 48, 72]), (20.0, [0, 16, 32, 48]), (25.0, [0, 24, 40, 64])]
    )
    def test_faster_video_is_sampled_at_the_nearest_frames(self, tmp_path, fps, expected):
        path = ramp_video(tmp_path / "a.mp4", 16, fps)
        assert levels(load(str(path), num_frames=4)) == pytest.approx(expected, abs=3)

    def test_slightly_slower_video_counts_as_the_same_rate(self, tmp_path):
        path = ramp_video(tmp_path / "a.mp4", 8, 29.97)
        assert levels(load(path, num_frames=8, fps=30.0)) == pytest.approx([8 * k for k in range(8)], abs=3)

    def test_slower_video(self, tmp_path):
        path = ramp_video(tmp_path / "a.mp4", 8, 5.0)
        assert "expected a video of 10 or more frames a second, got 5" in refused(path, num_frames=2)

    def test_too_few(self, tmp_path):
        path = ramp_video(tmp_path / "a.mp4", 7, 20.0)
        assert load(path, num_frames=4).shape[0] == 4
        assert "expected 5 or more frames at 10 fps, got 4" in refused(path, num_frames=5)

    def test_size_and_aspect(self, tmp_path):
        path = ramp_video(tmp_path / "a.mp4", 3, 10.0, height=48, width=64)
        assert "aspect" in refused(path)
        assert "pixels or more" in refused(path, image_size=(288, 512))

    def test_damaged(self, tmp_path):
        path = tmp_path / "a.mp4"
        path.write_bytes(b"no video")
        with pytest.raises(VideoError, match=r"a\.mp4") as caught:
            load(path)
        assert isinstance(caught.value, TerraError)
