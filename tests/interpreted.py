"""Programs whose Triton kernels run in Triton's interpreter, on a CPU."""

import os
import subprocess
import sys
from pathlib import Path


def run_interpreted(tmp_path: Path, program: str, *arguments: Path) -> None:
    here = Path(__file__).parent
    (tmp_path / "program.py").write_text(program)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{here.parent}:{here}"}
    command = [sys.executable, tmp_path / "program.py", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "all equal"
