#!/usr/bin/env bash
# ffmpeg -nostdin exits with 0 when it refuses to overwrite a file: a script takes the old file for its result.
#
# Versions: imageio-ffmpeg 0.8.1 (ffmpeg n9.0.2); Python 3.11. Seen 2026-11-29.
# Guess before: subprocess.run(["ffmpeg", "-nostdin", ...], check=True) raises where the output exists.
# Behavior: ffmpeg says "already exists. Exiting." on the error output, writes nothing, and exits with 0. A benchmark then
# times a conversion that never ran, and a pipeline goes on with the file of an earlier run. -y overwrites.
# Output seen:
#     exit code 0; the file is the old one; File 'out.mp4' already exists. Exiting.
# Exit code: 0 while this holds, 1 once it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check imageio-ffmpeg==0.8.1
cd "$folder"
ffmpeg=$("$folder/venv/bin/python" -c 'import imageio_ffmpeg; print(imageio_ffmpeg.get_ffmpeg_exe())')
echo "of an earlier run" > out.mp4
code=0
"$ffmpeg" -v error -nostdin -f lavfi -i testsrc=duration=1 out.mp4 2> errors || code=$?
echo "exit code $code; the file is $([ "$(cat out.mp4)" = "of an earlier run" ] && echo the old one || echo new); $(head -1 errors)"
[ "$code" = 0 ] && [ "$(cat out.mp4)" = "of an earlier run" ] && grep -q "already exists" errors
