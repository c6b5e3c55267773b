"""A benchmark of a few samples over random pictures, a small random ACT-Estimator, and runs of `terra-act-bench`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from entry import read_settings
from PIL import Image
from rich.console import Console
from tiny import COLS, ROWS
from torch import Tensor

from decoder.video import write_video
from terra.act_bench.estimator import ActEstimator, ActEstimatorConfig
from terra.act_bench.run import run
from terra.config.files import register_resolvers
from tokenizer.checkpoint import write_json, write_tensors

LABELS = {
    7: "curving_to_left/curving_to_left_moderate",
    12: "straight_constant_speed/straight_constant_speed_25kmph",
    40: "stopping/stopping_15kmph",
    41: "shifting_towards_left/shifting_towards_left_short",  # no class, so not scored
}
TINY = ActEstimatorConfig(side=28, d_model=32, num_heads=2)


def record(sample_id: int, label: str, seed: int = 0) -> dict[str, Any]:
    """A line of act_bench.jsonl in the benchmark's format: a drive that turns left, at its own speed."""
    speed, curve = 5 + sample_id % 5, 0.02 * (sample_id % 3)
    times = np.arange(50)[:, None] / 10 + np.arange(60) * 0.05
    ahead = speed * (times - times[:, :1])
    paths = np.stack([ahead, curve * ahead**2, 0 * ahead], axis=-1)
    reference = np.stack([speed * np.arange(60) / 10, curve * (speed * np.arange(60) / 10) ** 2], axis=1)
    return {
        "sample_id": sample_id,
        "label": label,
        "context_frames": [f"sweeps/CAM_FRONT/{sample_id}_{index}.jpg" for index in range(3)],
        "instruction_trajs": paths.tolist(),
        "reference_traj": np.column_stack([reference, np.zeros(60)]).tolist(),
        "intrinsic": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    }


def save_estimator(folder: Path, config: ActEstimatorConfig = TINY, *, prefix: str = "model.", **changes: Any) -> Path:
    """A random estimator in the published layout."""
    torch.manual_seed(0)
    tensors = {prefix + name: tensor for name, tensor in ActEstimator(config).state_dict().items()}
    write_estimator(folder, config, tensors, **changes)
    return folder


def write_estimator(folder: Path, config: ActEstimatorConfig, tensors: dict[str, Tensor], **changes: Any) -> None:
    write_tensors(folder / "model.safetensors", tensors)
    content: dict[str, Any] = {
        "architectures": ["ActEstimator"],
        "auto_map": {
            "AutoConfig": "configuration_act_estimator.ActEstimatorConfig",
            "AutoModel": "modeling_act_estimator.ActEstimator",
        },
        "d_model": config.d_model,
        "dropout": 0.1,
        "feature_map_size": config.feature_map_size,
        "input_shape": [3, config.num_frames, config.side, config.side],
        "max_seq_len": config.num_frames,
        "model_type": "ACT-Estimator",
        "num_classes": config.num_classes,
        "num_heads": config.num_heads,
        "timestamp_dim": 1,
        "torch_dtype": "float32",
        "transformers_version": "4.47.0",
    }
    write_json(folder / "config.json", {key: value for key, value in (content | changes).items() if value is not None})


class Bench:
    """A folder with act_bench.jsonl, the pictures of its samples, an estimator, and an output."""

    def __init__(self, folder: Path, estimator: Path, model: Path, tokenizer: Path) -> None:
        self.folder, self.output, self.manifest = folder, folder / "out", folder / "act_bench.jsonl"
        self.estimator, self.model, self.tokenizer = estimator, model, tokenizer
        self.write(*(record(sample_id, label) for sample_id, label in LABELS.items()))
        self.pictures = folder / "nuscenes"
        (self.pictures / "sweeps/CAM_FRONT").mkdir(parents=True)
        random = np.random.default_rng(0)
        for sample_id in LABELS:
            for index in range(3):
                pixels = random.integers(0, 256, (4 * ROWS, 4 * COLS, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(self.pictures / f"sweeps/CAM_FRONT/{sample_id}_{index}.jpg")

    def write(self, *records: dict[str, Any]) -> None:
        self.manifest.write_text("".join(json.dumps(each) + "\n" for each in records))

    def write_videos(self, *sample_ids: int, num_frames: int = 44, fps: float = 10.0) -> Path:
        """Gray videos whose brightness is four times the sample's id."""
        folder = self.folder / "videos"
        folder.mkdir(exist_ok=True)
        for sample_id in sample_ids:
            frames = np.full((num_frames, 32, 48, 3), 4 * sample_id, dtype=np.uint8)
            write_video(frames, folder / f"NUSCENES_ACTION_{sample_id:06}.mp4", fps)
        return folder

    def overrides(self, **changes: Any) -> list[str]:
        settings = {
            "manifest": self.manifest,
            "context_root": self.pictures,
            "output": self.output,
            "tokenizer.pretrained": self.tokenizer,
            "world_model.pretrained": self.model,
            "engine": "hf",
            "estimator.pretrained": self.estimator,
            "estimator.dtype": "float32",
            "retries": 0,
            "resamples": 20,
        }
        return [f"{key}={'null' if value is None else value}" for key, value in (settings | changes).items()]

    def run(self, **changes: Any) -> int:
        register_resolvers()
        with (self.folder / "console.txt").open("w") as file:
            return run(read_settings("act_bench", self.overrides(**changes)), Console(file=file, width=120))

    @property
    def console(self) -> str:
        return (self.folder / "console.txt").read_text()

    @property
    def results(self) -> dict[str, Any]:
        return json.loads((self.output / "results.json").read_text())
