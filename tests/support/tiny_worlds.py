"""Worlds that are not driven, a view that moves as the actions say: recordings, tiny models, small evaluations."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tiny import save_tiny, tiny_tokenizer_config

from terra.actions import Choice, Keys, TableSpace, Vector
from terra.dataset import ShardWriter, create_dataset
from terra.world_model import LlamaActionV2ForCausalLM
from tokenizer import LFQTokenizer, LFQTokenizerConfig

FPS, SIZE, NUM_FRAMES = 10.0, (32, 48), 40
STEP = 4  # pixels that an action moves the view by

KEYS = Keys(names=("right", "down"))
CHOICE = Choice(names=("stay", "left", "right"))
VECTOR = Vector(names=("dx", "dy"), units=("px", "px"), low=(-8.0, -4.0), high=(8.0, 4.0))
SPACES = {"keys": KEYS, "choice": CHOICE, "vector": VECTOR}


def some_values(space: TableSpace, random: np.random.Generator, count: int) -> np.ndarray:
    if isinstance(space, Vector):
        return random.uniform(space.low, space.high, (count, 2))
    if isinstance(space, Keys):
        return random.integers(0, 2, (count, 2)).astype(float)
    return random.integers(0, 3, (count, 1)).astype(float)


def moves(space: TableSpace, values: np.ndarray) -> np.ndarray:
    """Pixels right and down that each action moves the view by."""
    if isinstance(space, Vector):
        return values.round()
    if isinstance(space, Keys):
        return values * STEP
    return np.array([[0, 0], [-STEP, 0], [STEP, 0]])[values[:, 0].astype(int)]


def episode(space: TableSpace, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    coarse = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    ground = np.asarray(Image.fromarray(coarse).resize((256, 256), Image.Resampling.BICUBIC))
    values = some_values(space, random, NUM_FRAMES)
    at = np.cumsum(np.concatenate([random.integers(0, 256, (1, 2)), moves(space, values)[:-1]]), axis=0).astype(int)
    frames = [np.roll(ground, (-y, -x), axis=(0, 1))[: SIZE[0], : SIZE[1]] for x, y in at]
    return np.stack(frames), values


def make_dataset(folder: Path, space: TableSpace) -> Path:
    create_dataset(folder, source="shapes", fps=FPS, image_size=SIZE, space=space)
    for split, places in (("train", 6), ("held_out", 3)):
        for place in range(places):
            facts = {"split": split, "source": "shapes", "place": f"{split}_{place}", "fps": FPS, "image_size": SIZE}
            with ShardWriter(folder, **facts, camera=None, space=space) as writer:
                writer.add(f"{split}_{place}", *episode(space, 100 * place + len(split)))
    return folder


def make_models(folder: Path, space: TableSpace, **config_of_world_model: object) -> list[str]:
    """Random weights of the right shapes."""
    torch.manual_seed(0)
    config = tiny_tokenizer_config().to_dict() | {"image_size": list(SIZE)}
    LFQTokenizer(LFQTokenizerConfig.from_dict(config, "tiny")).save_pretrained(folder / "tokenizer")
    slots, action_dim = space.shape
    patches = (SIZE[0] // 4) * (SIZE[1] // 4)
    save_tiny(
        folder / "world_model",
        LlamaActionV2ForCausalLM,
        **{"num_image_patches": patches, "num_action_tokens": slots, "action_dim": action_dim, "fps": FPS},
        num_spatio_embeddings=patches + slots,
        max_position_embeddings=8 * (patches + slots),
        waypoint_times=None,
        action_space=space.model_dump(mode="json"),
        **config_of_world_model,
    )
    return ["model=folder", f"model.path={folder}", "device=cpu", "dtype=float32"]


EVALUATION = [
    *("num_clips=6", "num_frames=8", "num_context=2", "overlap=2", "drift_clips=2", "drift_frames=12"),
    *("engine=persistence", "workers=0", "resamples=100", "frechet_resamples=3", "pictures=1", "at_once=4"),
]
