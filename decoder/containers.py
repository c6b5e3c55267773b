"""The container of a video by its first bytes, and whether the file is whole."""

from pathlib import Path

from tokenizer.errors import VideoError
from tokenizer.files import open_regular

_MAX_BOXES = 1 << 16  # of an MP4; a fragmented one has two for each fragment
_IVF, _HEVC_DELIMITER = b"DKIF", b"\x00\x00\x00\x01\x46\x01"  # access units, as Terra writes them of messages
_RIFF, _EBML, _SEGMENT, _TS_PACKET = b"RIFF", b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67", 188


def find_demuxer(path: Path) -> str:
    """ffmpeg's demuxer of a whole video, by its first bytes.

    Raises:
        VideoError: another kind of file, or one that was cut off, as far as its kind can tell.
    """
    try:
        size = path.stat().st_size
        with open_regular(path, VideoError, "a video") as file:
            head = file.read(3 * _TS_PACKET)
            if head.startswith(b"GIF8"):
                file.seek(-1, 2)
                if file.read() != b";":
                    raise VideoError(f"{path}: expected a whole GIF, got one that was cut off")
                return "gif"
        if head.startswith(_IVF):
            return "ivf"
        if head.startswith(_HEVC_DELIMITER):
            return "hevc"
        if head[:4] == _RIFF and head[8:12] == b"AVI ":
            _check_size(path, 8 + int.from_bytes(head[4:8], "little"), size)
            return "avi"
        if head.startswith(_EBML):
            _check_size(path, _matroska_size(head), size)
            return "matroska"
        if len(head) == 3 * _TS_PACKET and {head[0], head[_TS_PACKET], head[2 * _TS_PACKET]} == {ord("G")}:
            _check_size(path, -(-size // _TS_PACKET) * _TS_PACKET, size)
            return "mpegts"
        check_boxes(path)
    except OSError as error:
        raise VideoError(f"{path}: expected a readable video: {error.strerror or error}") from None
    return "mov"


def _check_size(path: Path, expected: int, size: int) -> None:
    if size < expected:
        raise VideoError(f"{path}: expected {expected} bytes, got {size}: the video was cut off")


def _matroska_size(head: bytes) -> int:
    """The bytes that a Matroska or WebM file declares; 0 if it doesn't, as a live recording (RFC 8794)."""
    length, start = _ebml_number(head, 4)
    segment = start + length
    if head[segment : segment + 4] != _SEGMENT:
        return 0
    length, start = _ebml_number(head, segment + 4)
    return start + length if length else 0


def _ebml_number(head: bytes, start: int) -> tuple[int, int]:
    """The number (1 to 8 bytes; 0 where all its bits are set: unknown) that begins at a byte, and the byte after it."""
    first = head[start] if start < len(head) else 0
    width = 9 - first.bit_length()
    if not first:
        return 0, start + 1
    number = int.from_bytes(head[start : start + width], "big") & ((1 << 7 * width) - 1)
    return (0 if number == (1 << 7 * width) - 1 else number), start + width


def check_boxes(path: Path) -> None:
    """Raise `VideoError` if a file is no MP4 or was cut off, even where ffmpeg would read a shorter video.

    An MP4 is a sequence of boxes: 4 bytes of size (0: to the file's end; 1: the size is in 8 more bytes), 4 bytes of
    type (ISO 14496-12).
    """
    size = path.stat().st_size
    kinds: list[bytes] = []
    start = 0
    with open_regular(path, VideoError, "a video") as file:
        while start < size:
            file.seek(start)
            header = file.read(16)
            length, kind = int.from_bytes(header[:4], "big"), header[4:8]
            if length == 1:
                length = int.from_bytes(header[8:16], "big")
            if not kind.isalnum() or 0 < length < 8:
                break
            kinds.append(kind)
            if len(kinds) > _MAX_BOXES:
                raise VideoError(f"{path}: expected at most {_MAX_BOXES} boxes, got more")
            if start + length > size and kinds[0] in (b"ftyp", b"moov", b"wide", b"mdat", b"free", b"skip"):
                raise VideoError(f"{path}: expected {start + length} bytes, got {size}: the video was cut off")
            start += length or size
    if b"moov" not in kinds:
        raise VideoError(f"{path}: expected an MP4 video, got {'another kind of file' if size else 'an empty file'}")
