import errno
import shutil
from collections import namedtuple

import pytest

from terra.errors import OutputError
from terra.output import check_output, output_folder

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


def test_full_disk_is_one_line(tmp_path):
    with pytest.raises(OutputError, match=r"output=.*run: the disk is full"), output_folder(tmp_path / "run"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert listing(tmp_path) == []


def test_existing_folder_is_never_overwritten_unasked(tmp_path):
    (tmp_path / "run").mkdir()
    check_output(tmp_path / "run", overwrite=False, needed_bytes=0)  # empty
    (tmp_path / "run" / "video.mp4").write_text("x")
    with pytest.raises(OutputError, match="exists already: choose another, or overwrite=true"):
        check_output(tmp_path / "run", overwrite=False, needed_bytes=0)
    check_output(tmp_path / "run", overwrite=True, needed_bytes=0)


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "run").write_text("x")
    with pytest.raises(OutputError, match="expected a folder, got a file"):
        check_output(tmp_path / "run", overwrite=True, needed_bytes=0)
    with pytest.raises(OutputError, match="expected a place to write to"):
        check_output(tmp_path / "run" / "below", overwrite=False, needed_bytes=0)


def test_too_little_space_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10, 9, 1 << 20))
    with pytest.raises(OutputError, match="expected 32 MiB free on the disk, got 1 MiB"):
        check_output(tmp_path / "run", overwrite=False, needed_bytes=32 << 20)


def test_unwritable_place_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(OutputError, match="expected a place to write to"):
        check_output(tmp_path / "run", overwrite=False, needed_bytes=0)
