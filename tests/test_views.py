"""Several cameras in one picture: the layout, the key `views` of every file, and what is made of each view."""

import json

import numpy as np
import pytest
from hypothesis import given, strategies as st

from terra.errors import ConfigError, DatasetError
from terra.views import Views

NAMES = ("front", "wrist", "left", "right")
SIZES = st.tuples(*[st.integers(1, 12).map(lambda count: 16 * count)] * 2)


@given(st.integers(1, 4), SIZES, st.floats(0.3, 3.5))
def test_tiles_are_what_was_tiled(count, size, aspect):
    views = Views.tiled(NAMES[:count], size, aspect)
    random = np.random.default_rng(0)
    pictures = {name: random.integers(1, 256, (2, *views.tile_size(name), 3), dtype=np.uint8) for name in NAMES[:count]}
    whole = views.tile(pictures)
    assert whole.shape == (2, *size, 3)
    assert {name: part.tolist() for name, part in views.split(whole).items()} == {
        name: picture.tolist() for name, picture in pictures.items()
    }
    # What no camera shows is black, and nothing else is: three of four tiles.
    assert (whole > 0).mean() == pytest.approx(0.75 if count == 3 else 1.0)
    assert len({views.tile_size(name) for name in views.names}) == 1
    assert Views.read({"views": json.loads(json.dumps(views.describe()))}, "a") == views
    enlarged = whole.repeat(2, axis=1).repeat(2, axis=2)
    for name, part in views.split(enlarged).items():
        np.testing.assert_array_equal(part[:, ::2, ::2], pictures[name])


@pytest.mark.parametrize(
    ("size", "aspect", "tiles"),
    [
        ((144, 256), 4 / 3, (144, 128)),
        ((144, 256), 16 / 9, (144, 128)),  # 8:9 or 32:9: as near, side by side
        ((256, 256), 4 / 3, (128, 256)),
        ((256, 256), 1 / 2, (256, 128)),
        ((256, 128), 4 / 3, (128, 128)),
    ],
)
def test_two_views_keep_near_to_the_cameras_aspect(size, aspect, tiles):
    assert Views.tiled(NAMES[:2], size, aspect).tile_size("front") == tiles


@pytest.mark.parametrize(
    ("names", "size", "message"),
    [
        (NAMES, (136, 256), r"image_size: expected a multiple of 16 to be halved for views, got \[136, 256\]"),
        (("a", "a"), (32, 32), "views: expected 1 to 4 different names of cameras, got a, a"),
        ((), (32, 32), "views: expected 1 to 4 different names of cameras, got none"),
        ((*NAMES, "top"), (32, 32), "views: expected 1 to 4 different names of cameras"),
        (("../a", "b"), (32, 32), r"views: expected a name of letters, digits, '_' and '-', got '\.\./a'"),
    ],
)
def test_what_can_not_be_tiled_is_one_line(names, size, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        Views.tiled(names, size, 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"boxes": [[0, 0, 18, 16], [16, 0, 32, 16]]}, r"boxes: expected parts that do not overlap, got front \[0, 0"),
        ({"boxes": [[0, 0, 16, 16], [16, 0, 34, 16]]}, "boxes: expected a part of 32 x 16 pixels for wrist"),
        ({"boxes": [[0, 0, 16, 16], [20, 0, 20, 16]]}, "boxes: expected a part of 32 x 16 pixels for wrist"),
        ({"boxes": [[0, 0, 16, 16]]}, "boxes: expected one for each of front, wrist, got 1"),
        ({"boxes": [[0, 0, 15, 16], [16, 0, 32, 16]]}, r"boxes\[0\]: expected \[left, top, right, bottom\], even"),
        ({"names": ["front"]}, "boxes: expected one for each of front, got 2"),
        ({"more": 1}, "expected image_size, names, boxes, got 'more'"),
    ],
)
def test_views_of_a_file_are_checked(change, message):
    known = Views.tiled(NAMES[:2], (16, 32)).describe()
    with pytest.raises(DatasetError, match=f"^dataset.json: views: {message}"):
        Views.read({"views": known | change}, "dataset.json", DatasetError)


def test_edges_within_a_token_are_said(caplog):
    Views.tiled(NAMES[:2], (144, 256)).say_cut_patches("data")
    assert not caplog.messages
    Views.tiled(NAMES, (144, 256)).say_cut_patches("data")
    (message,) = caplog.messages
    assert message.startswith("data: expected views that meet at a multiple of 16 pixels, got 72:")
