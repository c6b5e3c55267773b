"""`terra-rollout` in this process: manifests good and bad, resuming, sharing, signals, and what is kept in memory."""

import errno
import os
import signal
import sys
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_rollouts import Batch

import terra.output
import terra.rollouts.inputs
from decoder import FramewiseDecoder
from decoder.video import probe_video, to_uint8
from terra import cli
from terra.context import context_files, load_context
from terra.engine.hf import HFEngine, HFSession
from terra.errors import ConfigError, ContextError, EngineError, OutputError
from terra.pipeline import Pipeline, RolloutRequest
from terra.rollout import RolloutWriter
from terra.rollouts import source
from terra.rollouts.folder import RolloutFolder
from terra.rollouts.locks import Claim, Lock
from terra.rollouts.manifest import count_rollouts, sample_seed
from terra.sampling import SamplingParams
from terra.trajectory import load_trajectory, save_poses
from tokenizer import LFQTokenizer
from tokenizer.checkpoint import read_json
from tokenizer.errors import VideoError


@pytest.fixture
def batch(tmp_path: Path, tiny_model: Path, tiny_tokenizer: Path) -> Batch:
    return Batch(tmp_path, tiny_model, tiny_tokenizer)


@pytest.mark.slow
def test_a_manifest_becomes_folders_with_the_tokens_of_each_made_alone(batch, hf_engine):
    batch.write(*(batch.line(index, num_frames=8 + index, sampling={"top_k": index}) for index in range(5)), b"  ")
    assert batch.run() == 0
    tokenizer = LFQTokenizer.from_pretrained(batch.tokenizer)
    alone = Pipeline(tokenizer, hf_engine, FramewiseDecoder(tokenizer), overlap=2)
    trajectory = load_trajectory(batch.folder / "drive.json")
    for index in range(5):
        name, num_frames = f"r{index}", 8 + index
        context = load_context(batch.folder / f"c{index % 2}", num_frames=3, image_size=(12, 16), fps=10)
        actions = torch.from_numpy(trajectory.actions(num_frames - 1))
        request = RolloutRequest(context, actions, seed=index)
        (expected,) = alone.generate([request], SamplingParams(temperature=0.9, top_k=index))
        assert torch.equal(batch.tokens(name), expected.tokens)
        assert probe_video(batch.output / "rollouts" / name / "video.mp4").num_frames == num_frames
        assert batch.record(name)["batch"]["request"]["sampling"]["top_k"] == index
    assert [(row["id"], row["status"], row["line"]) for row in batch.index()] == [
        (f"r{index}", "done", index + 1) for index in range(5)
    ]
    kept = {path.name for path in batch.output.iterdir() if not path.name.startswith(".")}
    assert kept == {"rollouts", "failed", "index.jsonl", "log.jsonl", "run.json"}


def test_frames_are_decoded_while_later_ones_are_generated(batch, monkeypatch):
    calls, written = [], []
    decode, write = FramewiseDecoder.decode, RolloutWriter.extend
    monkeypatch.setattr(FramewiseDecoder, "decode", lambda self, grids: calls.append(len(grids)) or decode(self, grids))
    monkeypatch.setattr(FramewiseDecoder, "device", torch.device("cuda"))  # where a decoder is in nobody's way
    monkeypatch.setattr(RolloutWriter, "extend", lambda self, pixels: written.append(pixels) or write(self, pixels))
    batch.write(batch.line(0, num_frames=12))
    assert batch.run() == 0
    assert len(calls) > 1
    assert sum(calls) == 12
    together = to_uint8(LFQTokenizer.from_pretrained(batch.tokenizer).decode(batch.tokens("r0")))
    assert np.array_equal(np.concatenate(written), together)


def test_a_rollout_whose_early_frames_could_not_be_decoded_is_decoded_again(batch, monkeypatch):
    calls = []
    decode = FramewiseDecoder.decode

    def fail_first(self, grids):
        calls.append(len(grids))
        # What waits behind the first must not be decoded beside all, which takes longer.
        time.sleep(0.5 if len(grids) == 12 else 0.05)
        if len(calls) == 1:
            raise VideoError("no memory")
        return decode(self, grids)

    monkeypatch.setattr(FramewiseDecoder, "decode", fail_first)
    monkeypatch.setattr(FramewiseDecoder, "device", torch.device("cuda"))
    batch.write(batch.line(0, num_frames=12))
    assert batch.run(retries=1) == 0
    assert calls[-1] == 12


def test_contexts_that_lines_share_are_tokenized_once(batch, monkeypatch):
    encoded = []
    encode = LFQTokenizer.encode
    monkeypatch.setattr(LFQTokenizer, "encode", lambda self, frames: encoded.append(1) or encode(self, frames))
    batch.write(*(batch.line(index) for index in range(8)))
    assert batch.run(engine="persistence") == 0
    assert len(encoded) == 2


def test_forgotten_contexts_are_tokenized_again(batch):
    batch.write(*(batch.line(index) for index in range(4)))
    assert batch.run(engine="persistence", contexts=1) == 0


@pytest.mark.slow
def test_a_free_seat_is_taken_at_once(batch):
    batch.write(batch.line(0, num_frames=50), *(batch.line(index, num_frames=4) for index in range(1, 8)))
    assert batch.run(at_once=2) == 0
    assert batch.log()[-1]["id"] == "r0"


def test_nothing_is_done_twice(batch, monkeypatch):
    batch.write(*(batch.line(index) for index in range(3)))
    assert batch.run() == 0
    before = {name: (batch.output / "rollouts" / name).stat().st_ino for name in batch.names()}
    batch.write(*(batch.line(index) for index in range(4)))
    opened = []
    open_session = HFEngine.open
    monkeypatch.setattr(HFEngine, "open", lambda *args: opened.append(args) or open_session(*args))
    assert batch.run() == 0
    assert len(opened) == 2  # the windows of the new line
    assert before.items() <= {name: (batch.output / "rollouts" / name).stat().st_ino for name in batch.names()}.items()
    assert len(batch.index()) == len(batch.log()) == 4


def test_a_rollout_that_another_process_ends_between_the_look_and_the_claim_is_not_made_again(batch, monkeypatch):
    batch.write(*(batch.line(index) for index in range(3)))
    assert batch.run() == 0
    theirs = batch.output / "rollouts" / "r1"
    aside = theirs.rename(batch.folder / "r1")
    inode = aside.stat().st_ino
    claim = RolloutFolder.claim

    def claim_late(folder, job):
        """The other process publishes its rollout and lets its claim go right before this one takes it."""
        assert not folder.is_done(job)
        aside.rename(theirs)
        return claim(folder, job)

    monkeypatch.setattr(RolloutFolder, "claim", claim_late)
    opened = []
    open_session = HFEngine.open
    monkeypatch.setattr(HFEngine, "open", lambda *args: opened.append(args) or open_session(*args))
    assert batch.run() == 0
    assert opened == []
    assert theirs.stat().st_ino == inode
    assert [row["status"] for row in batch.index()] == ["done"] * 3
    assert len(batch.log()) == 3
    assert not (batch.output / "claims").exists()


def test_a_sample_that_another_process_leaves_is_made_and_its_line_s_others_are_not_counted_again(batch, monkeypatch):
    batch.write(batch.line(0))
    assert batch.run(engine="persistence") == 0
    (batch.output / "claims").mkdir()
    theirs = Claim.take(batch.output / "claims" / "r0+1.claim")
    assert theirs is not None
    read_line = source.read_line

    def read_again(*args):
        theirs.release()
        return read_line(*args)

    monkeypatch.setattr(source, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(source, "read_line", read_again)
    metrics = batch.folder / "metrics.prom"
    assert batch.run(engine="persistence", num_samples=3, metrics=metrics) == 0
    assert batch.names() == ["r0", "r0+1", "r0+2"]
    lines = metrics.read_text().splitlines()
    assert 'terra_rollouts_total{status="done"} 2' in lines
    assert 'terra_rollouts_total{status="reused"} 1' in lines


def test_samples_have_seeds_by_rule_and_can_be_added(batch):
    batch.write(batch.line(0, seed=7))
    assert batch.run() == 0
    first = batch.tokens("r0")
    assert batch.run(num_samples=3) == 0
    assert batch.names() == ["r0", "r0+1", "r0+2"]
    assert [row["seed"] for row in batch.index()] == [sample_seed(7, sample) for sample in range(3)]
    assert [row["status"] for row in batch.log()] == ["done"] * 3
    assert torch.equal(batch.tokens("r0"), first)
    assert not torch.equal(batch.tokens("r0+1"), batch.tokens("r0+2"))


def test_sample_seeds():
    seeds = [sample_seed(seed, sample) for seed in range(20) for sample in range(1, 20)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(5, 0) == 5
    assert sample_seed(5, 2) == int(
        np.random.SeedSequence(5).spawn(3)[2].generate_state(1, np.uint64)[0] >> np.uint64(1)
    )


def test_act_bench_works_as_it_is(batch, tmp_path):
    points = np.zeros((50, 60, 3))
    points[..., 0] = np.arange(60) * 0.05 * 8
    pictures = [f"c1/{index}.png" for index in range(3)]
    lines = [
        {"sample_id": index, "label": "straight", "context_frames": pictures, "instruction_trajs": points.tolist()}
        for index in (4, 9)
    ]
    (tmp_path / "bench").mkdir()
    batch.manifest = tmp_path / "bench" / "act_bench.jsonl"
    batch.write(*lines)
    assert batch.run(context_root=tmp_path) == 0
    assert batch.names() == ["4", "9"]
    from_file = load_trajectory(batch.manifest, sample_id=9).actions(9)
    batch.manifest = tmp_path / "plain.jsonl"
    batch.write({"id": "p", "context": "c1", "trajectory": "bench/act_bench.jsonl", "sample_id": 9})
    assert batch.run(context_root=tmp_path) == 0
    assert torch.equal(batch.tokens("p"), batch.tokens("9"))
    assert from_file.shape == (9, 6, 3)


def bad_lines(batch: Batch) -> list[tuple[dict | bytes, str]]:
    return [
        (b'{"id": "x"', "expected JSON"),
        (b'{"id": "\xff"}', "expected UTF-8 text, got byte 0xff"),
        (b"[1]", "expected a JSON object"),
        (batch.line(3, id="../x"), "id (or sample_id): expected 1 to 200 letters"),
        (batch.line(4, color="red"), "got 'color'"),
        (batch.line(5, context=None), "expected either a context path or a list context_frames"),
        (batch.line(6, trajectory=3), "trajectory: expected a path, got 3"),
        (batch.line(7, seed=-1), "seed: expected a whole number from 0 to 2**63 - 1, got -1"),
        (batch.line(8, seed=2**63), "seed: expected a whole number from 0 to 2**63 - 1, got 9223372036854775808"),
        (batch.line(9, num_frames="many"), "num_frames: expected a whole number of at least 1, got 'many'"),
        (batch.line(20, seed=True), "seed: expected a whole number from 0 to 2**63 - 1, got True"),
        (batch.line(21, num_context=2.0), "num_context: expected a whole number of at least 1, got 2.0"),
        (batch.line(22, num_samples=None), "num_samples: expected a whole number from 1 to 10000, got null"),
        (batch.line(23, num_frame=9), "num_frame: no such setting; did you mean num_frames?"),
        (batch.line(10, sampling={"top_p": 2}), "sampling: top_p: expected above 0, up to 1, got 2"),
        (batch.line(11, sampling={"heat": 2}), "sampling: "),
        (batch.line(12, sampling=[2]), "sampling: expected settings or null, got [2]"),
        (batch.line(13, context="nowhere"), "nowhere"),
        (batch.line(14, trajectory="nowhere.json"), "nowhere.json"),
        (batch.line(15, num_frames=400), "num_frames=400 needs 399"),
        (batch.line(16, num_frames=3), "num_frames: expected more than num_context=3"),
        (batch.line(17, num_context=5), "expected 5 or more PNG or JPEG pictures, got 3"),
        (batch.line(18, context=None, context_frames=["c0/0.png", "c0/1.png"]), "expected 3 or more pictures, got 2"),
    ]


def test_bad_lines_fail_with_a_reason_and_the_rest_goes_on(batch):
    lines, reasons = zip(*bad_lines(batch), strict=True)
    batch.write(batch.line(100), *lines, batch.line(101))
    assert batch.run(engine="persistence") == 3
    rows = batch.index()
    assert [row["status"] for row in rows] == ["done", *["failed"] * len(lines), "done"]
    for row, reason in zip(rows[1:-1], reasons, strict=True):
        assert reason in row["reason"]
        assert "\n" not in row["reason"]
    assert [row["id"] for row in rows[:6]] == ["r100", "line+2", "line+3", "line+4", "line+5", "r4"]
    assert batch.names() == ["r100", "r101"]
    # Once they are as they should be, the same command makes them.
    batch.write(*(batch.line(index) for index in (100, 13, 14, 101)))
    assert batch.run(engine="persistence") == 0
    assert {row["status"] for row in batch.index()} == {"done"}


def test_limits_bound_the_contexts(batch):
    batch.write(batch.line(0))
    assert batch.run(**{"limits.picture_pixels": 100}) == 3
    (row,) = batch.index()
    assert "c0/0.png: expected at most 0.0001 megapixels" in row["reason"]


def test_all_samples_of_a_bad_line_fail(batch):
    batch.write(batch.line(0, num_samples=3, color="red"), batch.line(1, num_samples=0), batch.line(2))
    assert batch.run(engine="persistence", num_samples=2) == 3
    assert [(row["id"], row["status"]) for row in batch.index()] == [
        *(("r0", "failed"), ("r0+1", "failed"), ("r0+2", "failed"), ("r1", "failed"), ("r2", "done"), ("r2+1", "done"))
    ]


@pytest.mark.parametrize(("retries", "code"), [(0, 3), (1, 3), (2, 0)])
def test_failed_lines_are_tried_again(batch, monkeypatch, retries, code):
    calls = []

    def flaky(*args, **kwargs):
        calls.append(args)
        if len(calls) <= 2:
            raise ContextError("c0: not there yet")
        return load_context(*args, **kwargs)

    monkeypatch.setattr(terra.rollouts.inputs, "load_context", flaky)
    batch.write(batch.line(0))
    assert batch.run(engine="persistence", retries=retries) == code
    assert len(calls) == retries + 1
    assert [row["status"] for row in batch.log()] == ["failed" if code else "done"]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "expected one rollout a line, got an empty file"),
        ([b"", b"  "], "expected one rollout a line, got an empty file"),
        (
            [b'{"id": "a"}', b"", b'{"id": "b"}', b'{"sample_id": "a"}'],
            "line 4: expected an id of its own",
        ),
        (None, "expected a readable file, got: No such file"),
    ],
)
def test_manifests_of_no_use_are_refused_before_any_work(batch, texts, message):
    if texts is not None:
        batch.write(*texts)
    with pytest.raises(ConfigError, match=message):
        batch.run()
    assert not batch.output.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"at_once": 0}, "at_once: expected a whole number from 1 to 4096, got 0"),
        ({"on_change": "shrug"}, "on_change: expected one of refuse, redo, keep"),
        ({"retry_seconds": -1}, "retry_seconds: expected a number from 0 to 3600, got -1"),
        ({"overlap": 9}, "overlap: expected 1 to 7"),
        ({"engine.dtype": "int3"}, "dtype: expected one of"),
    ],
)
def test_bad_settings_are_refused(batch, changes, message):
    batch.write(batch.line(0))
    with pytest.raises(ConfigError, match=message):
        batch.run(**changes)
    assert not batch.output.exists()


def test_exit_codes_of_the_command(batch, monkeypatch, capsys):
    def command(**changes) -> int:
        monkeypatch.setattr(sys, "argv", ["terra-rollout", *batch.overrides(engine="persistence", **changes)])
        try:
            cli.main()
        except SystemExit as error:
            return int(error.code or 0)
        return 0

    assert command() == 2
    assert capsys.readouterr().err.startswith("error: manifest: expected a file or folder")
    batch.write(batch.line(0), batch.line(1, context="nowhere"))
    assert command() == 3
    batch.write(batch.line(0))
    assert command() == 0


@pytest.mark.slow
def test_changed_settings_are_refused_or_redone_or_kept(batch):
    batch.write({**batch.line(0), "seed": 5}, {key: value for key, value in batch.line(1).items() if key != "seed"})
    assert batch.run() == 0
    before = batch.tokens("r1")
    with pytest.raises(ConfigError, match=r"was made otherwise \(defaults\.seed: 0, now 3\): on_change=redo or keep"):
        batch.run(seed=3)
    assert batch.run(seed=3, on_change="keep") == 0
    assert torch.equal(batch.tokens("r1"), before)
    assert len(batch.log()) == 2
    assert batch.run(seed=3, on_change="redo") == 0
    assert not torch.equal(batch.tokens("r1"), before)
    assert [row["id"] for row in batch.log()[2:]] == ["r1"]  # the other has a seed of its own


def test_a_batch_goes_on_with_the_recorded_engine_device_and_type(batch):
    batch.write(batch.line(0))
    assert batch.run(engine="hf", device="cpu", dtype="bfloat16") == 0
    recorded = read_json(batch.output / "run.json")
    batch.write(batch.line(0), batch.line(1))
    assert batch.run(engine="auto") == 0
    assert read_json(batch.output / "run.json") == recorded
    assert recorded["made_with"]["engine"]["dtype"] == "bfloat16"
    assert batch.record("r1")["engine"] == batch.record("r0")["engine"]
    with pytest.raises(ConfigError, match=r'made_with\.engine\.dtype: "bfloat16", now "float32"'):
        batch.run(engine="auto", dtype="float32")


def test_changed_weights_are_noticed(batch, tmp_path):
    batch.write(batch.line(0))
    assert batch.run() == 0
    other = tmp_path / "other"
    other.mkdir()
    for path in batch.model.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    (other / "config.json").write_text((other / "config.json").read_text() + " ")
    with pytest.raises(ConfigError, match=r"made_with\.world_model_sha256: "):
        batch.run(**{"world_model.pretrained": other})
    assert batch.run(on_change="redo", **{"world_model.pretrained": other}) == 0
    assert len(batch.log()) == 2


def test_a_changed_line_fails_alone(batch):
    batch.write(batch.line(0), batch.line(1))
    assert batch.run(engine="persistence") == 0
    batch.write(batch.line(0), batch.line(1, seed=9))
    assert batch.run(engine="persistence") == 3
    assert "was made otherwise (request.seed: 1, now 9)" in batch.index()[1]["reason"]
    batch.write(batch.line(0), batch.line(1))
    assert batch.run(engine="persistence") == 0


@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_leaves_nothing_half_done(batch, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    batch.write(*(batch.line(index) for index in range(4)))
    with monkeypatch.context() as patch:
        patch.setattr(RolloutWriter, "extend", full)
        with pytest.raises(OutputError, match="No space left on device"):
            batch.run()
    assert batch.names() == []
    assert not (batch.output / "partial").exists()
    assert batch.run() == 0
    assert len(batch.log()) == 4


@pytest.mark.parametrize("name", ["log.jsonl", "failed"])
def test_a_file_that_can_not_be_written_ends_the_run(batch, name):
    batch.write(batch.line(0), batch.line(1, context="nowhere"))
    assert batch.run(engine="persistence") == 3
    path = batch.output / name
    if name == "failed":
        (path / "r1.json").unlink()
        path.rmdir()
        path.write_text("")
    else:
        path.unlink()
        path.symlink_to("/dev/full")  # a disk without any room
    with pytest.raises(OutputError, match=f"{name}.*(No space left on device|File exists|Not a directory)"):
        batch.run(engine="persistence")
    assert not (batch.output / "claims").exists()


def test_metrics_that_can_not_be_written_are_said(batch):
    batch.write(batch.line(0))
    with pytest.raises(OutputError, match=r"no/where/metrics\.prom: expected a writable file"):
        batch.run(engine="persistence", metrics=batch.folder / "no" / "where" / "metrics.prom")
    with pytest.raises(OutputError, match=r"expected a file or none, got a folder"):
        batch.run(engine="persistence", metrics=batch.folder)
    assert not batch.output.exists()
    assert batch.run(engine="persistence", metrics=batch.output / "metrics.prom") == 0


def test_a_disk_with_little_room_and_folders_that_can_not_be_are_refused_before_any_work(batch, monkeypatch):
    batch.write(batch.line(0))
    with pytest.raises(OutputError, match=r"expected a place to write to, got .*manifest\.jsonl, which is not"):
        batch.run(output=batch.manifest / "out")
    with monkeypatch.context() as patch:
        patch.setattr(terra.output.os, "access", lambda *_: False)
        with pytest.raises(OutputError, match="expected a place to write to"):
            batch.run()
    with monkeypatch.context() as patch:
        patch.setattr(terra.output.shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
        with pytest.raises(OutputError, match="expected 64 MiB free on the disk, got 1 MiB"):
            batch.run()
    assert not batch.output.exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["c0/2.png", "drive.json"])
def test_a_changed_file_under_the_same_path_is_noticed(batch, name):
    batch.write(batch.line(0), batch.line(1, context="c1/*.png", trajectory="other.json"))
    path, copy = batch.folder / name, batch.folder / "other.json"
    copy.write_bytes((batch.folder / "drive.json").read_bytes())
    assert batch.run() == 0
    before = {name: batch.tokens(name) for name in ("r0", "r1")}
    os.utime(path)
    assert batch.run() == 0
    assert len(batch.log()) == 2
    if name == "drive.json":
        times = np.arange(0, 9, 0.1)
        save_poses(path, times, np.stack([9 * times, 0 * times], 1), 0 * times, 10.0)
        what = "inputs.trajectory_sha256"
    else:
        path.write_bytes((batch.folder / "c1" / "2.png").read_bytes())
        what = "inputs.context_sha256"
    assert batch.run() == 3
    assert f"was made otherwise ({what}: " in batch.index()[0]["reason"]
    assert batch.run(on_change="keep") == 0
    assert torch.equal(batch.tokens("r0"), before["r0"])
    assert batch.run(on_change="redo") == 0
    assert not torch.equal(batch.tokens("r0"), before["r0"])
    assert torch.equal(batch.tokens("r1"), before["r1"])
    assert sorted(row["id"] for row in batch.log() if row["status"] == "done") == ["r0", "r0", "r1"]
    path.unlink()  # what was made from it stays
    assert batch.run() == 0


def test_a_fingerprint_is_of_the_files_that_are_read(tmp_path):
    pictures = [tmp_path / f"frame_{index}.png" for index in (2, 10, 1)]
    for path in (*pictures, tmp_path / "notes.txt", tmp_path / ".frame_0.png"):
        path.write_text(path.name)
    first = [tmp_path / "frame_1.png", tmp_path / "frame_2.png"]
    assert context_files(str(tmp_path), 2) == context_files(str(tmp_path / "*.png"), 2) == first
    assert context_files(str(pictures[1]), 1) == [pictures[1]]
    assert context_files(str(tmp_path / "nothing"), 1) == []


def test_counters_say_how_a_run_went(batch):
    batch.write(batch.line(0), batch.line(1), batch.line(2, context="nowhere"))
    metrics = batch.folder / "metrics.prom"
    assert batch.run(metrics=metrics) == 3
    lines = metrics.read_text().splitlines()
    assert "# TYPE terra_rollouts_total counter" in lines
    assert 'terra_rollouts_total{status="done"} 2' in lines
    assert 'terra_rollouts_total{status="failed"} 1' in lines
    assert 'terra_frames_total{kind="rollout"} 14' in lines
    assert "terra_rollouts_wanted 3" in lines
    seconds = dict(line.rsplit(" ", 1) for line in lines if line.startswith("terra_stage_seconds_total{"))
    assert len(seconds) == 5
    assert float(seconds['terra_stage_seconds_total{stage="generate"}']) > 0
    assert batch.run(metrics=metrics) == 3
    assert 'terra_rollouts_total{status="reused"} 2' in metrics.read_text()


def test_other_folders_are_left_alone(batch):
    batch.write(batch.line(0))
    batch.output.mkdir()
    (batch.output / "precious").write_text("x")
    with pytest.raises(OutputError, match="expected a new folder or one of terra-rollout"):
        batch.run()
    assert [path.name for path in batch.output.iterdir()] == ["precious"]
    with pytest.raises(OutputError, match="expected a folder, got a file"):
        batch.run(output=batch.manifest)


def test_a_failed_engine_ends_the_run_and_its_rollouts_are_left_to_do(batch, monkeypatch):
    async def broken(self, action):
        raise EngineError("the engine is gone")

    batch.write(*(batch.line(index) for index in range(3)))
    with monkeypatch.context() as patch:
        patch.setattr(HFSession, "step", broken)
        with pytest.raises(EngineError, match="the engine is gone"):
            batch.run(retries=1)
    assert not (batch.output / "claims").exists()
    assert list((batch.output / "failed").iterdir()) == []
    assert batch.run() == 0


@pytest.mark.slow
def test_a_long_manifest_is_not_read_ahead_and_sigterm_drains(batch, monkeypatch):
    batch.write(*(batch.line(index) for index in range(10_000)))
    parsed, published, ahead = [], [], []
    parse_line, publish = source.parse_line, RolloutFolder.publish

    def count_and_publish(self, job, write):
        ahead.append(len(parsed) - len(published))
        publish(self, job, write)
        published.append(job.name)
        if len(published) == 40:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(source, "parse_line", lambda *args: parsed.append(1) or parse_line(*args))
    monkeypatch.setattr(RolloutFolder, "publish", count_and_publish)
    assert batch.run(engine="persistence", at_once=4, workers=2, num_frames=4) == 143
    # At most: open sessions, two queues of two, two workers before and after each, and the line that is read.
    assert max(ahead) <= 4 + 2 * 2 + 2 * 3 + 1
    assert 40 <= len(published) <= 40 + 4 + 2 + 2 * 2
    assert batch.names() == sorted(published)
    rows = batch.index()
    assert sum(row["status"] == "done" for row in rows) == len(published)
    assert sum(row["status"] == "pending" for row in rows) == 10_000 - len(published)
    assert not (batch.output / "claims").exists()


def test_an_interrupt_that_ends_the_encoder_too_still_drains(batch, monkeypatch):
    batch.write(*(batch.line(index) for index in range(20)))
    write, broken = RolloutWriter.extend, []

    def encoder_ends_once(*args):
        if not broken:
            broken.append(args)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
            raise OutputError("ffmpeg ended with status 255")
        write(*args)

    monkeypatch.setattr(RolloutWriter, "extend", encoder_ends_once)
    assert batch.run(engine="persistence") == 130
    assert 0 < len(batch.names()) < 20
    assert list((batch.output / "failed").iterdir()) == []


def test_a_second_signal_stops_at_once(batch, monkeypatch):
    batch.write(*(batch.line(index, num_frames=60) for index in range(3)))
    step, steps, before = HFSession.step, [], signal.getsignal(signal.SIGINT)

    async def interrupted(self, action):
        steps.append(action)
        if len(steps) in (3, 6):
            os.kill(os.getpid(), signal.SIGINT)
        return await step(self, action)

    monkeypatch.setattr(HFSession, "step", interrupted)
    assert batch.run() == 130
    assert batch.names() == []
    assert len(steps) < 60
    assert {row["status"] for row in batch.index()} == {"pending"}
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
def test_surveying_a_manifest_takes_little_memory(batch):
    from entry import read_settings

    batch.write(*(batch.line(index) for index in range(10_000)))
    settings = read_settings("rollout", batch.overrides())
    tracemalloc.start()
    try:
        assert count_rollouts(settings) == 10_000
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_a_claim_has_one_holder(tmp_path):
    claim = Claim.take(tmp_path / "a.claim")
    assert claim is not None
    assert Claim.take(tmp_path / "a.claim") is None
    claim.release()
    claim.release()
    assert not (tmp_path / "a.claim").exists()
    (tmp_path / "a.claim").touch()  # left by a dead process
    again = Claim.take(tmp_path / "a.claim")
    assert again is not None
    again.release()
    with pytest.raises(OutputError, match="expected a writable file"):
        Claim.take(tmp_path / "no" / "folder")


def test_locks_are_shared_or_not(tmp_path):
    first = Lock.wait(tmp_path / "lock", shared=True)
    second = Lock.wait(tmp_path / "lock", shared=True)
    assert Lock.alone(tmp_path / "lock") is None
    first.release()
    second.release()
    last = Lock.alone(tmp_path / "lock")
    assert last is not None
    last.release()
