"""How videos and pictures are shown: their own times, shape of a pixel, colors, orientation; or refused by name."""

import io
import subprocess
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest
from PIL import Image, ImageCms

from decoder.frames import list_frames, stream_planes
from decoder.pictures import picture_problem, read_picture
from decoder.showing import Display, display_filters, parse_display
from decoder.video import VideoWriter, probe_video, read_video, stream_video, write_video
from terra.context import read_context
from terra.errors import ContextError, VideoError
from tokenizer.limits import LIMITS, Limits

H264 = ("-c:v", "libx264", "-bf", "0", "-pix_fmt", "yuv420p", "-crf", "10")
COLORS = {"red": (200, 30, 30), "green": (30, 170, 40), "blue": (40, 50, 190), "gray": (128, 128, 128)}


def numbered(count: int, height: int = 48, width: int = 64) -> np.ndarray:
    """Frames whose upper blocks tell their number in bits."""
    frames = np.full((count, height, width, 3), 20, np.uint8)
    for bit in range(8):
        frames[np.arange(count) >> bit & 1 == 1, : height // 2, bit * width // 8 : (bit + 1) * width // 8] = 235
    return frames


def numbers_of(frames) -> list[int]:
    height, width = frames[0].shape[:2]
    middles = [(2 * bit + 1) * width // 16 for bit in range(8)]
    return [sum(int(frame[height // 4, x, 0] > 127) << bit for bit, x in enumerate(middles)) for frame in frames]


def stripes(height: int = 48, width: int = 64) -> np.ndarray:
    frame = np.zeros((height, width, 3), np.uint8)
    for index, color in enumerate(COLORS.values()):
        frame[:, index * width // 4 : (index + 1) * width // 4] = color
    return frame


def stripe_colors(frame: np.ndarray) -> np.ndarray:
    height, width = frame.shape[:2]
    middles = [(2 * index + 1) * width // 8 for index in range(4)]
    return np.array([frame[height // 3 : height // 2, x - 2 : x + 2].mean((0, 1)) for x in middles])


def ffmpeg(*arguments: object, frames: np.ndarray | None = None, rate: int = 10) -> None:
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-y"]
    if frames is not None:
        size = f"{frames.shape[2]}x{frames.shape[1]}"
        command += ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", size, "-r", str(rate), "-i", "-"]
    subprocess.run([*command, *map(str, arguments)], input=None if frames is None else frames.tobytes(), check=True)


# Times


def test_a_frame_has_the_time_at_which_it_is_shown(tmp_path):
    times = [k / 15 for k in range(30)] + [2 + k / 30 for k in range(60)]
    graph = "setpts='round(if(lt(N,30),N/15,2+(N-30)/30)/TB)'"
    for name, more in {"a.mp4": ("-video_track_timescale", "90000"), "a.mkv": (), "b.mp4": ("-bf", "3")}.items():
        path = tmp_path / name
        ffmpeg("-vf", graph, "-fps_mode", "passthrough", *H264, *more, path, frames=numbered(90), rate=60)
        assert probe_video(path).times == pytest.approx(times, abs=0.0011 if path.suffix == ".mkv" else 1e-4)
        assert numbers_of(list(stream_video(path))) == list(range(90))


def test_hidden_frames_of_vp8_are_not_counted(tmp_path):
    path, log = tmp_path / "a.webm", tmp_path / "log"
    coding = ("-c:v", "libvpx", "-b:v", "300k", "-auto-alt-ref", "1", "-lag-in-frames", "16", "-passlogfile", log)
    ffmpeg(*coding, "-pass", 1, "-f", "null", "-", frames=numbered(90))
    ffmpeg(*coding, "-pass", 2, path, frames=numbered(90))
    packets = subprocess.run(
        [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", path, "-c", "copy", "-f", "framecrc", "-"],
        capture_output=True,
        check=True,
    ).stdout.count(b"\n0,")
    assert packets > 90  # else this shows nothing
    info = probe_video(path)
    assert info.times == pytest.approx(np.arange(90) / 10, abs=1e-3)
    assert info.fps == pytest.approx(10)


def test_a_gif_has_the_delays_that_browsers_show(tmp_path):
    pictures = [Image.fromarray(frame) for frame in numbered(7)]
    delays = [100, 10, 20, 300, 100, 0, 50]
    pictures[0].save(tmp_path / "a.gif", save_all=True, append_images=pictures[1:], duration=delays, loop=0)
    assert probe_video(tmp_path / "a.gif").times == pytest.approx([0, 0.1, 0.2, 0.22, 0.52, 0.62, 0.72])


def test_a_context_is_taken_by_the_frames_times(tmp_path):
    path = tmp_path / "a.mp4"

    def write(count: int, change: int, fps: int) -> None:
        times = f"setpts='round(if(lt(N,{change}),N/20,{change / 20}+(N-{change})/{fps})/TB)'"
        ffmpeg("-vf", times, "-fps_mode", "passthrough", *H264, path, frames=numbered(count), rate=60)

    write(30, 10, 10)
    got = read_context(path, num_frames=12, image_size=(48, 64), fps=10.0)
    assert numbers_of(got) == [0, 2, 4, 6, 8, *range(10, 17)]
    write(90, 10, 5)
    with pytest.raises(ContextError, match=r"expected a video of 10 or more frames a second, got 5\.\d+"):
        read_context(path, num_frames=12, image_size=(48, 64), fps=10.0)
    write(90, 80, 5)
    assert numbers_of(read_context(path, num_frames=40, image_size=(48, 64), fps=10.0)) == list(range(0, 80, 2))
    with pytest.raises(ContextError, match=r"expected a frame each 0\.1 s, got none of its own at 4\.\d0 s: the"):
        read_context(path, num_frames=50, image_size=(48, 64), fps=10.0)


# What a video says of its showing


def test_pixels_become_square(tmp_path):
    yy, xx = np.mgrid[:108, :144]
    inside = ((xx - 72) * 4 / 3) ** 2 + (yy - 54) ** 2 < 40**2
    disc = np.stack([np.where(inside, 235, 20).astype(np.uint8)] * 3, axis=2)
    ffmpeg("-vf", "setsar=4/3", *H264, tmp_path / "wide.mp4", frames=np.stack([disc] * 3))
    ffmpeg("-vf", "transpose,setsar=3/4", *H264, tmp_path / "high.mp4", frames=np.stack([disc] * 3))
    for name, size in {"wide": (108, 192), "high": (192, 108)}.items():
        inside = read_video(tmp_path / f"{name}.mp4")[0, ..., 0] > 127
        assert inside.shape == size
        assert abs(inside.any(0).sum() - inside.any(1).sum()) <= 2
    info = probe_video(tmp_path / "wide.mp4")
    assert (info.width, info.height) == (192, 108)
    with pytest.raises(VideoError, match=r"expected (shown )?frames of at most 20000 pixels, got"):
        read_video(tmp_path / "wide.mp4", limits=Limits(video_pixels=20_000))


@pytest.mark.parametrize("transfer", ["arib-std-b67", "smpte2084"])
def test_hdr_becomes_sdr(tmp_path, transfer):
    graph = (
        "scale=out_color_matrix=bt709:out_range=tv,format=yuv444p,setparams=color_primaries=bt709:color_trc=bt709:"
        "colorspace=bt709:range=tv,zscale=t=linear:npl=203,format=gbrpf32le,"
        f"zscale=p=bt2020:t={transfer}:m=bt2020nc:r=tv:npl=203,format=yuv420p10le"
    )
    said = f"log-level=none:colorprim=bt2020:transfer={transfer}:colormatrix=bt2020nc"
    path = tmp_path / "a.mov"
    ffmpeg("-vf", graph, "-c:v", "libx265", "-x265-params", said, "-crf", 4, path, frames=np.stack([stripes()] * 3))
    assert np.abs(stripe_colors(read_video(path)[0]) - list(COLORS.values())).max() < 6


@pytest.mark.parametrize(("height", "matrix"), [(720, "bt709"), (480, "smpte170m")])
def test_the_matrix_of_untagged_video_is_that_of_its_size(tmp_path, height, matrix):
    path = tmp_path / "a.mp4"
    graph = f"scale=out_color_matrix={matrix}:out_range=tv,format=yuv444p,setparams=colorspace=unknown"
    ffmpeg("-vf", graph, "-c:v", "libx264", "-crf", 4, path, frames=np.stack([stripes(height, 640)] * 2))
    assert list_frames(path).display.matrix == "unknown"
    assert np.abs(stripe_colors(read_video(path)[0]) - list(COLORS.values())).max() < 4


def test_interlaced_video_is_shown_without_combs(tmp_path):
    frames = np.full((24, 48, 64, 3), 20, np.uint8)
    for index in range(24):
        frames[index, :, 2 * index : 2 * index + 10] = 235
    path = tmp_path / "a.mkv"
    graph = "interlace=scan=tff:lowpass=off"
    ffmpeg("-vf", graph, "-c:v", "libx264", "-flags", "+ildct+ilme", "-x264-params", "tff=1", path, frames=frames)
    shown = read_video(path)[5][..., 0].astype(int)
    assert np.abs(shown[2:-2] - (shown[1:-3] + shown[3:-1]) / 2).mean() < 3
    assert probe_video(path).num_frames == 12


@pytest.mark.parametrize("turn", [90, 180, 270])
def test_a_display_matrix_turns_the_frame(tmp_path, turn):
    stored = tmp_path / "stored.mp4"
    ffmpeg(*H264, stored, frames=np.ascontiguousarray(np.rot90(numbered(5), turn // 90, axes=(1, 2))))
    ffmpeg("-display_rotation", -turn, "-i", stored, "-c", "copy", tmp_path / "a.mp4")
    assert numbers_of(read_video(tmp_path / "a.mp4")) == list(range(5))
    assert list_frames(tmp_path / "a.mp4").display.turns_sides == (turn != 180)


def test_dolby_vision_of_profile_5_is_refused():
    lines = [
        "[info]   Stream #0:0[0x1](und): Video: hevc (Main 10) (dvh1 / 0x31687664), yuv420p10le(pc), 1920x1080, 30 fps",
        "[info]     Side data:",
        "[info]       DOVI configuration record: version: 1.0, profile: 5, level: 4, rpu flag: 1",
        "[info]   Stream #0:1[0x2](und): Audio: aac",
    ]
    display = parse_display(lines)
    assert display is not None
    with pytest.raises(VideoError, match=r"a\.mp4: expected colors that can be shown, got Dolby Vision of profile 5"):
        display_filters(display, "a.mp4", LIMITS)


def test_ffmpegs_words_are_read():
    colors = "yuv420p10le(tv, bt2020nc/bt2020/arib-std-b67)"
    line = f"[info]   Stream #0:1[0x2](eng): Video: hevc (hvc1 / 0x31), {colors}, 1920x1080 [SAR 4:3 DAR 16:9], 3 kb/s"
    cover = "[info]   Stream #0:0: Video: png, rgb24(pc), 256x144, 90k tbr (attached pic)"
    got = parse_display([cover, line, "[info]   Side data:", "[info]   displaymatrix: rotation of -90.00 degrees"])
    assert got == Display(1920, 1080, 4 / 3, "bt2020nc", "bt2020", "arib-std-b67", "yuv420p10le", turns_sides=True)
    assert parse_display(["[info]   Stream #0:0: Audio: aac"]) is None


# Planes


@pytest.mark.parametrize("matrix", ["bt709", "smpte170m"])
def test_planes_are_the_frames(tmp_path, matrix):
    path = tmp_path / "a.mp4"
    graph = f"scale=out_color_matrix={matrix}:out_range=tv,format=yuv420p,setparams=colorspace={matrix}"
    ffmpeg("-vf", graph, "-c:v", "libx264", "-crf", 4, path, frames=np.stack([stripes(96, 128)] * 4))
    display = list_frames(path).display
    assert display.is_plain
    with VideoWriter(tmp_path / "b.mp4", 10.0, (64, 48), crf=4, planes=True) as writer:
        writer.extend(stream_planes(path, display, (0.0, 0.0, 128.0, 96.0), (48, 64)))
    shown = read_video(tmp_path / "b.mp4")
    assert shown.shape == (4, 48, 64, 3)
    assert np.abs(stripe_colors(shown[2]) - list(COLORS.values())).max() < 4


# ffmpeg itself


def test_ffmpeg_is_named_where_it_is_at_fault(tmp_path, monkeypatch):
    path = tmp_path / "a.mp4"
    write_video(numbered(5), path, fps=10.0)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(tmp_path / "none"))
    for act in (lambda: probe_video(path), lambda: write_video(numbered(5), tmp_path / "b.mp4", fps=10.0)):
        with pytest.raises(VideoError, match=r"expected ffmpeg 5\.1 or later.*none: No such file.*IMAGEIO_FFMPEG_EXE"):
            act()
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\necho \"Unrecognized option 'fps_mode'.\" >&2\nexit 1\n")
    old.chmod(0o755)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(old))
    with pytest.raises(VideoError, match=r"expected ffmpeg 5\.1 or later.*got another one: .*old"):
        read_video(path)


# Pictures


def encoded(picture: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_turned_as_exif_says(orientation):
    turns = {2: (np.fliplr,), 3: (np.flipud, np.fliplr), 4: (np.flipud,), 5: (np.rot90, np.flipud)}
    turns |= {6: (np.rot90,), 7: (np.rot90, np.fliplr), 8: (np.rot90, np.flipud, np.fliplr)}
    stored = stripes()
    for turn in turns.get(orientation, ()):
        stored = turn(stored)
    exif = Image.Exif()
    exif[0x0112] = orientation
    np.testing.assert_array_equal(read_picture(encoded(Image.fromarray(stored), exif=exif)), stripes())


def test_another_color_profile_is_converted_to_srgb():
    # sRGB's own primaries in another order: what the profile calls red is shown as green.
    data = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    tags = {bytes(data[at : at + 4]): at for at in range(132, 132 + 12 * int.from_bytes(data[128:132], "big"), 12)}
    red, green = tags[b"rXYZ"], tags[b"gXYZ"]
    data[red : red + 4], data[green : green + 4] = data[green : green + 4], data[red : red + 4]
    name = tags[b"desc"]
    where, size = int.from_bytes(data[name + 4 : name + 8], "big"), int.from_bytes(data[name + 8 : name + 12], "big")
    data[where : where + size] = bytes(data[where : where + size]).replace(b"\0s\0R\0G\0B", b"\0m\0i\0n\0e")
    shown = read_picture(encoded(Image.fromarray(stripes()), icc_profile=bytes(data)))
    assert np.abs(shown.astype(int) - stripes()[..., [1, 0, 2]]).max() <= 3


def test_what_is_no_rgb_picture_is_refused_by_name():
    rgb = Image.fromarray(stripes())
    cases = {
        "depth is no picture": encoded(Image.fromarray(np.full((9, 9), 40_000, np.uint16))),
        "transparent pixels: flatten it first": encoded(
            Image.merge("RGBA", [*rgb.split(), Image.new("L", rgb.size, 9)])
        ),
        "mode 'CMYK': convert it to RGB first": encoded(rgb.convert("CMYK"), "JPEG"),
    }
    for message, data in cases.items():
        with pytest.raises(VideoError, match=message):
            read_picture(data)


def test_a_damaged_picture_is_known_without_unpacking_it(tmp_path: Path):
    whole = {"a.png": encoded(Image.fromarray(stripes())), "a.jpg": encoded(Image.fromarray(stripes()), "JPEG")}
    for name, data in whole.items():
        path = tmp_path / name
        path.write_bytes(data + b"\0" * 100)
        assert picture_problem(path) is None
        # A film of some megabytes behind the picture, as phones append it.
        path.write_bytes(data + b"\0" * (1 << 17))
        assert picture_problem(path) is None
        for damaged, reason in ((b"", "empty"), (b"text", "cannot identify image file"), (data[: len(data) // 2], "")):
            path.write_bytes(damaged)
            assert reason in str(picture_problem(path))
    assert "No such file" in str(picture_problem(tmp_path / "none.png"))
