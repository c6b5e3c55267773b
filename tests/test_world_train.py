"""scripts/world_train.sh at small size: the town from nothing to a world, stopped and gone on with."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from terra.dataset import read_split
from terra.pipeline import Pipeline
from terra.recording.samples import opengl_problem
from terra.rollout import load_action_file

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
SMALL = {
    "WORLD": "town_hd",
    "GPUS": "0",
    "CORES": "4",
    "SCALE": "0.01",
    "SCENES": "1",
    "SIZE": "[64,96]",
    "RECORD": "frames_per_episode=66 episodes_per_place=1 maneuvers=[left,right]",
    "TOKENIZER": "recipe=tokenizer_smoke schedule=steps max_seconds=null max_steps=2 tokenizer.dim=6",
    "DECODER": "device=cpu perceptual.weight=0 adversarial.width=8 batch_size=2 schedule=steps max_seconds=null "
    "max_steps=1 evaluation_frames=8",
    "WORLD_MODEL": "recipe=world_model_smoke schedule=steps max_seconds=null max_steps=1 evaluation_windows=2",
    "ESTIMATOR": "estimator.width=8 estimator.reach=1 window=5 batch_size=2 schedule=steps max_seconds=null "
    "max_steps=1 evaluation_windows=2 max_frames=66",
    "EVALUATE": "num_clips=1 num_frames=6 max_groups=1 group_frames=6 resamples=10 frechet_resamples=2 pictures=1",
    "LIVE": "--frames 1 --warm 1",
}


def train(output: Path, limit: int) -> subprocess.CompletedProcess[str]:
    given = SMALL | {"OUTPUT": str(output), "LIMIT": str(limit), "PYTHON": sys.executable}
    return subprocess.run(
        ["bash", "scripts/world_train.sh"], cwd=ROOT, env=os.environ | given, capture_output=True, text=True
    )


def test_another_world_is_refused(tmp_path: Path) -> None:
    given = {"WORLD": "doom_hd", "OUTPUT": str(tmp_path), "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", "scripts/world_train.sh"], cwd=ROOT, env=os.environ | given, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (2, "WORLD: expected doom, pusht or town_hd, got doom_hd\n")


def test_what_runs_beside_has_saved_its_state_when_the_script_ends() -> None:
    """A stage in a shell of its own, as the decoder beside the tokens, while the stage in front fails."""
    script = (ROOT / "scripts" / "world_train.sh").read_text()
    stop = script[script.index("lane() {") : script.index("trap stop EXIT")]
    work = "trap 'sleep 0.5; echo saved; exit 0' TERM; while :; do sleep 0.05; done"
    lines = (
        "set -euo pipefail",
        "recordings=() beside=()",
        stop,
        "trap stop EXIT",
        f'stages() {{ timeout --kill-after 30 100 bash -c "{work}"; echo "the next stage"; }}',
        "lane stages &",
        "beside+=($!)",
        "timeout 100 sleep 99 & recordings+=($!)",
        "sleep 0.5; echo failed; exit 3",
    )
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (3, "failed\nsaved\n"), done.stderr


def test_town_hd_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    if (problem := opengl_problem()) is not None:
        pytest.skip(problem)
    stopped = train(tmp_path, 12)
    assert stopped.returncode == 75, stopped.stdout + stopped.stderr
    done = train(tmp_path, 1500)
    logs = "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    places = {name: read_split(tmp_path / "towns" / name, "held_out").episodes for name in ("town_hd", "shipped")}
    ours, theirs = ([(each.id, each.poses.x.tolist()) for each in episodes] for episodes in places.values())
    assert ours == theirs  # the same drives in both sizes
    for name in ("town_hd", "shipped"):
        metrics = json.loads((tmp_path / "evaluation" / name / "metrics.json").read_text())
        assert metrics["complete"] is True
        assert metrics["settings"]["measured_size"] == [144, 256]
    live = json.loads((tmp_path / "live.json").read_text())
    assert live["frames"] == 1
    assert live["frames_per_second"] > 0
    assert (tmp_path / "drive" / "video.mp4").exists()
    scene = tmp_path / "world" / "contexts" / "scene_1"
    with Pipeline.from_pretrained(tmp_path / "world", engine="persistence", device="cpu") as pipeline:
        assert pipeline.tokenizer.image_size == (64, 96)
        actions, _ = load_action_file(scene / "recorded.json", pipeline.engine.spec, 60)
    assert len(actions) == 59
    again = train(tmp_path, 1500)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "world model" not in again.stdout  # nothing is trained again
