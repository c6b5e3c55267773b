"""Programs whose Triton kernels run in Triton's interpreter, on a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import torch


def run_interpreted(tmp_path: Path, program: str, *arguments: Path) -> None:
    here = Path(__file__).parent
    (tmp_path / "program.py").write_text(program)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{here.parent}:{here}"}
    command = [sys.executable, tmp_path / "program.py", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "all equal"


def round_to_8_bits_rightly() -> None:
    """For programs that are interpreted: the interpreter's own rounding to 8 bits loses carries (triton 3.7)."""
    from triton import language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def converted(values, kind, to, mode):
        if kind != tl.float32 or to != tl.float8e4nv:
            return convert(values, kind, to, mode)
        return torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = converted
