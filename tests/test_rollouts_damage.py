"""Damaged results of `terra rollout`: named in one line, made again, and in the end those of an undisturbed run."""

import json
import shutil
from pathlib import Path

import pytest
from rollout_damage import ANY, DAMAGE, FILES, RECORDS, cut, edit, overwrite
from tiny_rollouts import Batch

from decoder.containers import check_boxes
from terra.errors import VideoError
from terra.rollout_record import VERSION
from terra.rollouts.folder import RolloutFolder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_tokenizer: Path) -> Batch:
    batch = Batch(tmp_path_factory.mktemp("undisturbed"), tiny_model, tiny_tokenizer)
    batch.write(*(batch.line(index, num_frames=6) for index in range(2)))
    assert run(batch) == 0
    return batch


@pytest.fixture
def batch(undisturbed: Batch) -> Batch:
    """The undisturbed batch with a copy of its output, to be damaged."""
    damaged = Batch.__new__(Batch)
    vars(damaged).update(vars(undisturbed))
    damaged.output = undisturbed.folder / "copy"
    shutil.rmtree(damaged.output, ignore_errors=True)
    shutil.copytree(undisturbed.output, damaged.output)
    return damaged


def run(batch: Batch, **changes: object) -> int:
    return batch.run(engine="persistence", num_samples=2, grid=True, **changes)


def check_healed(batch: Batch, undisturbed: Batch) -> None:
    assert batch.names() == undisturbed.names() == ["r0", "r0+1", "r1", "r1+1"]
    for name in batch.names():
        for file in FILES:
            path = Path("rollouts", name, file)
            assert (batch.output / path).read_bytes() == (undisturbed.output / path).read_bytes()
        got, expected = batch.record(name), undisturbed.record(name)
        assert got.keys() == expected.keys()
        assert {key for key in got if got[key] != expected[key]} <= {"seconds"}
    for grid in ("r0.mp4", "r1.mp4"):
        path = Path("grids", grid)
        assert (batch.output / path).read_bytes() == (undisturbed.output / path).read_bytes()
    assert [row["status"] for row in batch.index()] == ["done"] * 4
    assert not list((batch.output).rglob(".*.tmp"))


@pytest.mark.parametrize(("file", "damage"), [pytest.param(file, by, id=f"{file}-{how}") for file, how, by in DAMAGE])
def test_a_damaged_result_is_named_and_made_again(batch, undisturbed, caplog, file, damage):
    before = (batch.output / "rollouts" / "r1").stat().st_ino
    damage(batch.output / "rollouts" / "r0" / file)
    assert run(batch) == 0
    check_healed(batch, undisturbed)
    (line,) = [text for text in caplog.messages if "is damaged and made again" in text]
    assert line.startswith("r0: ")
    assert file in line or "more.mp4" in line or "run.json" in line
    assert "\n" not in line
    assert (batch.output / "rollouts" / "r1").stat().st_ino == before


@pytest.mark.parametrize("how", ["removed", "a file", "a dangling link", "a link"])
def test_a_folder_that_is_none_is_made_again(batch, undisturbed, how):
    folder = batch.output / "rollouts" / "r0"
    elsewhere = folder.rename(batch.output / "elsewhere")
    if how == "a file":
        folder.write_text("nothing")
    elif how != "removed":
        folder.symlink_to(batch.output / "nowhere")
        if how == "a link":
            (elsewhere / "video.mp4").unlink()
            (batch.output / "nowhere").symlink_to(elsewhere)
    assert run(batch) == 0
    assert folder.is_dir()
    assert not folder.is_symlink()
    check_healed(batch, undisturbed)


def test_a_video_changed_within_is_found_by_its_hash_on_request(batch, undisturbed, caplog):
    video, grid = batch.output / "rollouts" / "r1" / "video.mp4", batch.output / "grids" / "r0.mp4"
    for path in (video, grid):
        overwrite(path, path.read_bytes().index(b"mdat") + 40, bytes(8))
    assert run(batch) == 0
    assert "damaged" not in caplog.text
    assert video.read_bytes() != (undisturbed.output / "rollouts" / "r1" / "video.mp4").read_bytes()
    assert run(batch, verify=True) == 0
    assert "r1: is damaged and made again: video.mp4: expected the content" in caplog.text
    check_healed(batch, undisturbed)


@pytest.mark.parametrize("how", ["removed", "empty", "cut", "zeroed"])
def test_a_damaged_grid_is_made_again(batch, undisturbed, how):
    ANY[how](batch.output / "grids" / "r0.mp4")
    assert run(batch) == 0
    check_healed(batch, undisturbed)


@pytest.mark.parametrize("how", ["removed", "empty", "cut", "zeroed", "longer", "not an object", "deep"])
@pytest.mark.parametrize("file", ["run.json", "index.jsonl"])
def test_files_about_the_run_are_written_anew(batch, undisturbed, caplog, file, how):
    (ANY | RECORDS)[how](batch.output / file)
    assert run(batch) == 0
    check_healed(batch, undisturbed)
    assert (batch.output / "run.json").read_bytes() == (undisturbed.output / "run.json").read_bytes()
    assert len(batch.log()) == 4
    assert ("run.json" in caplog.text) == (file == "run.json" and how != "removed")


def test_a_log_cut_in_the_middle_of_a_line_is_gone_on_with_in_a_new_line(batch):
    log = batch.output / "log.jsonl"
    log.write_bytes(log.read_bytes()[:-10])
    (batch.output / "rollouts" / "r0" / "video.mp4").unlink()
    assert run(batch) == 0
    lines = log.read_text().splitlines()
    assert len(lines) == 5
    assert {json.loads(line)["id"] for line in lines[:3]} < set(batch.names())
    assert json.loads(lines[4])["id"] == "r0"


def test_a_damaged_failure_is_made_good_by_the_rollout_and_is_one_in_the_index_until_then(batch, undisturbed):
    shutil.rmtree(batch.output / "rollouts" / "r0")
    failure = batch.output / "failed" / "r0.json"
    failure.write_text("{")
    folder = RolloutFolder(batch.output, {}, "keep")
    assert folder.write_index([("r0", 1), ("r1", 2)]) == {"done": 1, "failed": 1, "pending": 0}
    assert "r0.json is damaged" in batch.index()[0]["reason"]
    assert run(batch) == 0
    assert not failure.exists()
    check_healed(batch, undisturbed)


def test_what_could_not_be_remade_is_pending_in_the_index(batch):
    cut(batch.output / "rollouts" / "r0" / "rollout.json")
    folder = RolloutFolder(batch.output, {}, "keep")
    assert folder.write_index([("r0", 1), ("r1", 2)]) == {"done": 1, "failed": 0, "pending": 1}


def test_scores_of_damaged_rollouts_are_made_again(batch, undisturbed):
    score = "tiny_rollouts:mean_token"
    assert run(batch, score=score) == 0
    best = (batch.output / "best.json").read_bytes()
    for path in (batch.output / "rollouts" / "r0+1" / "tokens.safetensors", batch.output / "best.json"):
        cut(path)
    edit(lambda record: record.update(score={"function": score}))(batch.output / "rollouts" / "r1" / "rollout.json")
    assert run(batch, score=score) == 0
    assert (batch.output / "best.json").read_bytes() == best
    for name in batch.names():
        tokens = Path("rollouts", name, "tokens.safetensors")
        assert (batch.output / tokens).read_bytes() == (undisturbed.output / tokens).read_bytes()


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1, None])
def test_results_of_another_terra_are_left_alone_unless_they_are_to_be_redone(batch, undisturbed, version):
    path = batch.output / "rollouts" / "r0" / "rollout.json"
    edit(lambda record: record.update(version=version))(path)
    newer = path.read_bytes()
    assert run(batch) == 3
    assert path.read_bytes() == newer
    assert f"expected version {VERSION}, got {version}: another Terra wrote it" in batch.index()[0]["reason"]
    assert run(batch, on_change="redo") == 0
    check_healed(batch, undisturbed)


def test_what_a_killed_process_left_half_written_is_removed(batch, undisturbed):
    for folder in (batch.output, batch.output / "failed", batch.output / "grids"):
        (folder / ".index.jsonl.123.abcd.tmp").write_text("{")
    assert run(batch) == 0
    check_healed(batch, undisturbed)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "got an empty file"),
        (b"no video at all", "got another kind of file"),
        (b"\0\0\0\x08ftyp", "got another kind of file"),
        (b"\0\0\0\x08ftyp\0\0\0\x08moov\0\0\0\x08mdat", None),
        (b"\0\0\0\x08ftyp\0\0\0\x08moov\0\0\0\x01mdat\0\0\0\0\0\0\0\x12..", None),
        (b"\0\0\0\x08ftyp\0\0\0\x08moov\0\0\0\x01mdat\0\0\0\0\0\0\0\x13..", "expected 35 bytes, got 34"),
        (b"\0\0\0\x08ftyp\0\0\0\x00moov", None),
        (b"\0\0\0\x08ftyp" * 100_000, "expected at most 65536 boxes, got more"),
    ],
)
def test_boxes_of_an_mp4(tmp_path, content, expected):
    path = tmp_path / "video.mp4"
    path.write_bytes(content)
    if expected is None:
        check_boxes(path)
    else:
        with pytest.raises(VideoError, match=expected):
            check_boxes(path)
