"""`terra replay`, and the one record of a rollout, whoever wrote it."""

import shutil
from pathlib import Path

import pytest
import torch
from entry import read_settings
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file, save_file
from tiny_rollouts import Batch, change, texts, told
from tiny_serving import Served, scene_folder

from terra.config.files import register_resolvers
from terra.errors import ConfigError, OutputError
from terra.generate import run as generate
from terra.rollout_record import read_record

pytestmark = pytest.mark.slow


@pytest.fixture
def batch(tmp_path: Path, tiny_model: Path, tiny_tokenizer: Path) -> Batch:
    return Batch(tmp_path, tiny_model, tiny_tokenizer)


@pytest.fixture
def made(batch: Batch) -> Path:
    """A rollout of `terra-generate`."""
    settings = {
        "context": batch.folder / "c0",
        "trajectory": batch.folder / "drive.json",
        "tokenizer.pretrained": batch.tokenizer,
        "world_model.pretrained": batch.model,
        "engine": "hf",
        "overlap": 2,
        "num_frames": 10,
        "seed": 3,
        "output": batch.folder / "made",
    }
    register_resolvers()
    return generate(
        read_settings("generate", [f"{key}={value}" for key, value in settings.items()]), Console(quiet=True)
    )


def test_a_rollout_is_made_again(made, caplog):
    caplog.set_level("INFO")
    code, text = told(made)
    assert code == 0
    assert "making the rollout again: 100 %, 7 of 7 frames" in caplog.text  # of ten, three are context
    assert [line.split(None, 1) for line in text.splitlines()] == [
        ["tokens", "the same"],
        ["pixels", "the same"],
        ["video.mp4", "the same bytes"],
    ]


def test_another_engine_makes_it_again(made):
    assert told(made, engine="jacobi", **{"engine.drafts": 4})[0] == 0
    assert told(made, engine="persistence")[0] == 1


def test_other_tokens_are_told(made):
    change(made, seed=4)
    code, text = told(made)
    assert code == 1
    assert "of 120 differ" in text
    assert "levels in" in text
    assert "other bytes" in text


def test_pixels_may_differ_where_tokens_agree(made):
    change(made, pixels_sha256="0" * 64)
    assert told(made) == (0, "tokens     the same\npixels     the same\nvideo.mp4  the same bytes\n")


def test_a_rollout_of_a_batch_is_made_again(batch, tmp_path):
    batch.write(batch.line(1, sampling={"top_k": 5}))
    assert batch.run() == 0
    assert told(batch.output / "rollouts/r1")[0] == 0


def test_changed_inputs_are_named(made, batch):
    picture = batch.folder / "c0/1.png"
    Image.open(picture).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(picture)
    with pytest.raises(ConfigError, match=r"context .*/c0: expected the content that the rollout was made from"):
        told(made)


def test_an_input_that_moved_is_found_beside_the_record(made, batch):
    (batch.folder / "drive.json").rename(made / "drive.json")
    assert told(made)[0] == 0
    (made / "drive.json").unlink()
    with pytest.raises(ConfigError, match=r"^trajectory: expected it at .*/gone.json, found none"):
        told(made, trajectory=made / "gone.json")


def test_inputs_that_are_gone_are_said_and_taken_from_the_rollout(made, batch):
    (batch.folder / "drive.json").unlink()
    shutil.rmtree(batch.folder / "c0")
    code, said = told(made)
    assert code == 0
    assert "c0 is not here: taken from tokens.safetensors" in said
    assert "drive.json is not here: taken from tokens.safetensors" in said
    assert "tokens     the same" in said


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_frames", 4),
        ("num_context", 0),
        ("num_context", "3"),
        ("fps", "x"),
        ("fps", 1e308),
        ("seed", -1),
        ("seed", 10**40),
        ("pixels_sha256", None),
        ("checkpoints", {"tokenizer": 5, "world_model": None}),
        ("inputs", {"context": [], "context_sha256": "", "trajectory": 5, "trajectory_sha256": "", "sample_id": None}),
        ("inputs", {"context": [5], "context_sha256": "", "trajectory": {}, "trajectory_sha256": ""}),
    ],
)
def test_a_record_with_wrong_values_is_refused_before_anything_is_made(made, name, value):
    change(made, **{name: value})
    with pytest.raises(OutputError, match=r"rollout\.json: "):
        told(made)


def test_a_rollout_without_its_video_is_refused(made):
    (made / "video.mp4").unlink()
    with pytest.raises(OutputError, match=r"video\.mp4: expected the video to compare with"):
        told(made)


def test_other_weights_are_refused(made):
    record = read_record(made)
    record["checkpoints"]["world_model"]["sha256"] = "0" * 64
    change(made, checkpoints=record["checkpoints"])
    with pytest.raises(ConfigError, match=r"world_model \S+: expected the weights 000000000000 of the rollout, got"):
        told(made)
    record["checkpoints"]["world_model"]["folder"] = "../nowhere"
    change(made, checkpoints=record["checkpoints"])
    with pytest.raises(ConfigError, match=r"^world_model: expected it at .*/nowhere.*: give model.path=DIR"):
        told(made)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"version": None}, "expected version 3, got None: another Terra wrote it: make the rollout again"),
        ({"version": 2}, "expected version 3, got 2"),
        ({"format": "other"}, "expected format 'terra-rollout', got 'other'"),
        ({"engine": {"name": "os.system"}}, "engine: expected one of graph, hf, jacobi"),
        ({"engine": {"name": "hf", "dtype": {"_target_": "os.abort"}}}, "engine: expected one of graph, hf, jacobi"),
        ({"sampling": {"heat": 1}}, "expected a whole record"),
    ],
)
def test_records_that_can_not_be_replayed_are_one_line(made, values, message):
    change(made, **values)
    with pytest.raises((ConfigError, OutputError), match=message):
        told(made)


def test_records_have_the_same_keys_and_jobs_the_tokens_of_a_stream(made, batch, tmp_path_factory):
    """generate, rollouts and the server write one record; a job's folder can be replayed without its upload."""
    batch.write(batch.line(0))
    assert batch.run() == 0
    places = tmp_path_factory.mktemp("scenes"), tmp_path_factory.mktemp("data")
    with Served(batch.model, batch.tokenizer, scene_folder(places[0]), places[1]) as server:
        import httpx

        body = {"scene": "day", "trajectory_name": "left", "num_frames": 10, "seed": 7}
        video = server.wait_for(httpx.post(f"{server.url}/v1/videos", json=body).json()["id"])
        assert video["status"] == "completed"
        folder = server.data / "results" / video["id"]
        record, stored = read_record(folder), load_file(folder / "tokens.safetensors")
        pipeline, sampling = server.service.model.pipeline, server.settings.sampling

        async def streamed() -> list[torch.Tensor]:
            return [each async for each in pipeline.stream(stored["tokens"][:3], stored["actions"], sampling, 7)]

        assert torch.equal(torch.stack(server.call(streamed())), stored["tokens"][3:])
    records = [read_record(made), read_record(batch.output / "rollouts/r0"), record]
    assert [text for each in records for text in texts(each) if Path(text).is_absolute()] == []
    assert [list(each) for each in records] == [list(records[0])] * 3
    assert [list(each["inputs"]) for each in records] == [list(records[0]["inputs"])] * 3
    assert [each["sampling"]["temperature"] for each in records] == [0.9, 0.9, 1.0]


def test_stored_tokens_stand_in_for_inputs_that_were_no_files(made):
    nothing = dict.fromkeys(read_record(made)["inputs"])
    change(made, inputs=nothing)
    assert told(made)[0] == 0
    stored = load_file(made / "tokens.safetensors")
    stored["tokens"][4] += 1
    save_file(
        {name: each.clamp(max=63) if name == "tokens" else each for name, each in stored.items()},
        made / "tokens.safetensors",
    )
    assert told(made)[0] == 1
    (made / "tokens.safetensors").unlink()
    with pytest.raises(OutputError, match="expected the tokens of the rollout"):
        told(made)
