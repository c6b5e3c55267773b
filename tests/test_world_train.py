"""scripts/world_train.sh at small size: the town from nothing to a world, stopped and gone on with."""

import json
import os
import signal
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


@pytest.mark.parametrize(
    ("ends_by", "code"),
    [(None, 1), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)],
    ids=["failure", "TERM", "INT"],
)
def test_trainings_have_saved_their_state_when_the_script_ends(
    tmp_path: Path, ends_by: signal.Signals | None, code: int
) -> None:
    """Stages aside, as the decoder beside the tokens, a recording and a stage in front, which fails or is stopped."""
    # It waits before it says that it has begun: timeout, stopped before it knows its child, ends and lets it run on.
    begun = tmp_path / "begun"
    training = (
        "trap 'sleep 0.5; echo saved; exit 0' TERM; sleep 0.5; "
        f"echo training; touch {begun}; while :; do sleep 0.05; done"
    )
    lines = (
        "set -euo pipefail",
        f"OUTPUT={tmp_path} GPUS=0",
        "source scripts/stages.sh",
        f'stages() {{ within bash -c "{training}"; echo "the next stage"; }}',
        "aside stages",
        "timeout 100 sleep 99 &",
        f"while [ ! -f {begun} ]; do sleep 0.1; done; within false"
        if ends_by is None
        else f'within bash -c "{training}"',
    )
    # Where tests run in the background of a shell, SIGINT is ignored unless it is set back.
    command = ["env", "--default-signal=INT", "bash", "-c", "\n".join(lines)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as script:
        assert script.stdout is not None
        trainings = 1 if ends_by is None else 2
        assert [script.stdout.readline() for _ in range(trainings)] == ["training\n"] * trainings
        if ends_by is not None:
            os.killpg(script.pid, ends_by) if ends_by == signal.SIGINT else script.send_signal(ends_by)
        output, _ = script.communicate(timeout=60)
    assert (script.returncode, output) == (code, "saved\n" * trainings)


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
