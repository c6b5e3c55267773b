"""How a video is to be shown, from what it says of itself: shape of a pixel, color matrix, HDR, interlacing.

ffmpeg turns a frame as the file's display matrix says. The rest is up to a filter graph, which `display_filters` gives:

    pixels that are not square   the frame is widened, or made higher, until they are
    BT.2020, HLG, PQ             mapped to BT.709; a white of 203 nits (ITU-R BT.2408) becomes white
    no color matrix, HD          BT.709, as players take it; ffmpeg would take BT.601
    interlaced                   the lines of the other field are interpolated, one frame for each stored one
    Dolby Vision, profile 5      refused: its colors are in a space that ffmpeg can't convert
    gray of more than 8 bits     refused: it is depth, which is no picture
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizer.errors import VideoError
from tokenizer.limits import Limits

_STREAM = re.compile(r"Stream #0:\d+.*?: Video: (?P<rest>.*)")
_SIZE = re.compile(r", (\d+)x(\d+)\b")
_PIXEL_ASPECT = re.compile(r"\bSAR (\d+):(\d+)")
_PIXELS = re.compile(r", (?P<format>[a-z0-9]+)(\((?P<facts>[^,()].*?)\))?(?=, \d+x\d+)")
_ROTATION = re.compile(r"rotation of (-?\d+(\.\d+)?) degrees")
_COLORS = re.compile(r"[a-z0-9.-]+(/[a-z0-9.-]+/[a-z0-9.-]+)?")
_HDR = {"smpte2084": "PQ", "arib-std-b67": "HLG"}
_EIGHT_BITS = ("yuv420p", "yuvj420p", "yuv422p", "yuvj422p", "yuv444p", "yuvj444p")
_HD_HEIGHT, _HD_WIDTH = 720, 1280
_SAME = "bicubic+accurate_rnd+full_chroma_int"

# To linear light of which 1 is a white of 203 nits, then the smaller gamut; what is brighter than 0.8 is compressed.
_TO_SDR = (
    "zscale=t=linear:npl=203,format=gbrpf32le,zscale=p=bt709,tonemap=tonemap=mobius:param=0.8:desat=0,"
    "zscale=t=bt709:m=bt709:r=tv,format=yuv444p"
)
_TO_BT709 = "zscale=p=bt709:t=bt709:m=bt709:r=tv,format=yuv444p"
_TO_SQUARE = f"scale=w='if(gt(sar,1),round(iw*sar),iw)':h='if(lt(sar,1),round(ih/sar),ih)':flags={_SAME},setsar=1"


@dataclass(frozen=True)
class Display:
    """What a video says of its showing.

    Attributes:
        width, height: of the stored frame, in pixels.
        pixel_aspect: width of a pixel over its height; 1 where nothing is said.
        matrix, primaries, transfer: by ffmpeg's names; "unknown" where nothing is said.
        pixel_format: by ffmpeg's name.
        turns_sides: whether the frame is shown turned by a quarter, so that width and height change places.
        is_interlaced: whether a frame holds two fields.
        is_dolby_vision_5: whether its colors are Dolby's own.
        num_streams: how many video streams the file has, without cover pictures.
    """

    width: int
    height: int
    pixel_aspect: float = 1.0
    matrix: str = "unknown"
    primaries: str = "unknown"
    transfer: str = "unknown"
    pixel_format: str = "unknown"
    turns_sides: bool = False
    is_interlaced: bool = False
    is_dolby_vision_5: bool = False
    num_streams: int = 1

    @property
    def is_yuv(self) -> bool:
        """Whether colors are stored as luma and chroma."""
        return self.pixel_format.startswith(("yuv", "nv", "p0"))

    @property
    def is_plain(self) -> bool:
        """Whether frames are of 8 bits and square pixels, upright, whole, and of luma and chroma."""
        others = self.is_interlaced or self.hdr or self.primaries == "bt2020" or self.pixel_aspect != 1.0
        return self.pixel_format in _EIGHT_BITS and not (others or self.turns_sides or self.is_dolby_vision_5)

    @property
    def hdr(self) -> str | None:
        """HLG or PQ, where the video is of a high dynamic range."""
        return _HDR.get(self.transfer)


def parse_display(description: Sequence[str]) -> Display | None:
    """Read ffmpeg's lines on its input; None if they tell of no video stream."""
    chosen: str | None = None
    profile_5 = turns = False
    for line in description:
        match = _STREAM.search(line)
        if match and "(attached pic)" not in line and chosen is None:
            chosen = match["rest"]
        elif "Stream #0:" in line and chosen is not None:
            break
        elif chosen is not None and "DOVI configuration record" in line:
            profile_5 = bool(re.search(r"\bprofile: 5\b", line))
        elif chosen is not None and (turn := _ROTATION.search(line)):
            turns = abs(round(float(turn[1]) / 90)) % 2 == 1
    size = None if chosen is None else _SIZE.search(chosen)
    if chosen is None or size is None:
        return None
    pixels = _PIXELS.search(chosen)
    facts = [] if pixels is None or pixels["facts"] is None else [fact.strip() for fact in pixels["facts"].split(",")]
    words = ("tv", "pc", "progressive", "top first", "bottom first", "gray")
    named = next((fact for fact in facts if fact not in words and _COLORS.fullmatch(fact)), "unknown")
    matrix, primaries, transfer = named.split("/") if "/" in named else [named] * 3
    # The container's aspect stands behind the codec's, and counts.
    aspects = _PIXEL_ASPECT.findall(chosen)
    across, up = map(int, aspects[-1]) if aspects else (1, 1)
    return Display(
        width=int(size[1]),
        height=int(size[2]),
        pixel_aspect=across / up if across and up else 1.0,
        matrix=matrix,
        primaries=primaries,
        transfer=transfer,
        pixel_format="unknown" if pixels is None else pixels["format"],
        turns_sides=turns,
        is_interlaced=any("first" in fact for fact in facts),
        is_dolby_vision_5=profile_5,
        num_streams=sum(bool(_STREAM.search(line)) and "(attached pic)" not in line for line in description),
    )


def display_filters(display: Display, where: str, limits: Limits) -> str:
    """The filter graph that shows a video rightly; "" if its frames are right as ffmpeg gives them.

    Args:
        display: what the video says.
        where: the video's name, for a message.
        limits: bounds on the pixels of a frame as it is shown.

    Raises:
        VideoError: a video that can't be shown rightly, or whose frames become larger than the bounds.
    """
    if display.is_dolby_vision_5:
        raise VideoError(
            f"{where}: expected colors that can be shown, got Dolby Vision of profile 5: re-encode it as SDR"
        )
    if display.pixel_format.startswith("gray") and display.pixel_format != "gray":
        got = f"gray of more than 8 bits ({display.pixel_format}): depth is no picture"
        raise VideoError(f"{where}: expected colors, or gray of 8 bits, got {got}")
    filters = []
    if display.is_interlaced:
        filters.append("bwdif=mode=send_frame:deint=interlaced")
    if display.hdr is not None:
        filters.append(_TO_SDR)
    elif display.primaries == "bt2020":
        filters.append(_TO_BT709)
    elif display.is_yuv and display.matrix == "unknown" and _is_hd(display):
        filters.append("setparams=colorspace=bt709")
    if display.pixel_aspect != 1.0:
        filters.append(_TO_SQUARE)
        pixels = display.width * display.height * max(display.pixel_aspect, 1 / display.pixel_aspect)
        if pixels > limits.video_pixels:
            got = f"{pixels:.0f} with pixels of an aspect of {display.pixel_aspect:g}"
            raise VideoError(f"{where}: expected shown frames of at most {limits.video_pixels} pixels, got {got}")
    return ",".join(filters)


def planes_filters(display: Display, box: tuple[float, float, float, float], size: tuple[int, int]) -> str:
    """The filter graph that crops and resizes a plain video's frames, and makes them BT.709 YUV 4:2:0.

    Args:
        display: what the video says; it must be plain.
        box: (left, top, right, bottom) of what is kept of a frame, in pixels; taken to even ones.
        size: (height, width).
    """
    left, top = (2 * round(edge / 2) for edge in box[:2])
    right, bottom = (
        2 * min(round(edge / 2), most // 2) for edge, most in zip(box[2:], (display.width, display.height), strict=True)
    )
    matrix = display.matrix
    if matrix == "unknown":
        matrix = "bt709" if _is_hd(display) else "smpte170m"
    return (
        f"crop={right - left}:{bottom - top}:{left}:{top},setparams=colorspace={matrix},"
        f"zscale=w={size[1]}:h={size[0]}:f=bicubic:m=bt709:r=limited:d=none,format=yuv420p"
    )


def _is_hd(display: Display) -> bool:
    return display.height >= _HD_HEIGHT or display.width >= _HD_WIDTH
