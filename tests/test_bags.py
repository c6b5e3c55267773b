import json
import math
import shutil
import struct
from dataclasses import replace

import numpy as np
import pytest
from entry import read_settings
from mcap.writer import CompressionType
from rosbags.rosbag1 import Writer as Writer1
from rosbags.rosbag2 import CompressionFormat, CompressionMode, StoragePlugin, Writer as Writer2
from tiny_bags import (
    EPOCH,
    HEIGHT,
    WIDTH,
    access_units,
    coded,
    compressed,
    image,
    in_json,
    joints,
    number,
    packed,
    pedals,
    protobuf,
    ros,
    twist,
    write_mcap,
)

from terra.actions import Keys, Vector
from terra.dataset import read_frames, read_split
from terra.dataset.importing.alignment import align
from terra.dataset.importing.bags import Bags, BagSource, list_topics
from terra.dataset.importing.command import run as import_recordings
from terra.errors import ConfigError, DatasetError, TerraError
from tokenizer.limits import LIMITS

CAMERA, SPEED = "/camera/image/compressed", "/cmd_vel"
MS = 10**6


def drive_messages(count=40, step=100 * MS, action_step=50 * MS, begin=EPOCH, first=0, latency=5 * MS):
    """Pictures that carry their number, and a speed that is its own time, m/s, from the first picture on."""
    messages = [
        (CAMERA, begin + each * step + latency, compressed(begin + each * step, packed(coded(first + each))))
        for each in range(count)
    ]
    span = count * step
    messages += [(SPEED, begin + at, twist((begin + at - EPOCH) / 1e9)) for at in range(0, span, action_step)]
    return sorted(messages, key=lambda each: each[1])


def opened(folder, action=(f"{SPEED}.linear.x",), space=None, **settings):
    return BagSource.open(folder, Bags(action=action, **settings), space)


def matched(drive, fps):
    """The numbers of the pictures that an import takes of each stretch, and the actions that it gives them."""
    shown = numbers(drive)
    return [
        ([shown[frame] for frame in part.frame_index], part.track[:, 0])
        for part in align(drive, fps, min_frames=2).parts
    ]


def numbers(drive):
    return [number(each) for each in drive.frames()]


def test_each_picture_has_the_action_of_its_time(tmp_path):
    write_mcap(tmp_path / "a.mcap", drive_messages())
    source = opened(tmp_path)
    assert source.list_drives() == ("a",)
    drive = source.open_drive("a")
    assert numbers(drive) == list(range(40))
    np.testing.assert_allclose(drive.frame_times, np.arange(40) / 10)
    at = drive.track.space.resampled(drive.track.times, drive.track.values, drive.frame_times[:-1], 0)
    np.testing.assert_allclose(at[:, 0], drive.frame_times[:-1], atol=1e-6)
    assert source.space.names == ("cmd_vel.linear.x",)
    assert source.space.units == ("m/s",)
    assert drive.breaks == ()
    assert drive.left_out == {}
    assert "header.stamp of /camera/image/compressed and log time of /cmd_vel" in drive.clock


@pytest.mark.parametrize("codec", ["h264", "h265", "vp9", "av1"])
def test_video(tmp_path, codec):
    units = access_units(codec, 30)
    messages = [
        (CAMERA, EPOCH + each * 50 * MS, protobuf("CompressedVideo", EPOCH + each * 50 * MS, format=codec, data=unit))
        for each, unit in enumerate(units)
    ]
    messages += [(SPEED, EPOCH + each * 50 * MS, twist(each / 20)) for each in range(31)]
    write_mcap(tmp_path / "a.mcap", messages)
    assert numbers(opened(tmp_path).open_drive("a")) == list(range(30))


def test_a_lost_access_unit_and_what_depends_on_it_are_left_out(tmp_path):
    # A decoder would show as many pictures as there are units, and smear those behind the lost one.
    units = dict(enumerate(access_units("h264", 30)))
    del units[13]
    _write_units(tmp_path / "a.mcap", "h264", units)
    drive = opened(tmp_path).open_drive("a")
    assert numbers(drive) == [*range(13), *range(20, 30)]
    assert drive.left_out == {"pictures behind a lost one, up to the next key frame": 6}
    assert [each.frame for each in drive.breaks] == [13]


@pytest.mark.parametrize("codec", ["h265", "vp9", "av1"])
def test_behind_a_lost_unit_of_other_codecs_nothing_is_shown_either(tmp_path, codec):
    units = dict(enumerate(access_units(codec, 30)))
    del units[13]
    _write_units(tmp_path / "a.mcap", codec, units)
    drive = opened(tmp_path).open_drive("a")
    # A decoder of H.265 misses the lost one; of the others only its time tells.
    first = 10 if codec == "h265" else 13
    assert numbers(drive) == [*range(first), *range(20, 30)]
    assert sum(drive.left_out.values()) == 19 - first
    assert [each.frame for each in drive.breaks] == [first]


def test_video_begins_with_a_key_frame(tmp_path):
    _write_units(tmp_path / "a.mcap", "h264", dict(enumerate(access_units("h264", 30)[4:], start=4)))
    drive = opened(tmp_path).open_drive("a")
    assert numbers(drive) == list(range(10, 30))
    assert drive.left_out == {"pictures before a key frame": 6}
    assert drive.breaks == ()


def test_units_that_are_none_are_left_out(tmp_path):
    units = dict(enumerate(access_units("h264", 30))) | {4: b"", 15: b"no unit", 16: b"\x00\x00\x01"}
    _write_units(tmp_path / "a.mcap", "h264", units)
    drive = opened(tmp_path).open_drive("a")
    assert numbers(drive) == [*range(4), *range(10, 15), *range(20, 30)]


@pytest.mark.parametrize(("codec", "got"), [("h263", "'h263'"), ("", "''")])
def test_a_codec_that_is_not_read(tmp_path, codec, got):
    _write_units(tmp_path / "a.mcap", codec, dict(enumerate(access_units("h264", 30)[:5])))
    with pytest.raises(DatasetError, match=f"expected video of h264, h265, vp9 or av1, got {got}"):
        opened(tmp_path).open_drive("a")


def _write_units(path, codec, units):
    messages = [
        (CAMERA, EPOCH + each * 50 * MS, protobuf("CompressedVideo", EPOCH + each * 50 * MS, format=codec, data=unit))
        for each, unit in units.items()
    ]
    write_mcap(path, messages + [(SPEED, EPOCH + each * 50 * MS, twist(each / 20)) for each in range(31)])


COLOR = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)


def _rows(pixels, padding=0):
    """Bytes and step of pixels whose rows are padded."""
    flat = pixels.reshape(len(pixels), -1)
    padded = np.pad(flat, ((0, 0), (0, padding)), constant_values=77)
    return padded.tobytes(), padded.shape[1]


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize(
    ("encoding", "pixels", "expected"),
    [
        ("rgb8", COLOR, COLOR),
        ("bgr8", COLOR[:, :, ::-1], COLOR),
        ("8UC3", COLOR[:, :, ::-1], COLOR),
        ("rgba8", np.dstack([COLOR, COLOR[:, :, :1]]), COLOR),
        ("bgra8", np.dstack([COLOR[:, :, ::-1], COLOR[:, :, :1]]), COLOR),
        ("mono8", COLOR[:, :, 0], COLOR[:, :, [0, 0, 0]]),
    ],
)
def test_pixels_of_every_order(tmp_path, encoding, pixels, expected, padding):
    data, step = _rows(np.ascontiguousarray(pixels), padding)
    for name, make in (
        ("ros", lambda ns: image(ns, encoding, data, step)),
        (
            "json",
            lambda ns: in_json("RawImage", ns, encoding=encoding, width=WIDTH, height=HEIGHT, step=step, data=data),
        ),
        (
            "proto",
            lambda ns: protobuf("RawImage", ns, encoding=encoding, width=WIDTH, height=HEIGHT, step=step, data=data),
        ),
    ):
        _write_with(tmp_path / name / "a.mcap", make)
        for frame in opened(tmp_path / name).open_drive("a").frames():
            np.testing.assert_array_equal(frame, expected)


@pytest.mark.parametrize(
    ("encoding", "order"), [("uyvy", "UYVY"), ("yuv422", "UYVY"), ("yuyv", "YUYV"), ("yuv422_yuy2", "YUYV")]
)
def test_pairs_of_pixels_have_limited_range(tmp_path, encoding, order):
    # BT.601: Y of 16 is black, 235 is white, and these are red, green and blue (Rec. ITU-R BT.601, 8 bits).
    known = {(16, 128, 128): (0, 0, 0), (235, 128, 128): (255, 255, 255), (81, 90, 240): (255, 0, 0)}
    known |= {(145, 54, 34): (0, 255, 0), (41, 240, 110): (0, 0, 255)}
    data, expected = bytearray(), []
    for (y, u, v), color in known.items():
        values, bright = {"U": u, "V": v}, [y, y]
        data += bytes(values[letter] if letter in values else bright.pop() for letter in order)
        expected += [color, color]
    pixels = bytes(data)
    _write_with(tmp_path / "a.mcap", lambda ns: image(ns, encoding, pixels, len(pixels), width=10, height=1))
    frame = next(opened(tmp_path).open_drive("a").frames())
    assert np.abs(frame[0].astype(int) - expected).max() <= 2


@pytest.mark.parametrize("encoding", ["16UC1", "32FC1", "mono16", "bayer_rggb8", "nv21", "green"])
def test_pixels_that_are_no_colors_are_refused_by_name(tmp_path, encoding):
    _write_with(tmp_path / "a.mcap", lambda ns: image(ns, encoding, bytes(HEIGHT * WIDTH * 4), WIDTH * 4))
    with pytest.raises(DatasetError, match=f"expected pixels of rgb8, .*, got .*'{encoding}'"):
        opened(tmp_path).open_drive("a")


@pytest.mark.parametrize(
    "words", ["16UC1; compressedDepth png", "32FC1; compressedDepth rvl", "mono16; png compressed "]
)
def test_compressed_depth_is_refused(tmp_path, words):
    _write_with(tmp_path / "a.mcap", lambda ns: compressed(ns, packed(coded(1), "PNG"), words))
    with pytest.raises(DatasetError, match="expected pictures, got depth"):
        opened(tmp_path).open_drive("a")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("words", ["png", "jpeg", "rgb8; jpeg compressed bgr8", ""])
def test_compressed_pictures_are_read_by_what_they_are(tmp_path, kind, words):
    for name, make in (
        ("ros", lambda ns: compressed(ns, packed(coded(9), kind), words)),
        ("json", lambda ns: in_json("CompressedImage", ns, format=words, data=packed(coded(9), kind))),
        ("proto", lambda ns: protobuf("CompressedImage", ns, format=words, data=packed(coded(9), kind))),
    ):
        _write_with(tmp_path / name / "a.mcap", make)
        assert numbers(opened(tmp_path / name).open_drive("a")) == [9, 9, 9]


def _write_with(path, make):
    messages = [(CAMERA, EPOCH + each * 50 * MS, make(EPOCH + each * 50 * MS)) for each in range(3)]
    write_mcap(path, messages + [(SPEED, EPOCH + each * 50 * MS, twist(each / 20)) for each in range(4)])


def test_pictures_that_cannot_be_decoded_are_left_out(tmp_path):
    messages = drive_messages()
    places = [place for place, each in enumerate(messages) if each[0] == CAMERA]
    whole = packed(coded(1))
    for number_, data in ((5, whole[:200]), (6, b""), (20, b"no picture")):
        topic, time, _ = messages[places[number_]]
        messages[places[number_]] = topic, time, compressed(EPOCH + number_ * 100 * MS, data)
    write_mcap(tmp_path / "a.mcap", messages)
    drive = opened(tmp_path).open_drive("a")
    assert numbers(drive) == [each for each in range(40) if each not in (5, 6, 20)]
    assert drive.left_out == {"pictures that can't be decoded": 3}
    assert [each.frame for each in drive.breaks] == [5, 18]
    np.testing.assert_allclose(drive.frame_times, [each / 10 for each in range(40) if each not in (5, 6, 20)])


def test_a_bag_without_a_whole_picture_is_refused(tmp_path):
    _write_with(tmp_path / "a.mcap", lambda ns: compressed(ns, b"no picture"))
    with pytest.raises(DatasetError, match=r"expected 2 or more pictures that can be shown, got 0 of 3, .*PNG"):
        opened(tmp_path).open_drive("a")


def test_a_few_late_pictures_are_put_in_order(tmp_path):
    messages = drive_messages(latency=0)
    pictures = [each for each in messages if each[0] == CAMERA]
    pictures[10], pictures[11] = pictures[11], pictures[10]
    pictures.insert(23, pictures.pop(20))
    write_mcap(tmp_path / "a.mcap", pictures + [each for each in messages if each[0] != CAMERA])
    drive = opened(tmp_path).open_drive("a")
    assert numbers(drive) == list(range(40))
    np.testing.assert_allclose(drive.frame_times, np.arange(40) / 10)
    assert "2 pictures that came late are in their place" in drive.clock


@pytest.mark.parametrize("back", [0.1, 0.25, 0.3, 1.0, 2.04, 1000])
def test_where_the_clock_is_set_back_the_drive_is_interrupted(tmp_path, back):
    # 20 pictures, then the clock of all stamps is set back; actions tell the time as it truly passes.
    shift = int(back * 1e9)
    messages = []
    for tick in range(400):
        true = tick * 10 * MS
        told = EPOCH + true - (shift if tick >= 200 else 0)
        if tick % 10 == 0:
            messages.append((CAMERA, told, compressed(told, packed(coded(tick // 10)))))
        messages.append((SPEED, told, twist(true / 1e9)))
    write_mcap(tmp_path / "a.mcap", messages)
    drive = opened(tmp_path).open_drive("a")
    # After exactly a picture's time the first picture is taken for the last one, which came twice.
    shown = [each for each in range(40) if each != 20 or back != 0.1]
    assert numbers(drive) == shown
    assert [(each.frame, each.reason) for each in drive.breaks] == [(20, "the clock was set back")]
    for pictures, values in matched(drive, 10):
        np.testing.assert_allclose(values, np.array(pictures) / 10, atol=0.011)  # the last row of a stretch is held
    assert sum(len(pictures) for pictures, _ in matched(drive, 10)) >= 38


def test_a_clock_that_is_set_back_while_there_are_no_pictures(tmp_path):
    # The camera pauses for 2 s, within which the clock is set back by 1 s: the pictures' own times go on.
    messages = []
    for tick in range(600):
        told = EPOCH + tick * 10 * MS - (10**9 if tick >= 300 else 0)
        if tick % 10 == 0 and not 200 < tick < 400:
            messages.append((CAMERA, told, compressed(told, packed(coded(tick // 10)))))
        messages.append((SPEED, told, twist(tick / 100)))
    write_mcap(tmp_path / "a.mcap", messages)
    drive = opened(tmp_path).open_drive("a")
    assert [(each.frame, each.reason) for each in drive.breaks] == [(21, "the clock was set back")]
    stretches = matched(drive, 10)
    assert [pictures for pictures, _ in stretches] == [list(range(21)), list(range(40, 60))]
    for pictures, values in stretches:
        np.testing.assert_allclose(values, np.array(pictures) / 10, atol=1e-6)


def test_a_clock_of_actions_alone_that_is_set_back_is_refused(tmp_path):
    messages = [each for each in drive_messages(40) if each[0] == CAMERA]
    back = [EPOCH + tick * 10 * MS - (10**9 if tick >= 200 else 0) for tick in range(400)]
    messages += [(SPEED, told, twist(0.0)) for told in back]
    write_mcap(tmp_path / "a.mcap", messages)
    with pytest.raises(
        DatasetError, match=r"a.mcap: /cmd_vel.linear.x: expected increasing times, got some that go back"
    ):
        opened(tmp_path).open_drive("a")


def test_every_compression_and_none(tmp_path):
    for name in ("NONE", "LZ4", "ZSTD"):
        write_mcap(tmp_path / name / "a.mcap", drive_messages(10), compression=getattr(CompressionType, name))
        assert numbers(opened(tmp_path / name).open_drive("a")) == list(range(10))
    write_mcap(tmp_path / "loose" / "a.mcap", drive_messages(10), use_chunking=False)
    assert numbers(opened(tmp_path / "loose").open_drive("a")) == list(range(10))


@pytest.mark.parametrize("use_chunking", [True, False])
def test_a_file_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path, caplog, use_chunking):
    path = write_mcap(tmp_path / "a.mcap", drive_messages(), use_chunking=use_chunking, chunk_size=2000)
    whole = path.read_bytes()
    lengths = []
    for share in (0.3, 0.31, 0.32, 0.33, 0.6):
        path.write_bytes(whole[: int(len(whole) * share)])
        caplog.clear()
        drive = opened(tmp_path).open_drive("a")
        shown = numbers(drive)
        assert shown == list(range(len(shown)))
        assert f"{path}: the file is cut off: what could be read is imported" in caplog.text
        lengths.append(len(shown))
    assert lengths == sorted(lengths)
    assert 5 < lengths[0] < lengths[-1] < 40


def test_a_damaged_chunk_is_left_out_and_interrupts_the_drive(tmp_path, caplog):
    path = write_mcap(tmp_path / "a.mcap", drive_messages(), compression=CompressionType.NONE, chunk_size=4000)
    data = bytearray(path.read_bytes())
    place = data.find(packed(coded(20)))
    data[place + 100] ^= 255
    path.write_bytes(data)
    drive = opened(tmp_path).open_drive("a")
    shown = numbers(drive)
    assert 20 not in shown
    assert len(shown) > 30
    (interruption,) = drive.breaks
    assert shown == [*range(interruption.frame), *range(shown[interruption.frame], 40)]
    assert shown[interruption.frame] > interruption.frame
    assert "a damaged chunk: crc validation failed" in interruption.reason
    assert "a damaged chunk" in caplog.text


@pytest.mark.parametrize(
    ("content", "got"),
    [(b"", "an empty file"), (b"PK\3\4 and more", "a file that begins with"), (b"\x89MCAP0\r\n", "a file that begins")],
)
def test_what_is_no_mcap_is_refused(tmp_path, content, got):
    (tmp_path / "a.mcap").write_bytes(content)
    with pytest.raises(DatasetError, match=f"a.mcap: expected an MCAP file, got {got}"):
        list_topics(tmp_path)


@pytest.mark.parametrize("name", ["LZ4", "ZSTD"])
def test_a_chunk_that_unpacks_to_more_than_the_bound_is_not_unpacked(tmp_path, caplog, name):
    path = write_mcap(tmp_path / "a.mcap", drive_messages(5))
    bomb = ("x", {"data": "0" * (LIMITS.bag_record_bytes + 1000)})
    write_mcap(path, [*drive_messages(5), ("/bomb", EPOCH, bomb)], compression=getattr(CompressionType, name))
    drive = opened(tmp_path).open_drive("a")
    assert len(numbers(drive)) >= 4
    assert f"expected at most {LIMITS.bag_record_bytes} unpacked bytes, got more" in caplog.text


def test_an_attachment_larger_than_the_bound_is_passed_over(tmp_path, caplog):
    path = tmp_path / "a.mcap"
    write_mcap(path, drive_messages(10))
    data = path.read_bytes()
    # Behind the header: a record that says to be an attachment of more bytes than a record may have.
    place = 8 + 9 + struct.unpack_from("<Q", data, 9)[0]
    size = LIMITS.bag_record_bytes + 1
    with path.open("wb") as file:
        file.write(data[:place] + struct.pack("<BQ", 9, size))
        file.seek(size, 1)
        file.write(data[place:])
    assert numbers(opened(tmp_path).open_drive("a")) == list(range(10))
    assert "what could be read" not in caplog.text


def test_clocks(tmp_path, caplog):
    # The camera takes 30 ms to send a picture: by the log each picture is that late.
    write_mcap(tmp_path / "a.mcap", drive_messages(10, latency=30 * MS))
    for clock, first in (("auto", 0.0), ("log", 0.03)):
        drive = opened(tmp_path, clock=clock).open_drive("a")
        value = drive.track.space.resampled(drive.track.times, drive.track.values, drive.frame_times[:1], 0)
        np.testing.assert_allclose(value, first, atol=1e-9)
    assert drive.clock == "log time of /camera/image/compressed, /cmd_vel"
    with pytest.raises(DatasetError, match=r"bags.clock=header: expected header.stamp in /cmd_vel, got a type without"):
        opened(tmp_path, clock="header").open_drive("a")


def test_headers_of_another_clock_than_the_log_are_not_mixed_with_it(tmp_path):
    # The camera counts from its own start.
    messages = [
        (topic, time, compressed(time - EPOCH + 5 * MS, bytes(message.data)) if topic == CAMERA else message)
        for topic, time, message in drive_messages(10)
    ]
    write_mcap(tmp_path / "a.mcap", messages)
    drive = opened(tmp_path).open_drive("a")
    assert drive.clock.startswith("log time of /camera/image/compressed, /cmd_vel, because headers tell")
    value = drive.track.space.resampled(drive.track.times, drive.track.values, drive.frame_times, 0)[:, 0]
    np.testing.assert_allclose(value, np.minimum(np.arange(10) / 10 + 0.005, 0.95), atol=1e-6)


@pytest.mark.parametrize("ns", [0, EPOCH])
def test_headers_that_are_never_set_are_not_taken(tmp_path, ns):
    _write_with(tmp_path / "a.mcap", lambda _: compressed(ns, packed(coded(1))))
    drive = opened(tmp_path).open_drive("a")
    assert "log time of /camera/image/compressed" in drive.clock
    np.testing.assert_allclose(drive.frame_times, [0, 0.05, 0.1])
    with pytest.raises(DatasetError, match="got headers that don't tell messages apart"):
        opened(tmp_path, clock="header").open_drive("a")


def test_a_picture_without_a_time_is_left_out(tmp_path):
    messages = drive_messages(20)
    place = [place for place, each in enumerate(messages) if each[0] == CAMERA][7]
    messages[place] = CAMERA, messages[place][1], compressed(0, packed(coded(7)))
    write_mcap(tmp_path / "a.mcap", messages)
    drive = opened(tmp_path).open_drive("a")
    assert numbers(drive) == [each for each in range(20) if each != 7]
    assert drive.left_out == {"pictures without a time": 1}
    assert [each.frame for each in drive.breaks] == [7]


def test_a_picture_that_came_twice_counts_once(tmp_path):
    messages = drive_messages(20)
    place = [place for place, each in enumerate(messages) if each[0] == CAMERA][7]
    messages.insert(place, messages[place])
    write_mcap(tmp_path / "a.mcap", messages)
    drive = opened(tmp_path).open_drive("a")
    assert numbers(drive) == list(range(20))
    assert drive.left_out == {"pictures with the time of another one": 1}
    assert drive.breaks == ()


def test_joints_are_known_by_name_in_whatever_order(tmp_path):
    # Two publishers share the topic, and one changes the order.
    messages = [each for each in drive_messages(20) if each[0] == CAMERA]
    for tick in range(40):
        time, t = EPOCH + tick * 50 * MS, tick / 20
        arm = [("shoulder", t), ("elbow", 10 + t)][:: 1 if tick % 2 else -1]
        messages.append(("/joint_states", time, joints(time, *zip(*arm, strict=True))))
        messages.append(("/joint_states", time + 10 * MS, joints(time + 10 * MS, ["grip"], [20 + t])))
    write_mcap(tmp_path / "a.mcap", sorted(messages, key=lambda each: each[1]))
    named = opened(tmp_path, ("/joint_states.position[elbow]", "/joint_states.position[grip]"))
    assert named.space.names == ("joint_states.position.elbow", "joint_states.position.grip")
    assert named.space.units == ("", "")
    assert named.space.low == (10.0, 20.0)
    track = named.open_drive("a").track
    np.testing.assert_allclose(track.values[:, 0] + 10, track.values[:, 1] + 0.01, atol=1e-9)
    every = opened(tmp_path, ("/joint_states.position",))
    assert set(every.space.names) == {f"joint_states.position.{name}" for name in ("shoulder", "elbow", "grip")}
    with pytest.raises(
        ConfigError, match=r"bags.action: /joint_states.position\[wrist\]: expected numbers, got 80 mess"
    ):
        opened(tmp_path, ("/joint_states.position[wrist]",))


def test_messages_of_a_package_of_ones_own(tmp_path):
    messages = [each for each in drive_messages(20) if each[0] == CAMERA]
    messages += [("/pedals", EPOCH + tick * 50 * MS, pedals(tick / 20, tick)) for tick in range(40)]
    write_mcap(tmp_path / "a.mcap", messages)
    source = opened(tmp_path, ("/pedals.speed", "/pedals.gear", "/pedals.trim[2]"))
    assert source.space.names == ("pedals.speed", "pedals.gear", "pedals.trim.2")
    values = source.open_drive("a").track.values
    np.testing.assert_allclose(values[7], [0.35, 7, 3])
    every = opened(tmp_path, ("/pedals.trim",))
    assert every.space.names == ("pedals.trim.0", "pedals.trim.1", "pedals.trim.2")


def test_json_and_protobuf_have_fields_too(tmp_path):
    messages = [each for each in drive_messages(20) if each[0] == CAMERA]
    for tick in range(40):
        time = EPOCH + tick * 50 * MS
        messages.append(("/wheel", time, ("car.Wheel", {"state": {"angle": tick / 20, "on": True}, "all": [1, tick]})))
        messages.append(("/gas", time, protobuf("Gas", time, share=tick / 40)))
    write_mcap(tmp_path / "a.mcap", sorted(messages, key=lambda each: each[1]))
    source = opened(tmp_path, ("/wheel.state.angle", "/wheel.state.on", "/wheel.all[1]", "/gas.share"))
    np.testing.assert_allclose(source.open_drive("a").track.values[8], [0.4, 1, 8, 0.2])


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ((), "bags.action: expected fields such as"),
        (("/cmd_vel.linear.w",), r"/cmd_vel.linear.w: .*: expected a field w, got x, y, z"),
        (("/cmd_vel.linear",), r"expected a number or an array of numbers, got fields: x, y, z"),
        (("/cmd_vel.linear.x[0]",), r"expected an array before \[0\], got none"),
        (("/cmd_vel.linear..x",), r"expected a field such as /cmd_vel.linear.x"),
        (("/cmd_val.linear.x",), r"expected a field of /camera.*, /cmd_vel, got '/cmd_val'; did you mean /cmd_vel\?"),
    ],
)
def test_fields_that_are_not_there(tmp_path, action, expected):
    write_mcap(tmp_path / "a.mcap", drive_messages(5))
    with pytest.raises(ConfigError, match=expected):
        opened(tmp_path, action)


def test_several_cameras_are_listed(tmp_path):
    messages = drive_messages(5)
    messages += [("/rear", EPOCH + each, image(EPOCH + each, "rgb8", *_rows(coded(1)))) for each in range(3)]
    write_mcap(tmp_path / "a.mcap", messages)
    with pytest.raises(
        ConfigError, match=r"expected one of /camera/image/compressed \(5 of 64x32, .*/rear \(3 of 64x32"
    ):
        opened(tmp_path)
    assert len(numbers(opened(tmp_path, video="/rear").open_drive("a"))) == 3
    with pytest.raises(ConfigError, match=r"bags.video: expected a topic of .*, got geometry_msgs/Twist"):
        opened(tmp_path, video="/cmd_vel")
    topics = {each.name: each for each in list_topics(tmp_path)["a"]}
    assert (topics["/rear"].count, topics["/rear"].type, topics["/rear"].picture_size) == (
        3,
        "sensor_msgs/Image",
        "64x32",
    )
    assert topics[CAMERA].is_picture
    assert not topics[SPEED].is_picture
    assert topics[CAMERA].rate == pytest.approx(10)


def test_a_silent_topic_is_not_bridged(tmp_path):
    # The joints say nothing from 1 s to 3 s, while the speed goes on.
    messages = drive_messages(50)
    times = [EPOCH + tick * 50 * MS for tick in range(100) if not 1 < tick / 20 < 3]
    messages += [("/joint_states", time, joints(time, ["a"], [(time - EPOCH) / 1e9])) for time in times]
    write_mcap(tmp_path / "a.mcap", sorted(messages, key=lambda each: each[1]))
    drive = opened(tmp_path, (f"{SPEED}.linear.x", "/joint_states.position[a]")).open_drive("a")
    assert numbers(drive) == [*range(11), *range(30, 50)]
    assert drive.left_out == {"pictures while /joint_states.position[a] is silent": 19}
    assert [each.frame for each in drive.breaks] == [11]
    for pictures, values in matched(drive, 10):
        np.testing.assert_allclose(values, np.array(pictures) / 10, atol=1e-6)
    joints_alone = opened(tmp_path, ("/joint_states.position[a]",)).open_drive("a")
    assert [pictures for pictures, _ in matched(joints_alone, 10)] == [list(range(11)), list(range(30, 50))]


def test_ranges_are_those_of_all_bags_and_can_be_declared(tmp_path):
    write_mcap(tmp_path / "a.mcap", drive_messages(10))
    write_mcap(tmp_path / "sub" / "b.mcap", drive_messages(10, begin=EPOCH + 10**12))
    source = opened(tmp_path)
    assert source.list_drives() == ("a", "sub_b")
    assert (source.space.low, source.space.high) == ((0.0,), (1000.95,))
    space = Vector(names=("v",), units=("m/s",), low=(0.0,), high=(0.5,))
    with pytest.raises(DatasetError, match=r"a.mcap: .* s: v: expected 0 to 0.5 m/s, got 0.55"):
        opened(tmp_path, space=space).open_drive("a")
    with pytest.raises(ConfigError, match=r"expected 2 fields, as action_space has, got 1: cmd_vel.linear.x"):
        opened(tmp_path, space=Keys(names=("a", "b")))


def test_keys_are_held_until_the_next_message(tmp_path):
    messages = drive_messages(20)
    presses = {0: 0, 5: 1, 9: 0}
    messages += [("/pedals", EPOCH + tick * 100 * MS, pedals(0.0, gear)) for tick, gear in presses.items()]
    messages += [("/pedals", EPOCH + tick * 100 * MS, pedals(0.0, 0)) for tick in range(10, 20)]
    write_mcap(tmp_path / "a.mcap", sorted(messages, key=lambda each: each[1]))
    drive = opened(tmp_path, ("/pedals.gear",), Keys(names=("fire",))).open_drive("a")
    values = drive.track.space.resampled(drive.track.times, drive.track.values, drive.frame_times, 2.0)[:, 0]
    assert np.flatnonzero(values).tolist() == [4, 5, 6, 7, 8] or np.flatnonzero(values).tolist() == [5, 6, 7, 8]


def test_a_split_bag_is_one_recording(tmp_path, caplog):
    messages = drive_messages()
    folder = tmp_path / "monday"
    for part in range(3):
        write_mcap(folder / f"monday_{part}.mcap", messages[part * 40 : (part + 1) * 40])
    names = [f"monday_{part}.mcap" for part in range(3)]
    facts = {"version": 8, "storage_identifier": "mcap", "relative_file_paths": names, "compression_format": ""}
    (folder / "metadata.yaml").write_text(json.dumps({"rosbag2_bagfile_information": facts}))
    source = opened(tmp_path)
    assert source.list_drives() == ("monday",)
    drive = source.open_drive("monday")
    assert numbers(drive) == list(range(40))
    assert drive.breaks == ()
    assert opened(folder).list_drives() == ("monday",)
    (folder / "monday_1.mcap").unlink()
    drive = source.open_drive("monday")
    shown = numbers(drive)
    (interruption,) = drive.breaks
    assert interruption.reason == "monday_1.mcap, which metadata.yaml names, is missing"
    assert shown[interruption.frame] - shown[interruption.frame - 1] > 10
    assert interruption.reason in caplog.text


@pytest.mark.parametrize("text", ["", "a: [", "rosbag2_bagfile_information: {relative_file_paths: 3}", "[" * 5000])
def test_metadata_that_names_no_files(tmp_path, text):
    (tmp_path / "metadata.yaml").write_text(text)
    with pytest.raises(DatasetError, match=r"metadata.yaml: expected the description of a ROS 2 bag"):
        list_topics(tmp_path)


def _ros1(message):
    """The same message as ROS 1 has it, whose header also counts."""
    if message.__msgtype__ == "geometry_msgs/msg/Twist":
        return message
    kind = ros(ros1=True).types["std_msgs/msg/Header"]
    return replace(message, header=kind(seq=0, stamp=message.header.stamp, frame_id=""))


def _write_ros1(path, messages):
    with Writer1(path) as writer:
        connections = {}
        for topic, time, message in messages:
            kind = message.__msgtype__
            if topic not in connections:
                connections[topic] = writer.add_connection(topic, kind, typestore=ros(ros1=True))
            writer.write(connections[topic], time, ros(ros1=True).serialize_ros1(_ros1(message), kind))


def test_bags_of_ros_1(tmp_path):
    _write_ros1(tmp_path / "old.bag", drive_messages())
    source = opened(tmp_path)
    assert source.list_drives() == ("old",)
    drive = source.open_drive("old")
    assert numbers(drive) == list(range(40))
    at = drive.track.space.resampled(drive.track.times, drive.track.values, drive.frame_times[:-1], 0)
    np.testing.assert_allclose(at[:, 0], drive.frame_times[:-1], atol=1e-6)
    assert source.space.units == ("m/s",)
    whole = (tmp_path / "old.bag").read_bytes()
    (tmp_path / "old.bag").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DatasetError, match=r"old.bag: expected a ROS bag, got: "):
        list_topics(tmp_path)


@pytest.mark.parametrize(
    ("storage", "packed_by"),
    [
        (StoragePlugin.SQLITE3, None),
        (StoragePlugin.SQLITE3, CompressionMode.FILE),
        (StoragePlugin.SQLITE3, CompressionMode.MESSAGE),
        (StoragePlugin.MCAP, None),
    ],
)
def test_folders_of_ros_2(tmp_path, storage, packed_by):
    writer = Writer2(tmp_path / "tuesday", version=9, storage_plugin=storage)
    if packed_by is not None:
        writer.set_compression(packed_by, CompressionFormat.ZSTD)
    with writer:
        connections = {}
        for topic, time, message in drive_messages():
            kind = message.__msgtype__
            if topic not in connections:
                connections[topic] = writer.add_connection(topic, kind, typestore=ros())
            writer.write(connections[topic], time, ros().serialize_cdr(message, kind))
    if packed_by is None and storage == StoragePlugin.SQLITE3:
        (tmp_path / "alone").mkdir()
        shutil.copy(tmp_path / "tuesday" / "tuesday.db3", tmp_path / "alone" / "monday.db3")
        assert numbers(opened(tmp_path / "alone").open_drive("monday")) == list(range(40))
        shutil.rmtree(tmp_path / "alone")
    source = opened(tmp_path)
    assert source.list_drives() == ("tuesday",)
    drive = source.open_drive("tuesday")
    assert numbers(drive) == list(range(40))
    at = drive.track.space.resampled(drive.track.times, drive.track.values, drive.frame_times[:-1], 0)
    np.testing.assert_allclose(at[:, 0], drive.frame_times[:-1], atol=1e-6)


def test_messages_of_an_encoding_that_is_not_read(tmp_path):
    write_mcap(tmp_path / "a.mcap", drive_messages(5), compression=CompressionType.NONE, use_chunking=False)
    data = (tmp_path / "a.mcap").read_bytes().replace(b"\x07\x00\x00\x00ros2msg", b"\x07\x00\x00\x00ros9msg")
    (tmp_path / "a.mcap").write_bytes(data)
    with pytest.raises(DatasetError, match=r"/cmd_vel: expected messages in CDR .* got cdr \(schema ros9msg\)"):
        opened(tmp_path)


def _import(folder, output, *more):
    given = [f"input={folder}", f"output={output}", "kind=mcap", "workers=0", "fps=10", "image_size=[32,64]"]
    return import_recordings(read_settings("import", [*given, f"bags.action=[{SPEED}.linear.x]", *more]))


def test_bags_become_a_dataset(tmp_path, caplog):
    # b misses pictures 20 to 24, and says so.
    write_mcap(tmp_path / "bags" / "a.mcap", drive_messages())
    messages = drive_messages(50, first=100, begin=EPOCH + 10**11)
    missing = [(CAMERA, EPOCH + 10**11 + each * 100 * MS + 5 * MS) for each in range(20, 25)]
    write_mcap(tmp_path / "bags" / "b.mcap", [each for each in messages if each[:2] not in missing])
    with caplog.at_level("INFO"):
        assert _import(tmp_path / "bags", tmp_path / "data", "held_out=[b]") == 0
    assert "a.mcap: 40 frames read, 40 kept (4.0 s), times by header.stamp of /camera/image/compr" in caplog.text
    assert "b.mcap: 45 frames read, 45 kept (4.5 s) in 2 stretches, 1 gap cut out, the longest of 0.60 s" in caplog.text
    episodes = [each for split in ("train", "held_out") for each in read_split(tmp_path / "data", split).episodes]
    found = [([number(frame) for frame in read_frames(each)], each.actions[:, 0]) for each in episodes]
    assert [pictures for pictures, _ in found] == [list(range(40)), list(range(100, 120)), list(range(125, 150))]
    for pictures, values in found:
        shown = np.array(pictures)
        times = np.where(shown < 100, shown / 10, 100 + (shown - 100) / 10)
        np.testing.assert_allclose(values[:-1], times[:-1], atol=1e-4)
    facts = json.loads((tmp_path / "data" / "dataset.json").read_text())
    assert facts["action_space"]["units"] == ["m/s"]


def test_a_bag_that_fails_leaves_nothing_behind(tmp_path, caplog):
    write_mcap(tmp_path / "bags" / "a.mcap", drive_messages())
    _write_with(tmp_path / "bags" / "b.mcap", lambda ns: image(ns, "32FC1", bytes(HEIGHT * WIDTH * 4), WIDTH * 4))
    (tmp_path / "bags" / "c.mcap").write_bytes(b"no bag")
    assert _import(tmp_path / "bags", tmp_path / "data") == 2
    assert "expected pixels of rgb8" in caplog.text
    assert "c.mcap: expected an MCAP file" in caplog.text
    assert [each.name for each in (tmp_path / "data" / "train").iterdir()] == ["mcap_a"]


def test_settings_that_do_not_fit(tmp_path):
    write_mcap(tmp_path / "bags" / "a.mcap", drive_messages(5))
    with pytest.raises(ConfigError, match=r"bags.clock: expected one of auto, header, log, got 'heder'"):
        _import(tmp_path / "bags", tmp_path / "data", "bags.clock=heder")
    with pytest.raises(ConfigError, match=r"picture_fps: expected none with kind=mcap, got 20.0"):
        _import(tmp_path / "bags", tmp_path / "data", "picture_fps=20")
    with pytest.raises(ConfigError, match=r"bags: expected none with kind=donkeycar"):
        _import(tmp_path / "bags", tmp_path / "data", "kind=donkeycar")
    assert not (tmp_path / "data").exists()


def test_what_is_no_bag_is_named(tmp_path, caplog):
    write_mcap(tmp_path / "a.mcap", drive_messages(5))
    write_mcap(tmp_path / "sub" / "b.mcap", drive_messages(5))
    for name in ("c.bag.active", "notes.txt"):
        (tmp_path / name).write_text("x")
    assert opened(tmp_path).list_drives() == ("a", "sub_b")
    assert f"{tmp_path}: not used as bags: c.bag.active, notes.txt" in caplog.text


def test_a_topic_of_two_types_is_refused(tmp_path):
    messages = drive_messages(5)
    write_mcap(tmp_path / "bag" / "bag_0.mcap", messages)
    other = [
        (CAMERA, EPOCH + 10**9 + each, image(EPOCH + 10**9 + each, "mono8", bytes(WIDTH * HEIGHT), WIDTH))
        for each in range(3)
    ]
    write_mcap(tmp_path / "bag" / "bag_1.mcap", other)
    facts = {"relative_file_paths": ["bag_0.mcap", "bag_1.mcap"]}
    (tmp_path / "bag" / "metadata.yaml").write_text(json.dumps({"rosbag2_bagfile_information": facts}))
    message = r"expected messages of one type, got sensor_msgs/CompressedImage and sensor_msgs/Image"
    with pytest.raises(DatasetError, match=message):
        opened(tmp_path).open_drive("bag")


def test_a_message_that_is_none_interrupts_video(tmp_path):
    # VP9 itself doesn't tell that a unit is missing, and time goes on as ever.
    units = access_units("vp9", 30)
    messages = []
    for each, unit in enumerate(units):
        time = EPOCH + each * 50 * MS
        messages.append((CAMERA, time, protobuf("CompressedVideo", time, format="vp9", data=unit)))
    messages += [(SPEED, EPOCH + each * 50 * MS, twist(each / 20)) for each in range(31)]
    path = write_mcap(tmp_path / "a.mcap", messages, use_chunking=False)
    # Its first byte is the tag of the field `timestamp`, 0 is none.
    content = protobuf("CompressedVideo", EPOCH + 13 * 50 * MS, format="vp9", data=units[13]).SerializeToString()
    path.write_bytes(path.read_bytes().replace(content, b"\0" + content[1:]))
    drive = opened(tmp_path).open_drive("a")
    assert numbers(drive) == [*range(13), *range(20, 30)]
    assert sum(drive.left_out.values()) == 7
    assert [each.frame for each in drive.breaks] == [13]


def test_numbers_that_are_none_are_left_out(tmp_path, caplog):
    messages = [each for each in drive_messages(20) if each[0] == CAMERA]
    for tick in range(40):
        messages.append((SPEED, EPOCH + tick * 50 * MS, twist(math.nan if tick == 7 else tick / 20, math.inf)))
    write_mcap(tmp_path / "a.mcap", messages)
    drive = opened(tmp_path).open_drive("a")
    assert np.isfinite(drive.track.values).all()
    assert len(drive.track.times) == 39
    assert "/cmd_vel.linear.x: 1 of 40 messages without a finite number or a time are left out" in caplog.text
    with pytest.raises(ConfigError, match=r"bags.action: /cmd_vel.angular.z: expected finite numbers, got none"):
        opened(tmp_path, (f"{SPEED}.angular.z",))


def test_arrays_without_names_have_one_length(tmp_path):
    messages = [each for each in drive_messages(20) if each[0] == CAMERA]
    messages += [("/w", EPOCH + tick * 50 * MS, ("car.W", {"all": [1.0] * (2 + tick // 20)})) for tick in range(40)]
    write_mcap(tmp_path / "a.mcap", messages)
    with pytest.raises(ConfigError, match=r"/w.all: .*expected as many numbers in each message, got 2 and 3; name one"):
        opened(tmp_path, ("/w.all",))
    assert opened(tmp_path, ("/w.all[1]",)).space.names == ("w.all.1",)


def test_two_bags_of_one_name(tmp_path):
    write_mcap(tmp_path / "a b.mcap", drive_messages(5))
    write_mcap(tmp_path / "a" / "b.mcap", drive_messages(5))
    with pytest.raises(
        DatasetError, match=r"expected bags of different names, got .*a/b.mcap and .*a b.mcap|got .*a b.mc"
    ):
        list_topics(tmp_path)
    (tmp_path / "none").mkdir()
    with pytest.raises(
        DatasetError, match=r"expected bags \(.bag, .db3, .mcap, or folders with metadata.yaml\), got none"
    ):
        list_topics(tmp_path / "none")


@pytest.mark.parametrize("kind", ["mcap", "loose", "bag"])
def test_damage_anywhere_is_told_in_one_line(tmp_path, kind):
    path = tmp_path / f"a.{'bag' if kind == 'bag' else 'mcap'}"
    if kind == "bag":
        _write_ros1(path, drive_messages(12))
    else:
        write_mcap(path, drive_messages(12), use_chunking=kind == "mcap", chunk_size=2000)
    whole, random = path.read_bytes(), np.random.default_rng(0)
    read, refused = 0, []
    for _ in range(40):
        data = bytearray(whole)
        for _ in range(random.choice([1, 3, 20])):
            place = int(random.integers(len(data)))
            words = [bytes(random.bytes(1)), b"\xff" * 4, bytes(8), b"\xff\xff\xff\x7f"]
            data[place : place + 4] = words[random.integers(len(words))]
        path.write_bytes(data)
        try:
            drive = opened(tmp_path).open_drive("a")
            assert len(numbers(drive)) == len(drive.frame_times)
            read += 1
        except TerraError as error:
            refused.append(str(error))
    assert read
    assert refused
    assert not any("\n" in line for line in refused)
