"""Donkeycar's tubs: which records there are, who drove, what is interrupted, and what is left out with a count."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from entry import read_settings
from hypothesis import HealthCheck, given, settings, strategies as st
from tiny_tubs import START, Records, drive, picture, shift_clock, shown, write_old_tub, write_tub

from terra.dataset import read_frames, read_split
from terra.dataset.importing import DonkeycarSource
from terra.dataset.importing.command import run
from terra.dataset.importing.source import SourceDrive
from terra.errors import DatasetError

DAMAGED, UNREADABLE = "records with a missing or damaged picture", "records that can't be read"
FIELDS, RANGE = "records with a missing or wrong field", "records with values out of range"
DELETED, NOT_STORED = "deleted records", "records that the pilot drove with values that are not stored"


def opened(folder: Path, picture_fps: float | None = None) -> SourceDrive:
    source = DonkeycarSource(folder, picture_fps)
    (name,) = source.list_drives()
    return source.open_drive(name)


def indexes(found: SourceDrive) -> list[int]:
    """The records of a drive by what their pictures show, which is what their steering says."""
    pictures = [shown(frame) for frame in found.frames()]
    assert len(found.frame_times) == len(pictures)
    assert (np.diff(found.frame_times) > 0).all()
    np.testing.assert_array_equal(found.track.times, found.frame_times)
    np.testing.assert_allclose(found.track.values[:, 0], np.array(pictures) / 1000)
    return pictures


def breaks(found: SourceDrive) -> list[tuple[int, str]]:
    """Each break by the record that follows it."""
    return [(shown(list(found.frames())[each.frame]), each.reason) for each in found.breaks]


def without(count: int, *lost: int) -> list[int]:
    return [each for each in range(count) if each not in lost]


def import_tub(folder: Path, output: Path, *more: str) -> int:
    given = ["kind=donkeycar", f"input={folder}", f"output={output}", "fps=10", "image_size=[32,48]", "workers=0"]
    return run(read_settings("import", [*given, *more]))


@pytest.mark.parametrize("picture_fps", [None, 20.0])
def test_a_tub_is_a_drive_at_its_own_times(tmp_path, caplog, picture_fps):
    records = drive(120)
    records[30]["_timestamp_ms"] += 15  # the loop of the car is never quite regular
    found = opened(write_tub(tmp_path / "tub", records), picture_fps)
    assert indexes(found) == list(range(120))
    assert (found.name, found.breaks, dict(found.left_out)) == ("tub", (), {})
    assert found.frame_times[30] - found.frame_times[0] == pytest.approx(1.515 if picture_fps is None else 1.5)
    warned = "its records have times, one each 50 ms in the median: they are exact without picture_fps="
    assert (warned in caplog.text) == (picture_fps is not None)


def test_each_session_is_a_drive_of_its_own(tmp_path):
    day = 86_400_000
    records = drive(40, "26-05-01_0") + drive(30, "26-05/02_1", first=40, start=START - day)
    records += drive(50, "26-05-09_2", first=70, start=START + day)
    source = DonkeycarSource(write_tub(tmp_path / "tub", records), None)
    names = ("tub_26-05-01_0", "tub_26-05-02_1", "tub_26-05-09_2")
    assert source.list_drives() == names
    assert source.recordings == {"tub": names}
    assert [indexes(source.open_drive(name)) for name in names] == [
        *([*range(40)], [*range(40, 70)], [*range(70, 120)]),
    ]


def test_sections_cut_each_session(tmp_path):
    source = DonkeycarSource(write_tub(tmp_path / "tub", drive(40, "a") + drive(20, "b", first=40)), None, 2)
    assert source.list_drives() == ("tub_a_00", "tub_a_01", "tub_b_00", "tub_b_01")
    assert source.recordings["tub_a"] == ("tub_a_00", "tub_a_01")
    assert source.recordings["tub"] == source.list_drives()
    assert indexes(source.open_drive("tub_b_01")) == [*range(50, 60)]
    one = DonkeycarSource(write_tub(tmp_path / "one", drive(40)), None, 4)
    assert one.list_drives() == ("one_00", "one_01", "one_02", "one_03")
    assert one.recordings == {"one": one.list_drives()}


def test_a_session_that_goes_on_after_another_is_interrupted_there(tmp_path):
    records = (
        drive(30, "a") + drive(20, "b", first=30, start=START + 1500) + drive(30, "a", first=50, start=START + 2500)
    )
    source = DonkeycarSource(write_tub(tmp_path / "tub", records), None)
    found = source.open_drive("tub_a")
    assert indexes(found) == [*range(30), *range(50, 80)]
    assert breaks(found) == [(50, "records are missing")]


def test_a_session_of_nothing_is_said_and_left_out(tmp_path, caplog):
    records = drive(30, "a") + drive(20, "b", first=30)
    source = DonkeycarSource(write_tub(tmp_path / "tub", records, deleted=range(30, 50)), None)
    assert source.list_drives() == ("tub",)
    assert "session b left out: expected 2 or more records, got 0 (left out: 20 deleted records)" in caplog.text
    assert indexes(source.open_drive("tub")) == [*range(30)]


@pytest.mark.parametrize("picture_fps", [None, 20.0])
def test_the_clock_may_be_set_back_and_stop(tmp_path, picture_fps):
    records = drive(120)
    shift_clock(records, 40, -3600)
    shift_clock(records, 80, 12.5)
    found = opened(write_tub(tmp_path / "tub", records), picture_fps)
    assert indexes(found) == list(range(120))
    if picture_fps is None:  # the pause is a gap of the times, which the import cuts
        assert breaks(found) == [(40, "the clock was set back")]
        np.testing.assert_allclose(found.frame_times[[39, 40, 79, 80]], [1.95, 2.0, 3.95, 16.5])
    else:
        assert breaks(found) == [(40, "the clock was set back"), (80, "the recording was paused")]
        np.testing.assert_allclose(found.frame_times, np.arange(120) / 20)


def test_times_of_a_conversion_need_a_rate(tmp_path, caplog):
    records = drive(60)
    for row, record in enumerate(records):
        record["_timestamp_ms"] = START + 3 * row + (100 if row > 20 else 0)
    folder = write_tub(tmp_path / "tub", records)
    with pytest.raises(DatasetError, match=r"at most 100 records a second, got one each 3 ms, .*: give picture_fps="):
        opened(folder)
    found = opened(folder, 20.0)
    assert (indexes(found), found.breaks) == (list(range(60)), ())
    assert found.clock == "picture_fps=20, as declared"
    assert "its records have times" not in caplog.text


def test_two_records_in_one_millisecond(tmp_path):
    records = drive(60)
    records[17]["_timestamp_ms"] = records[16]["_timestamp_ms"]
    found = opened(write_tub(tmp_path / "tub", records))
    assert indexes(found) == without(60, 17)
    assert found.breaks == ()
    assert found.left_out == {"records at the time of the one before": 1}


def test_deleted_records_are_left_out(tmp_path):
    found = opened(write_tub(tmp_path / "tub", drive(120), deleted=[0, 1, *range(60, 75), 90, 119, 500]))
    assert indexes(found) == without(120, 0, 1, *range(60, 75), 90, 119)
    assert breaks(found) == [(75, DELETED), (91, DELETED)]
    assert found.left_out == {DELETED: 19}


def test_deletion_counts_lines_as_donkeycar_does(tmp_path, caplog):
    """After a loss of power two lines became one: donkeycar deletes by lines, whatever their _index."""
    folder = write_tub(tmp_path / "tub", drive(120), deleted=[80])
    catalog = folder / "catalog_0.catalog"
    lines = catalog.read_text().splitlines(keepends=True)
    catalog.write_text("".join([*lines[:10], lines[10][:50] + lines[11], *lines[12:]]))
    found = opened(folder)
    assert indexes(found) == without(120, 10, 11, 81)
    assert breaks(found) == [(12, UNREADABLE), (82, DELETED)]
    assert "catalog_0.catalog: line 12: _index is not the line's position: records are deleted by" in caplog.text


def test_what_donkeycar_passes_over_is_passed_over(tmp_path):
    """An empty line ends its catalog, and what follows there has no position either."""
    folder = write_tub(tmp_path / "tub", drive(120), deleted=[60])
    catalog = folder / "catalog_0.catalog"
    lines = catalog.read_text().splitlines(keepends=True)
    catalog.write_text("".join([*lines[:44], "\n", *lines[44:]]))
    found = opened(folder)
    assert indexes(found) == without(120, *range(44, 50), 66)
    assert found.left_out == {"records after an empty line, which donkeycar does not read": 6, DELETED: 1}
    assert [frame for frame, _ in breaks(found)] == [50, 67]


def test_gaps_of_a_converted_tub(tmp_path):
    """Where records of version 1 were erased, the conversion writes empty records and deletes them."""
    records = drive(120)
    for row in (30, 31, 32, 70):
        records[row] = {"__empty__": True, **{key: records[row][key] for key in records[row] if key.startswith("_")}}
    found = opened(write_tub(tmp_path / "tub", records, deleted=[30, 31, 32]))
    assert indexes(found) == without(120, 30, 31, 32, 70)
    empty = "empty records, with which a conversion filled gaps"
    assert found.left_out == {DELETED: 3, empty: 1}
    assert breaks(found) == [(33, DELETED), (71, empty)]


@pytest.mark.parametrize(
    ("change", "reason", "detail"),
    [
        ({"user/angle": 1.5}, RANGE, "catalog_0.catalog: line 8: steering: expected -1 to 1, got 1.5"),
        ({"user/angle": "left"}, FIELDS, "line 8: user/angle: expected a number, got 'left'"),
        ({"user/throttle": float("nan")}, FIELDS, "line 8: user/throttle: expected a finite number"),
        ({"cam/image_array": "../../../etc/passwd"}, FIELDS, "line 8: cam/image_array: expected"),
        ({"cam/image_array": None}, FIELDS, "line 8: cam/image_array: expected"),
        ({"cam/image_array": "none.jpg"}, DAMAGED, "none.jpg: expected a picture, got no such file"),
        ({"_timestamp_ms": None}, "records without a time, which picture_fps= would give", ""),
        ({"user/mode": 5}, FIELDS, "line 8: user/mode: expected"),
    ],
)
def test_a_bad_record_alone_is_left_out(tmp_path, caplog, change, reason, detail):
    records = drive(60)
    records[7] |= change
    folder = write_tub(tmp_path / "tub", records)
    (folder / "images" / "none.jpg").unlink(missing_ok=True)
    found = opened(folder)
    assert indexes(found) == without(60, 7)
    assert found.left_out == {reason: 1}
    assert breaks(found) == [(8, reason)]
    assert not detail or f"left out: 1 {reason}; the first: " in caplog.text
    assert detail in caplog.text


def test_a_battery_was_pulled(tmp_path, caplog):
    folder = write_tub(tmp_path / "tub", drive(120))
    pictures = [folder / "images" / f"{index}_cam_image_array_.jpg" for index in range(120)]
    pictures[50].write_bytes(b"")
    pictures[51].write_bytes(pictures[51].read_bytes()[:-80])
    pictures[90].write_bytes(b"\0" * 4096)
    pictures[91].unlink()
    picture(92, (96, 64)).save(pictures[92])
    last = folder / "catalog_2.catalog"
    last.write_bytes(last.read_bytes()[:-60] + b"\0" * 200)
    found = opened(folder)
    assert indexes(found) == without(120, 50, 51, 90, 91, 92, 119)
    size = "records with a picture of another size"
    assert found.left_out == {DAMAGED: 4, size: 1, UNREADABLE: 1}
    assert breaks(found) == [(52, DAMAGED), (93, DAMAGED)]
    assert f"left out: 4 {DAMAGED}; the first: {pictures[50]}: expected a picture, got an empty file" in caplog.text
    assert f"{pictures[92]}: expected 48 x 32 pixels as in most pictures, got 96 x 64" in caplog.text
    assert f"{last}: line 20" in caplog.text


def test_the_index_began_again_after_a_loss_of_power(tmp_path):
    """The manifest was saved before the last records: the next session overwrites their pictures."""
    records = drive(60, "a") + drive(40, "b", first=50, start=START + 60_000)
    source = DonkeycarSource(write_tub(tmp_path / "tub", records), None)
    first, second = map(source.open_drive, source.list_drives())
    assert indexes(first) == [*range(50)]
    assert indexes(second) == [*range(50, 90)]
    assert first.left_out == {"records whose picture a later record has overwritten": 10}


def test_the_values_are_those_that_drove(tmp_path, caplog):
    caplog.set_level("INFO")
    records = drive(80)
    for row, record in enumerate(records):
        record["pilot/angle"], record["pilot/throttle"] = -0.25, 0.75
        record["user/mode"] = ["user", "local_angle", "local", "local"][row // 20]
    del records[70]["pilot/angle"], records[30]["pilot/throttle"]
    found = opened(write_tub(tmp_path / "tub", records))
    rows = without(80, 70)
    expected = [(row / 1000, 0.5) if row < 20 else (-0.25, 0.5) if row < 40 else (-0.25, 0.75) for row in rows]
    np.testing.assert_allclose(found.track.values, expected)
    assert [shown(frame) for frame in found.frames()] == rows
    assert found.left_out == {NOT_STORED: 1}
    assert breaks(found) == [(71, NOT_STORED)]
    assert "the pilot drove 59 of 79 records" in "".join(caplog.messages)


def test_where_the_pilots_values_are_not_stored_only_the_users_records_are_taken(tmp_path):
    records = drive(80)
    for record in records[20:50]:
        record["user/mode"] = "local"
    found = opened(write_tub(tmp_path / "tub", records))
    assert indexes(found) == without(80, *range(20, 50))
    assert found.left_out == {NOT_STORED: 30}
    assert breaks(found) == [(50, NOT_STORED)]


def test_other_channels_are_named(tmp_path, caplog):
    caplog.set_level("INFO")
    records = [{**record, "imu/acl_x": 0.1, "behavior/one_hot_state_array": [1, 0]} for record in drive(20)]
    DonkeycarSource(write_tub(tmp_path / "tub", records), None).list_drives()
    assert "not used as actions: behavior/one_hot_state_array, imu/acl_x" in caplog.text


@pytest.mark.parametrize("clock", ["milliseconds", "timestamp", "none"])
def test_a_tub_of_version_1(tmp_path, clock):
    records = drive(40)
    records[20]["user/mode"] = "local"
    shift_clock(records, 25, 4.0)
    if clock != "milliseconds":
        for record in records:
            milliseconds = record.pop("_timestamp_ms") - START
            if clock == "timestamp":
                record["timestamp"] = f"2018-04-08 12:00:{milliseconds / 1000:09.6f}"
    folder = write_old_tub(tmp_path / "tub", records, excluded=[12])
    (folder / "record_10.json").unlink()  # erased with the car's button
    (folder / "record_31.json").write_text("")
    if clock == "none":
        with pytest.raises(DatasetError, match=r"expected 2 or more records, got 0 .* which picture_fps= would give"):
            opened(folder)
    found = opened(folder, 20.0 if clock == "none" else None)
    assert indexes(found) == without(40, 9, 11, 20, 30)
    assert found.left_out == {DELETED: 1, NOT_STORED: 1, UNREADABLE: 1}
    assert [number for number, _ in breaks(found)] == [10, 12, 21, 31]
    pause = found.frame_times[22] - found.frame_times[21]  # records 25 and 24
    assert pause == pytest.approx(0.05 if clock == "none" else 4.05)


def test_a_folder_of_tubs_of_both_versions(tmp_path, caplog):
    write_tub(tmp_path / "tubs" / "new", drive(30))
    write_tub(tmp_path / "tubs" / "new_two", drive(20, "a") + drive(20, "b", first=20))
    write_old_tub(tmp_path / "tubs" / "old", drive(25))
    write_tub(tmp_path / "tubs" / "wrong", drive(5))
    (tmp_path / "tubs" / "wrong" / "manifest.json").write_text("[]\n[]\n")
    source = DonkeycarSource(tmp_path / "tubs", None)
    assert source.list_drives() == ("new", "new_two_a", "new_two_b", "old", "wrong")
    (tmp_path / "tubs" / "new" / "manifest.json").unlink()
    (tmp_path / "tubs" / "new" / "record_1.json").write_text("")  # which leaves nothing that can be read
    assert len(source.open_drive("new_two_b").frame_times) == 20
    assert import_tub(tmp_path / "tubs", tmp_path / "out") == 2
    assert len(read_split(tmp_path / "out", "train").episodes) == 3
    assert "wrong/manifest.json: line 2" in caplog.text
    with pytest.raises(DatasetError, match=r"expected a donkeycar tub with manifest\.json .*, got none"):
        DonkeycarSource(tmp_path / "out", None).list_drives()


def test_names_that_meet_are_refused(tmp_path):
    write_tub(tmp_path / "a", drive(10, "b_0") + drive(10, "c", first=10))
    write_tub(tmp_path / "a_b", drive(10, "0") + drive(10, "1", first=10))
    with pytest.raises(DatasetError, match="expected tubs and sessions of different names, got a_b_0 again"):
        DonkeycarSource(tmp_path, None).list_drives()


def test_a_tub_without_records_says_why(tmp_path, caplog):
    records: Records = [{**record, "user/mode": "local"} for record in drive(20)]
    assert import_tub(write_tub(tmp_path / "tub", records, deleted=[0]), tmp_path / "out") == 2
    assert f"tub: expected 2 or more records, got 0 (left out: 1 {DELETED}, 19 {NOT_STORED})" in caplog.text
    folder = write_tub(tmp_path / "other", drive(20))
    for path in (folder / "images").iterdir():
        path.write_bytes(b"")
    assert import_tub(folder, tmp_path / "out2") == 2
    assert f"got 0 (left out: 20 {DAMAGED}); the first problem: {folder}/images/0_cam" in caplog.text


def test_a_tub_is_cut_into_sections(tmp_path):
    folder = write_tub(tmp_path / "tub", drive(161), deleted=[3])
    (folder / "images" / "._0_cam.jpg").write_bytes(b"no frame")
    assert import_tub(folder, tmp_path / "out", "sections=4", "held_out=[tub_03]") == 0
    (held_out,) = read_split(tmp_path / "out", "held_out").episodes
    assert (held_out.place, held_out.num_frames) == ("tub_03", 20)
    np.testing.assert_allclose(held_out.actions[:, 0], np.arange(121, 161, 2) / 1000)
    assert {episode.place for episode in read_split(tmp_path / "out", "train").episodes} == {
        "tub_00",
        "tub_01",
        "tub_02",
    }


@pytest.mark.parametrize("picture_fps", ["null", "20"])
def test_the_dataset_has_the_stretches_of_the_plan(tmp_path, caplog, picture_fps):
    caplog.set_level("INFO")
    records = drive(200, "26-05-01_0") + drive(100, "26-05-02_1", first=200, start=START - 3_600_000)
    shift_clock(records[:200], 100, 5.0)
    shift_clock(records, 260, -600.0)
    for record in records[290:]:
        record["user/mode"] = "local"
    folder = write_tub(tmp_path / "tub", records, deleted=[*range(40, 50), 205])
    (folder / "images" / "150_cam_image_array_.jpg").write_bytes(b"")
    more = ("fps=20", "held_out=[tub_26-05-02_1]", f"picture_fps={picture_fps}")
    assert import_tub(folder, tmp_path / "out", *more) == 0
    found = {split: read_split(tmp_path / "out", split).episodes for split in ("train", "held_out")}
    for split, stretches in (
        ("train", [range(40), range(50, 100), range(100, 150), range(151, 200)]),
        ("held_out", [range(206, 260), range(260, 290)]),
    ):
        assert [episode.num_frames for episode in found[split]] == list(map(len, stretches))
        for episode, stretch in zip(found[split], stretches, strict=True):
            np.testing.assert_allclose(episode.actions[:, 0], np.array(stretch) / 1000)
            assert [shown(frame) for frame in read_frames(episode)] == list(stretch)
    assert f"1 left out: {DAMAGED}" in caplog.text
    assert f"10 left out: {NOT_STORED}" in caplog.text
    assert "5 left out: in 1 stretch of fewer than 16 frames" in caplog.text


def test_a_manifest_of_another_kind_is_one_line(tmp_path):
    for number, (text, message) in enumerate(
        [
            ("", r"manifest\.json: line 0.*expected JSON"),
            (json.dumps({"paths": "catalog_0.catalog"}), "expected paths and deleted_indexes in its last line"),
            (json.dumps({"paths": ["../catalog"], "deleted_indexes": []}), "paths: expected names of files beside it"),
            (
                json.dumps({"paths": ["gone.catalog"], "deleted_indexes": []}),
                r"gone\.catalog: expected a readable file",
            ),
        ]
    ):
        folder = tmp_path / f"tub{number}"
        folder.mkdir()
        (folder / "manifest.json").write_text(text)
        with pytest.raises(DatasetError, match=message):
            opened(folder)


def test_what_is_no_file_is_not_waited_for(tmp_path):
    folder = write_tub(tmp_path / "tub", drive(40))
    (folder / "images" / "7_cam_image_array_.jpg").unlink()
    os.mkfifo(folder / "images" / "7_cam_image_array_.jpg")
    assert opened(folder).left_out == {DAMAGED: 1}
    (folder / "catalog_0.catalog").unlink()
    os.mkfifo(folder / "catalog_0.catalog")
    with pytest.raises(DatasetError, match=r"catalog_0\.catalog: expected a readable file, got a FIFO"):
        opened(folder)
    old = write_old_tub(tmp_path / "old", drive(20))
    os.mkfifo(old / "record_21.json")
    assert opened(old).left_out == {UNREADABLE: 1}


FIRST, RECORD = (json.dumps(record).encode() for record in drive(2, "a"))
PIECES = [FIRST, RECORD, RECORD[:-9], b"", b" ", b"\0", b"\xff", b"[", b"5", b"null", b"{}", b"[" * 3000]
PIECES += [b'{"_session_id": 5}', FIRST.replace(b"00000,", b"00020,")]
PIECES += [RECORD.replace(b'"a"', b'"../up"'), RECORD.replace(b"0.001", b"1e999"), RECORD.replace(b"0.5", b"null")]
PIECES += [RECORD.replace(b"1_cam_image_array_", b"0_cam_image_array_"), b'{"_index": 1, "_index": 1}']
PIECES += [RECORD.replace(b"1700000000050", b"-1e308"), RECORD.replace(b"1700000000050", b"9" * 400)]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from(PIECES), max_size=12),
    st.lists(st.one_of(st.integers(-3, 12), st.none(), st.text(max_size=3)), max_size=4),
    st.sampled_from([None, 20.0]),
)
def test_whatever_stands_in_a_catalog_is_read_or_refused_in_one_line(tmp_path, lines, deleted, picture_fps):
    folder = tmp_path / "tub"
    if not folder.exists():
        write_tub(folder, drive(2))
    (folder / "catalog_0.catalog").write_bytes(b"\n".join(lines))
    (folder / "manifest.json").write_text(json.dumps({"paths": ["catalog_0.catalog"], "deleted_indexes": deleted}))
    source = DonkeycarSource(folder, picture_fps)
    for name in source.list_drives():
        assert re.fullmatch("[A-Za-z0-9][A-Za-z0-9._-]*", name)
        try:
            found, problem = source.open_drive(name), ""
        except DatasetError as error:
            found, problem = None, str(error)
        assert "\n" not in problem
        if found is not None:
            assert np.isfinite(found.frame_times).all()
            assert (np.diff(found.frame_times) > 0).all()
            assert len(list(found.frames())) == len(found.frame_times) == len(found.track.values)
