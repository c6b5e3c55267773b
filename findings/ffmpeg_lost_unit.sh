#!/usr/bin/env bash
# A lost access unit of H.264 or VP9 leaves no trace in ffmpeg's exit status, its errors or its number of frames.
#
# Versions: imageio-ffmpeg 0.8.1 (ffmpeg 9.0.2), numpy 2.3.5; Python 3.11. Seen 2026-11-29.
# Guess before: with -xerror ffmpeg fails where a frame refers to one that is missing, or gives fewer frames than packets.
# Behavior: 30 pictures carry their number; the unit of number 13 is taken out, as a lossy connection does. ffmpeg -v error
# -xerror says nothing, ends with 0 and gives 29 frames, of which some before the next key frame (20) show other
# numbers. Only -v debug tells of H.264's "Frame num gap". (Of H.265 ffmpeg gave fewer frames, of AV1 it failed.)
# Output seen:
#     h264: exit status 0, no error, 29 frames of 29 units, 3 of them wrong
#     vp9: exit status 0, no error, 29 frames of 29 units, 2 of them wrong
# Exit code: 0 while this holds, 1 once it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check imageio-ffmpeg==0.8.1 numpy==2.3.5
cat > "$folder/run.py" <<'PYTHON'
import subprocess
import sys
from pathlib import Path

import imageio_ffmpeg
import numpy as np

FFMPEG, WIDTH, HEIGHT, COUNT, LOST = imageio_ffmpeg.get_ffmpeg_exe(), 256, 128, 30, 13
FOLDER = Path(sys.argv[1])


def picture(number):
    row = np.repeat([235 if number >> bit & 1 else 20 for bit in range(8)], WIDTH // 8)
    return np.broadcast_to(row[None, :, None], (HEIGHT, WIDTH, 3)).astype(np.uint8)


def number(frame):
    blocks = frame.reshape(HEIGHT, 8, WIDTH // 8, 3)[:, :, 8:-8].mean(axis=(0, 2, 3))
    return sum(int(level > 127) << bit for bit, level in enumerate(blocks))


def units(data, codec):
    if codec == "h264":  # by access unit delimiters
        mark = b"\x00\x00\x00\x01\x09"
        return b"", [mark + part for part in data.split(mark)[1:]]
    found, at = [], 32  # an IVF file's header; each frame has a header of 12 bytes
    while at < len(data):
        end = at + 12 + int.from_bytes(data[at : at + 4], "little")
        found.append(data[at:end])
        at = end
    return data[:32], found


holds = True
raw = b"".join(picture(each).tobytes() for each in range(COUNT))
for codec, encoder in {
    "h264": "libx264 -bf 0 -sc_threshold 0 -bsf:v h264_metadata=aud=insert -f h264",
    "vp9": "libvpx-vp9 -deadline realtime -lag-in-frames 0 -f ivf",
}.items():
    source = f"-v error -f rawvideo -pix_fmt rgb24 -s {WIDTH}x{HEIGHT} -r 20 -i pipe:0 -pix_fmt yuv420p -g 10 -c:v {encoder}"
    data = subprocess.run([FFMPEG, *source.split(), "pipe:1"], input=raw, stdout=subprocess.PIPE, check=True).stdout
    head, parts = units(data, codec)
    assert len(parts) == COUNT
    path = FOLDER / codec
    path.write_bytes(head + b"".join(parts[:LOST] + parts[LOST + 1 :]))
    demuxer = "h264" if codec == "h264" else "ivf"
    decode = f"-v error -xerror -f {demuxer} -i {path} -fps_mode passthrough -pix_fmt rgb24 -f rawvideo pipe:1"
    run = subprocess.run([FFMPEG, *decode.split()], capture_output=True)
    frames = np.frombuffer(run.stdout, np.uint8).reshape(-1, HEIGHT, WIDTH, 3)
    meant = [each for each in range(COUNT) if each != LOST]
    wrong = sum(number(frame) != each for frame, each in zip(frames, meant))
    said = "no error" if not run.stderr else "an error"
    print(f"{codec}: exit status {run.returncode}, {said}, {len(frames)} frames of {len(meant)} units, {wrong} of them wrong")
    holds &= not run.returncode and not run.stderr and len(frames) == len(meant) and wrong > 0
sys.exit(0 if holds else 1)
PYTHON
"$folder/venv/bin/python" "$folder/run.py" "$folder"
