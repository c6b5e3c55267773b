import numpy as np
import pytest
from tiny_bags import EPOCH, access_units, coded, compressed, image, in_json, joints, number, packed, pedals, protobuf, ros, twist, write_mcap, WIDTH, HEIGHT

from terra.dataset.importing.bags import Bags, BagSource, list_topics
from terra.errors import ConfigError, DatasetError

CAMERA, SPEED = "/camera/image/compressed", "/cmd_vel"
MS = 10**6


def drive_messages(count=40, step=100 * MS, action_step=50 * MS, begin=EPOCH, first=0, latency=5 * MS):
    """Pictures that carry their number, and a speed that is its own time, m/s, from the first picture on."""
    messages = [
        (CAMERA, begin + each * step + latency, compressed(begin + each * step, packed(coded(first + each)))) for each in range(count)
    ]
    span = count * step
    messages += [(SPEED, begin + at, twist((begin + at - EPOCH) / 1e9)) for at in range(0, span, action_step)]
    return sorted(messages, key=lambda each: each[1])


def opened(folder, action=(f"{SPEED}.linear.x",), space=None, **settings):
    return BagSource.open(folder, Bags(action=action, **settings), space)


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
    assert drive.breaks == () and drive.left_out == {}
    assert "header.stamp of /camera/image/compressed and log time of /cmd_vel" in drive.clock


@pytest.mark.parametrize("codec", ["h264", "h265", "vp9", "av1"])
def test_video(tmp_path, codec):
    units = access_units(codec, 30)
    messages = [(CAMERA, EPOCH + each * 50 * MS, protobuf("CompressedVideo", EPOCH + each * 50 * MS, format=codec, data=unit)) for each, unit in enumerate(units)]
    messages += [(SPEED, EPOCH + each * 50 * MS, twist(each / 20)) for each in range(31)]
    write_mcap(tmp_path / "a.mcap", messages)
    assert numbers(opened(tmp_path).open_drive("a")) == list(range(30))
