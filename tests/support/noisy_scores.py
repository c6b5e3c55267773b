"""Tells by how much a generated token misses the best one, where two ways of computing a model round differently."""

import torch

from terra.noise import vocabulary_noise
from terra.prompt import Prompt, build_prompt
from terra.sampling import SamplingParams
from terra.world_model import LlamaActionForCausalLM, LlamaActionV2ForCausalLM


def largest_miss(
    model: LlamaActionForCausalLM | LlamaActionV2ForCausalLM,
    prompt: Prompt,
    actions: torch.Tensor,
    frames: torch.Tensor,
    sampling: SamplingParams,
    seed: int,
) -> float:
    """The largest difference between the model's best noisy score and that of the token which a frame has.

    It is 0 where every token of `frames` is what the model samples after the tokens before, and as small as rounding
    errors where the model and the maker of the frames differ by rounding alone.
    """
    assert sampling.top_k == 0
    assert sampling.top_p == 1.0
    layout, given = model.config.layout, prompt.num_frames
    window = build_prompt(torch.cat([prompt.tokens, frames]), torch.cat([prompt.actions, actions]))
    ids = window.ids(layout.action_slots)
    with torch.inference_mode():
        logits = model(input_ids=ids[None], actions=window.actions[None]).logits[0, :, : model.config.image_vocab_size]
    places = torch.cat(
        [torch.arange(layout.image_tokens) + frame * layout.block - 1 for frame in range(given, given + len(frames))]
    )
    scores = logits[places].float()
    if not sampling.greedy:
        scores = scores / sampling.temperature
        scores = scores + vocabulary_noise(torch.full_like(places, seed), places, scores.shape[-1])
    chosen = scores.gather(-1, ids[places + 1][:, None])
    return float((scores.amax(-1, keepdim=True) - chosen).max())
