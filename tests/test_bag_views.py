"""Several cameras of a bag: each tile shows what its camera saw at the instant at which the action was told."""

import itertools
import json

import numpy as np
import pytest
from entry import read_settings
from tiny_bags import (
    EPOCH,
    HEIGHT,
    WIDTH,
    access_units,
    coded,
    compressed,
    image,
    number,
    packed,
    protobuf,
    twist,
    write_mcap,
)

from terra.dataset import read_frames, read_split
from terra.dataset.importing import bag_shared
from terra.dataset.importing.bag_files import Recording
from terra.dataset.importing.bags import Bags, BagSource, view_names
from terra.dataset.importing.cameras import lay_out
from terra.dataset.importing.command import run
from terra.errors import ConfigError, DatasetError
from terra.views import Views
from tokenizer.limits import LIMITS

FRONT, WRIST, SPEED = "/front/image_raw/compressed", "/wrist/image_raw", "/cmd_vel"
FIELD = f"{SPEED}.linear.x"
MS = 10**6


def jpeg(ns, shown):
    return compressed(ns, packed(coded(shown)))


def raw(ns, shown):
    return image(ns, "rgb8", coded(shown).tobytes(), WIDTH * 3)


def camera(topic, times, make=jpeg, latency=4 * MS):
    """Pictures that carry their number, taken at times in seconds after EPOCH."""
    stamps = [EPOCH + round(time * 1e9) for time in times]
    return [(topic, stamp + latency, make(stamp, shown)) for shown, stamp in enumerate(stamps)]


def speeds(seconds, since=0.0):
    """A speed that is its own time in seconds after EPOCH, each 20 ms."""
    times = np.arange(since, seconds, 0.02)
    return [(SPEED, EPOCH + round(time * 1e9), twist(float(time))) for time in times]


def bag(path, *parts):
    return write_mcap(path, sorted(itertools.chain(*parts), key=lambda each: each[1]))


def opened(folder, *topics):
    return BagSource.open(folder, Bags(video=topics or (FRONT, WRIST), action=(FIELD,)), None)


def shown_by(footage):
    return [number(each) for each in footage.frames()]


def imported(folder, output, *more):
    """Import at 10 frames a second; each episode's numbers of front and wrist, and its actions."""
    given = [f"input={folder}", f"output={output}", "kind=mcap", "workers=0", "fps=10", "image_size=[64,64]"]
    given += [f"bags.video=[{FRONT},{WRIST}]", f"bags.action=[{FIELD}]", "min_frames=4", *more]
    assert run(read_settings("import", given)) == 0
    found = []
    for episode in read_split(output, "train").episodes:
        assert episode.views is not None
        assert episode.actions is not None
        parts = episode.views.split(read_frames(episode))
        numbers = [np.array([number(picture) for picture in parts[name]]) for name in ("front", "wrist")]
        found.append((*numbers, episode.actions[:, 0]))
    return found


def losses(output):
    (path,) = output.glob("train/*/shard.json")
    return json.loads(path.read_text())["losses"]


def check_aligned(episodes, front, wrist):
    """Each tile is within half of its camera's period of the instant at which its action was told."""
    for first, second, actions in episodes:
        instants = front[first[0]] + np.arange(len(first)) / 10
        assert np.abs(front[first] - instants).max() <= 0.5 / 30 + 1e-6
        assert np.abs(wrist[second] - instants).max() <= 0.5 / 15 + 1e-6
        # The last action of a stretch holds the last row.
        assert np.abs(actions[:-1] - instants[:-1]).max() <= 0.02 + 1e-6


@pytest.mark.parametrize("make", [jpeg, raw])
def test_each_tile_is_within_half_a_frame_of_its_instant(tmp_path, make, caplog):
    front, wrist = np.arange(120) / 30, 0.417 + np.arange(50) / 15
    bag(tmp_path / "in" / "a.mcap", camera(FRONT, front), camera(WRIST, wrist, make), speeds(4))
    with caplog.at_level("INFO"):
        episodes = imported(tmp_path / "in", tmp_path / "out")
    assert len(episodes) == 1
    check_aligned(episodes, front, wrist)
    first, second, _ = episodes[0]
    assert front[first[0]] == pytest.approx(0.4)  # half a frame before the wrist's first
    assert front[first[-1]] == pytest.approx(3.7)
    assert second.tolist()[:2] == [0, 1]
    # The wrist's camera begins 5 instants late: 0 to 0.3 s, and ends 2 early.
    assert losses(tmp_path / "out")["left_out"]["without a frame of wrist"] == 4 + 2
    facts = json.loads((tmp_path / "out" / "dataset.json").read_text())
    assert facts["views"]["names"] == ["front", "wrist"]
    assert facts["views"]["boxes"] == [[0, 0, 64, 32], [0, 32, 64, 64]]
    assert "header.stamp of /front/image_raw/compressed, /wrist/image_raw and log time of /cmd_vel" in caplog.text


def test_a_camera_with_a_gap(tmp_path):
    front, wrist = np.arange(120) / 30, np.arange(60) / 15
    wrist = wrist[(wrist < 1.45) | (wrist > 2.25)]
    bag(tmp_path / "in" / "a.mcap", camera(FRONT, front), camera(WRIST, wrist), speeds(4))
    episodes = imported(tmp_path / "in", tmp_path / "out")
    check_aligned(episodes, front, wrist)
    spans = [(front[first[0]], front[first[-1]]) for first, _, _ in episodes]
    np.testing.assert_allclose(spans, [(0, 1.4), (2.3, 3.9)])
    assert losses(tmp_path / "out")["left_out"] == {"without a frame of wrist": 8}


def test_losses_are_told_of_each_camera(tmp_path):
    front, wrist = np.arange(60) / 30, np.arange(30) / 15
    first, second = camera(FRONT, front), camera(WRIST, wrist, jpeg)
    for place in (20, 21):
        second[place] = (*second[place][:2], compressed(EPOCH + round(wrist[place] * 1e9), b"no picture"))
    second.insert(5, second[4])
    bag(tmp_path / "in" / "a.mcap", first, second, speeds(2))
    drive = opened(tmp_path / "in").open_drive("a")
    assert tuple(drive.others) == ("wrist",)
    other = drive.others["wrist"]
    assert drive.left_out == {}
    assert drive.breaks == ()
    assert other.left_out == {"pictures that can't be decoded": 2, "pictures with the time of another one": 1}
    assert [(each.frame, each.reason) for each in other.breaks] == [(19 + 1, "pictures that can't be decoded")]
    kept = [shown for shown in range(30) if shown not in (20, 21)]
    assert shown_by(other) == kept
    np.testing.assert_allclose(other.times, wrist[kept], atol=1e-6)
    episodes = imported(tmp_path / "in", tmp_path / "out")
    assert len(episodes) == 2
    assert losses(tmp_path / "out")["left_out"]["wrist: pictures that can't be decoded"] == 2


def test_video_and_pictures_of_one_bag(tmp_path):
    units = access_units("h264", 30)
    times = [EPOCH + each * 50 * MS for each in range(30)]
    video = [
        (WRIST, time, protobuf("CompressedVideo", time, format="h264", data=unit))
        for shown, (time, unit) in enumerate(zip(times, units, strict=True))
        if shown != 13
    ]
    bag(tmp_path / "a.mcap", camera(FRONT, np.arange(45) / 30), video, speeds(1.5))
    drive = opened(tmp_path).open_drive("a")
    other = drive.others["wrist"]
    kept = [*range(13), *range(20, 30)]
    assert list(zip(shown_by(drive), range(45), strict=True)) == [(shown, shown) for shown in range(45)]
    assert shown_by(other) == kept
    np.testing.assert_allclose(other.times, np.array(kept) / 20, atol=1e-6)
    assert other.left_out == {"pictures behind a lost one, up to the next key frame": 6}
    assert [each.frame for each in other.breaks] == [13]


@pytest.mark.parametrize("back", [0.05, 0.5, 2.0])
def test_where_the_clock_is_set_back_all_cameras_are_shifted_apart(tmp_path, back):
    # Set back by 0.05 s at 15 frames a second the first camera's own times still increase.
    messages = []
    for tick in range(0, 4000, 5):
        true = tick / 1000
        told = EPOCH + round((true - (back if true >= 2.01 else 0)) * 1e9)
        if tick % 65 == 0:
            messages.append((FRONT, told, jpeg(told, tick // 65)))
        if tick % 30 == 10:
            messages.append((WRIST, told, raw(told, tick // 30)))
        if tick % 10 == 0:
            messages.append((SPEED, told, twist(true)))
    write_mcap(tmp_path / "in" / "a.mcap", messages)
    drive = opened(tmp_path / "in").open_drive("a")
    for times in (drive.frame_times, drive.others["wrist"].times):
        (place,) = np.flatnonzero(np.diff(times) < -1e5)
        assert (np.diff(np.delete(times, place)) > 0).sum() >= len(times) - 3
    episodes = imported(tmp_path / "in", tmp_path / "out")
    assert len(episodes) == 2
    for first, second, actions in episodes:
        wrist = second * 0.03 + 0.01
        assert np.abs(first * 0.065 - wrist).max() <= 0.5 * (0.065 + 0.03) + 1e-6
        assert np.abs(actions[:-1] - wrist[:-1]).max() <= 0.015 + 0.01 + 1e-6
    assert sum(len(first) for first, _, _ in episodes) >= 36


def test_pictures_that_may_be_of_either_setting_of_the_clock_are_left_out(tmp_path):
    # The clock is set back at 3 s, which only the actions tell: the front's pictures pause, and the wrist's a while.
    messages = []
    for tick in range(600):
        told = EPOCH + tick * 10 * MS - (10**9 if tick >= 300 else 0)
        if tick % 10 == 0 and not 200 < tick < 400:
            messages.append((FRONT, told, jpeg(told, tick // 10)))
        if tick % 10 == 0 and not 250 < tick < 380:
            messages.append((WRIST, told, raw(told, tick // 10)))
        messages.append((SPEED, told, twist(tick / 100)))
    write_mcap(tmp_path / "a.mcap", messages)
    drive = opened(tmp_path).open_drive("a")
    other = drive.others["wrist"]
    assert shown_by(drive) == [*range(21), *range(40, 60)]
    assert shown_by(other) == [*range(20), *range(40, 60)]  # its picture 20 was logged behind the front's last one
    assert other.left_out == {"pictures between two settings of the clock": 6 + 2}
    np.testing.assert_allclose(other.times, np.delete(drive.frame_times, 20))
    assert [each.frame for each in other.breaks] == [20]


def test_lost_messages_interrupt_every_camera(tmp_path):
    front, wrist = np.arange(60) / 30, np.arange(30) / 15
    messages = sorted([*camera(FRONT, front), *camera(WRIST, wrist), *speeds(2)], key=lambda each: each[1])
    facts = {"relative_file_paths": ["a_0.mcap", "a_1.mcap", "a_2.mcap"]}
    write_mcap(tmp_path / "a" / "a_0.mcap", [each for each in messages if each[1] < EPOCH + 10**9])
    write_mcap(tmp_path / "a" / "a_2.mcap", [each for each in messages if each[1] > EPOCH + 1.1e9])
    (tmp_path / "a" / "metadata.yaml").write_text(json.dumps({"rosbag2_bagfile_information": facts}))
    drive = opened(tmp_path).open_drive("a")
    for footage, number_before in ((drive, 30), (drive.others["wrist"], 15)):
        (interruption,) = footage.breaks
        assert interruption.reason == "a_1.mcap, which metadata.yaml names, is missing"
        shown = shown_by(footage)
        assert shown[interruption.frame - 1] == number_before - 1
        assert shown[interruption.frame] > number_before


@pytest.mark.parametrize("topics", [(FRONT, WRIST), (WRIST, FRONT)])
def test_a_camera_whose_clock_alone_is_set_back_is_refused(tmp_path, topics):
    front, wrist = np.arange(90) / 30, np.arange(45) / 15
    first, second = camera(FRONT, front, latency=0), camera(WRIST, wrist, raw)
    for place in range(20, 45):
        topic, log_time, _ = second[place]
        second[place] = topic, log_time, raw(log_time - 700 * MS, place)
    bag(tmp_path / "a.mcap", first, second, speeds(3))
    message = rf"a.mcap: {topics[1]}: expected the clock of {topics[0]}, got times 0.[67]\d* s apart"
    with pytest.raises(DatasetError, match=message):
        opened(tmp_path, *topics).open_drive("a")


def test_actions_behind_all_pictures_tell_of_no_clock_that_was_set_back(tmp_path):
    # A converter wrote one topic after another: which actions belong to which setting of the clock is not known.
    told = [EPOCH + tick * 100 * MS - (2 * 10**9 if tick >= 20 else 0) for tick in range(40)]
    pictures = [(topic, time, jpeg(time, tick)) for tick, time in enumerate(told) for topic in (FRONT, WRIST)]
    write_mcap(tmp_path / "a.mcap", pictures + [(SPEED, time, twist(0.0)) for time in told])
    with pytest.raises(DatasetError, match=r"a.mcap: expected times at which all of bags.action are told, got none"):
        opened(tmp_path).open_drive("a")


def test_shapes_are_known_before_a_drive_is_opened(tmp_path):
    wide = image(EPOCH, "mono8", bytes(40 * 160), 160, width=160, height=40)
    bag(tmp_path / "a.mcap", camera(FRONT, np.arange(3) / 30), [(WRIST, EPOCH, wide)], speeds(1))
    source = opened(tmp_path)
    assert source.shapes == ((HEIGHT, WIDTH), (40, 160))
    views = lay_out(source, (64, 128))  # its one picture of the wrist makes no drive
    assert views == Views.tiled(("front", "wrist"), (64, 128), (2 * 4) ** 0.5)
    unit = protobuf("CompressedVideo", EPOCH, format="h264", data=access_units("h264", 1)[0])
    bag(tmp_path / "a.mcap", camera(FRONT, np.arange(3) / 30), [(WRIST, EPOCH, unit)], speeds(1))
    assert opened(tmp_path).shapes == ()


def test_the_bag_is_read_once_for_the_pictures_of_all_cameras(tmp_path, monkeypatch):
    front, wrist = np.arange(60) / 30, np.arange(30) / 15
    bag(tmp_path / "a.mcap", camera(FRONT, front), camera(WRIST, wrist, raw), speeds(2))
    drive = opened(tmp_path).open_drive("a")
    begun = []
    read = Recording.messages
    monkeypatch.setattr(Recording, "messages", lambda self, topics=None: (begun.append(1), read(self, topics))[1])
    other = drive.others["wrist"]
    both = list(itertools.zip_longest(drive.frames(), other.frames()))
    assert [number(one) for one, _ in both] == list(range(60))
    assert [number(two) for _, two in both[:30]] == list(range(30))
    assert len(begun) == 1
    assert shown_by(other) == list(range(30))
    assert shown_by(drive) == list(range(60))
    assert len(begun) == 2
    # One topic after another: what would have to be held is too much, and the second is read by itself.
    monkeypatch.setattr(bag_shared, "LIMITS", LIMITS.model_copy(update={"bag_record_bytes": 10_000}))
    frames = drive.frames()
    next(frames)
    assert shown_by(other) == list(range(30))
    assert [number(each) for each in frames] == list(range(1, 60))
    assert len(begun) > 3


@pytest.mark.parametrize(
    ("topics", "names"),
    [
        (("/front/image", "/wrist/image"), ("front", "wrist")),
        (("/front/image_raw/compressed", "/wrist/image_raw"), ("front", "wrist")),
        (("/camera/color/image_raw", "/camera/infra1/image_rect_raw"), ("color", "infra1")),
        (("/a/left/image", "/a/right/image", "/b/left/image"), ("a_left", "a_right", "b_left")),
        (("/camera/image", "/camera/image/compressed"), ("camera_image", "camera_image_compressed")),
        (("/_cam~0/image", "/_cam~1/image"), ("cam_0", "cam_1")),
        (("/ä", "/ö"), ("camera0", "camera1")),
    ],
)
def test_names_of_cameras(topics, names):
    assert view_names(topics) == names


@pytest.mark.parametrize(
    ("video", "message"),
    [
        (f"[{FRONT},/rear/image]", r"bags.video: expected one of /front\S* \(6 of 64x32, .*several, got /rear/image"),
        (f"[{FRONT},{SPEED}]", r"bags.video: expected a topic of .*, got geometry_msgs/Twist of /cmd_vel"),
        (f"[{FRONT},{FRONT}]", r"bags.video: expected each once, got"),
        ("[a,b,c,d,e]", r"bags.video: expected 1 to 4 topics, got a, b, c, d, e"),
        ("[]", r"bags.video: expected 1 to 4 topics, got none"),
        ("{a:b}", r"bags.video: expected a list such as \[a,b\], got"),
    ],
)
def test_wrong_topics_are_one_line(tmp_path, video, message):
    bag(tmp_path / "in" / "a.mcap", camera(FRONT, np.arange(6) / 30), camera(WRIST, np.arange(3) / 15), speeds(1))
    given = [f"input={tmp_path}/in", f"output={tmp_path}/out", "kind=mcap", f"bags.action=[{FIELD}]"]
    with pytest.raises(ConfigError, match=message) as raised:
        run(read_settings("import", [*given, f"bags.video={video}"]))
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_a_bag_without_one_of_the_cameras_fails_alone(tmp_path, caplog):
    front, wrist = np.arange(60) / 30, np.arange(30) / 15
    bag(tmp_path / "in" / "b.mcap", camera(FRONT, front), camera(WRIST, wrist), speeds(2))
    bag(tmp_path / "in" / "a.mcap", camera(FRONT, front), speeds(2))
    given = [f"input={tmp_path}/in", f"output={tmp_path}/out", "kind=mcap", f"bags.action=[{FIELD}]", "workers=0"]
    given += [f"bags.video=[{FRONT},{WRIST}]", "image_size=[64,64]"]
    assert run(read_settings("import", given)) == 2
    assert f"a.mcap: expected messages of {WRIST}, got none" in caplog.text
    assert [each.name for each in (tmp_path / "out" / "train").iterdir()] == ["mcap_b"]


def test_one_topic_in_a_list_is_as_one_alone(tmp_path):
    bag(tmp_path / "a.mcap", camera(FRONT, np.arange(6) / 30), camera(WRIST, np.arange(3) / 15), speeds(1))
    one = opened(tmp_path, FRONT)
    assert one.views == ()
    given = [f"input={tmp_path}", f"output={tmp_path}", "kind=mcap", f"bags.action=[{FIELD}]"]
    alone, listed = (read_settings("import", [*given, f"bags.video={each}"]).bags for each in (FRONT, f"[{FRONT}]"))
    assert alone == listed
    assert one.declared["video"] == FRONT
    drive = one.open_drive("a")
    assert drive.others == {}
    assert next(drive.frames()).shape == (HEIGHT, WIDTH, 3)
