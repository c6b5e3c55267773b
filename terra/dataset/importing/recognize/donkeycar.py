"""Recognition of donkeycar's tubs: version 2 by manifest.json and catalogs, version 1 by record_N.json."""

import math
import re
from pathlib import Path

import numpy as np

from terra.dataset.importing.donkeycar_tubs import Record, read_tub
from terra.dataset.importing.recognize.found import Found, Listing, counted
from terra.errors import DatasetError

_RECORD = re.compile(r"record_\d+\.json")
_LOOP_HZ = 20.0  # of donkeycar's own configuration
_RATES = (2.0, 100.0)  # a second: what a car's times may plausibly say
_LOOKED_AT = 2000  # records whose times are looked at
_MOST_TUBS, _MOST_READ = 200, 20  # that are listed, and whose records are read


def recognize(listing: Listing) -> Found | None:
    """A tub, or a folder of tubs."""
    versions = [version] if (version := _version(listing)) else []
    tubs = [listing] if versions else []
    for name in [] if versions else listing.folders[:_MOST_TUBS]:
        if version := _version(listing.inside(name)):
            versions.append(version)
            tubs.append(listing.inside(name))
    if not tubs:
        return None
    version = " and ".join(str(each) for each in sorted(set(versions)))
    what = "donkeycar tub" if tubs[0] is listing else f"{counted(len(tubs), 'donkeycar tub')}"
    rates = [_rate(tub.folder) for tub in tubs[:_MOST_READ]]
    settings, comments = {}, ()
    if wrong := [rate for rate in rates if not _RATES[0] <= rate <= _RATES[1]]:
        said = "no times" if math.isnan(wrong[0]) else f"{wrong[0]:.3g} records a second"
        settings = {"picture_fps": _LOOP_HZ}
        comments = (f"its times say {said}, which no car has: picture_fps= is the car's own rate, by default 20",)
    return Found("donkeycar", f"{what}, version {version}", listing.folder, settings, comments=comments)


def _version(listing: Listing) -> int | None:
    if "manifest.json" in listing.files and (listing.with_suffix([".catalog"]) or "images" in listing.folders):
        return 2
    return 1 if any(map(_RECORD.fullmatch, listing.files)) else None


def _rate(folder: Path) -> float:
    """Records a second by the times of a tub's first ones; NaN where they do not tell."""
    try:
        entries = read_tub(folder).entries[:_LOOKED_AT]
    except DatasetError:
        return _LOOP_HZ  # what is damaged is said when the tub is opened
    times = [entry.milliseconds for entry in entries if isinstance(entry, Record) and entry.milliseconds is not None]
    steps = np.diff(times) / 1000
    return float(1 / np.median(steps[steps > 0])) if (steps > 0).any() else math.nan
