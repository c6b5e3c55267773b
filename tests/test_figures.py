"""What the notebooks show: curves of a run, videos side by side, paths from above, the speed of loaded engines."""

import json

import numpy as np
import pytest
from tiny_driving import drive_poses, write_driving

from terra.benchmark.compare import compare_engines, speed_table
from terra.config.files import compose
from terra.dataset import read_split
from terra.errors import OutputError
from terra.evaluation.clips import choose_clips
from terra.evaluation.motion import integrate, steps_of
from terra.evaluation.plots import draw_paths, draw_strip
from terra.evaluation.scores import GENERATED, PERSISTENCE, TRUE, ClipScores
from terra.training.curves import draw_log, read_log


def test_a_log_is_drawn_as_it_is(tmp_path):
    lines = [{"step": 1, "loss": 3.0}, {"step": 2, "accuracy": 0.5}, {"step": 3, "loss": 2.0}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_log(tmp_path, "loss") == ([1, 3], [3.0, 2.0])
    figure = draw_log(tmp_path, {"loss": "nats", "accuracy": "share"})
    assert [axes.get_ylabel() for axes in figure.axes] == ["nats", "share"]
    assert figure.axes[0].lines[0].get_xydata().tolist() == [[1, 3], [3, 2]]
    with pytest.raises(OutputError, match="expected speed, got accuracy, loss, step"):
        read_log(tmp_path, "speed")


@pytest.mark.parametrize("content", [None, "{\n"])
def test_a_bad_log_is_one_line(tmp_path, content):
    if content is not None:
        (tmp_path / "log.jsonl").write_text(content)
    with pytest.raises(OutputError, match="expected the log of a training run") as caught:
        read_log(tmp_path, "loss")
    assert "\n" not in str(caught.value)


def test_a_strip_goes_from_the_last_context_frame_to_the_end():
    videos = {name: np.full((9, 4, 8, 3), level, np.uint8) for name, level in {"true": 10, "generated": 20}.items()}
    for video in videos.values():
        video[:, 0, 0] = np.arange(9)[:, None]
    figure = draw_strip(videos, fps=10.0, num_context=3)
    shown = [axes.images[0].get_array() for axes in figure.axes]
    assert [int(picture[0, 0, 0]) for picture in shown] == [2, 3, 4, 6, 7, 8] * 2
    assert [int(picture[1, 1, 0]) for picture in shown] == [10] * 6 + [20] * 6
    assert [axes.get_title() for axes in figure.axes[:6]] == ["0.0 s", "0.1 s", "0.2 s", "0.4 s", "0.5 s", "0.6 s"]
    assert [figure.axes[index].get_ylabel() for index in (0, 6)] == ["true", "generated"]


def test_paths_are_those_told_and_recovered(tmp_path):
    episodes = read_split(write_driving(tmp_path / "data", num_frames=8), "held_out").episodes
    clips = choose_clips(episodes, 2, num_frames=6, num_context=2, seed=0)
    straight = steps_of(drive_poses(5, turning=0.0), 0, 5)
    steps = {TRUE: clips[0].instructed, GENERATED: straight, PERSISTENCE: 0 * straight}
    figure = draw_paths([ClipScores(clip, steps=steps) for clip in clips])
    drawn = {line.get_label(): np.asarray(line.get_xydata()) for line in figure.axes[0].lines}
    assert np.allclose(drawn["instructed"], integrate(clips[0].instructed)[:, 1::-1])
    assert np.allclose(drawn[TRUE], drawn["instructed"])
    assert np.allclose(drawn[GENERATED][:, 0], 0)
    assert not drawn[PERSISTENCE].any()
    left, right = figure.axes[0].get_xlim()
    assert left > right


def test_engines_are_compared_with_the_first(persistence_engine, wait):
    speeds = compare_engines({"a": (persistence_engine, [1]), "b": (persistence_engine, [1, 3])}, wait)
    assert [(each.engine, each.rollouts) for each in speeds] == [("a", 1), ("b", 1), ("b", 3)]
    assert all(each.frames_per_second > 0 for each in speeds)
    table = speed_table(speeds, tokens_per_frame=12)
    assert table.columns[-1].header == "times a"
    assert next(iter(table.columns[-1].cells)) == "1"


def test_settings_are_those_of_a_command_line():
    config = compose("train_tokenizer", ["recipe=tokenizer_smoke", "data=here", "output=there", "max_steps=7"])
    assert (config.max_steps, config.batch_size, config.data) == (7, 4, "here")
