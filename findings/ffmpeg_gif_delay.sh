#!/usr/bin/env bash
# ffmpeg's option -min_delay does not lift the short delays of a GIF, though its help says so and browsers do.
#
# Versions: imageio-ffmpeg 0.8.1 (ffmpeg n9.0.2), pillow 12.0.0; Python 3.11. Seen 2026-11-29.
# Guess before: a frame of 10 ms gets the default_delay of 100 ms, because the default of min_delay is 20 ms.
# Behavior: a delay of 10 ms stays 10 ms, with min_delay=2 and with min_delay=5 (hundredths of a second). Only a delay of
# 0 becomes 100 ms. A browser shows both for 100 ms, so a GIF read by ffmpeg runs up to ten times as fast as it is shown.
# Output seen:
#     delays of 100, 10, 0, 100 ms; durations by ffmpeg, in hundredths:
#     min_delay=2: 10 1 10 10
#     min_delay=5: 10 1 10 10
# Exit code: 0 while this holds, 1 once it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check imageio-ffmpeg==0.8.1 pillow==12.0.0
cat > "$folder/run.py" <<'PYTHON'
import subprocess
import sys

import imageio_ffmpeg
from PIL import Image

frames = [Image.new("L", (16, 16), 60 * index) for index in range(4)]
frames[0].save("a.gif", save_all=True, append_images=frames[1:], duration=[100, 10, 0, 100])
print("delays of 100, 10, 0, 100 ms; durations by ffmpeg, in hundredths:")
found = []
for least in (2, 5):
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-min_delay", str(least), "-i", "a.gif", "-c", "copy"]
    listed = subprocess.run([*command, "-f", "framecrc", "-"], capture_output=True, text=True, check=True).stdout
    found.append([line.split(",")[3].strip() for line in listed.splitlines() if line.startswith("0,")])
    print(f"min_delay={least}: {' '.join(found[-1])}")
sys.exit(0 if found == [["10", "1", "10", "10"]] * 2 else 1)
PYTHON
cd "$folder" && "$folder/venv/bin/python" run.py
