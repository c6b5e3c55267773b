import os
import subprocess
from contextlib import suppress
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from PIL import Image

import decoder
from decoder.video import (
    VideoInfo,
    VideoWriter,
    probe_video,
    read_video,
    stream_video,
    to_frames,
    to_uint8,
    write_png_sequence,
    write_video,
)
from terra.errors import OutputError, VideoError
from tokenizer.limits import Limits


def moving_waves(num_frames: int = 12, height: int = 48, width: int = 64) -> np.ndarray:
    rows, columns = np.mgrid[:height, :width]
    shades = [
        np.stack([127 + 100 * np.sin(columns / 15 + index / 3), 127 + 100 * np.cos(rows / 12), 2 * columns], axis=-1)
        for index in range(num_frames)
    ]
    return np.stack(shades).clip(0, 255).astype(np.uint8)


def psnr(got: np.ndarray, expected: np.ndarray) -> float:
    return 10 * np.log10(255**2 / np.mean((got.astype(float) - expected) ** 2))


@pytest.fixture(scope="module")
def mp4(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("mp4") / "waves.mp4"
    write_video(moving_waves(), path, fps=10.0)
    return path


@pytest.fixture(scope="module")
def gif(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gif") / "waves.gif"
    write_video(moving_waves(), path, fps=10.0)
    return path


def assert_regular(info: VideoInfo) -> None:
    assert (info.num_frames, info.fps, info.width, info.height) == (12, 10.0, 64, 48)
    assert info.times == pytest.approx(np.arange(12) / 10, abs=1e-12)


def test_mp4_keeps_frames_rate_and_colors(mp4):
    assert_regular(probe_video(mp4))
    got = read_video(mp4)
    assert got.shape == (12, 48, 64, 3)
    assert got.dtype == np.uint8
    for frame, expected in zip(got, moving_waves(), strict=True):
        assert psnr(frame, expected) > 36


def test_a_flat_color_survives_the_color_matrix(tmp_path):
    frames = np.full((2, 16, 16, 3), (200, 40, 10), np.uint8)
    write_video(frames, tmp_path / "flat.mp4", fps=1.0)
    assert np.abs(read_video(tmp_path / "flat.mp4").astype(int) - frames).max() <= 3


@pytest.mark.parametrize("fps", [0.5, 10.0, 12.5, 24000 / 1001, 30000 / 1001])
def test_mp4_keeps_the_exact_rate(tmp_path, fps):
    write_video(moving_waves(5), tmp_path / "v.mp4", fps)
    assert probe_video(tmp_path / "v.mp4").fps == pytest.approx(fps, rel=1e-9)


def test_mp4_starts_with_its_index_and_is_4_2_0(mp4):
    data = mp4.read_bytes()
    assert data.index(b"moov") < data.index(b"mdat")
    assert b"avc1" in data


def test_max_frames_reads_the_beginning(mp4, gif):
    for path in (mp4, gif):
        assert np.array_equal(read_video(path, max_frames=3), read_video(path)[:3])
        assert len(read_video(path, max_frames=100)) == 12
        with pytest.raises(VideoError, match="max_frames"):
            read_video(path, max_frames=0)


@pytest.mark.parametrize("suffix", [".mp4", ".gif"])
def test_one_frame_is_a_video(tmp_path, suffix):
    write_video(moving_waves(1), tmp_path / f"one{suffix}", fps=10.0)
    assert probe_video(tmp_path / f"one{suffix}").num_frames == 1


def test_gif_keeps_every_frame(gif):
    assert_regular(probe_video(gif))
    for frame, expected in zip(read_video(gif), moving_waves(), strict=True):
        assert psnr(frame, expected) > 26


@settings(max_examples=20)
@given(
    kinds=st.lists(st.integers(0, 2), min_size=1, max_size=12),
    fps=st.sampled_from([1.0, 8.0, 10.0, 15.0, 30.0, 50.0]),
)
def test_gif_keeps_equal_neighbors_and_total_duration(tmp_path_factory, kinds, fps):
    pictures = np.zeros((3, 6, 8, 3), np.uint8)
    pictures[1, 0, 0] = (255, 0, 0)
    pictures[2, 3:] = (0, 0, 255)
    path = tmp_path_factory.mktemp("gif") / "still.gif"
    write_video(pictures[kinds], path, fps)
    with Image.open(path) as image:
        assert image.n_frames == len(kinds)
        assert image.info["loop"] == 0
        durations = []
        for index in range(image.n_frames):
            image.seek(index)
            durations.append(image.info["duration"])
    assert sum(durations) == pytest.approx(1000 * len(kinds) / fps, abs=5)
    assert np.abs(read_video(path).astype(int) - pictures[kinds]).max() <= 8


def test_still_parts_of_a_gif_do_not_flicker(tmp_path):
    frames = np.repeat(moving_waves(1), 4, axis=0)
    frames[2, 30:] = 255 - frames[2, 30:]
    write_video(frames, tmp_path / "v.gif", fps=10.0)
    got = read_video(tmp_path / "v.gif")
    assert (got[:, :30] == got[:1, :30]).all()
    assert np.array_equal(got[3], got[0])


@pytest.mark.parametrize(("height", "width"), [(47, 64), (48, 63)])
def test_odd_sizes_are_refused_for_mp4_but_not_for_gif(tmp_path, height, width):
    frames = moving_waves(2, height, width)
    with pytest.raises(VideoError, match=f"even width and height .* got {width}x{height}"):
        write_video(frames, tmp_path / "v.mp4", fps=10.0)
    write_video(frames, tmp_path / "v.gif", fps=10.0)
    assert read_video(tmp_path / "v.gif").shape == frames.shape


@pytest.mark.parametrize(
    ("name", "fps", "message"),
    [
        ("v.avi", 10.0, "ends in .mp4 or .gif, got .avi"),
        ("v", 10.0, "no suffix"),
        ("v.mp4", 0.0, "positive frame rate"),
        ("v.mp4", float("nan"), "positive frame rate"),
        ("v.gif", 60.0, "at most 50 frames a second"),
    ],
)
def test_what_cannot_be_stored_is_refused(tmp_path, name, fps, message):
    with pytest.raises(VideoError, match=message):
        write_video(moving_waves(2), tmp_path / name, fps)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "frames", [np.zeros((2, 4, 4, 3)), np.zeros((4, 4, 3), np.uint8), np.zeros((0, 4, 4, 3), np.uint8)]
)
def test_only_stacks_of_8_bit_frames_are_written(tmp_path, frames):
    with pytest.raises(VideoError, match="expected uint8"):
        write_video(frames, tmp_path / "v.mp4", fps=10.0)
    with pytest.raises(VideoError, match="expected uint8"):
        write_png_sequence(frames, tmp_path / "frames")


def stop_after_one_frame(path: Path) -> None:
    with VideoWriter(path, fps=10.0, size=(64, 48)) as writer:
        writer.append(moving_waves(1)[0])
        raise ZeroDivisionError


def append_all(path: Path, frames: list[np.ndarray]) -> None:
    with VideoWriter(path, fps=10.0, size=(64, 48)) as writer:
        for frame in frames:
            writer.append(frame)


@pytest.mark.parametrize("name", ["v.mp4", "v.gif"])
def test_nothing_half_written_is_left(tmp_path, name):
    path = tmp_path / name
    path.write_text("before")
    with pytest.raises(ZeroDivisionError):
        stop_after_one_frame(path)
    with pytest.raises(VideoError, match="at least one frame"):
        append_all(path, [])
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
    write_video(moving_waves(), path, fps=10.0)
    assert len(read_video(path)) == 12
    assert list(tmp_path.iterdir()) == [path]


def test_a_writer_takes_frames_of_its_size_inside_with(tmp_path):
    writer = VideoWriter(tmp_path / "v.mp4", fps=10.0, size=(64, 48))
    with pytest.raises(VideoError, match="with statement"):
        writer.append(moving_waves()[0])
    with pytest.raises(VideoError, match=r"\(48, 64, 3\) for frame 1, got uint8 \(64, 48, 3\)"):
        append_all(tmp_path / "v.mp4", [moving_waves(1)[0], moving_waves(1, 64, 48)[0]])
    assert list(tmp_path.iterdir()) == []


def test_crf_trades_size_for_likeness(tmp_path):
    sizes = []
    for crf in (1, 40):
        with VideoWriter(tmp_path / "v.mp4", fps=10.0, size=(64, 48), crf=crf) as writer:
            for frame in moving_waves():
                writer.append(frame)
        sizes.append((tmp_path / "v.mp4").stat().st_size)
    assert sizes[0] > sizes[1]
    with pytest.raises(VideoError, match="crf"):
        VideoWriter(tmp_path / "v.mp4", fps=10.0, size=(64, 48), crf=52)


@pytest.mark.parametrize("name", ["v.mp4", "v.gif"])
def test_output_errors_are_one_line(tmp_path, name):
    targets = [tmp_path / "no_such_folder" / name, tmp_path / name]
    targets[1].mkdir()
    if Path("/proc/version").exists():
        targets.append(Path("/proc") / name)  # not writable even for root
    for target in targets:
        with pytest.raises(OutputError, match=name) as caught:
            write_video(moving_waves(), target, fps=10.0)
        assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_an_encoder_that_gives_up_is_an_output_error(tmp_path, monkeypatch):
    encoder = tmp_path / "ffmpeg"
    encoder.write_text("#!/bin/sh\necho '[out#0/mp4 @ 0x1] [av @ 0x2] No space left on device' >&2\nexit 1\n")
    encoder.chmod(0o755)
    monkeypatch.setattr("imageio_ffmpeg.get_ffmpeg_exe", lambda: str(encoder))
    with pytest.raises(OutputError, match=r"frames: No space left on device$"):
        write_video(np.zeros((60, 480, 640, 3), np.uint8), tmp_path / "v.mp4", fps=10.0)
    assert [path.name for path in tmp_path.iterdir()] == ["ffmpeg"]


def no_ffmpeg() -> str:
    raise RuntimeError("No ffmpeg exe could be found.")


def test_a_missing_ffmpeg_is_named(mp4, monkeypatch):
    monkeypatch.setattr("imageio_ffmpeg.get_ffmpeg_exe", no_ffmpeg)
    with pytest.raises(VideoError, match="expected ffmpeg"):
        read_video(mp4)


def assert_refused(path: Path) -> None:
    for read in (probe_video, read_video):
        with pytest.raises(VideoError, match=path.name) as caught:
            read(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".mp4", ".gif"])
@pytest.mark.parametrize("content", [b"", b"hello\n", b"\x00" * 500, bytes(range(256)) * 8, b"\x89PNG\r\n\x1a\n" * 9])
def test_what_is_no_video_is_refused(tmp_path, suffix, content):
    path = tmp_path / f"v{suffix}"
    path.write_bytes(content)
    assert_refused(path)


def test_paths_that_are_no_video_files_are_refused(tmp_path):
    assert_refused(tmp_path / "missing.mp4")
    assert_refused(tmp_path)
    (tmp_path / "notes.txt").write_text("a road")
    assert_refused(tmp_path / "notes.txt")


def test_a_video_without_frames_is_refused(tmp_path):
    path = tmp_path / "v.mp4"
    path.write_bytes(b"\0\0\0\x10ftypisom\0\0\0\0" + b"\0\0\0\x08moov")
    assert_refused(path)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 0.999])
def test_cut_off_videos_are_refused(tmp_path, mp4, gif, share):
    for whole in (mp4, gif):
        data = whole.read_bytes()
        path = tmp_path / whole.name
        path.write_bytes(data[: int(len(data) * share)])
        assert_refused(path)


def test_an_mp4_cut_between_two_frames_is_refused(tmp_path, mp4):
    data = mp4.read_bytes()
    unit = data.index(b"mdat") + 4
    for _ in range(5):
        unit += 4 + int.from_bytes(data[unit : unit + 4], "big")
    path = tmp_path / "cut.mp4"
    path.write_bytes(data[:unit])
    assert_refused(path)


def test_damage_inside_an_mp4_is_refused_unless_it_lies_after_what_is_read(tmp_path, mp4):
    data = bytearray(mp4.read_bytes())
    data[-400:-200] = bytes(200)
    path = tmp_path / "damaged.mp4"
    path.write_bytes(data)
    with pytest.raises(VideoError, match=r"damaged.mp4"):
        read_video(path)
    assert np.array_equal(read_video(path, max_frames=1), read_video(mp4, max_frames=1))


def test_png_sequence_is_lossless_and_whole(tmp_path):
    frames = moving_waves(3)
    write_png_sequence(frames, tmp_path / "frames")
    names = sorted(path.name for path in (tmp_path / "frames").iterdir())
    assert names == ["frame_0000.png", "frame_0001.png", "frame_0002.png"]
    for name, frame in zip(names, frames, strict=True):
        with Image.open(tmp_path / "frames" / name) as picture:
            assert np.array_equal(np.asarray(picture), frame)
    with pytest.raises(OutputError, match="new or empty folder"):
        write_png_sequence(frames, tmp_path / "frames")
    with pytest.raises(OutputError, match="new or empty folder"):
        write_png_sequence(frames, tmp_path / "no" / "frames")
    assert [path.name for path in tmp_path.iterdir()] == ["frames"]


def test_all_256_steps_come_back_exactly():
    steps = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1).repeat(3, axis=3)
    frames = to_frames(steps)
    assert frames.shape == (1, 3, 16, 16)
    assert frames.dtype == torch.float32
    assert (frames.min().item(), frames.max().item()) == (-1.0, 1.0)
    assert np.array_equal(to_uint8(frames), steps)


def test_channels_go_first_and_come_back():
    frames = moving_waves(2)
    assert torch.equal(to_frames(frames)[1, 2], torch.from_numpy(frames[1, :, :, 2].astype(np.float32) / 127.5 - 1))
    assert np.array_equal(to_uint8(to_frames(frames)), frames)


def test_to_uint8_clamps_rounds_and_refuses_nan():
    values = torch.tensor([-3.0, -1.0, -1 + 0.6 / 127.5, 1 - 0.4 / 127.5, 1.0, 7.0])
    frames = values.expand(1, 3, 1, 6)
    assert to_uint8(frames)[0, 0, :, 0].tolist() == [0, 0, 1, 255, 255, 255]
    assert to_uint8(torch.zeros(1, 3, 2, 2, dtype=torch.bfloat16, requires_grad=True)).max() == 128
    with pytest.raises(VideoError, match="not finite"):
        to_uint8(torch.full((1, 3, 2, 2), float("nan")))


def test_the_package_offers_its_public_names():
    for name in decoder.__all__:
        assert getattr(decoder, name).__name__ == name
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = decoder.no_such_name


@pytest.mark.parametrize("suffix", [".mp4", ".gif"])
def test_larger_videos_than_the_bounds_are_refused(tmp_path, suffix):
    path = tmp_path / f"v{suffix}"
    write_video(moving_waves(4), path, fps=10.0)
    assert len(read_video(path, limits=Limits(video_pixels=48 * 64))) == 4
    with pytest.raises(VideoError, match=r"expected frames of at most 3071 pixels, got 64x48"):
        read_video(path, limits=Limits(video_pixels=48 * 64 - 1))
    with pytest.raises(VideoError, match=r"expected at most 3 frames, got more"):
        probe_video(path, limits=Limits(video_frames=3))
    with pytest.raises(VideoError, match=r"expected at most 9\.5 frames a second, got 10"):
        probe_video(path, limits=Limits(video_fps=9.5))


@pytest.mark.parametrize("suffix", [".mp4", ".gif"])
def test_a_video_is_streamed_and_may_be_left_early(tmp_path, suffix):
    path = tmp_path / f"v{suffix}"
    write_video(moving_waves(), path, fps=10.0)
    frames = stream_video(path)
    assert np.array_equal(next(frames), read_video(path)[0])
    frames.close()
    assert np.array_equal(np.stack(list(stream_video(path))), read_video(path))


def test_reading_that_takes_too_long_ends(mp4):
    with pytest.raises(VideoError, match=r"expected frames that are read within 1e-09 s"):
        list(stream_video(mp4, seconds=1e-9))


PLAYLISTS = {
    "hls": "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{other}\n#EXT-X-ENDLIST\n",
    "concat": "ffconcat version 1.0\nfile '{other}'\n",
    "dash": "<?xml version='1.0'?><MPD><BaseURL>{other}</BaseURL></MPD>",
}


@pytest.mark.parametrize("name", ["v.mp4", "v.mov", "v.gif"])
@pytest.mark.parametrize("playlist", PLAYLISTS.values(), ids=PLAYLISTS)
@pytest.mark.parametrize("head", [b"", b"GIF8", b"\0\0\0\x08ftyp\0\0\0\x08moov"])
def test_a_playlist_reads_no_other_file(tmp_path, mp4, name, playlist, head):
    path = tmp_path / name
    path.write_bytes(head + playlist.format(other=mp4).encode() + b";")
    with pytest.raises(VideoError):
        read_video(path)


def test_a_pipe_and_a_device_are_no_videos(tmp_path):
    os.mkfifo(tmp_path / "pipe.mp4")
    (tmp_path / "device.mp4").symlink_to("/dev/zero")
    for name in ("pipe.mp4", "device.mp4"):
        with pytest.raises(VideoError, match="expected a video file"):
            read_video(tmp_path / name)


CONTAINERS = {
    "h264.mkv": ("-c", "copy"),
    "h264.ts": ("-c", "copy"),
    "h264.avi": ("-c", "copy"),
    "mjpeg.avi": ("-c:v", "mjpeg", "-q:v", "2"),
    "mpeg2.ts": ("-c:v", "mpeg2video", "-q:v", "2"),
    "vp8.webm": ("-c:v", "libvpx", "-crf", "4", "-b:v", "4M"),
    "vp9.webm": ("-c:v", "libvpx-vp9", "-crf", "10", "-b:v", "0", "-deadline", "realtime", "-cpu-used", "8"),
}


@pytest.fixture(scope="module")
def containers(mp4, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("containers")
    for name, arguments in CONTAINERS.items():
        command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", mp4, *arguments, folder / name]
        subprocess.run(list(map(str, command)), check=True)
    return {name: folder / name for name in CONTAINERS}


@pytest.mark.parametrize("name", CONTAINERS)
def test_other_containers_are_read_frame_by_frame(containers, mp4, name):
    info, expected = probe_video(containers[name]), probe_video(mp4)
    assert (info.num_frames, info.width, info.height) == (expected.num_frames, expected.width, expected.height)
    assert info.fps == pytest.approx(expected.fps, rel=1e-3)
    off = np.abs(read_video(containers[name]).astype(float) - read_video(mp4)).mean(axis=(1, 2, 3))
    assert off.max() < 12
    frames = list(stream_video(containers[name]))
    np.testing.assert_array_equal(frames[-1], read_video(containers[name])[-1])


@pytest.mark.parametrize("name", CONTAINERS)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_other_containers_cut_off_are_refused_or_shorter(containers, tmp_path, name, share):
    data = containers[name].read_bytes()
    path = tmp_path / name
    path.write_bytes(data[: int(len(data) * share)])
    if path.suffix == ".ts" and path.stat().st_size % 188 == 0:
        assert probe_video(path).num_frames < probe_video(containers[name]).num_frames
    else:
        assert_refused(path)


@pytest.mark.parametrize(
    "data",
    [
        b"RIFF\0\0\0\0AVI ",
        b"RIFF\xff\xff\xff\xffAVI LIST",
        b"RIFF\0\0\0\0WAVE" * 100,
        b"\x1a\x45\xdf\xa3",
        b"\x1a\x45\xdf\xa3" + b"\xff" * 40,
        b"\x1a\x45\xdf\xa3\0\0",
        b"\x1a\x45\xdf\xa3\x80\x18\x53\x80\x67\x01\x00\x00\x00\x00\x00\x00",
        (b"G" + bytes(187)) * 3,
        b"G" * 188 * 4,
        b"#EXTM3U\n#EXTINF:1,\n/etc/passwd\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
    ],
)
@pytest.mark.parametrize("suffix", [".avi", ".mkv", ".webm", ".ts"])
def test_what_only_begins_like_a_video_is_refused(tmp_path, data, suffix):
    (tmp_path / f"a{suffix}").write_bytes(data)
    assert_refused(tmp_path / f"a{suffix}")


@pytest.mark.slow
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_videos_are_read_or_refused(tmp_path, mp4, gif, containers, data):
    """Any bytes of a video changed: frames of some size, or one of our errors."""
    source = data.draw(st.sampled_from([mp4, gif, *containers.values()]))
    content = bytearray(source.read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / f"damaged{source.suffix}"
    path.write_bytes(bytes(content))
    with suppress(VideoError):
        info = probe_video(path)
        assert read_video(path, max_frames=2).shape[1:] == (info.height, info.width, 3)
