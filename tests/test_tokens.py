import json
import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import save_file
from tiny_driving import record

from decoder.video import to_unit_range
from terra.actions import Waypoints
from terra.dataset import read_split
from terra.dataset.tokens import (
    ShardFacts,
    TokenizedDriving,
    load_tokens,
    read_shard_facts,
    save_shard,
    token_dtype,
    write_index,
)
from terra.errors import ConfigError, DatasetError
from terra.training import tokenize as tokenize_module
from terra.training.data import load_driving
from terra.training.tokenize import FrameEncoder, finish_split, tokenize_split
from terra.training.tokenizer import small_config
from tokenizer import LFQTokenizer

CONFIG = small_config(image_size=(16, 32), ch=32, ch_mult=[1, 1, 1], num_res_blocks=1, dim=6)
SHARDS = ((5, 3), (4,), (7, 2))
FACTS = ShardFacts(10.0, 16, "f" * 64, Waypoints(), "0" * 64, "float32")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    record(folder, shards=SHARDS)
    return folder


@pytest.fixture(scope="module")
def model() -> LFQTokenizer:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LFQTokenizer(CONFIG).eval()


def encoder(model: LFQTokenizer, batch_size: int = 4) -> FrameEncoder:
    return FrameEncoder(model, torch.device("cpu"), batch_size=batch_size)


def tokenize(recorded: Path, output: Path, model: LFQTokenizer, processes: int = 1, **settings) -> None:
    found = read_split(recorded, "train")
    for rank in range(processes):
        tokenize_split(found, output, encoder(model), "a" * 64, rank=rank, num_processes=processes, **settings)
    finish_split(found, output)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_tokens_made_in_a_stream_are_those_made_at_once(recorded, model, tmp_path):
    tokenize(recorded, tmp_path, model)
    loaded = load_tokens(tmp_path)
    driving = load_driving(recorded, "train")
    assert torch.equal(loaded.tokens.long(), model.encode(to_unit_range(driving.frames)))
    assert len(loaded.tokens.unique()) > 1
    assert torch.equal(loaded.actions, driving.actions)
    assert torch.equal(loaded.episode_start, driving.episode_start)
    assert (loaded.fps, loaded.codebook_size, loaded.tokenizer_sha256) == (10.0, 64, "a" * 64)
    assert loaded.space == Waypoints()
    assert loaded.tokens.dtype == torch.uint8
    index = json.loads((tmp_path / "tokens.json").read_text())
    assert (index["frames"], index["episodes"], len(index["files"])) == (21, 5, 3)


def test_tokens_of_driving_have_poses_and_places(recorded, model, tmp_path):
    tokenize(recorded, tmp_path, model)
    loaded = load_tokens(tmp_path)
    assert loaded.poses is not None
    assert loaded.place is not None
    episodes = sorted(read_split(recorded, "train").episodes, key=lambda each: each.video.parent.name)
    expected = torch.cat([torch.tensor(each.poses.x[: each.num_frames]) for each in episodes])
    assert torch.equal(loaded.poses[:, 0], expected)
    assert (loaded.poses.shape, loaded.poses.dtype) == ((21, 3), torch.float64)
    first, second, third = loaded.place[:2], loaded.place[2:3], loaded.place[3:]
    assert first.unique().shape == second.unique().shape == third.unique().shape == (1,)
    assert len(loaded.place.unique()) == 3
    part = loaded.first(7)
    assert part.place is not None
    assert (part.poses is not None, len(part.place)) == (True, 2)


def test_tokens_without_poses_are_read_and_made_again_with_poses(recorded, model, tmp_path, monkeypatch):
    save = tokenize_module.save_shard
    monkeypatch.setattr(tokenize_module, "save_shard", lambda *arguments: save(*arguments[:5]))
    tokenize(recorded, tmp_path, model)
    old = load_tokens(tmp_path)
    assert (old.poses, old.place) == (None, None)
    monkeypatch.undo()
    tokenize(recorded, tmp_path, model)
    new = load_tokens(tmp_path)
    assert torch.equal(new.tokens, old.tokens)
    assert new.poses is not None


def test_processes_and_workers_change_no_byte(recorded, model, tmp_path):
    tokenize(recorded, tmp_path / "one", model)
    tokenize(recorded, tmp_path / "two", model, processes=2, workers=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert len(contents(tmp_path / "one")) == 4


def test_a_stopped_run_goes_on_to_the_same_files(recorded, model, tmp_path, monkeypatch):
    tokenize(recorded, tmp_path / "whole", model)
    save, written = tokenize_module.save_shard, []

    def stop_at_the_second(path, *arguments):
        if len(written) == 1:
            raise KeyboardInterrupt
        written.append(path)
        save(path, *arguments)

    monkeypatch.setattr(tokenize_module, "save_shard", stop_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        tokenize(recorded, tmp_path / "parts", model)
    with pytest.raises(DatasetError, match=r"tokens.json: expected tokens made to the end.*found no such file and 1 p"):
        load_tokens(tmp_path / "parts")
    with pytest.raises(DatasetError, match="these are recordings, run terra tokenize first"):
        load_tokens(recorded / "train")
    monkeypatch.setattr(tokenize_module, "save_shard", lambda path, *rest: (written.append(path), save(path, *rest)))
    tokenize(recorded, tmp_path / "parts", model)
    assert contents(tmp_path / "whole") == contents(tmp_path / "parts")
    assert len(written) == len(set(written)) == 3
    tokenize(recorded, tmp_path / "parts", model)
    assert len(written) == 3


EMPTY = (lambda path: path.write_bytes(b""), "expected a safetensors header within the file's 0 bytes")
CUT = (lambda path: path.write_bytes(path.read_bytes()[:-7]), "bytes of tensor data, got")
ZEROED = (lambda path: path.write_bytes(bytes(path.stat().st_size)), "got")
CHANGED = (lambda path: path.write_bytes(path.read_bytes()[:-7] + b"changed"), "expected sha256 .* of tokens.json, got")


@pytest.mark.parametrize(
    ("damage", "message", "is_finished"),
    [
        *((*damage, is_finished) for damage in (EMPTY, CUT, ZEROED) for is_finished in (True, False)),
        (*CHANGED, True),  # which a hash alone shows
    ],
)
def test_a_damaged_token_file_is_named_and_made_again(recorded, model, tmp_path, caplog, damage, message, is_finished):
    tokenize(recorded, tmp_path, model)
    before = contents(tmp_path)
    path = next(tmp_path.rglob("*.safetensors"))
    damage(path)
    if not is_finished:
        path.with_name("tokens.json").unlink()
    tokenize(recorded, tmp_path, model)
    assert contents(tmp_path) == before
    (line,) = [text for text in caplog.messages if "is damaged and made again" in text]
    assert re.search(message, line)


INDEX_OF_NUMBERS = '{"format": "terra-tokens", "version": 2, "files": {"a": 1}}'


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"files": 1}', INDEX_OF_NUMBERS])
def test_a_damaged_index_is_written_anew(recorded, model, tmp_path, content):
    tokenize(recorded, tmp_path, model)
    before = contents(tmp_path)
    next(tmp_path.rglob("tokens.json")).write_text(content)
    tokenize(recorded, tmp_path, model)
    assert contents(tmp_path) == before


def test_files_of_another_tokenizer_or_recording(recorded, model, tmp_path):
    tokenize(recorded, tmp_path / "tokens", model)
    with pytest.raises(DatasetError, match="expected tokens of the same tokenizer_sha256: choose another output"):
        tokenize_split(read_split(recorded, "train"), tmp_path / "tokens", encoder(model), "b" * 64)
    other = tmp_path / "other"
    record(other, shards=((5, 2), (4,), (7, 2)))
    before = contents(tmp_path / "tokens")
    tokenize(other, tmp_path / "tokens", model)
    after = contents(tmp_path / "tokens")
    assert sum(before[name] != after[name] for name in before) >= 2  # the shard that differs, and the index
    assert len(load_tokens(tmp_path / "tokens").tokens) == 20


def test_damaged_episodes_are_left_out(model, tmp_path, caplog):
    folder = tmp_path / "recorded"
    record(folder, shards=SHARDS)
    for name in ("*_01.mp4", "*_02.mp4"):
        next(folder.glob(f"*/*/{name}")).write_bytes(b"not a video")
    with caplog.at_level(logging.WARNING):
        tokenize(folder, tmp_path / "tokens", model)
    assert "2 damaged episodes" in caplog.text
    assert load_tokens(tmp_path / "tokens").episode_start.tolist() == [0, 5, 12, 14]
    assert torch.equal(load_tokens(tmp_path / "tokens").actions, load_driving(folder, "train").actions)


def test_frames_of_another_size_and_nothing_readable(recorded, model, tmp_path):
    other = LFQTokenizer(CONFIG.replace(image_size=(16, 16)))
    with pytest.raises(ConfigError, match=r"expected frames of the tokenizer's \(16, 16\).*got \(16, 32\)"):
        tokenize_split(read_split(recorded, "train"), tmp_path, encoder(other), "a" * 64)
    with pytest.raises(ConfigError, match="batch_size: expected at least 1, got 0"):
        encoder(model, batch_size=0)
    with pytest.raises(DatasetError, match="expected tokens of a readable episode of split train, got none"):
        finish_split(read_split(recorded, "train"), tmp_path)


def test_half_precision_changes_few_tokens(recorded, model):
    frames = load_driving(recorded, "train").frames.permute(0, 2, 3, 1)
    exact = encoder(model)(frames)
    half = FrameEncoder(LFQTokenizer(CONFIG), torch.device("cpu"), torch.bfloat16)
    half._encoder.load_state_dict(model.encoder.state_dict())
    assert (half(frames) == exact).float().mean() > 0.7
    assert half.precision == "bfloat16"


@pytest.mark.parametrize(
    ("codebook_size", "dtype"),
    [(256, torch.uint8), (257, torch.int16), (2**15, torch.int16), (2**18, torch.int32)],
)
def test_the_smallest_type_that_holds_the_ids(codebook_size, dtype, tmp_path):
    assert token_dtype(codebook_size) is dtype
    ids = torch.tensor([0, 1, codebook_size - 1]).view(3, 1, 1)
    save_shard(
        tmp_path / "a.safetensors",
        replace(FACTS, codebook_size=codebook_size),
        ids,
        torch.zeros(3, 6, 3),
        torch.tensor([0, 3]),
    )
    write_index(tmp_path, ["a.safetensors"])
    loaded = load_tokens(tmp_path)
    assert loaded.tokens.dtype is dtype
    assert torch.equal(loaded.windows(torch.tensor([0]), 3)[0].flatten(), ids.flatten())


def shard(folder: Path, name: str = "a.safetensors", facts: ShardFacts = FACTS, **changes: torch.Tensor) -> None:
    tensors = {
        "tokens": torch.arange(16)[:, None, None].expand(-1, 2, 4),
        "actions": torch.zeros(16, 6, 3),
        "episode_start": torch.tensor([0, 9, 16]),
    }
    save_shard(folder / name, facts, **(tensors | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": torch.full((16, 2, 4), 31)}, r"expected ids in \[0, 16\), got 31 to 31"),
        ({"episode_start": torch.tensor([0, 9, 9, 16])}, "episode_start: expected increasing from 0 to 16"),
        ({"episode_start": torch.tensor([0, 9])}, "episode_start: expected increasing from 0 to 16"),
        ({"actions": torch.zeros(3, 6, 3)}, r"got \(16, 2, 4\) and \(3, 6, 3\)"),
        (
            {"poses": torch.zeros(16, 2), "place": torch.zeros(2)},
            r"expected poses and place of shapes .*, got \{'poses': \(16, 2\), 'place': \(2,\)\}",
        ),
        ({"poses": torch.full((16, 3), float("nan")), "place": torch.zeros(2)}, "poses: expected finite numbers"),
    ],
)
def test_token_files_that_make_no_sense_are_refused(changes, message, tmp_path):
    shard(tmp_path, **changes)
    write_index(tmp_path, ["a.safetensors"])
    with pytest.raises(DatasetError, match=message):
        load_tokens(tmp_path)


def test_damaged_and_foreign_token_files_are_refused(tmp_path):
    shard(tmp_path)
    write_index(tmp_path, ["a.safetensors"])
    path = tmp_path / "a.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    with pytest.raises(DatasetError, match="expected sha256"):
        load_tokens(tmp_path)
    with pytest.raises(DatasetError, match=r"expected tokens as terra tokenize writes them"):
        read_shard_facts(path)
    save_file({"tokens": torch.zeros(1)}, path)
    with pytest.raises(DatasetError, match="expected terra-tokens version 2, got None version None"):
        read_shard_facts(path)
    path.unlink()
    with pytest.raises(DatasetError, match=r"expected the token file that tokens\.json names, found none"):
        load_tokens(tmp_path)
    shard(tmp_path)
    shard(tmp_path, "b.safetensors", replace(FACTS, tokenizer_sha256="e" * 64))
    with pytest.raises(DatasetError, match=r"b.safetensors: expected the tokenizer_sha256 of .*a.safetensors, got oth"):
        write_index(tmp_path, ["a.safetensors", "b.safetensors"])
    shard(tmp_path, "b.safetensors", tokens=torch.zeros(16, 1, 4))
    write_index(tmp_path, ["a.safetensors", "b.safetensors"])
    with pytest.raises(DatasetError, match=r"b.safetensors: expected tokens of shape \(2, 4\), got \(1, 4\)"):
        load_tokens(tmp_path)
    for text, message in [
        ('{"format": "other"}', r'expected format terra-tokens version 2, got \["other", null\]'),
        ('{"format": "terra-tokens", "version": 2}', "expected an index of token files"),
        ("{", "expected JSON"),
    ]:
        (tmp_path / "tokens.json").write_text(text)
        with pytest.raises(DatasetError, match=message):
            load_tokens(tmp_path)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(1, 12), st.data())
def test_windows_never_cross_episodes(lengths, window, data):
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
    count = int(bounds[-1])
    episode = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    tagged = TokenizedDriving(
        tokens=episode[:, None, None].expand(-1, 2, 4).to(torch.int16),
        actions=torch.arange(count)[:, None, None].expand(-1, 6, 3).float(),
        episode_start=bounds,
        fps=10.0,
        codebook_size=16,
        tokenizer_sha256="f" * 64,
        space=Waypoints(),
    )
    if max(lengths) < window:
        with pytest.raises(DatasetError, match=f"expected an episode of at least {window} frames, got at most"):
            tagged.window_starts(window)
        return
    starts = tagged.window_starts(window)
    assert len(starts) == sum(max(0, length - window + 1) for length in lengths)
    assert len(starts.unique()) == len(starts)
    some = starts[data.draw(st.lists(st.integers(0, len(starts) - 1), min_size=1, max_size=4))]
    tokens, actions = tagged.windows(some, window)
    assert tokens.dtype == torch.int64
    assert tokens.shape == (len(some), window, 2, 4)
    assert (tokens == tokens[:, :1]).all()
    assert all(torch.equal(a, tagged.actions[s : s + window]) for a, s in zip(actions, some.tolist(), strict=True))


@pytest.mark.parametrize(
    ("count", "bounds"), [(1, [0, 1]), (7, [0, 7]), (9, [0, 7, 9]), (16, [0, 7, 16]), (99, [0, 7, 16])]
)
def test_the_first_frames_are_whole_episodes_and_a_part(count, bounds):
    tokens, actions = torch.arange(16)[:, None, None], torch.randn(16, 6, 3)
    whole = TokenizedDriving(tokens, actions, torch.tensor([0, 7, 16]), 10.0, 16, "f" * 64, Waypoints())
    part = whole.first(count)
    assert part.episode_start.tolist() == bounds
    assert part.tokens.flatten().tolist() == list(range(min(count, 16)))
    assert torch.equal(part.actions, actions[:count])
