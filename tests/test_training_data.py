import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from tiny_driving import gray, record

from terra.dataset import read_frames, read_split
from terra.errors import ConfigError, DatasetError
from terra.training import data
from terra.training.data import decode_episodes, kept_frames, load_driving
from terra.trajectory import WAYPOINT_TIMES


def levels(frames: torch.Tensor) -> torch.Tensor:
    return frames.float().mean(dim=(1, 2, 3))


def videos(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*/*.mp4"))


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_episodes_are_loaded_in_order_with_their_actions(workers, tmp_path):
    record(tmp_path, shards=((5,), (3, 4)))
    loaded = load_driving(tmp_path, "train", workers=workers)
    assert loaded.frames.shape == (12, 3, 16, 32)
    assert loaded.frames.dtype == torch.uint8
    assert loaded.frames.is_contiguous(memory_format=torch.channels_last)
    assert loaded.episode_start.tolist() == [0, 5, 8, 12]
    assert (loaded.fps, loaded.damaged) == (10.0, ())
    expected = torch.tensor([gray(0)] * 5 + [gray(1)] * 3 + [gray(2)] * 4).float()
    torch.testing.assert_close(levels(loaded.frames), expected, atol=6.0, rtol=0)
    assert loaded.actions.dtype == torch.float32
    times = torch.tensor(WAYPOINT_TIMES)
    for index, speed in enumerate([1.0] * 5 + [2.0] * 3 + [3.0] * 4):
        action = torch.stack([torch.zeros(6), speed * times, times], dim=1)
        torch.testing.assert_close(loaded.actions[index], action, atol=1e-5, rtol=0)


def test_damaged_episodes_are_left_out_with_a_warning(tmp_path, caplog):
    record(tmp_path, shards=((3, 4), (5, 6)))
    videos(tmp_path)[1].write_bytes(b"not a video")
    videos(tmp_path)[2].unlink()
    with caplog.at_level(logging.WARNING):
        loaded = load_driving(tmp_path, "train")
    assert loaded.episode_start.tolist() == [0, 3, 9]
    assert len(loaded.frames) == len(loaded.actions) == 9
    assert len(loaded.damaged) == 2
    for video in ("_01", "_02"):
        assert sum(video in reason for reason in loaded.damaged) == 1
    assert "2 damaged episodes are left out" in caplog.text


def test_missing_splits_and_bad_settings(tmp_path):
    with pytest.raises(DatasetError, match=r"dataset\.json"):
        load_driving(tmp_path / "nowhere", "train")
    record(tmp_path, shards=((3,),))
    with pytest.raises(DatasetError, match="held_out"):
        load_driving(tmp_path, "held_out")
    with pytest.raises(ConfigError, match="workers: expected 0 or more, got -1"):
        load_driving(tmp_path, "train", workers=-1)
    with pytest.raises(ConfigError, match="max_frames: expected at least 1 or null, got 0"):
        load_driving(tmp_path, "train", max_frames=0)
    with pytest.raises(DatasetError, match="expected an episode of split train for each of 2 processes, got 1"):
        load_driving(tmp_path, "train", rank=0, num_processes=2)
    videos(tmp_path)[0].write_bytes(b"not a video")
    with pytest.raises(DatasetError, match=r"expected a readable episode of split train, got 1 damaged: .*\.mp4"):
        load_driving(tmp_path, "train")


def test_processes_share_the_episodes_and_the_limit(tmp_path):
    record(tmp_path, shards=((5, 3), (4, 6)))
    for max_frames in (None, 7):
        whole = load_driving(tmp_path, "train", max_frames=max_frames)
        parts = [load_driving(tmp_path, "train", max_frames=max_frames, rank=r, num_processes=2) for r in (0, 1)]
        assert len(whole.frames) == (max_frames or 18)
        bounds = whole.episode_start.tolist()
        for rank, part in enumerate(parts):
            mine = [slice(bounds[i], bounds[i + 1]) for i in range(rank, 4, 2)]
            assert torch.equal(part.frames, torch.cat([whole.frames[s] for s in mine]))
            assert torch.equal(part.actions, torch.cat([whole.actions[s] for s in mine]))


def test_of_a_large_split_episodes_are_left_out(tmp_path, monkeypatch):
    record(tmp_path, shards=((6,) * 5,))
    monkeypatch.setattr(data, "_ALWAYS_DECODED", 20)  # three episodes
    decoded = []
    monkeypatch.setattr(data, "read_frames", lambda episode: decoded.append(episode.id) or read_frames(episode))
    loaded = load_driving(tmp_path, "train", max_frames=7)
    assert len(loaded.frames) == 7
    episodes = [episode.id for episode in read_split(tmp_path, "train").episodes]
    assert decoded == [episodes[index] for index in (0, 2, 4)]
    decoded.clear()
    assert len(load_driving(tmp_path, "train", max_frames=14).frames) == 14  # twice as many are 28, in four episodes
    assert len(decoded) == 4
    assert len(load_driving(tmp_path, "train").frames) == 30


@settings(max_examples=50)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 300))
def test_kept_frames_are_evenly_spaced_over_the_split(lengths, limit):
    class Length:
        def __init__(self, num_frames: int):
            self.num_frames = num_frames

    kept = kept_frames([Length(length) for length in lengths], limit)
    assert len(kept) == len(lengths)
    assert all(((part >= 0) & (part < length)).all() for part, length in zip(kept, lengths, strict=True))
    starts = np.cumsum([0, *lengths[:-1]])
    places = np.concatenate([part + start for part, start in zip(kept, starts, strict=True)])
    assert len(places) == min(limit, sum(lengths))
    assert len(places) == 1 or np.diff(places).max() - np.diff(places).min() <= 1


def test_decoding_can_be_broken_off(tmp_path):
    record(tmp_path, shards=((3,) * 8,))
    episodes = read_split(tmp_path, "train").episodes
    decoded = decode_episodes(episodes, workers=2)
    first = next(decoded)
    assert not isinstance(first, str)
    assert first.frames.shape == (3, 16, 32, 3)
    decoded.close()  # returns, rather than decode the rest
