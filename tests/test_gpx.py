"""GPS tracks beside videos: their files, the smoother, and a town's drive that becomes a drive again."""

from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from entry import read_settings
from hypothesis import HealthCheck, given, settings, strategies as st
from PIL import Image
from tiny_driving import drive_frames, drive_poses

from decoder.video import VideoWriter
from terra.dataset import Poses, read_split, trajectory_of
from terra.dataset.importing.command import run
from terra.dataset.importing.gps import load_gps
from terra.dataset.importing.gpx import GpxSource
from terra.dataset.importing.smoothing import smooth
from terra.dataset.importing.source import Break, SourceDrive
from terra.errors import DatasetError
from terra.recording.drives import simulate_drive
from terra.recording.lanes import LaneGraph
from terra.recording.planning import plan_town
from terra.trajectory import Trajectory

pytestmark = pytest.mark.slow

DEGREES_NORTH = 180 / np.pi / 6_363_450.0  # of a meter, at the latitude of 48 degrees (meridional radius of WGS 84)
DEGREES_EAST = 180 / np.pi / 6_389_908.0 / np.cos(np.radians(48))
START = datetime(2026, 5, 1, 12, tzinfo=UTC).timestamp()


def gpx(points, head: str = '<?xml version="1.0" encoding="UTF-8"?>') -> str:
    rows = [
        f'<trkpt lat="{lat:.8f}" lon="{lon:.8f}"><ele>3</ele><time>{time}</time></trkpt>' for time, lat, lon in points
    ]
    body = "\n".join(["<trk><trkseg>", *rows, "</trkseg></trk>"])
    return f'{head}\n<gpx version="1.1" xmlns="http://www.topografix.com/GPX/1/1">\n{body}\n</gpx>\n'


def track(poses: Poses, *, sigma: float, seed: int = 0) -> list[tuple[str, float, float]]:
    """The fixes of a drive, one a second, as a logger with noise writes them."""
    each = round(1 / (poses.time[1] - poses.time[0]))
    noise = np.random.default_rng(seed).normal(0, sigma, (2, len(poses.time[::each])))
    lat = 48 + (poses.y[::each] + noise[1]) * DEGREES_NORTH
    lon = 11 + (poses.x[::each] + noise[0]) * DEGREES_EAST
    times = [datetime.fromtimestamp(START + time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") for time in poses.time[::each]]
    return list(zip(times, lat.tolist(), lon.tolist(), strict=True))


def errors(truth: Poses, found: Poses) -> tuple[np.ndarray, np.ndarray]:
    """Meters and degrees by which poses are off, at each instant of the truth that both have."""
    at = truth.time[truth.time <= found.time[-1]]
    # Both planes have their own origin: the first fix, which has noise itself.
    moved = np.column_stack([np.interp(at, found.time, each) for each in (found.x, found.y)])
    true = np.column_stack([truth.x, truth.y])[: len(at)]
    moved += np.median(true - moved, axis=0)
    turned = np.interp(at, found.time, found.heading) - truth.heading[: len(at)]
    return np.hypot(*(moved - true).T), np.degrees(np.abs(np.mod(turned + np.pi, 2 * np.pi) - np.pi))


def sideways_errors(truth: Poses, found: Trajectory, seconds: tuple[float, ...]) -> np.ndarray:
    """Meters by which the points of the paths ahead of each frame are off to the left or right, a column a time."""
    positions = np.column_stack([truth.x, truth.y])
    true = Trajectory.from_poses(truth.time, positions, truth.heading, fps=found.fps, source="truth")
    count = min(true.num_frames, found.num_frames)
    return np.abs(found.actions(count, seconds)[:, :, 0] - true.actions(count, seconds)[:, :, 0])


def write_drive(folder: Path, poses: Poses, text: str, name: str = "a.gpx", num_frames: int | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    with VideoWriter(folder / f"{Path(name).stem}.mp4", 10.0, size=(32, 16)) as writer:
        writer.extend(drive_frames(len(poses.time) if num_frames is None else num_frames))
    (folder / name).write_text(text)
    return folder


def import_gpx(folder: Path, output: Path, *more: str) -> int:
    given_ = ["kind=gpx", f"input={folder}", f"output={output}", "image_size=[16,32]", "workers=0"]
    return run(read_settings("import", [*given_, "frames_per_episode=1000", *more]))


def test_a_town_drive_becomes_a_drive_again(tmp_path):
    """The bar: 1 Hz, 2 m of noise; what was measured (terra/dataset/README.md), with a margin."""
    meters, degrees, sideways, raw = [], [], [], []
    for town in range(4):
        truth = simulate_drive(LaneGraph(plan_town(town)), 0, 600).poses
        folder = write_drive(tmp_path / f"in{town}", truth, gpx(track(truth, sigma=2.0, seed=town)))
        assert import_gpx(folder, tmp_path / f"out{town}") == 0
        (episode,) = read_split(tmp_path / f"out{town}", "train").episodes
        assert trajectory_of(episode).num_frames >= episode.num_frames >= 590
        off, turned = errors(truth, episode.poses)
        meters.append(off)
        degrees.append(turned[np.abs(truth.speed[: len(turned)]) > 1])
        sideways.append(sideways_errors(truth, trajectory_of(episode), (1.0, 2.0)))
        raw.append(np.random.default_rng(town).normal(0, 2, (600, 2)))
    meters, degrees = np.concatenate(meters), np.concatenate(degrees)
    one, two = np.concatenate(sideways).T
    assert np.quantile(meters, 0.5) < 1.3
    assert np.quantile(meters, 0.95) < 3.0
    assert np.quantile(degrees, 0.5) < 4.6
    assert np.quantile(degrees, 0.95) < 14.5
    assert np.quantile(one, 0.5) < 0.19
    assert np.quantile(one, 0.95) < 0.7
    assert np.quantile(two, 0.5) < 0.62
    assert np.quantile(two, 0.95) < 2.3
    assert np.median(meters) < 0.7 * np.median(np.hypot(*np.concatenate(raw).T))


@pytest.mark.parametrize("turning", [-0.2, 0.0, 0.2])
def test_fixes_without_noise_give_the_drive_itself(tmp_path, turning):
    truth = drive_poses(300, turning=turning)
    folder = write_drive(tmp_path / "in", truth, gpx(track(truth, sigma=0.0)))
    assert import_gpx(folder, tmp_path / "out", "gps.sigma_meters=0.05") == 0
    (episode,) = read_split(tmp_path / "out", "train").episodes
    off, turned = errors(truth, episode.poses)
    assert off.max() < 0.1
    assert turned.max() < 2
    np.testing.assert_allclose(episode.poses.speed, 6.0, atol=0.2)


def test_a_standing_car_keeps_its_heading():
    times = np.arange(60.0)
    driven = 8.0 * np.clip(times, 0, 20) + 8.0 * np.clip(times - 40, 0, None)
    positions = np.stack([driven, 0 * driven], axis=1) + np.random.default_rng(1).normal(0, 2, (60, 2))
    nodes, states = smooth(times, positions, 2.0, 3.0)
    standing = (nodes > 23) & (nodes < 37)
    assert np.ptp(states[standing, 2]) < np.radians(3)
    assert np.abs(states[standing, 2]).max() < np.radians(8)
    assert np.abs(states[standing, 3]).max() < 1
    off = states[standing, :2] - [160, 0]
    assert np.hypot(*off.T).max() < 2


def test_a_fix_far_off_moves_the_path_little_and_a_long_gap_parts_it():
    times = np.concatenate([np.arange(20.0), np.arange(50.0, 70.0)])
    positions = np.stack([6 * times, 0.0 * times], axis=1)
    positions[10, 1] += 60
    nodes, states = smooth(times, positions, 2.0, 3.0)
    assert np.abs(states[:, 1]).max() < 4
    assert sorted(np.diff(nodes))[-1] == 31
    np.testing.assert_allclose(np.median(states[:, 3]), 6.0, atol=0.3)


def test_the_video_may_begin_later_and_a_csv_will_do(tmp_path):
    truth = drive_poses(400)
    points = track(truth, sigma=0.0)
    text = "# logger\n time,lat,lon,hdop\n" + "".join(
        f"{5 + index},{lat:.9f},{lon:.9f},1\n" for index, (_, lat, lon) in enumerate(points)
    )
    folder = write_drive(tmp_path / "in", truth, text, "a.csv", num_frames=200)
    given_ = ("gps.offset_seconds=10", "gps.sigma_meters=0.05")
    assert import_gpx(folder, tmp_path / "out", *given_) == 0
    (episode,) = read_split(tmp_path / "out", "train").episodes
    assert episode.num_frames == 200
    turned = np.mod(episode.poses.heading - truth.heading[100 : 100 + len(episode.poses.heading)] + 1, 2 * np.pi) - 1
    assert np.degrees(np.abs(turned)).max() < 2


def test_meters_are_those_of_the_ellipsoid_also_across_the_180th_meridian(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("time,lat,lon\n0,-17,179.9995\n1,-17,-179.9995\n2,-16.999,179.9995\n")
    meters = load_gps(path).meters()
    # A thousandth of a degree: 2 pi N cos(17) / 360,000 of the parallel, 2 pi M / 360,000 of the meridian.
    np.testing.assert_allclose(meters, [[0, 0], [106.50, 0], [0, 110.67]], atol=0.02)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(1e-6, 6), st.floats(-50, 50), st.floats(-50, 50)), min_size=1, max_size=25),
    st.floats(0.01, 50),
)
def test_whatever_the_fixes_the_motion_is_finite(steps, sigma):
    spans, x, y = np.array(steps).T
    times = np.concatenate([[0], np.cumsum(spans)])
    positions = np.concatenate([np.zeros((1, 2)), np.cumsum(np.stack([x, y], axis=1), axis=0)])
    nodes, states = smooth(times, positions, sigma, 3.0)
    assert np.isfinite(states).all()
    assert (np.diff(nodes) > 0).all()
    assert (nodes[0], nodes[-1]) == (times[0], times[-1])


BOMB = '<!DOCTYPE gpx [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">]><gpx>&b;</gpx>'
POINT = '<trkpt lat="1" lon="2"><time>2026-05-01T00:00:0{}Z</time></trkpt>'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "line 1: expected GPX without a document type or entities, got one"),
        ('<!DOCTYPE gpx SYSTEM "file:///etc/passwd"><gpx/>', "expected GPX without a document type"),
        ("<kml></kml>", "line 1: expected a GPX file, got <kml>"),
        ("<gpx><trk>", r"line 1: expected well-formed XML, got: no element found"),
        ("", "expected well-formed XML"),
        (
            '<?xml version="1.0" encoding="klingon"?><gpx/>',
            "line 1: expected well-formed XML, got: unknown encoding|UTF-8",
        ),
        ("<gpx>" + "<a>" * 40, "expected at most 32 elements within each other, got more"),
        ("<gpx></gpx>", "expected 2 or more fixes, got 0"),
        ('<gpx>\n<trkpt lat="1" lon="2"/></gpx>', "line 2: expected a <time> in the point, got none"),
        ('<gpx><trkpt lat="x" lon="2"><time>1</time></trkpt></gpx>', "lat: expected -85 to 85 degrees, got 'x'"),
        ('<gpx><trkpt lon="2"><time>1</time></trkpt></gpx>', "lat: expected -85 to 85 degrees, got 'None'"),
        ('<gpx><trkpt lat="90" lon="2"><time>1</time></trkpt></gpx>', "lat: expected -85 to 85 degrees, got '90'"),
        ('<gpx><trkpt lat="1" lon="200"><time>1</time></trkpt></gpx>', "lon: expected -180 to 180 degrees, got '200'"),
        ('<gpx><trkpt lat="1" lon="nan"><time>1</time></trkpt></gpx>', "lon: expected -180 to 180 degrees, got 'nan'"),
        (
            '<gpx><trkpt lat="1" lon="2"><time>noon</time></trkpt></gpx>',
            "time: expected ISO 8601, such as .*, got 'noon'",
        ),
        (f'<gpx><trkpt lat="1" lon="2"><time>{"1" * 99}</time></trkpt></gpx>', "time: expected at most 64 characters"),
        (
            "<gpx>" + POINT.format(5) + "\n" + POINT.format(4) + "</gpx>",
            r"expected 2 or more fixes, got 1 \(left out: 1 fixes at a time that is not after the one before\)$",
        ),
    ],
)
def test_a_bad_gpx_is_one_line(tmp_path, text, message):
    path = tmp_path / "a.gpx"
    path.write_text(text)
    with pytest.raises(DatasetError, match=message) as error:
        load_gps(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time,lat\n0,1\n", "line 1: expected the columns time, lat, lon, each once, got time, lat"),
        ("time,lat,lon,lat\n", "each once, got time, lat, lon, lat"),
        ("time,lat,lon\n0,1\n", "line 2: expected 3 columns, got 2"),
        ("time,lat,lon\n0,1,2\nsoon,1,2\n", "line 3: time: expected ISO 8601, such as .*, got 'soon'"),
        ("time,lat,lon\n" + "0" * 2000, "line 2: expected at most 1000 characters, got 2000"),
    ],
)
def test_a_bad_csv_is_one_line(tmp_path, text, message):
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(DatasetError, match=message):
        load_gps(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(
        st.binary(max_size=300),
        st.text(max_size=300).map(str.encode),
        st.lists(
            st.sampled_from(
                [
                    *(
                        "<gpx>",
                        "</gpx>",
                        "<trk>",
                        "</trk>",
                        '<trkpt lat="1" lon="2">',
                        '<trkpt lat="1e400" lon="">',
                        "</trkpt>",
                    ),
                    *(
                        "<time>",
                        "</time>",
                        "2026-05-01T12:00:00Z",
                        "9999-12-31T23:59:59-23:59",
                        "1e308",
                        "&lt;",
                        "<!-- -->",
                    ),
                    *("<![CDATA[1]]>", "<!DOCTYPE a>", "<x:trkpt lat='3' lon='4'>", "</x:trkpt>", "\0", "é"),
                ]
            ),
            max_size=30,
        ).map(lambda parts: "".join(["<gpx>", *parts, "</gpx>"]).encode()),
    ),
    st.sampled_from([".gpx", ".csv"]),
)
def test_whatever_stands_in_a_file_is_read_or_refused_in_one_line(tmp_path, data, suffix):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(data if suffix == ".gpx" else b"time,lat,lon\n" + data)
    with suppress(DatasetError):
        found = load_gps(path)
        assert np.isfinite(found.meters()).all()
        assert (np.diff(found.times) > 0).all()


def test_what_is_no_drive_leaves_nothing(tmp_path, caplog):
    truth = drive_poses(100)
    points = track(truth, sigma=0.0)
    standing = [(time, 48.0, 11.0) for time, _, _ in points]
    jumping = [(time, lat + index % 2 * 0.1, lon) for index, (time, lat, lon) in enumerate(points)]
    for number, (chosen, more, message) in enumerate(
        (
            (standing, (), "expected a car that moves, because its heading is that of the motion"),
            (jumping, (), "expected a car's motion, at most 80 m/s, got"),
            (points, ("gps.offset_seconds=1000",), "expected fixes during the video's 12.9 s, got"),
        )
    ):
        caplog.clear()
        folder = write_drive(tmp_path / f"in{number}", truth, gpx(chosen))
        assert import_gpx(folder, tmp_path / f"out{number}", *more) == 2
        assert message in caplog.text
        assert not list((tmp_path / f"out{number}").glob("train/*"))
    with pytest.raises(DatasetError, match=r"expected NAME\.gpx or \.csv beside NAME \(\.avi, .*\), got none"):
        import_gpx(tmp_path / "out0", tmp_path / "none")


def test_fixes_at_one_time_and_other_files_are_said(tmp_path, caplog):
    truth = drive_poses(100)
    points = track(truth, sigma=0.0)
    folder = write_drive(tmp_path / "in", truth, gpx([points[0], *points]))
    (folder / "b.gpx").write_text("")
    assert import_gpx(folder, tmp_path / "out") == 0
    assert "a.gpx: left out: 1 fixes at a time that is not after the one before" in caplog.text
    assert "not used as videos with GPS tracks: b.gpx" in caplog.text


def write_pictures(folder: Path, num_frames: int) -> None:
    """Pictures whose shade is their number."""
    folder.mkdir(parents=True)
    for index in range(num_frames):
        Image.new("RGB", (32, 16), (index // 2,) * 3).save(folder / f"{index}.png")


def open_gpx(folder: Path, text: str, num_frames: int = 400, **changes: float) -> tuple[SourceDrive, list[int]]:
    """The drive of a track beside pictures at 10 a second, and the (even) numbers of its pictures."""
    write_pictures(folder / "a", num_frames)
    (folder / "a.gpx").write_text(text)
    drive = GpxSource(folder, 10.0, sigma_meters=0.05, **changes).open_drive("a")
    return drive, [2 * int(frame[0, 0, 0]) for frame in drive.frames()]


def test_a_tunnel_leaves_out_what_was_filmed_in_it(tmp_path, caplog):
    truth = drive_poses(400, turning=0.1)
    points = track(truth, sigma=0.0)
    drive, shown = open_gpx(tmp_path / "in", gpx(points[:11] + points[18:]))  # none from 11 to 17 s
    known = [*range(0, 101), *range(180, 400)]
    np.testing.assert_allclose(drive.frame_times, np.array(known) / 10)
    assert shown == [each // 2 * 2 for each in known]
    assert drive.breaks == (Break(101, "the GPS track has a gap, a jump or a new segment"),)
    assert drive.left_out == {"frames without fixes": 79}
    assert "no motion is known from 10.0 to 18.0 s of the video: 79 frames left out" in caplog.text
    # Both stretches are as good as a track without a gap; they share one plane.
    off, turned = errors(truth, drive.poses)
    seen = (truth.time <= 10) | (truth.time >= 18)
    assert off[seen[: len(off)]].max() < 0.15
    assert turned[seen[: len(off)]].max() < 2


def test_a_fix_far_off_or_a_jump_cuts_the_track_and_no_more(tmp_path, caplog):
    points = track(drive_poses(400), sigma=0.0)
    moved = [(time, lat + (row == 5) * 0.1 + (row >= 20) * 0.1, lon) for row, (time, lat, lon) in enumerate(points)]
    drive, shown = open_gpx(tmp_path / "one", gpx([*points[:5], moved[5], *points[6:]]))
    assert shown == [each // 2 * 2 for each in (*range(0, 41), *range(60, 400))]
    assert [each.frame for each in drive.breaks] == [41]
    assert "m/s at 4.0 s of the video is no car's motion: cut there, and at 1 more" in caplog.text
    drive, shown = open_gpx(tmp_path / "two", gpx([*points[:20], *moved[20:]]))
    assert shown == [each // 2 * 2 for each in (*range(0, 191), *range(200, 400))]
    assert [each.frame for each in drive.breaks] == [191]


def test_damaged_pictures_beside_a_tunnel(tmp_path):
    points = track(drive_poses(400), sigma=0.0)
    write_pictures(tmp_path / "in" / "a", 400)
    for number in (50, 140, 300):
        (tmp_path / "in" / "a" / f"{number}.png").write_bytes(b"")
    (tmp_path / "in" / "a.gpx").write_text(gpx(points[:11] + points[18:]))
    drive = GpxSource(tmp_path / "in", 10.0, sigma_meters=0.05).open_drive("a")
    known = [each for each in (*range(0, 101), *range(180, 400)) if each not in (50, 300)]
    assert [2 * int(frame[0, 0, 0]) for frame in drive.frames()] == [each // 2 * 2 for each in known]
    assert [known[each.frame] for each in drive.breaks] == [51, 180, 301]
    assert drive.left_out == {"damaged pictures": 3, "frames without fixes": 78}


def test_segments_are_stretches_in_the_order_of_their_times(tmp_path):
    truth = drive_poses(400)
    points = track(truth, sigma=0.0)
    whole = gpx([*points[16:], *points[:16]])
    cut = whole.replace(f'<trkpt lat="{points[0][1]:.8f}"', f'</trkseg><trkseg><trkpt lat="{points[0][1]:.8f}"')
    assert cut.count("<trkseg>") == 2
    drive, shown = open_gpx(tmp_path / "in", cut)
    known = [*range(0, 151), *range(160, 400)]
    assert shown == [each // 2 * 2 for each in known]
    assert [each.frame for each in drive.breaks] == [151]
    assert (np.diff(drive.poses.time) > 0).all()
    np.testing.assert_allclose(drive.poses.speed, 6.0, atol=0.2)


def test_points_without_time_and_fixes_that_go_back_are_left_out(tmp_path, caplog):
    truth = drive_poses(400, turning=-0.1)
    points = track(truth, sigma=0.0)
    clean, _ = open_gpx(tmp_path / "clean", gpx(points))
    early = datetime.fromtimestamp(START + 3, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    late = "2080-01-06T00:00:00Z"  # before a receiver knows the date
    noisy = [
        *points[:9],
        (early, 48.0, 11.0),
        *points[9:15],
        points[14],
        *points[15:20],
        (late, 48.0, 11.0),
        *points[20:],
    ]
    text = gpx(noisy).replace(f"<ele>3</ele><time>{points[30][0]}</time>", "", 1)
    text = text.replace("<trkseg>", '<trkseg><trkpt lat="0" lon="0"/>', 1)
    drive, shown = open_gpx(tmp_path / "noisy", text)
    assert "left out: 2 points without a time" in caplog.text
    assert "left out: 3 fixes at a time that is not after the one before" in caplog.text
    assert drive.breaks == ()
    assert len(shown) == 400
    at = np.arange(0, 39, 0.1)
    for name in ("x", "y", "heading"):
        expected = np.interp(at, clean.poses.time, getattr(clean.poses, name))
        np.testing.assert_allclose(np.interp(at, drive.poses.time, getattr(drive.poses, name)), expected, atol=0.1)


def test_a_car_that_stands_between_two_gaps_has_no_heading_there(tmp_path):
    truth = drive_poses(400)
    points = track(truth, sigma=0.0)
    parked = [(points[row][0], *points[12][1:]) for row in range(16, 24)]
    drive, shown = open_gpx(tmp_path / "in", gpx([*points[:12], *parked, *points[28:]]))
    assert shown == [each // 2 * 2 for each in (*range(0, 111), *range(280, 400))]
    assert [each.frame for each in drive.breaks] == [111]
    assert drive.left_out == {"frames without fixes": 169}


def test_pictures_will_do(tmp_path):
    truth = drive_poses(100)
    (tmp_path / "in" / "a").mkdir(parents=True)
    for index, frame in enumerate(drive_frames(100)):
        Image.fromarray(frame).save(tmp_path / "in" / "a" / f"{index}.png")
    (tmp_path / "in" / "a.gpx").write_text(gpx(track(truth, sigma=0.0)))
    assert import_gpx(tmp_path / "in", tmp_path / "out", "picture_fps=10") == 0
    assert read_split(tmp_path / "out", "train").episodes[0].num_frames == 91
