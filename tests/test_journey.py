"""The whole way of a user, at a size that a CPU trains in a minute: record, train both models, generate, evaluate."""

import json
from pathlib import Path

import pytest
import torch
from entry import load_script, read_settings
from rich.console import Console

from decoder.video import probe_video
from terra.config.files import register_resolvers
from terra.errors import TerraError
from terra.generate import run as generate
from terra.recording.run import run as record
from terra.training.tokenize import run as tokenize
from terra.training.tokenizer import run as train_tokenizer
from terra.training.world_model import run as train
from terra.world_model import LlamaActionConfig, LlamaActionV2ForCausalLM
from tokenizer import LFQTokenizer

pytestmark = pytest.mark.slow

TOKENIZER = [
    *("tokenizer.ch=32", "tokenizer.ch_mult=[1,1,1,1,2]", "tokenizer.num_res_blocks=1", "tokenizer.dim=6"),
    *("perceptual.weight=0", "batch_size=4", "schedule=steps", "max_seconds=null", "max_steps=100", "warmup_steps=10"),
    *("learning_rate=2e-3", "ema_decay=0.95", "workers=0", "evaluation_frames=16", "log_every_seconds=1"),
]
WORLD_MODEL = [
    *("world_model.hidden_size=64", "world_model.intermediate_size=128", "world_model.num_hidden_layers=2"),
    *("world_model.num_attention_heads=1", "world_model.num_key_value_heads=1", "window=8", "batch_size=8"),
    *("schedule=steps", "max_seconds=null", "max_steps=160", "warmup_steps=10", "learning_rate=3e-3"),
    *("ema_decay=0.95", "preview_frames=0", "evaluation_windows=8", "log_every_seconds=1"),
]


@pytest.fixture(scope="module")
def towns(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("moderngl", reason="the extra `record` is not installed")
    from terra.recording.canvas import open_context

    try:
        open_context().release()
    except TerraError as error:
        pytest.skip(f"no OpenGL here: {error}")
    folder = tmp_path_factory.mktemp("journey") / "towns"
    for split, episodes in (("train", 4), ("held_out", 2)):
        overrides = [f"split={split}", "towns=1", f"episodes_per_place={episodes}", "frames_per_episode=50"]
        record(read_settings("record", [*overrides, "image_size=[48,80]", f"output={folder}", "workers=0"]))
    return folder


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def evaluate(towns: Path, tokenizer: Path, world_model: Path, output: Path) -> dict:
    from terra.evaluation.evaluate import run

    run(
        read_settings(
            "evaluate",
            [
                *(f"data={towns}", f"output={output}", "engine=hf", "sampling=greedy", "workers=1", "pictures=1"),
                *(f"tokenizer.pretrained={tokenizer}", f"world_model.pretrained={world_model}", "estimator=null"),
                *("num_clips=4", "num_frames=8", "drift_clips=0", "max_groups=0", "overlap=3", "resamples=50"),
                "frechet_resamples=2",
            ],
        ),
        Console(quiet=True),
    )
    return read(output / "metrics.json")


def generated(metrics: dict, metric: str) -> float:
    return metrics["measures"]["rollouts"][metric]["generated"]["value"]


def test_from_a_recording_to_a_measured_video(towns: Path, tmp_path: Path) -> None:
    register_resolvers()
    train_tokenizer(read_settings("train_tokenizer", [*TOKENIZER, f"data={towns}", f"output={tmp_path / 'tok'}"]))
    tokenizer = tmp_path / "tok" / "tokenizer"
    assert losses(tmp_path / "tok")[-1] < losses(tmp_path / "tok")[0]

    tokens = tmp_path / "tokens"
    settings = [f"data={towns}", f"checkpoint={tokenizer}", f"output={tokens}", "workers=1"]
    tokenize(read_settings("tokenize", settings))

    train(read_settings("train", [*WORLD_MODEL, f"data={tokens}", f"output={tmp_path / 'wm'}"]))
    world_model = tmp_path / "wm" / "world_model"
    assert losses(tmp_path / "wm")[-1] < losses(tmp_path / "wm")[0]

    video = next((towns / "held_out").glob("*/*.mp4"))
    load_script("context_cut").cut(video, 10, 3, tmp_path / "context")
    settings = [f"tokenizer.pretrained={tokenizer}", f"world_model.pretrained={world_model}", "engine=hf"]
    settings += [f"context={tmp_path / 'context'}", f"trajectory={tmp_path / 'context' / 'trajectory.json'}"]
    generate(read_settings("generate", [*settings, "num_frames=8", f"output={tmp_path / 'drive'}"]))
    assert probe_video(tmp_path / "drive" / "video.mp4").num_frames == 8

    torch.manual_seed(0)
    untrained = tmp_path / "untrained"
    LFQTokenizer(LFQTokenizer.from_pretrained(tokenizer).config).save_pretrained(untrained / "tokenizer")
    LlamaActionV2ForCausalLM(LlamaActionConfig.from_pretrained(world_model)).save_pretrained(untrained / "world_model")
    ours = evaluate(towns, tokenizer, world_model, tmp_path / "ours")
    theirs = evaluate(towns, tokenizer, untrained / "world_model", tmp_path / "theirs")
    assert ours["teacher_forced"]["cross_entropy"] < theirs["teacher_forced"]["cross_entropy"] - 0.5
    assert ours["teacher_forced"]["accuracy"] > theirs["teacher_forced"]["accuracy"] + 0.1
    assert generated(ours, "psnr") > generated(theirs, "psnr") + 1.0
    assert (tmp_path / "ours" / "rollouts.png").is_file()
