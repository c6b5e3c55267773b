"""Writing of MP4: frames are encoded as they come, as the H.264 that browsers and QuickTime play."""

import subprocess
import tempfile
from fractions import Fraction
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from decoder.ffmpeg import ffmpeg_program, first_complaint, start_ffmpeg, widen
from tokenizer.errors import VideoError

_FROM_RGB = ("-vf", "scale=out_color_matrix=bt709:out_range=tv:flags=bicubic+accurate_rnd+full_chroma_inp")
_AS_BT709 = "setparams=colorspace=bt709:color_primaries=bt709:color_trc=bt709:range=tv"


class Mp4Sink:
    """Encodes frames as they come; `finish` completes the file, `close` ends the encoder, also after a failure.

    The video is H.264 with 4:2:0 chroma (which browsers and QuickTime play), BT.709 colors, and its index first, for
    streaming. With `planes` the frames come as BT.709 YUV 4:2:0 of limited range, else as RGB.
    """

    def __init__(
        self, path: Path, fps: float, size: tuple[int, int], crf: int, preset: str, threads: int, planes: bool = False
    ) -> None:
        rate = str(Fraction(fps).limit_denominator(1001))
        pixels, filters = "rgb24", _FROM_RGB
        if planes:
            pixels, filters = "yuv420p", ("-vf", _AS_BT709)
        command = [
            *(ffmpeg_program(), "-v", "error", "-y", "-filter_threads", str(threads)),
            *("-f", "rawvideo", "-pix_fmt", pixels, "-s", f"{size[0]}x{size[1]}", "-r", rate, "-i", "pipe:0"),
            *filters,
            *("-c:v", "libx264", "-pix_fmt", "yuv420p", "-crf", str(crf), "-preset", preset, "-threads", str(threads)),
            *("-colorspace", "bt709", "-color_primaries", "bt709", "-color_trc", "bt709", "-color_range", "tv"),
            *("-movflags", "+faststart", "-f", "mp4", str(path.absolute())),
        ]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close())
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}
        try:
            self._process = start_ffmpeg(command, self._log, **pipes, bufsize=0)
        except VideoError:
            self._log.close()
            raise
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        widen(self._pipe)

    def append(self, frame: UInt8[np.ndarray, "..."]) -> None:
        """Encode one frame, RGB (height, width, 3) or planes (3/2 height, width).

        Raises `OSError` with ffmpeg's reason if ffmpeg has exited.
        """
        rest = np.ascontiguousarray(frame).data.cast("B")
        try:
            while rest:
                rest = rest[self._pipe.write(rest) or 0 :]
        except BrokenPipeError as error:
            self._process.wait()
            raise OSError(self._last_words()) from error

    def finish(self) -> None:
        """Wait until the file is complete. Raises `OSError` with ffmpeg's reason if ffmpeg fails."""
        self._pipe.close()
        if self._process.wait() != 0:
            raise OSError(self._last_words())

    def close(self) -> None:
        """End the ffmpeg process, whatever its state."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._pipe.close()
        self._log.close()

    def _last_words(self) -> str:
        self._log.seek(0)
        return first_complaint(self._log.read(), self._process.returncode)
