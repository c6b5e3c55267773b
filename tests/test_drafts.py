"""Drafts and diagonal decoding on small random models: what is exact is compared with the engine."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, strategies as st
from tiny import COLS, ROWS, save_tiny, tiny_tokenizer_config
from tiny_driving import FPS, SIZE, write_driving

from terra.benchmark import draft_experiment
from terra.benchmark.diagonal import TruthPicks, decode_diagonally, diagonal_places
from terra.benchmark.draft_measure import NEAR_TIE, KeyedPicks, is_equal
from terra.benchmark.draft_report import summarise_diagonal, summarise_drafts
from terra.benchmark.drafts import FramePicks, count_passes, from_own_picks, from_previous_frame, read_prompts
from terra.engine.drafts import decode_frame, from_both, num_right
from terra.errors import ConfigError, EngineError
from terra.evaluation.estimator import EstimatorConfig, MotionEstimator
from terra.prompt import build_prompt
from terra.sampling import SamplingParams
from terra.world_model import LlamaActionV2ForCausalLM, load_world_model
from terra.world_model.window import Head, WindowReader, sees_all_fed, sees_earlier_places
from tokenizer import LFQTokenizer, LFQTokenizerConfig

TOKENS = ROWS * COLS
VOCAB = 64
CONTEXT, MADE = 2, 3
SEED = 7


@pytest.fixture(scope="module")
def model(tiny_model):
    return load_world_model(tiny_model)


@pytest.fixture(scope="module")
def drive():
    generator = torch.Generator().manual_seed(1)
    frames = torch.randint(0, VOCAB, (CONTEXT + MADE, ROWS, COLS), generator=generator)
    return frames, torch.randn(CONTEXT + MADE - 1, 6, 3, generator=generator)


def make_prompt(drive):
    return build_prompt(drive[0][:CONTEXT], drive[1][: CONTEXT - 1])


def from_engine(hf_engine, wait, drive, temperature, seed=SEED):
    async def go():
        session = await hf_engine.open(make_prompt(drive), SamplingParams(temperature=temperature), seed)
        frames = [frame async for frame in session.run(drive[1][CONTEXT - 1 :])]
        await session.close()
        return frames

    return wait(go())


def open_window(model, drive, sight=sees_all_fed, count=1):
    reader = WindowReader(model, sight)
    read_prompts(reader, [make_prompt(drive)] * count)
    return reader


def head_after(drive, frame, previous, layout):
    """The head of the frame after number `frame`, whose tokens are `previous` (a batch of them)."""
    return Head.after_frame(previous[:, -1, -1], drive[1][frame].expand(len(previous), 6, 3), frame, layout)


def first_head(drive, layout):
    return head_after(drive, CONTEXT - 1, drive[0][None, CONTEXT - 1], layout)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", ["previous", "own", "both"])
@pytest.mark.parametrize("num_drafts", [0, 1, 4, 40])
def test_drafted_frames_are_the_engines(model, hf_engine, wait, drive, temperature, name, num_drafts):
    reader, layout, frames = open_window(model, drive), model.config.layout, []
    for index in range(MADE):
        last = frames[-1] if frames else drive[0][CONTEXT - 1]
        head = head_after(drive, CONTEXT + index - 1, last[None], layout)
        previous = last.flatten().tolist()
        drafter = {
            "previous": from_previous_frame(previous),
            "own": from_own_picks(previous[-1]),
            "both": from_both(previous),
        }[name]
        pick = FramePicks(temperature, [SEED], CONTEXT + index, layout, VOCAB)
        tokens, lengths = decode_frame(reader, head, pick, drafter, num_drafts)
        frames.append(tokens.reshape(ROWS, COLS))
        assert sum(lengths) == TOKENS
        assert reader.length == layout.block * (CONTEXT + index) + TOKENS - 1
        if name == "previous":
            assert len(lengths) == count_passes(tokens.tolist(), previous, num_drafts)
    assert torch.equal(torch.stack(frames), torch.stack(from_engine(hf_engine, wait, drive, temperature)))


def test_right_drafts_fill_each_pass(model, drive):
    layout = model.config.layout
    head = first_head(drive, layout)
    pick = FramePicks(0.9, [SEED], CONTEXT, layout, VOCAB)
    right, _ = decode_frame(open_window(model, drive), head, pick, from_own_picks(0), 0)
    drafted, lengths = decode_frame(open_window(model, drive), head, pick, from_previous_frame(right.tolist()), 4)
    assert torch.equal(drafted, right)
    assert lengths == [5, 5, 2]


def test_own_picks_are_kept_from_one_pass_to_the_next(model, drive):
    layout = model.config.layout
    head = first_head(drive, layout)
    asked = []

    def drafter(made, own, places):
        asked.append((len(made), dict(own), places))
        return [own.get(place, 0) for place in places]

    decode_frame(open_window(model, drive), head, FramePicks(0.9, [SEED], CONTEXT, layout, VOCAB), drafter, 4)
    for (done, _, places), (then, own, _) in itertools.pairwise(asked):
        # The pass picked one place beyond its drafts; what it did not add to the frame is passed on.
        assert list(own) == list(range(then, places.stop + 1))
        assert then > done


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(0, 20), st.randoms())
def test_passes_counted_from_known_drafts(tokens, num_drafts, random):
    drafts = [random.randint(0, 2) for _ in tokens]
    passes = count_passes(tokens, drafts, num_drafts)
    assert -(-len(tokens) // (num_drafts + 1)) <= passes <= len(tokens)
    assert count_passes(tokens, tokens, num_drafts) == -(-len(tokens) // (num_drafts + 1))
    assert count_passes(tokens, [token + 1 for token in tokens], num_drafts) == len(tokens)


@given(st.lists(st.integers(0, 1), max_size=9), st.lists(st.integers(0, 1), min_size=9, max_size=9))
def test_drafts_are_right_up_to_the_first_that_differs(drafts, picks):
    right = num_right(drafts, picks)
    assert drafts[:right] == picks[:right]
    assert right == len(drafts) or drafts[right] != picks[right]


@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_diagonal_places_tile_the_frame(rows, cols, data):
    lag = data.draw(st.integers(1, cols))
    passes = diagonal_places(rows, cols, lag)
    assert len(passes) == cols + lag * (rows - 1)
    when = {place: number for number, places in enumerate(passes) for place in places}
    assert sorted(when) == list(range(rows * cols))
    assert sum(map(len, passes)) == rows * cols
    for place, number in when.items():
        if place % cols:
            assert when[place - 1] == number - 1
        if place >= cols:
            assert number - when[place - cols] == lag


@pytest.mark.parametrize("lag", [0, COLS + 1])
def test_lags_that_are_none(lag):
    with pytest.raises(ValueError, match=f"1 to {COLS}"):
        diagonal_places(ROWS, COLS, lag)


def diagonal_frames(model, drive, sight, lag, seeds=(SEED,), temperature=0.9):
    """Frames of the same drive with several seeds side by side."""
    reader, layout, frames = open_window(model, drive, sight, len(seeds)), model.config.layout, []
    previous = drive[0][CONTEXT - 1].expand(len(seeds), ROWS, COLS)
    for index in range(CONTEXT, CONTEXT + MADE):
        head = head_after(drive, index - 1, previous, layout)
        pick = FramePicks(temperature, seeds, index, layout, VOCAB)
        previous = decode_diagonally(reader, head, pick, previous, lag)
        frames.append(previous)
        assert reader.length == layout.block * index + TOKENS - 1
    return torch.stack(frames, dim=1)


@pytest.mark.parametrize("sight", [sees_all_fed, sees_earlier_places])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_lag_of_a_whole_row_is_sequential(model, hf_engine, wait, drive, sight, temperature):
    seeds = (SEED, SEED + 1)
    frames = diagonal_frames(model, drive, sight, COLS, seeds, temperature)
    for row, seed in zip(frames, seeds, strict=True):
        assert torch.equal(row, torch.stack(from_engine(hf_engine, wait, drive, temperature, seed)))


@pytest.mark.parametrize("sight", [sees_all_fed, sees_earlier_places])
@pytest.mark.parametrize("lag", [1, 2, 3])
def test_windows_side_by_side_are_as_alone(model, drive, sight, lag):
    together = diagonal_frames(model, drive, sight, lag, (SEED, SEED + 1))
    assert not torch.equal(together[0], together[1])
    for row, seed in zip(together, (SEED, SEED + 1), strict=True):
        assert torch.equal(row, diagonal_frames(model, drive, sight, lag, (seed,))[0])


def sees(place, other, schedule, sight):
    """Whether the query that predicts `place` sees the token at `other`, as the docstrings define it."""
    number = {each: when for when, places in enumerate(schedule) for each in places}
    # A token is fed in the pass after its own; of the same pass, those of rows above are fed first.
    stands_in = number[place] - 1 != number[place - 1]
    made = number[other] < number[place] - 1 or (number[other] == number[place] - 1 and (stands_in or other < place))
    return made and (sight is sees_all_fed or other < place)


@pytest.mark.parametrize("sight", [sees_all_fed, sees_earlier_places])
@pytest.mark.parametrize("lag", [1, 2, COLS])
def test_a_prediction_depends_on_what_its_place_sees(model, drive, sight, lag):
    layout, schedule = model.config.layout, diagonal_places(ROWS, COLS, lag)
    truth, previous = drive[0][None, CONTEXT], drive[0][None, CONTEXT - 1]

    def nats(frame):
        picks = TruthPicks(frame)
        head = first_head(drive, layout)
        assert torch.equal(decode_diagonally(open_window(model, drive, sight), head, picks, previous, lag), frame)
        return picks.nats[0]

    expected = nats(truth)
    for other in range(TOKENS):
        changed = truth.clone().flatten()
        changed[other] = (changed[other] + 1) % VOCAB
        got = nats(changed.reshape(truth.shape))
        for place in range(TOKENS):
            if place != other:
                seen = place > 0 and sees(place, other, schedule, sight)
                assert bool(got[place] != expected[place]) == seen, (place, other)


def test_slots_need_their_actions(model):
    layout = model.config.layout
    with pytest.raises(ValueError, match="expected 6 rows for the slots, got 0"):
        WindowReader(model).feed(torch.zeros(1, layout.block, dtype=torch.int64), torch.arange(layout.block))


def test_a_frame_may_differ_from_a_near_tie_on_alone():
    right, other = torch.tensor([1, 2, 3]), torch.tensor([1, 5, 6])
    margin = [1.0, 2 * NEAR_TIE, 1.0]
    assert is_equal(right, right, margin, "here")
    with pytest.raises(EngineError, match="here: expected the tokens of sequential decoding, got another at place 1"):
        is_equal(other, right, margin, "here")
    assert not is_equal(other, right, [1.0, NEAR_TIE / 2, 1.0], "here")


def test_picks_know_how_sure_they_were(model):
    layout = model.config.layout
    picks = FramePicks(0.5, [SEED], 1, layout, VOCAB)
    logits = torch.randn(1, 3, VOCAB, generator=torch.Generator().manual_seed(3))
    sure = KeyedPicks(picks)
    assert torch.equal(sure(logits, range(3)), picks(logits, range(3)))
    best = picks.scores(logits, range(3))[0].sort(descending=True).values
    assert sure.margin == pytest.approx((best[:, 0] - best[:, 1]).tolist())
    chances = logits[0].softmax(-1)
    assert sure.entropy == pytest.approx((-chances * chances.log()).sum(-1).tolist(), rel=1e-4)


def test_rates_are_of_all_frames_and_of_those_that_change_most():
    frames = [
        {"tokens": 12, "copied": copied, "passes": {"both": {"4": passes}}}
        for copied, passes in [(0.9, 3), (0.1, 12), (0.8, None), (0.5, 4), (0.7, 6)]
    ]
    (row,) = summarise_drafts([{"clip": "a", "temperature": 0.9, "frames": frames}])
    assert row["overall"] == pytest.approx(48 / 25)
    assert row["changing"] == 1.0
    assert row["tokens_per_pass"]["median"] == pytest.approx((2.0 + 3.0) / 2)
    assert row["left_out"] == 1


def test_differences_are_within_clips():
    def row(lag, nats):
        clips = {name: {"nats": value, "psnr": 20.0, "ADE": 1.0} for name, value in nats.items()}
        return {"lag": lag, "sight": "all fed", "sequential": lag == COLS, "passes": 6, "clips": clips}

    rows = summarise_diagonal([row(COLS, {"a": 1.0, "b": 5.0}), row(1, {"b": 5.5, "a": 1.5})], 20)
    assert rows[1]["nats_difference"] == {"value": 0.5, "low": 0.5, "high": 0.5, "count": 2, "units": 2}
    assert rows[0]["nats_difference"]["value"] == 0.0


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory):
    """Recordings and random models of their size."""
    folder = tmp_path_factory.mktemp("laboratory")
    rows, cols = SIZE[0] // 4, SIZE[1] // 4
    content = tiny_tokenizer_config().to_dict() | {"image_size": list(SIZE)}
    torch.manual_seed(0)
    LFQTokenizer(LFQTokenizerConfig.from_dict(content, "tiny")).save_pretrained(folder / "tokenizer")
    sizes = {"num_image_patches": rows * cols, "num_spatio_embeddings": rows * cols + 6}
    lengths = {"max_position_embeddings": 8 * (rows * cols + 6)}
    save_tiny(folder / "world_model", LlamaActionV2ForCausalLM, **sizes, **lengths)
    MotionEstimator(EstimatorConfig(FPS, SIZE, 8, 1, 8)).save_pretrained(folder / "estimator")
    return SimpleNamespace(folder=folder, data=write_driving(folder / "data", num_frames=6))


def asked(laboratory, output, **changes):
    values = {
        **{"data": str(laboratory.data), "split": "held_out", "output": str(output), "device": "cpu"},
        **{"estimator": str(laboratory.folder / "estimator"), "dtype": "float32", "temperature": 0.9, "seed": 0},
        **{"num_context": 2, "workers": 1, "draft_clips": 1, "draft_frames": 2, "drafts": [3, 6]},
        **{"diagonal_clips": 2, "diagonal_frames": 2, "lags": [1, 2], "resamples": 20},
    }
    return values | changes


def experiment(laboratory, values):
    return draft_experiment.run(values, laboratory.folder / "tokenizer", laboratory.folder / "world_model")


def test_the_experiment_goes_on_where_it_stopped(laboratory, tmp_path, monkeypatch):
    values = asked(laboratory, tmp_path)
    measure = draft_experiment.diagonal_frames

    def stop(models, drives, temperature, lag, sight):
        if lag == 2:
            raise KeyboardInterrupt
        return measure(models, drives, temperature, lag, sight)

    monkeypatch.setattr(draft_experiment, "diagonal_frames", stop)
    with pytest.raises(KeyboardInterrupt):
        experiment(laboratory, values)
    monkeypatch.setattr(draft_experiment, "drafted_frames", lambda *_: pytest.fail("is there already"))
    monkeypatch.setattr(draft_experiment, "diagonal_frames", measure)
    text = experiment(laboratory, values)
    monkeypatch.setattr(draft_experiment, "diagonal_frames", lambda *_: pytest.fail("is there already"))
    assert experiment(laboratory, values) == text == (tmp_path / "draft_experiment.txt").read_text()
    assert (tmp_path / "draft_experiment.png").stat().st_size > 10_000
    found = json.loads((tmp_path / "draft_experiment.json").read_text())
    kinds = {(row["temperature"], row["drafts"], row["num_drafts"]) for row in found["drafts"]}
    assert kinds == set(itertools.product((0.9, 0.0), ("previous frame", "own picks", "both"), (3, 6)))
    assert all(1.0 <= row["overall"] <= row["num_drafts"] + 1 for row in found["drafts"])
    assert [row["passes"] for row in found["diagonal"]] == [32, 11, 11, 14, 14]
    with pytest.raises(ConfigError, match="results of another plan"):
        experiment(laboratory, values | {"seed": 1})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_clips": 0}, "draft_clips: expected 1 or more"),
        ({"temperature": 0.0}, "temperature: expected above 0"),
        ({"drafts": [0]}, "drafts: expected numbers of 1 or more"),
        ({"lags": [8]}, "lags: expected numbers of 1 to 7"),
        ({"diagonal_frames": 7}, "diagonal_frames: expected at most 6"),
    ],
)
def test_what_the_experiment_refuses(laboratory, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        experiment(laboratory, asked(laboratory, tmp_path, **changes))
    assert not any(tmp_path.iterdir())
