import errno
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from terra.errors import OutputError
from terra.output import check_output, output_folder

WRITTEN = ["video.*", "frames/frame_*.png"]
Usage = namedtuple("Usage", "total used free")


def listing(folder):
    return sorted(path.name for path in folder.iterdir())


def test_folder_appears_when_complete(tmp_path):
    with output_folder(tmp_path / "deep" / "run") as folder:
        (folder / "video.mp4").write_text("x")
        assert not (tmp_path / "deep" / "run").exists()
    assert listing(tmp_path / "deep" / "run") == ["video.mp4"]
    assert listing(tmp_path / "deep") == ["run"]


def test_nothing_is_left_after_an_error(tmp_path):
    def fail(folder):
        (folder / "half").write_text("x")
        raise KeyError

    with pytest.raises(KeyError), output_folder(tmp_path / "run") as folder:
        fail(folder)
    assert listing(tmp_path) == []


def test_old_folder_stays_until_the_new_one_is_complete(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "old").write_text("x")
    with pytest.raises(KeyError), output_folder(tmp_path / "run"):
        raise KeyError
    assert listing(tmp_path / "run") == ["old"]
    with output_folder(tmp_path / "run") as folder:
        (folder / "new").write_text("x")
    assert listing(tmp_path / "run") == ["new"]
    assert listing(tmp_path) == ["run"]


def test_what_comes_meanwhile_stays(tmp_path):
    run = tmp_path / "run"

    def work(folder):
        (folder / "video.mp4").write_text("x")
        run.mkdir()
        (run / "thesis.txt").write_text("x")

    check = lambda: check_output(run, needed_bytes=0)  # noqa: E731
    with pytest.raises(OutputError, match="exists already"), output_folder(run, check) as folder:
        work(folder)
    assert listing(run) == ["thesis.txt"]
    assert listing(tmp_path) == ["run"]


def test_full_disk_is_one_line(tmp_path):
    with pytest.raises(OutputError, match=r"output=.*run: the disk is full"), output_folder(tmp_path / "run"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert listing(tmp_path) == []


def test_existing_folder_is_never_overwritten_unasked(tmp_path):
    (tmp_path / "run").mkdir()
    check_output(tmp_path / "run", needed_bytes=0)  # empty
    (tmp_path / "run" / "video.mp4").write_text("x")
    with pytest.raises(OutputError, match="exists already: choose another, or overwrite=true"):
        check_output(tmp_path / "run", needed_bytes=0)
    check_output(tmp_path / "run", needed_bytes=0, replaced=["video.mp4"])


def test_only_an_earlier_result_is_replaced(tmp_path):
    run = tmp_path / "run"
    (run / "frames").mkdir(parents=True)
    (run / "video.mp4").write_text("x")
    (run / "frames/frame_0000.png").write_text("x")
    check_output(run, needed_bytes=0, replaced=WRITTEN)
    check_output(run, needed_bytes=0, replaced=None)  # of a command that adds to the folder
    (run / "holiday.jpg").write_text("x")
    expected = r"replaces an earlier result alone \(video\.\*, frames/frame_\*\.png\), got holiday\.jpg$"
    with pytest.raises(OutputError, match=expected):
        check_output(run, needed_bytes=0, replaced=WRITTEN)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("frames/thesis.txt", lambda path: path.write_text("x")),
        ("frames/frame_0001.png", Path.mkdir),
        ("frames/frame_0001.png", lambda path: path.symlink_to("frame_0000.png")),
        ("video.mp4", lambda path: (path.mkdir(), (path / "thesis.txt").write_text("x"))),
        ("video.mp4", lambda path: path.symlink_to("frames/frame_0000.png")),
        ("video.mp4", os.mkfifo),
        ("frames/more", Path.mkdir),
    ],
)
def test_what_only_has_a_results_names_is_not_replaced(tmp_path, name, make):
    run = tmp_path / "run"
    (run / "frames").mkdir(parents=True)
    (run / "frames/frame_0000.png").write_text("x")
    make(run / name)
    with pytest.raises(OutputError, match=f"earlier result alone .*, got {name}$"):
        check_output(run, needed_bytes=0, replaced=WRITTEN)


def test_the_command_says_what_is_an_earlier_result(tmp_path):
    def refuse(folder):
        raise OutputError(f"{folder}: expected a record")

    (tmp_path / "run").mkdir()
    check_output(tmp_path / "run", needed_bytes=0, replaced=WRITTEN, check_replaced=refuse)  # empty
    (tmp_path / "run/video.mp4").write_text("x")
    with pytest.raises(OutputError, match="expected a record"):
        check_output(tmp_path / "run", needed_bytes=0, replaced=WRITTEN, check_replaced=refuse)


@pytest.mark.parametrize("output", ["run", "link", "run/../run", "run/frames/.."])
@pytest.mark.parametrize("given", ["run/video.mp4", "run", "run/frames", "link/frames", "other"])
def test_an_input_is_never_replaced(tmp_path, output, given):
    (tmp_path / "run" / "frames").mkdir(parents=True)
    (tmp_path / "run" / "video.mp4").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    (tmp_path / "other").symlink_to(tmp_path / "run" / "frames")
    with pytest.raises(OutputError, match=r"expected a folder without the inputs, got .* in it"):
        check_output(
            tmp_path / output,
            needed_bytes=0,
            replaced=WRITTEN,
            inputs=[tmp_path / "away", tmp_path / given],
        )


@pytest.mark.parametrize("output", ["adapter/decoder", "adapter/decoder/out", "link/new"])
def test_nothing_is_written_into_an_input(tmp_path, output):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "adapter")
    with pytest.raises(OutputError, match=r"expected a folder outside the inputs, got one in .*adapter$"):
        check_output(tmp_path / output, needed_bytes=0, inputs=[tmp_path / "adapter"])


@pytest.mark.parametrize("output", [".", "", "/", "..", "below/.."])
def test_the_current_folder_is_no_output(tmp_path, monkeypatch, output):
    (tmp_path / "here" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(OutputError, match="expected a folder of its own"):
        check_output(Path(output), needed_bytes=0, replaced=["*"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("n" * 300, "expected a name of at most 200 bytes, got 300: nnn"),
        ("ä" * 101, "expected a name of at most 200 bytes, got 202"),
        ("a\0b", "null byte|NUL"),
        ("n" * 300 + "/run", "File name too long"),
        ("link", "a link to nothing"),
        ("loop", "a link to nothing|[Ss]ymbolic link|[Ss]ymlink"),
    ],
)
def test_places_that_can_not_be_are_one_line(tmp_path, name, message):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OutputError, match=message) as caught:
        check_output(tmp_path / name, needed_bytes=0)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    assert listing(tmp_path) == ["link", "loop"]


def test_a_link_stays_and_leads_to_the_new_folder(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    with output_folder(tmp_path / "run") as folder:
        (folder / "new").write_text("x")
    assert (tmp_path / "run").is_symlink()
    assert listing(tmp_path / "run") == ["new"]
    assert listing(tmp_path) == ["disk", "run"]


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "run").write_text("x")
    with pytest.raises(OutputError, match="expected a folder, got a file"):
        check_output(tmp_path / "run", needed_bytes=0, replaced=["video.mp4"])
    with pytest.raises(OutputError, match="expected a place to write to"):
        check_output(tmp_path / "run" / "below", needed_bytes=0)


def test_too_little_space_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10, 9, 1 << 20))
    with pytest.raises(OutputError, match="expected 32 MiB free on the disk, got 1 MiB"):
        check_output(tmp_path / "run", needed_bytes=32 << 20)


def test_unwritable_place_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(OutputError, match="expected a place to write to"):
        check_output(tmp_path / "run", needed_bytes=0)
