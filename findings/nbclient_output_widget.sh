#!/usr/bin/env bash
# A progress bar of rich ends the execution of a notebook, if nbclient is told not to store the state of widgets.
#
# Versions: nbclient 0.11.0, rich 15.0.0, ipywidgets 8.1.9, ipykernel 7.4.0, nbformat 5.10.4; Python 3.11. Seen 2026-11-29.
# Guess before: a notebook may show a bar of rich, however it is executed.
# Behavior: rich shows a bar in a notebook within an ipywidgets Output. nbclient then looks up that widget's state, which
# it has not kept, and execute() raises KeyError with the widget's id, not CellExecutionError. With the default, True,
# the same notebook runs. A bar without a widget, such as printed lines, runs with both.
# Output seen:
#     store_widget_state=True: ran
#     store_widget_state=False: KeyError
# Exit code: 0 while this holds, 1 once it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  nbclient==0.11.0 rich==15.0.0 ipywidgets==8.1.9 ipykernel==7.4.0 nbformat==5.10.4
cat > "$folder/run.py" <<'PYTHON'
import sys

import nbformat
from nbclient import NotebookClient

CELL = """
from rich.progress import Progress
with Progress(transient=True) as progress:
    bar = progress.add_task("work", total=3)
    for _ in range(3):
        progress.advance(bar)
"""


def outcome(store: bool) -> str:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    try:
        NotebookClient(notebook, timeout=120, kernel_name="python3", store_widget_state=store).execute()
    except Exception as error:
        return type(error).__name__
    return "ran"


found = {store: outcome(store) for store in (True, False)}
for store, what in found.items():
    print(f"store_widget_state={store}: {what}")
sys.exit(0 if found == {True: "ran", False: "KeyError"} else 1)
PYTHON
cd "$folder" && JUPYTER_PATH="$folder/venv/share/jupyter" "$folder/venv/bin/python" run.py 2>"$folder/log"
