"""Recognition of KITTI's odometry benchmark: sequences/NN/ beside poses/NN.txt."""

from terra.dataset.importing.kitti import PICTURES
from terra.dataset.importing.recognize.found import Camera, Found, Listing, counted, some
from terra.errors import DatasetError

_CAMERAS = {"image_0": "left, gray", "image_1": "right, gray", "image_2": "left, color", "image_3": "right, color"}


def recognize(listing: Listing) -> Found | None:
    """Sequences with poses. Raises DatasetError for sequences alone."""
    if "sequences" not in listing.folders:
        return None
    sequences = listing.inside("sequences")
    cameras = [
        name for name in _CAMERAS if any((sequences.folder / each / name).is_dir() for each in sequences.folders)
    ]
    if not cameras:
        return None
    poses = listing.inside("poses").with_suffix([".txt"]) if "poses" in listing.folders else []
    if not poses:
        got = f"sequences {some(sequences.folders)} alone: unpack data_odometry_poses.zip there"
        raise DatasetError(f"{listing.folder}: expected KITTI odometry with poses/NN.txt, got {got}")
    return Found(
        kind="kitti",
        title="KITTI odometry",
        folder=listing.folder,
        cameras=tuple(Camera(name, note=_CAMERAS[name], is_taken=name == PICTURES) for name in cameras),
        facts=(("stated", f"{counted(len(sequences.folders), 'sequence')}, {len(poses)} with poses"),),
        comments=("camera.height_meters=1.65 places the path in overlays",),
        driving=True,
    )
