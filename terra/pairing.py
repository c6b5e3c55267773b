"""Checks that a tokenizer belongs to a world model: another tokenizer's ids are in range, but mean other pictures."""

from pathlib import Path

from terra.engine.base import EngineSpec
from terra.errors import CheckpointError
from terra.world_model.published import TOKENIZERS, tokenizer_of
from tokenizer import LFQTokenizer, LFQTokenizerConfig
from tokenizer.checkpoint import CONFIG_NAME, checkpoint_sha256
from tokenizer.lineage import makes_tokens_of


def check_pairing(tokenizer: Path | LFQTokenizer, spec: EngineSpec) -> None:
    """Refuse a tokenizer that the world model was not trained with.

    Args:
        tokenizer: a checkpoint folder or a loaded tokenizer. Without a folder only the counts are checked.
        spec: the facts in the world model's config.json.

    Raises:
        CheckpointError: another number of tokens a frame, another codebook, pictures of another size than the views',
            another encoder than recorded or, where nothing is recorded, the other one of the two published tokenizers,
            which differ in weights alone.
    """
    if isinstance(tokenizer, Path):
        config = LFQTokenizerConfig.load(tokenizer / CONFIG_NAME)
        folder, size = tokenizer, config.image_size
        got = (config.num_tokens, config.quantizer_config.codebook_size)
    else:
        folder, size = tokenizer.checkpoint, tokenizer.image_size
        got = (tokenizer.rows * tokenizer.cols, tokenizer.codebook_size)
    name = "tokenizer" if folder is None else f"tokenizer {folder}"
    expected = (spec.layout.image_tokens, spec.vocab_size)
    if got != expected:
        raise CheckpointError(
            f"{name}: the world model expects {expected[0]} tokens a frame of a codebook of "
            f"{expected[1]}, got {got[0]} of {got[1]}"
        )
    if spec.views is not None and spec.views.image_size != tuple(size):
        sizes = f"{spec.views.image_size} for its views, got {tuple(size)}"
        raise CheckpointError(f"{name}: the world model expects pictures of {sizes}")
    if folder is None:
        return
    recorded = spec.tokenizer_sha256
    if recorded is not None and not makes_tokens_of(folder, recorded):
        like = LFQTokenizerConfig.load(folder / CONFIG_NAME).tokens_like
        hint = ", whose tokens are nearly the same: train the world model, or an adapter of it, on them"
        raise CheckpointError(
            f"{name}: the world model was trained with tokenizer {recorded[:12]}, got {checkpoint_sha256(folder)[:12]}"
            + (hint if like == recorded else "")
        )
    if recorded is None:
        published = tokenizer_of(spec.architecture or "")
        if folder.name in TOKENIZERS and folder.name != published:
            raise CheckpointError(f"{name}: the published {spec.architecture} was trained with {published}")
