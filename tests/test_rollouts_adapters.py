"""`adapter` of a manifest's lines: one batch of several models, resumed, refused and replayed line by line."""

from pathlib import Path

import pytest
import torch
from test_replay import told
from tiny_adapter import save_adapter, save_decoder
from tiny_rollouts import Batch

from terra.rollout_record import read_record
from terra.world_model.adapter import adapter_sha256

pytestmark = pytest.mark.slow

NAMES = (None, "night", "rain")


@pytest.fixture
def batch(tmp_path: Path, tiny_model: Path, tiny_tokenizer: Path) -> Batch:
    return Batch(tmp_path, tiny_model, tiny_tokenizer)


@pytest.fixture
def adapters(batch) -> dict[str, Path]:
    """Two adapters, of which the first has a decoder of its own."""
    seeds = {"night": 2, "rain": 3}
    found = {name: save_adapter(batch.folder / name, batch.model, seed=seed) for name, seed in seeds.items()}
    save_decoder(found["night"], batch.tokenizer)
    return found


def given(adapters: dict[str, Path]) -> dict[str, str]:
    return {f"+adapters.{name}": str(folder) for name, folder in adapters.items()}


def lines(batch: Batch) -> list[dict]:
    """A line of each model, of the same context, actions and seed."""
    named = [{} if name is None else {"adapter": name} for name in NAMES]
    return [batch.line(0, id=f"r{index}", **name) for index, name in enumerate(named)]


def test_lines_of_several_models_equal_a_batch_of_each(batch, adapters):
    batch.write(*lines(batch))
    assert batch.run(**given(adapters)) == 0
    assert batch.run(**given(adapters), score="tiny_rollouts:mean_token") == 0  # of what is decoded anew
    made = []
    for index, name in enumerate(NAMES):
        record, folder = batch.record(f"r{index}"), adapters.get(name or "")
        described = folder and {"name": name, "folder": f"../../../{name}", "sha256": adapter_sha256(folder)}
        assert record["adapter"] == described
        assert record["batch"]["request"].get("adapter") == name
        alone = batch.folder / f"alone{index}"
        batch.write(batch.line(0))
        assert batch.run(output=alone, adapter=folder or "null") == 0
        made.append(batch.tokens(f"r{index}"))
        assert torch.equal(made[-1], batch.tokens("r0", alone))
        assert record["pixels_sha256"] == read_record(alone / "rollouts" / "r0")["pixels_sha256"]
        assert told(batch.output / "rollouts" / f"r{index}")[0] == 0
    assert len({each.numpy().tobytes() for each in made}) == len(NAMES)


def test_an_unknown_name_fails_alone(batch, adapters):
    batch.write(*lines(batch), batch.line(3, adapter="fog"), batch.line(4, adapter=7))
    assert batch.run(engine="persistence", **given(adapters)) == 3
    reasons = {row["id"]: row["reason"] for row in batch.index() if row["status"] == "failed"}
    assert reasons == {
        "r3": f"{batch.manifest}: line 4: adapter: expected one of night, rain, got 'fog'",
        "r4": f"{batch.manifest}: line 5: adapter: expected a name of adapters=, got 7",
    }
    batch.write(batch.line(3, adapter="fog"))
    assert batch.run(engine="persistence") == 3
    assert batch.index()[0]["reason"].endswith("adapter: expected none (adapters= names none), got 'fog'")


def test_a_changed_adapter_changes_its_own_lines_alone(batch, adapters):
    batch.write(*lines(batch))
    settings = {"engine": "persistence", **given(adapters)}
    assert batch.run(**settings) == 0
    before = {name: (batch.output / "rollouts" / name).stat().st_ino for name in batch.names()}
    save_adapter(adapters["rain"], batch.model, seed=9)
    assert batch.run(**settings) == 3
    (failed,) = (row for row in batch.index() if row["status"] == "failed")
    assert failed["id"] == "r2"
    assert "inputs.adapter_sha256" in failed["reason"]
    assert batch.run(**settings, on_change="redo") == 0
    after = {name: (batch.output / "rollouts" / name).stat().st_ino for name in batch.names()}
    assert [name for name in before if before[name] != after[name]] == ["r2"]
    batch.write(*lines(batch)[:2], batch.line(0, id="r2"))  # the line names none any more
    assert batch.run(**settings) == 3
    (failed,) = (row for row in batch.index() if row["status"] == "failed")
    assert 'request.adapter: "rain", now null' in failed["reason"]
    batch.write(*lines(batch)[:2])
    assert batch.run(engine="persistence", **given({"night": adapters["night"]})) == 0
