"""Training with memory frames: which frames a window holds, what its loss counts, and the model that comes out."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings, strategies as st
from tiny_training import CPU, TINY_SIZE, config, placed, read_log, tokenized, world_model_objective

from terra.actions import Keys, Waypoints
from terra.errors import ConfigError, DatasetError
from terra.memory import expected_poses, memory_times, place_action
from terra.prompt import pack_blocks
from terra.training.prediction import evaluate_memory
from terra.training.randomness import step_random
from terra.training.windows import MemoryWindows, Windows
from terra.training.world_model import train_world_model
from terra.training.world_model_settings import MemoryTraining, WorldModelTraining
from terra.world_model import load_adapter, load_world_model
from terra.world_model.model import IGNORED_LABEL

WINDOW = 9
MEMORY = {"frames": 2}


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def tagged(lengths: tuple[int, ...] = (40, 44, 30)):
    """Drives whose tokens are the frames' numbers."""
    data = placed(lengths)
    tokens = torch.arange(len(data.tokens))[:, None, None].expand(-1, 2, 4).contiguous().to(torch.int16)
    return replace(data, tokens=tokens, codebook_size=len(tokens))


def frames_of(batch) -> np.ndarray:
    return batch.tokens[:, :, 0, 0].numpy()


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    frames=st.integers(1, 4),
    kind=st.sampled_from(["view", "recent"]),
    share=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_a_window_is_memory_and_then_consecutive_frames(seed, frames, kind, share):
    data = tagged()
    memory = MemoryTraining(frames=frames, kind=kind, share=share, other_drives=0.5, exact=0.0)
    windows = MemoryWindows(data, WINDOW, memory)
    batch = windows.draw(torch.Generator().manual_seed(seed), 12, 1.0)
    bounds = data.episode_start.tolist()
    assert batch.remembers.any() or share < 1
    for row, (window, actions) in enumerate(zip(frames_of(batch), batch.actions, strict=True)):
        num_memory = frames if batch.remembers[row] else 0
        memory, consecutive = window[:num_memory], window[num_memory:]
        assert (np.diff(consecutive) == 1).all()
        (first, last), *rest = [(a, b) for a, b in pairwise(bounds) if a <= consecutive[0] < b]
        assert (rest, consecutive[-1] < last) == ([], True)
        assert torch.equal(actions[num_memory:], data.actions[torch.from_numpy(consecutive).long()])
        age = 0 if kind == "recent" else 10
        for frame in memory:
            same_drive = first <= frame < last
            assert frame < consecutive[0] - age if same_drive else {int(frame) < 84, consecutive[0] < 84} == {True}
        if num_memory:
            now = int(consecutive[2])
            times = memory_times(num_memory, WINDOW - num_memory - 3, data.fps)
            expected = expected_poses(data.poses[now].numpy(), data.actions[now].numpy(), Waypoints(), times)
            places = place_action(expected, data.poses[memory.astype(int)].numpy(), Waypoints())
            np.testing.assert_array_equal(actions[:num_memory], places)
        if kind == "recent" and num_memory:
            assert memory.tolist() == list(range(consecutive[0] - frames, consecutive[0]))


def test_exact_memory_is_the_window_s_own_frames_at_their_times():
    windows = MemoryWindows(tagged(), WINDOW, MemoryTraining(frames=2, share=1.0, exact=1.0))
    batch = windows.draw(torch.Generator().manual_seed(0), 16, 1.0)
    frames = frames_of(batch)[batch.remembers.numpy()]
    # Of 4 generated frames, 5 to 8 of the window, memory is for the times 1.5 and 3.5 frames after the last given one.
    assert len(frames) > 4
    assert (frames[:, :2] - frames[:, 4:5] == [2, 4]).all()


def test_in_the_first_part_of_a_run_all_windows_remember_their_own_frames():
    memory = MemoryTraining(frames=2, share=0.0, exact_until=0.4)
    draw = lambda windows, progress: windows.draw(torch.Generator().manual_seed(0), 16, progress)  # noqa: E731
    first = draw(MemoryWindows(tagged(), WINDOW, memory), 0.39)
    assert first.remembers.all()
    assert (frames_of(first)[:, :2] - frames_of(first)[:, 4:5] == [2, 4]).all()
    assert not draw(MemoryWindows(tagged(), WINDOW, memory), 0.4).remembers.any()
    assert not draw(MemoryWindows(tagged(), WINDOW, memory.replace(kind="recent")), 0.0).remembers.any()


def test_other_drives_of_the_place_are_remembered_where_they_may():
    data = tagged()
    for share in (0.0, 1.0):
        windows = MemoryWindows(data, WINDOW, MemoryTraining(frames=4, share=1.0, other_drives=share, exact=0.0))
        batch = windows.draw(torch.Generator().manual_seed(0), 64, 1.0)
        drives = np.searchsorted(data.episode_start.numpy(), frames_of(batch), side="right") - 1
        own = drives[:, -1:]
        assert (drives != own).any() == bool(share)
        assert (drives[drives != own] < 2).all()  # the third drive has a place of its own


def test_memory_frames_show_what_comes_into_view():
    """On a circle of 21 frames, what was seen one lap ago is what is seen now."""
    windows = MemoryWindows(tagged((60,)), WINDOW, MemoryTraining(frames=2, share=1.0))
    whole, _ = windows.spread(30)
    frames = frames_of(whole)
    later = frames[frames[:, 2] > 34]
    lap = 2 * np.pi / 0.3
    phase = (later[:, 2:3] + 2 - later[:, :2]) % lap
    assert (np.minimum(phase, lap - phase).min(axis=1) < 8).all()


def test_the_loss_counts_no_memory_frame():
    objective = world_model_objective(placed(), window=WINDOW, memory=MEMORY)
    batch = objective.draw(step_random(0, 0, CPU), 16, 1.0)
    ignored = (batch["labels"] == IGNORED_LABEL).view(16, WINDOW, 14)
    assert 4 < ignored[:, 0, 0].sum() < 16
    assert torch.equal(ignored, ignored[:, :1, :1].expand(-1, WINDOW, 14) & (torch.arange(WINDOW) < 2)[:, None])
    assert batch["input_ids"].min() >= 0
    rows = ignored[:, 0, 0].nonzero()[:, 0]
    assert (batch["actions"][rows][:, :2, :, 2] == 0).all()
    before = objective.loss(batch, 0.0)["loss"]
    batch["labels"][rows[0], 14:28] = 3
    assert objective.loss(batch, 0.0)["loss"] != before


def test_in_the_first_part_of_a_run_only_memory_frames_are_sure_to_be_right():
    memory = MEMORY | {"exact_until": 0.5, "exact_corruption": 0.8}
    data = placed()
    objective = world_model_objective(data, window=WINDOW, memory=memory, max_corruption=0.0)
    batch = objective.draw(step_random(0, 0, CPU), 64, 0.1)
    ids, labels = (batch[name].view(64, WINDOW, 14) for name in ("input_ids", "labels"))
    changed = ids[:, 2:] != labels[:, 2:]
    assert 0.25 < changed.float().mean() < 0.5  # half of 0.8, less the replacements that change nothing
    assert changed.float().mean(dim=(1, 2)).std() > 0.1  # a rate of its own for each window
    frames = {tuple(each.tolist()) for each in pack_blocks(data.tokens.long(), 6).view(-1, 14)}
    assert {tuple(each.tolist()) for each in ids[:, :2].flatten(0, 1)} <= frames
    later = objective.draw(step_random(0, 0, CPU), 64, 0.5)
    assert torch.equal(later["input_ids"].view(64, WINDOW, 14)[:, 2:], later["labels"].view(64, WINDOW, 14)[:, 2:])


def test_without_memory_windows_are_as_they_were():
    data = tokenized((30,))
    generator = torch.Generator().manual_seed(3)
    chosen = torch.randint(len(data.window_starts(WINDOW)), (5,), generator=torch.Generator().manual_seed(3))
    batch = Windows(data, WINDOW).draw(generator, 5, 1.0)
    tokens, actions = data.windows(data.window_starts(WINDOW)[chosen], WINDOW)
    assert torch.equal(batch.tokens, tokens)
    assert torch.equal(batch.actions, actions)
    assert not batch.remembers.any()


def test_evaluation_compares_the_same_frames():
    data = placed()
    objective = world_model_objective(data, window=WINDOW, memory=MEMORY)
    windows = MemoryWindows(data, WINDOW, MemoryTraining(frames=2))
    metrics = evaluate_memory(objective.model.eval(), windows, 6)
    assert metrics["frames"] == 2
    for name in ("with", "without"):
        assert len(metrics[name]["cross_entropy_by_frame"]) == WINDOW - 2
        assert metrics[name]["evaluated_windows"] == 6
    assert metrics["with"]["copy_accuracy_by_frame"][1:] == metrics["without"]["copy_accuracy_by_frame"][1:]
    assert metrics["with"]["cross_entropy"] != metrics["without"]["cross_entropy"]
    whole, alone = windows.spread(6)
    assert torch.equal(whole.tokens[:, 2:], alone.tokens)
    ids = pack_blocks(whole.tokens, 6)
    labels = ids.clone()
    labels[:, : 3 * 14] = IGNORED_LABEL
    with torch.no_grad():
        loss = objective.model(input_ids=ids, actions=whole.actions, labels=labels).loss.item()
    assert metrics["with"]["cross_entropy"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
    ("data", "changes", "error", "message"),
    [
        (tokenized((40,)), {}, DatasetError, "memory.frames: expected tokens with poses, got none: run terra tokenize"),
        (placed((12,)), {}, DatasetError, "memory.frames: expected an episode of at least 21 frames, got none"),
        (placed(), {"frames": 6}, ConfigError, "memory.frames: expected at most 5 in a window of 9, got 6"),
        (
            replace(placed(), space=Keys(names=("left", "right"))),
            {},
            ConfigError,
            "memory.frames: expected none for actions of",
        ),
    ],
)
def test_what_cannot_be_remembered_is_refused(data, changes, error, message):
    with pytest.raises(error, match=message):
        MemoryWindows(data, WINDOW, MemoryTraining(**MEMORY | changes))


def train_tiny(output: Path, accelerator: Accelerator, **training: object):
    values = {"window": WINDOW, "evaluation_windows": 3, "memory": MEMORY, **training}
    data, held_out = placed(), placed((30,), seed=1)
    return train_world_model(
        data, held_out, config(output, max_steps=2), TINY_SIZE, WorldModelTraining(**values), accelerator
    )


@pytest.mark.slow
def test_a_model_that_remembers_is_written_tuned_and_adapted(tmp_path, accelerator):
    section = {"frames": 2, "field_of_view": 90.0, "range": 40.0}
    train_tiny(tmp_path / "plain", accelerator, memory={})
    assert "memory" not in json.loads((tmp_path / "plain" / "world_model" / "config.json").read_text())
    assert "memory" not in json.loads((tmp_path / "plain" / "metrics.json").read_text())
    train_tiny(tmp_path / "new", accelerator)
    base = str(tmp_path / "plain" / "world_model")
    train_tiny(tmp_path / "tuned", accelerator, init_from=base, keep="best")
    for name in ("new", "tuned"):
        written = json.loads((tmp_path / name / "world_model" / "config.json").read_text())["memory"]
        assert written.items() >= section.items()
        assert load_world_model(tmp_path / name / "world_model").config.memory == written
        metrics = json.loads((tmp_path / name / "metrics.json").read_text())
        assert metrics["memory"]["frames"] == 2
    assert metrics["start"]["memory"]["with"]["cross_entropy"] > 0
    last = read_log(tmp_path / "tuned")[-1]
    assert {"held_out_memory_cross_entropy", "held_out_no_memory_cross_entropy"} <= last.keys()
    train_tiny(tmp_path / "adapted", accelerator, init_from=base, adapter={"rank": 2})
    assert load_adapter(tmp_path / "adapted" / "adapter", Path(base)).config.memory == written
    train_tiny(tmp_path / "forgets", accelerator, init_from=str(tmp_path / "new" / "world_model"), memory={})
    assert "memory" not in json.loads((tmp_path / "forgets" / "world_model" / "config.json").read_text())
