"""A notebook widget that shows one of several videos frame by frame or plays it."""

from collections.abc import Mapping
from io import BytesIO

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from terra.extras import extras_named

with extras_named("terra.insight.widgets"):
    import ipywidgets

_WIDTH = 512  # pixels on the screen


def flip_through(videos: Mapping[str, UInt8[np.ndarray, "frames height width 3"]], fps: float) -> ipywidgets.VBox:
    """Make a widget with a list of the videos' names, a slider over frames that also plays, and the chosen frame.

    The slider's length is that of the shortest video.
    """
    last = min(map(len, videos.values())) - 1
    name = ipywidgets.Dropdown(options=list(videos), layout={"width": "12em"})
    frame = ipywidgets.IntSlider(max=last, description="frame")
    play = ipywidgets.Play(max=last, interval=round(1000 / fps))
    picture = ipywidgets.Image(format="jpeg", width=_WIDTH)

    def draw(_: object = None) -> None:
        file = BytesIO()
        Image.fromarray(videos[str(name.value)][int(frame.value)]).save(file, "JPEG", quality=90)
        picture.value = file.getvalue()

    ipywidgets.jslink((play, "value"), (frame, "value"))
    name.observe(draw, "value")
    frame.observe(draw, "value")
    draw()
    return ipywidgets.VBox([ipywidgets.HBox([name, play, frame]), picture])
