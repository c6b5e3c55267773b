"""Recognition of nuScenes: a folder of tables (v1.0-mini, v1.0-trainval, ...) beside samples/ and sweeps/."""

from terra.dataset.importing.nuscenes import CHANNEL
from terra.dataset.importing.nuscenes_tables import read_table
from terra.dataset.importing.recognize.found import Camera, Found, Listing

_TABLES = {"scene.json", "sample_data.json", "ego_pose.json"}


def recognize(listing: Listing) -> Found | None:
    """NuScenes' own folder, or its folder of tables. Raises DatasetError for a damaged table of sensors."""
    tables = [listing] if set(listing.files) >= _TABLES else []
    tables = tables or [
        listing.inside(name)
        for name in listing.folders
        if name.startswith("v") and set(listing.inside(name).files) >= _TABLES
    ]
    if not tables:
        return None
    others = [each.folder.name for each in tables[1:]]
    comments = (f"other tables: input={listing.folder}/{' | '.join(others)}",) if others else ()
    channels = [str(row["channel"]) for row in read_table(tables[0].folder, "sensor").rows.values()]
    return Found(
        kind="nuscenes",
        title=f"nuScenes, {tables[0].folder.name}",
        folder=tables[0].folder if others else listing.folder,
        cameras=tuple(
            Camera(name, is_taken=name == CHANNEL)
            for name in sorted(channels, key=lambda name: name != CHANNEL)
            if name.startswith("CAM")
        ),
        comments=(*comments, "camera.height_meters=1.51 camera.x_forward_meters=1.70 place the path in overlays"),
        driving=True,
    )
