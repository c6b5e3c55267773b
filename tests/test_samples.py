"""Sample drives: what is written is read back by the import, and the plane is seen as the camera says."""

from pathlib import Path

import numpy as np
import pytest
from tiny_driving import CAMERA, drive_poses

from decoder.camera import Camera, project
from terra.dataset.importing import VideoPosesSource
from terra.dataset.motion import check_motion
from terra.recording import samples

SIZE = (48, 80)


def test_the_import_reads_what_is_written(tmp_path: Path):
    samples.write_samples(tmp_path, drives=2, num_frames=5, image_size=SIZE, camera=CAMERA, scenery="plane")
    source = VideoPosesSource(tmp_path)
    assert source.list_drives() == ("drive_00", "drive_01")
    for name in source.list_drives():
        drive = source.open_drive(name)
        frames = list(drive.frames())
        assert len(frames) == len(drive.frame_times) == 5
        assert frames[0].shape == (*SIZE, 3)
        assert len(drive.poses.time) == 5 + 30
        assert not check_motion(drive.poses, name).warnings


@pytest.mark.parametrize(
    "camera",
    [
        CAMERA,
        Camera(fov_degrees=60.0, height_meters=1.8, pitch_radians=-0.1, x_forward_meters=1.5),
        Camera(fov_degrees=100.0, height_meters=1.2, pitch_radians=0.05),
    ],
)
def test_the_plane_lies_where_the_camera_projects_it(camera: Camera):
    ahead, left = samples._ground(SIZE, camera)
    seen = np.isfinite(ahead)
    places = project(np.stack([ahead[seen], left[seen]], axis=-1), camera, (SIZE[1], SIZE[0]))
    rows, columns = np.nonzero(seen)
    assert seen[-1].all()
    assert not seen[0].any()
    assert np.allclose(places, np.stack([columns, rows], axis=-1) + 0.5)


def test_the_plane_moves_with_the_car_alone():
    standing = list(samples.draw_plane(drive_poses(3, turning=0.0, speed=0.0), 3, SIZE, CAMERA))
    moving = list(samples.draw_plane(drive_poses(3, speed=6.0), 3, SIZE, CAMERA))
    assert (standing[0] == standing[2]).all()
    assert (moving[0] == standing[0]).all()
    assert (moving[0] != moving[1]).any()
