#!/usr/bin/env bash
# The bound record_size_limit of MCAP's Python reader does not bound what a chunk unpacks to.
#
# Versions: mcap 1.6.0, lz4 4.4.5, zstandard 0.25.0; Python 3.11. Seen 2026-11-29.
# Guess before: with record_size_limit of 1 MiB no chunk of more than 1 MiB is held in memory.
# Behavior: the bound holds for a chunk as it is stored. Of 12 kB by zstd, or 1.3 MB by lz4 (then within a limit of 2 MiB),
# 300 MiB are unpacked, and the reader gives a message of 300 MiB.
# Output seen:
#     zstd: a file of less than 1 MiB gave a message of 300 MiB
#     lz4: a file of less than 2 MiB gave a message of 300 MiB
# Exit code: 0 while this holds, 1 once it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check mcap==1.6.0 lz4==4.4.5 zstandard==0.25.0
cat > "$folder/run.py" <<'PYTHON'
import io
import sys

from mcap.reader import NonSeekingReader
from mcap.writer import CompressionType, Writer

holds = True
for kind, limit in ((CompressionType.ZSTD, 1 << 20), (CompressionType.LZ4, 2 << 20)):
    file = io.BytesIO()
    writer = Writer(file, compression=kind)
    writer.start()
    channel = writer.register_channel("topic", "json", writer.register_schema("a", "", b""))
    writer.add_message(channel, 0, bytes(300 << 20), 0)
    writer.finish()
    assert len(file.getvalue()) < limit
    file.seek(0)
    size = 0
    for _, _, message in NonSeekingReader(file, record_size_limit=limit).iter_messages(log_time_order=False):
        size = len(message.data) >> 20
    print(f"{kind.name.lower()}: a file of less than {limit >> 20} MiB gave a message of {size} MiB")
    holds &= size == 300
sys.exit(0 if holds else 1)
PYTHON
"$folder/venv/bin/python" "$folder/run.py"
