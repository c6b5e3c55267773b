"""Access units of H.264, H.265, VP9 and AV1, one a message, as `foxglove.CompressedVideo` has them: which can be shown.

A decoder says nothing of some losses: after a lost H.264 picture it shows as many pictures as it was given, smeared.
So decoding begins at key frames, H.264's frame numbers are followed (ITU-T H.264, 7.3.2.1.1 and 7.3.3), and a group of
pictures counts only if as many frames come out of it as went in. VP9 and AV1 have no such numbers: where their units
lie farther apart than usual, one may be lost.
"""

import math
import re
import struct
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from decoder.frames import stream_frames
from terra.errors import DatasetError, VideoError
from tokenizer.limits import LIMITS

_CODECS = ("h264", "h265", "vp9", "av1")
_FOURCC = {"h264": b"H264", "vp9": b"VP90", "av1": b"AV01"}  # in IVF, in which ffmpeg reads no H.265
_DELIMITER = b"\x00\x00\x00\x01\x46\x01\x50"  # H.265's access unit delimiter, by which its files are known
_START = re.compile(rb"\x00\x00\x01")
_BATCH = 64  # units that are decoded by one process, which takes 0.1 s to start
_GAP = 1.5  # of the usual time between two units
_STEPS = 32  # by which that is known
_HEAD = 1024  # bytes of an H.264 NAL unit in which its numbers stand
_SEQUENCE_HEADER = 1  # AV1's OBU before a key frame
_WITH_CHROMA = (100, 110, 122, 244, 44, 83, 86, 118, 128, 138, 139, 134, 135)  # H.264 profiles whose SPS tells it

BEFORE_KEY_FRAME = "pictures before a key frame"
BEHIND_A_LOST_ONE = "pictures behind a lost one, up to the next key frame"
BEHIND_A_GAP = "pictures of vp9 or av1 behind a gap in time, up to the next key frame"
UNDECODABLE = "pictures that can't be decoded, and those up to the next key frame"


def check_codec(name: str, where: str) -> str:
    """The codec of a `format` field. Raises DatasetError if it is none that is read."""
    if name not in _CODECS:
        raise DatasetError(f"{where}: expected video of h264, h265, vp9 or av1, got {name[:40]!r}")
    return name


def decode_units(codec: str, units: Sequence[bytes]) -> Iterator[UInt8[np.ndarray, "height width 3"]]:
    """Yield the frames of consecutive access units that begin with a key frame, RGB in [0, 255]. Raises VideoError."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "units"
        with path.open("wb") as file:
            if codec == "h265":
                file.write(_DELIMITER + b"".join(units).removeprefix(_DELIMITER))
            else:
                file.write(b"DKIF" + struct.pack("<HH4sHHIIII", 0, 32, _FOURCC[codec], 16, 16, 30, 1, len(units), 0))
                for number, unit in enumerate(units):
                    file.write(struct.pack("<IQ", len(unit), number) + unit)
        yield from stream_frames(path)


@dataclass
class UnitChecker:
    """Finds out which access units of a topic can be shown; `problems` has the reason of every other, by its index."""

    codec: str
    where: str
    problems: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._groups: list[list[tuple[int, bytes]]] = []  # of pictures, each from a key frame on
        self._waits_for: str | None = BEFORE_KEY_FRAME
        self._numbers = _FrameNumbers()
        self._bytes = 0
        self._last_time: int | None = None
        self._steps: deque[int] = deque(maxlen=_STEPS)

    def add(self, index: int, unit: bytes, time: int) -> None:
        """Take the next unit, of a time in ns. Raises DatasetError if key frames lie too far apart to be held."""
        if self.codec in ("vp9", "av1") and self._is_behind_gap(time) and self._waits_for is None:
            self._waits_for = BEHIND_A_GAP
        is_key = is_key_frame(self.codec, unit)
        is_next = self.codec != "h264" or self._numbers.is_next(unit, is_key)
        if is_key:
            if sum(map(len, self._groups)) >= _BATCH:
                self._decode()
            self._waits_for = None
            self._groups.append([])
        elif not is_next and self._waits_for is None:
            self._waits_for = BEHIND_A_LOST_ONE
        if self._waits_for is not None:
            self.problems[index] = self._waits_for
            return
        self._groups[-1].append((index, unit))
        self._bytes += len(unit)
        if self._bytes > LIMITS.bag_record_bytes:
            raise DatasetError(f"{self.where}: expected a key frame each {LIMITS.bag_record_bytes} bytes, got fewer")

    def lose(self) -> None:
        """Take note that units are lost here."""
        if self._waits_for is None:
            self._waits_for = BEHIND_A_LOST_ONE

    def finish(self) -> None:
        """Decode what is left."""
        self._decode()

    def _is_behind_gap(self, time: int) -> bool:
        last, self._last_time = self._last_time, time
        if last is None:
            return False
        usual = float(np.median(self._steps)) if self._steps else math.inf
        self._steps.append(time - last)
        return time - last > _GAP * usual

    def _decode(self) -> None:
        groups, self._groups, self._bytes = [group for group in self._groups if group], [], 0
        if not _decodes(self.codec, [unit for group in groups for _, unit in group]):
            for group in groups:
                if len(groups) == 1 or not _decodes(self.codec, [unit for _, unit in group]):
                    self.problems.update((index, UNDECODABLE) for index, _ in group)


def stream_units(codec: str, units: Iterator[bytes], where: str) -> Iterator[UInt8[np.ndarray, "height width 3"]]:
    """Yield the frames of all units that a `UnitChecker` found nothing wrong with. Raises VideoError, DatasetError."""
    batch: list[bytes] = []
    for unit in units:
        if len(batch) >= _BATCH and is_key_frame(codec, unit):
            yield from _exactly(codec, batch, where)
            batch = []
        batch.append(unit)
    yield from _exactly(codec, batch, where)


def is_key_frame(codec: str, unit: bytes) -> bool:
    """Whether decoding can begin with an access unit."""
    if codec == "h264":
        return any(nal[0] & 31 == 5 for nal in _nal_units(unit))
    if codec == "h265":
        return any(16 <= nal[0] >> 1 & 63 <= 23 for nal in _nal_units(unit))
    if codec == "vp9":
        # frame_marker (2 bits), profile (2, in profile 3 a third), show_existing_frame, frame_type (0: a key frame).
        shift = 1 if unit[:1] and unit[0] & 0x30 == 0x30 else 0
        return bool(unit) and unit[0] >> (3 - shift) & 1 == 0 and unit[0] >> (2 - shift) & 1 == 0
    return _SEQUENCE_HEADER in _obu_types(unit)


def _decodes(codec: str, units: Sequence[bytes]) -> bool:
    try:
        return not units or sum(1 for _ in decode_units(codec, units)) == len(units)
    except VideoError:
        return False


def _exactly(codec: str, units: Sequence[bytes], where: str) -> Iterator[UInt8[np.ndarray, "height width 3"]]:
    count = 0
    for frame in decode_units(codec, units) if units else ():
        count += 1
        yield frame
    if count != len(units):
        raise DatasetError(f"{where}: expected a frame of each of {len(units)} messages, got {count}")


def _nal_units(unit: bytes) -> Iterator[bytes]:
    """The NAL units of an access unit in Annex B's format, each of at least a byte."""
    starts = [match.end() for match in _START.finditer(unit)]
    for start, end in pairwise([*starts, len(unit) + 3]):
        if start < len(unit):
            yield unit[start : end - 3]


def _obu_types(unit: bytes) -> Iterator[int]:
    at = 0
    while at < len(unit):
        head = unit[at]
        yield head >> 3 & 15
        at += 2 if head & 4 else 1
        if not head & 2:  # no size: up to the end
            return
        size = shift = 0
        while at < len(unit) and shift < 56:
            size |= (unit[at] & 127) << shift
            shift, at = shift + 7, at + 1
            if not unit[at - 1] & 128:
                break
        at += size


class _FrameNumbers:
    """Follows H.264's frame_num, which counts the pictures that others refer to."""

    def __init__(self) -> None:
        self._bits = 0  # of frame_num; 0: not known, or gaps are allowed
        self._has_planes = False
        self._last: int | None = None

    def is_next(self, unit: bytes, is_key: bool) -> bool:
        """Whether no picture is missing before an access unit, as far as its numbers tell."""
        for nal in _nal_units(unit):
            kind, is_reference = nal[0] & 31, bool(nal[0] >> 5 & 3)
            with suppress(IndexError):  # of a NAL unit that was cut off, of which the decoder tells
                if kind == 7:
                    self._bits = 0
                    self._read_sequence(_Bits(nal[1:_HEAD]))
                elif kind in (1, 5):
                    return not self._bits or self._follows(_Bits(nal[1:_HEAD]), is_key, is_reference)
        return False  # no picture in it

    def _follows(self, bits: "_Bits", is_key: bool, is_reference: bool) -> bool:
        for _ in ("first_mb_in_slice", "slice_type", "pic_parameter_set_id"):
            bits.golomb()
        bits.take(2 if self._has_planes else 0)
        last, number = self._last, bits.take(self._bits)
        if is_reference:
            self._last = number
        return is_key or last is None or number in (last, (last + 1) % (1 << self._bits))

    def _read_sequence(self, bits: "_Bits") -> None:
        profile = bits.take(8)
        bits.take(16)
        bits.golomb()
        self._has_planes = False
        if profile in _WITH_CHROMA:
            chroma = bits.golomb()
            self._has_planes = chroma == 3 and bool(bits.take(1))
            for _ in ("bit_depth_luma", "bit_depth_chroma"):
                bits.golomb()
            bits.take(1)
            for size in ([16] * 6 + [64] * (6 if chroma == 3 else 2)) if bits.take(1) else ():
                if bits.take(1):
                    last = following = 8
                    for _ in range(size):
                        following = (last + bits.signed_golomb()) % 256 if following else 0
                        last = following or last
        length = bits.golomb() + 4
        order = bits.golomb()
        if order == 0:
            bits.golomb()
        elif order == 1:
            bits.take(1)
            for _ in ("offset_for_non_ref_pic", "offset_for_top_to_bottom_field"):
                bits.golomb()
            for _ in range(min(bits.golomb(), 255)):
                bits.golomb()
        bits.golomb()
        self._bits = 0 if bits.take(1) else length


class _Bits:
    """Bits of a NAL unit, without the bytes that keep start codes out of it. Raises IndexError at its end."""

    def __init__(self, data: bytes) -> None:
        data = data.replace(b"\x00\x00\x03", b"\x00\x00")
        self._text, self._at = "".join(f"{byte:08b}" for byte in data), 0

    def take(self, count: int) -> int:
        """The number in the next bits."""
        if self._at + count > len(self._text):
            raise IndexError
        self._at += count
        return int(self._text[self._at - count : self._at] or "0", 2)

    def golomb(self) -> int:
        """An unsigned Exp-Golomb code."""
        one = self._text.index("1", self._at) if "1" in self._text[self._at :] else len(self._text)
        zeros = one - self._at
        self._at = one
        return self.take(zeros + 1) - 1

    def signed_golomb(self) -> int:
        """A signed Exp-Golomb code."""
        code = self.golomb()
        return (code + 1) // 2 if code % 2 else -(code // 2)
