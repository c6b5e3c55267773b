"""Looking inside: what the model expects and reads, and the bits of tokens, on tiny random models."""

import math

import numpy as np
import pytest
import torch
from tiny import COLS, ROWS, tiny_tokenizer_config

from terra.insight.attention import attention_by_part, attention_map, last_frame_attention
from terra.insight.bits import bit_correlation, bit_importance, decode_bits, flip_bit
from terra.insight.figures import bars, curves, frame_rows, maps_over_frames, matrix
from terra.insight.prediction import action_divergence, moved_waypoints, token_entropy
from terra.insight.widgets import flip_through
from terra.prompt import build_prompt
from terra.world_model import load_world_model
from tokenizer import LFQTokenizer

VOCABULARY = 64


@pytest.fixture(scope="module")
def model(tiny_model):
    return load_world_model(tiny_model)


@pytest.fixture(scope="module")
def tokenizer():
    torch.manual_seed(0)
    return LFQTokenizer(tiny_tokenizer_config()).eval()


def window(num_frames: int = 4):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (num_frames, ROWS, COLS), generator=generator)
    return build_prompt(tokens, torch.randn(num_frames - 1, 6, 3, generator=generator))


def distributions(model, prompt):
    """Each image token's distribution but the first one's, by one forward pass: (tokens - 1, vocabulary)."""
    slots = model.config.num_action_tokens
    ids = prompt.ids(slots)
    with torch.no_grad():
        logits = model(ids[None], actions=prompt.actions[None]).logits[0, :, :VOCABULARY]
    block = ROWS * COLS + slots
    predicting = [frame * block + place - 1 for frame in range(prompt.num_frames) for place in range(ROWS * COLS)]
    return logits.softmax(-1)[predicting[1:]]


def test_entropy_is_that_of_each_token_s_distribution(model):
    prompt = window()
    entropy = token_entropy(model, prompt)
    assert entropy.shape == (4, ROWS, COLS)
    assert entropy[0, 0, 0] == pytest.approx(math.log2(VOCABULARY))
    expected = torch.distributions.Categorical(distributions(model, prompt)).entropy() / math.log(2)
    torch.testing.assert_close(entropy.flatten()[1:], expected, atol=1e-4, rtol=1e-4)


def test_divergence_is_that_of_the_two_predictions(model):
    prompt = window()
    other = prompt.actions[-1] + 1.0
    ours = action_divergence(model, prompt, torch.stack([prompt.actions[-1], other, other]))
    changed = build_prompt(prompt.tokens, torch.cat([prompt.actions[:-1], other[None]]))
    told, instead = (distributions(model, each)[-ROWS * COLS :] for each in (prompt, changed))
    expected = (told * (told / instead).log2()).sum(-1).reshape(ROWS, COLS)
    assert expected.sum() > 0.1
    assert ours[0].abs().max() < 1e-5
    torch.testing.assert_close(ours[1], expected, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(ours[1], ours[2])


def test_moved_waypoints_moves_one_at_a_time():
    action = torch.randn(6, 3)
    moved = moved_waypoints(action, 0.5) - action
    assert moved.shape == (2, 6, 6, 3)
    for axis in range(2):
        torch.testing.assert_close(moved[axis, :, :, axis], 0.5 * torch.eye(6))
        assert moved[axis].sum() == pytest.approx(3.0, abs=1e-5)


def test_attention_is_that_of_a_forward_over_the_whole_window(model):
    prompt = window()
    attention = last_frame_attention(model, prompt)
    assert model.config._attn_implementation == "sdpa"
    ids = prompt.ids(6)[:-1]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        embeds = model.embed(ids[None], prompt.actions[None], torch.arange(len(ids)))
        whole = torch.cat(model.model(inputs_embeds=embeds, output_attentions=True).attentions)
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(attention, whole[:, :, -ROWS * COLS :], atol=1e-5, rtol=1e-4)


def test_attention_is_split_without_loss(model):
    prompt, layout = window(), model.config.layout
    attention = last_frame_attention(model, prompt)
    parts = attention_by_part(attention, layout)
    assert list(parts) == ["this frame", "last action", "earlier actions", "frame -1", "frame -2", "frame -3"]
    torch.testing.assert_close(sum(parts.values()), torch.ones(2, 2))
    where = attention_map(attention, layout, ROWS)
    assert where.shape == (ROWS * COLS, 4, ROWS, COLS)
    for frame, name in enumerate(("frame -3", "frame -2", "frame -1", "this frame")):
        torch.testing.assert_close(where[:, frame].sum(dim=(1, 2)).mean(), parts[name].mean())
    # The first of a frame's tokens is predicted before any other of them is there.
    assert where[0, 3].abs().max() == 0
    assert where[-1, 3].flatten()[:-1].min() > 0


@pytest.mark.parametrize("num_frames", [1, 9])
@pytest.mark.parametrize("look", [token_entropy, last_frame_attention])
def test_a_window_of_another_length_is_refused(model, look, num_frames):
    with pytest.raises(ValueError, match=f"window: expected 2 to 8 frames, got {num_frames}"):
        look(model, window(num_frames))


def test_a_bit_turned_over_twice_is_as_before(tokenizer):
    quantizer = tokenizer.config.quantizer_config
    tokens = torch.arange(VOCABULARY).reshape(1, 8, 8)
    for channel in range(6):
        flipped = flip_bit(tokens, channel, quantizer)
        # Channel 0 is the most significant bit.
        assert torch.equal(flipped, tokens ^ (1 << (5 - channel)))
        assert torch.equal(flip_bit(flipped, channel, quantizer), tokens)


def test_all_bits_decode_as_the_tokenizer_does(tokenizer):
    tokens = window().tokens
    torch.testing.assert_close(decode_bits(tokenizer, tokens, range(6)), tokenizer.decode(tokens))
    # Without its bits a token is like any other.
    assert torch.equal(decode_bits(tokenizer, tokens, []), decode_bits(tokenizer, tokens.flip(0), []))


def test_a_channel_that_is_not_there_is_refused(tokenizer):
    tokens = window().tokens
    for channel in (-1, 6):
        with pytest.raises(ValueError, match=f"channel: expected 0 to 5, got {channel}"):
            flip_bit(tokens, channel, tokenizer.config.quantizer_config)
        with pytest.raises(ValueError, match=f"channel: expected 0 to 5, got {channel}"):
            decode_bits(tokenizer, tokens, [channel])


def test_a_channel_that_the_decoder_does_not_read_has_no_importance(tokenizer):
    deaf = LFQTokenizer(tokenizer.config).eval()
    deaf.load_state_dict(tokenizer.state_dict())
    with torch.no_grad():
        deaf.decoder.conv_in.weight[:, 2] = 0
    frames = torch.rand(2, 3, 4 * ROWS, 4 * COLS) * 2 - 1
    importance = bit_importance(deaf, frames)
    assert importance.shape == (6,)
    assert importance[2] == 0
    assert importance.abs().max() > 0


def test_bits_of_all_ids_are_uncorrelated(tokenizer):
    tokens = torch.arange(VOCABULARY).reshape(1, 8, 8)
    correlation = bit_correlation(tokens, tokenizer.config.quantizer_config)
    torch.testing.assert_close(correlation, torch.eye(6))


def test_figures_show_what_they_are_given():
    frames = np.full((2, 8, 16, 3), 200, np.uint8)
    grid = frame_rows({"a": frames, "b": frames[:1]}, ["one", "two"], title="frames")
    assert [axes.get_title() for axes in grid.axes[:2]] == ["one", "two"]
    assert sum(len(axes.images) for axes in grid.axes) == 3
    maps = np.stack([np.zeros((2, 4)), np.ones((2, 4))])
    over = maps_over_frames({"a": (frames, maps)}, label="bits").axes
    low, high = (np.asarray(axes.images[0].get_array()) for axes in over[:2])
    assert low.shape == (8, 16, 3)
    assert not np.array_equal(low, high)
    assert 0 <= min(low.min(), high.min()) <= max(low.max(), high.max()) <= 1
    assert len(curves([0, 1], {"x": [1, 2], "y": [2, 1]}, xlabel="s", ylabel="bits").axes[0].lines) == 2
    stacked = bars(["1", "2"], {"x": [1, 2], "y": [3, 4]}, xlabel="", ylabel="", stacked=True).axes[0]
    tops = [patch.get_y() + patch.get_height() for patch in stacked.patches]
    assert tops == [1, 2, 4, 6]
    assert matrix(np.eye(3), xlabel="", ylabel="", label="").axes[0].images[0].get_array().shape == (3, 3)


def test_the_widget_shows_the_chosen_frame():
    videos = {"black": np.zeros((3, 8, 8, 3), np.uint8), "white": np.full((2, 8, 8, 3), 255, np.uint8)}
    box = flip_through(videos, fps=10.0)
    (name, play, frame), picture = box.children[0].children, box.children[1]
    assert frame.max == play.max == 1
    black = picture.value
    frame.value = 1
    assert picture.value == black
    name.value = "white"
    assert picture.value != black
    assert bytes(picture.value)[:2] == b"\xff\xd8"
