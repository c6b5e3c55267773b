"""Checks of each checkpoint, by its headers and hashes, and of the pair."""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save

from terra.check.report import PAIR, Findings
from terra.config.groups import CheckpointSettings, PairSettings
from terra.engine.base import EngineSpec
from terra.errors import CheckpointError
from terra.pairing import check_pairing
from terra.world_model import LlamaActionConfig, load_config
from terra.world_model.published import TOKENIZERS, WORLD_MODELS, PublishedTokenizer, PublishedWorldModel
from tokenizer import LFQTokenizerConfig
from tokenizer.checkpoint import checkpoint_sha256, load_tensors, read_layout
from tokenizer.files import file_sha256
from tokenizer.model import load_config as load_tokenizer_config

TOKENIZER, WORLD_MODEL = "tokenizer", "world model"
LAYOUT, COUNTS, HASHES, FIT = "keys and shapes", "published counts", "published hashes", "fit"


@dataclass(frozen=True)
class Tokenizer:
    """A checkpoint folder whose weights fit its config."""

    folder: Path
    config: LFQTokenizerConfig


@dataclass(frozen=True)
class WorldModel:
    """A checkpoint folder whose weights fit its config."""

    folder: Path
    config: LlamaActionConfig


def check_tokenizer(settings: CheckpointSettings, findings: Findings, *, hashes: bool) -> Tokenizer | None:
    """Check the checkpoint of the setting `tokenizer`; return None if it can't be used."""
    with findings.catch(TOKENIZER, LAYOUT):
        folder = settings.folder()
        config = load_tokenizer_config(folder)
        counts = _count(folder)
        (height, width), bits = config.image_size, config.quantizer_config.dim
        geometry = f"{height} x {width} pixels as {config.rows} x {config.cols} tokens of {bits} bits"
        findings.add(TOKENIZER, LAYOUT, "passed", f"{_text(counts)}, {geometry}")
        if published := TOKENIZERS.get(settings.subfolder or ""):
            _compare_counts(TOKENIZER, published, counts, findings)
            if hashes:
                _compare_tensors(folder, published, findings)
        return Tokenizer(folder, config)
    return None


def check_world_model(settings: PairSettings, findings: Findings, *, hashes: bool) -> WorldModel | None:
    """Check the checkpoint of the setting `world_model`; return None if it can't be used."""
    with findings.catch(WORLD_MODEL, LAYOUT):
        folder = settings.world_model.folder()
        config = load_config(folder)
        counts = _count(folder)
        window = f"{config.layout.max_frames} frames of {config.layout.image_tokens} + {config.layout.action_slots}"
        model = f"{(config.architectures or [''])[0]}, {config.num_hidden_layers} layers, windows of {window}"
        findings.add(WORLD_MODEL, LAYOUT, "passed", f"{_text(counts)}, {model}")
        if published := _published(settings, config, counts):
            _compare_counts(WORLD_MODEL, published, counts, findings)
            if hashes:
                _compare_files(folder, published, findings)
        return WorldModel(folder, config)
    return None


def _published(
    settings: PairSettings, config: LlamaActionConfig, counts: tuple[int, int]
) -> PublishedWorldModel | None:
    """The published world model that a checkpoint claims to be, by its subfolder's name.

    Models of users' own lie in world_model/ too (model=folder), which is the subfolder of the published v1. The name
    counts there only with a published tokenizer's name beside it (model=terra_v1), or with v1's class and counts.
    """
    published = WORLD_MODELS.get(settings.world_model.subfolder or "")
    if published is None or settings.tokenizer.subfolder in TOKENIZERS:
        return published
    same_class = (config.architectures or [None])[0] == published.architecture
    return published if same_class and counts == (published.num_tensors, published.num_parameters) else None


def check_pair(tokenizer: Tokenizer, world_model: WorldModel, findings: Findings) -> bool:
    """Check that the world model's tokens are the tokenizer's."""
    with findings.catch(PAIR, FIT):
        model = world_model.config
        check_pairing(tokenizer.folder, EngineSpec.of(model))
        sha256 = checkpoint_sha256(tokenizer.folder)
        recorded = {None: "no tokenizer is recorded", sha256: "the one recorded"}.get(
            model.tokenizer_sha256, "with the encoder of the one recorded"
        )
        geometry = f"{model.num_image_patches} tokens a frame of a codebook of {model.image_vocab_size:,}"
        findings.add(PAIR, FIT, "passed", f"{geometry}; tokenizer {sha256[:12]}, {recorded}")
        return True
    return False


def _count(folder: Path) -> tuple[int, int]:
    """Count tensors and parameters from the headers."""
    layout = read_layout(folder)
    return len(layout), sum(math.prod(shape) for shape in layout.values())


def _text(counts: tuple[int, int]) -> str:
    return f"{counts[0]} tensors, {counts[1]:,} parameters"


def _compare_counts(
    subject: str, published: PublishedTokenizer | PublishedWorldModel, counts: tuple[int, int], findings: Findings
) -> None:
    expected = (published.num_tensors, published.num_parameters)
    if counts == expected:
        findings.add(subject, COUNTS, "passed", "as published")
    else:
        findings.add(subject, COUNTS, "failed", f"expected {_text(expected)}, got {_text(counts)}")


def _compare_files(folder: Path, published: PublishedWorldModel, findings: Findings) -> None:
    equal = 0
    for name, expected in published.sha256.items():
        with findings.catch(WORLD_MODEL, HASHES):
            got = file_sha256(folder / name, CheckpointError)
            if got != expected:
                raise CheckpointError(f"{folder / name}: expected SHA-256 {expected[:12]}, got {got[:12]}")
            equal += 1
    if equal == len(published.sha256):
        num_files = len(list(folder.glob("*.safetensors")))
        rest = "" if equal == num_files else "; of the others none is known"
        findings.add(WORLD_MODEL, HASHES, "passed", f"{equal} of {num_files} files have their published SHA-256{rest}")


def _compare_tensors(folder: Path, published: PublishedTokenizer, findings: Findings) -> None:
    if published.plain_sha256 is None:
        findings.add(TOKENIZER, HASHES, "unknown", "no SHA-256 of this tokenizer is known")
    elif hashlib.sha256(save(load_tensors(folder))).hexdigest() == published.plain_sha256:
        findings.add(TOKENIZER, HASHES, "passed", "the tensors give the SHA-256 of the file as it was first published")
    else:
        # A different hash proves nothing: the same weights with entries in another order have another hash.
        findings.add(
            TOKENIZER, HASHES, "unknown", "the tensors don't give the SHA-256 of the file as it was first published"
        )
