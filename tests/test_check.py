"""`terra-check`: what it says of whole, damaged, swapped and published checkpoints, and of the bit order."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_config
from tiny_published import SMALL, write_small
from torch.nn import functional as F
from trap import Trap

from terra.actions import Keys, save_actions
from terra.check.bit_order import next_frame_loss
from terra.check.synthetic import tokenizer_config, world_model_config, world_model_layout
from terra.cli import COMMANDS, command
from terra.context import load_context
from terra.engine.base import EngineSpec
from terra.errors import CheckpointError
from terra.pairing import check_pairing
from terra.prompt import Prompt, pack_blocks
from terra.trajectory import load_trajectory
from terra.world_model import LlamaActionForCausalLM, LlamaActionV2ForCausalLM, load_config
from terra.world_model.published import TOKENIZERS, WORLD_MODELS
from tokenizer import EncoderDecoderConfig, LFQTokenizer, LFQTokenizerConfig, QuantizerConfig
from tokenizer.checkpoint import load_tensors, read_json, write_json, write_tensors
from tokenizer.config import BitOrder
from tokenizer.files import file_sha256

pytestmark = pytest.mark.slow

CONTEXTS = Path(__file__).parent.parent / "terra/demo/contexts"


@pytest.fixture(scope="module")
def small_repository(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    for name in WORLD_MODELS:
        write_small(folder, name)
    return folder


@pytest.fixture
def repository(small_repository, tmp_path) -> Path:
    return shutil.copytree(small_repository, tmp_path / "Terra")


@pytest.fixture
def terra_check(tmp_path, monkeypatch, capsys):
    """Runs terra-check; gives its exit code and what was found, by (of, what)."""

    def run(*settings: str) -> tuple[int, dict[tuple[str, str], tuple[str, str]]]:
        report = tmp_path / "report.json"
        monkeypatch.setenv("COLUMNS", "1000")
        monkeypatch.setattr(sys, "argv", ["terra-check", f"report={report}", *settings])
        code = 0
        try:
            command("check", COMMANDS["check"].run)
        except SystemExit as stop:
            code = int(stop.code or 0)
        findings = read_json(report)["findings"]
        printed = capsys.readouterr().out.splitlines()[1:]
        assert [line.split()[-1] for line in printed] == [each["detail"].split()[-1] for each in findings]
        return code, {(each["subject"], each["question"]): (each["status"], each["detail"]) for each in findings}

    return run


def paths(repository: Path, model: str = "terra_v2") -> list[str]:
    return [f"model={model}", f"model.path={repository}"]


@pytest.mark.slow
def test_the_shipped_pair_passes_and_its_bit_order_is_far_better(terra_check):
    day = CONTEXTS / "day"
    code, found = terra_check(f"context={day}", f"trajectory={day / 'right.json'}")
    assert code == 0
    assert {status for status, _ in found.values()} == {"passed"}
    assert found["tokenizer", "keys and shapes"][1].startswith("177 tensors, 11,059,760 parameters, 144 x 256 pixels")
    assert found["world model", "keys and shapes"][1].startswith("83 tensors, 31,559,680 parameters, LlamaActionV2")
    assert found["pair", "bit order"][1].startswith("msb_first, better by ")
    assert float(found["pair", "bit order"][1].split("better by ")[1].split(";")[0]) > 5


def write_sparse(path: Path, layout: dict[str, tuple[int, ...]], dtype: str, item_bytes: int) -> None:
    """A safetensors file with a true header over data that take no place on the disk."""
    header, end = {}, 0
    for name, shape in layout.items():
        begin, end = end, end + item_bytes * torch.Size(shape).numel()
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


@pytest.mark.slow
@pytest.mark.parametrize(("choice", "name"), [("terra_v1", "world_model"), ("terra_v2", "world_model_v2")])
def test_the_published_layout_passes_by_its_headers_alone(tmp_path, terra_check, choice, name):
    published = WORLD_MODELS[name]
    content = world_model_config(name, {})
    write_json(tmp_path / name / "config.json", content)
    write_sparse(tmp_path / name / "model.safetensors", world_model_layout(content), "BF16", 2)
    folder = tmp_path / published.tokenizer
    write_json(folder / "config.json", tokenizer_config({}))
    with torch.device("meta"):
        tensors = LFQTokenizer(LFQTokenizerConfig()).state_dict()
    write_sparse(folder / "model.safetensors", {key: tuple(t.shape) for key, t in tensors.items()}, "F32", 4)
    code, found = terra_check("hashes=false", *paths(tmp_path, choice))
    assert code == 0
    assert found["world model", "keys and shapes"] == (
        "passed",
        f"{published.num_tensors} tensors, {published.num_parameters:,} parameters, {published.architecture}, "
        "22 layers, windows of 25 frames of 576 + 6",
    )
    for subject in ("world model", "tokenizer"):
        assert found[subject, "published counts"] == ("passed", "as published")
    assert found["pair", "fit"][1].startswith("576 tokens a frame of a codebook of 262,144")
    assert found["pair", "bit order"][0] == "unknown"


def test_another_size_is_not_what_is_published(repository, terra_check):
    code, found = terra_check("hashes=false", *paths(repository))
    assert code == 1
    status, detail = found["world model", "published counts"]
    assert status == "failed"
    assert detail.startswith("expected 209 tensors, 2,052,366,336 parameters, got 29 tensors, ")
    assert found["pair", "fit"][0] == "passed"


@pytest.mark.parametrize("name", WORLD_MODELS)
def test_a_model_of_ones_own_is_not_compared_with_what_is_published(repository, tmp_path, terra_check, name):
    own = tmp_path / "own"
    shutil.copytree(repository / name, own / "world_model")
    shutil.copytree(repository / WORLD_MODELS[name].tokenizer, own / "tokenizer")
    code, found = terra_check("model=folder", f"model.path={own}")
    assert code == 0
    assert found.keys() == {
        ("tokenizer", "keys and shapes"),
        ("world model", "keys and shapes"),
        ("pair", "fit"),
        ("pair", "bit order"),
    }


@pytest.fixture
def known(monkeypatch, small_repository):
    """As if the small checkpoints were the published ones."""
    for name, published in WORLD_MODELS.items():
        layout = world_model_layout(world_model_config(name, SMALL))
        counts = {"num_tensors": len(layout), "num_parameters": sum(torch.Size(s).numel() for s in layout.values())}
        shards = sorted((small_repository / name).glob("*.safetensors"))
        sums = {shard.name: file_sha256(shard, CheckpointError) for shard in shards[:3]}
        monkeypatch.setitem(WORLD_MODELS, name, replace(published, sha256=sums, **counts))
        tensors = load_tensors(small_repository / published.tokenizer)
        write_tensors(small_repository.parent / "plain.safetensors", tensors)
        plain = file_sha256(small_repository.parent / "plain.safetensors", CheckpointError)
        counts = {"num_tensors": len(tensors), "num_parameters": sum(t.numel() for t in tensors.values())}
        monkeypatch.setitem(
            TOKENIZERS, published.tokenizer, replace(TOKENIZERS[published.tokenizer], plain_sha256=plain, **counts)
        )


def test_hashes_of_the_published_files_pass(known, repository, terra_check):
    code, found = terra_check(*paths(repository))
    assert code == 0
    hashes = found["world model", "published hashes"]
    assert hashes == ("passed", "3 of 7 files have their published SHA-256; of the others none is known")
    # The tokenizer's file has metadata, the one whose hash is known had none.
    assert found["tokenizer", "published hashes"][0] == "passed"


def test_the_published_world_model_is_known_beside_another_tokenizer(known, repository, terra_check):
    (repository / "lfq_tokenizer_B_256").rename(repository / "tokenizer")
    code, found = terra_check("model=folder", f"model.path={repository}")
    assert code == 0
    assert found["world model", "published counts"] == ("passed", "as published")
    assert found["world model", "published hashes"][0] == "passed"


def test_one_other_weight_is_found_by_its_hash(known, repository, terra_check):
    shard = repository / "world_model_v2/model-00002-of-00007.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    code, found = terra_check(*paths(repository))
    assert code == 1
    status, detail = found["world model", "published hashes"]
    assert status == "failed"
    expected = WORLD_MODELS["world_model_v2"].sha256[shard.name]
    assert detail == f"{shard}: expected SHA-256 {expected[:12]}, got {file_sha256(shard, CheckpointError)[:12]}"


def test_other_tokenizer_weights_are_not_taken_for_the_published_ones(known, repository, terra_check):
    path = repository / "lfq_tokenizer_B_256_ema/model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    code, found = terra_check(*paths(repository))
    unknown = "the tensors don't give the SHA-256 of the file as it was first published"
    assert (code, found["tokenizer", "published hashes"]) == (0, ("unknown", unknown))


def truncate(folder: Path) -> None:
    shard = folder / "model-00003-of-00007.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])


def point(folder: Path) -> None:
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 482386000\n"
    (folder / "model-00002-of-00007.safetensors").write_text(text)


def remove(folder: Path) -> None:
    (folder / "model-00007-of-00007.safetensors").unlink()


def escape(folder: Path) -> None:
    index = read_json(folder / "model.safetensors.index.json")
    index["weight_map"]["lm_head.weight"] = "../world_model/model-00006-of-00007.safetensors"
    write_json(folder / "model.safetensors.index.json", index)


def swap(folder: Path) -> None:
    for path in (folder.parent / "world_model").glob("*safetensors*"):
        shutil.copy(path, folder)


def widen(folder: Path) -> None:
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", config | {"intermediate_size": 97})


def drop(folder: Path) -> None:
    shard = folder / "model-00006-of-00007.safetensors"
    save_file({name.replace("lm_head", "head"): tensor for name, tensor in load_file(shard).items()}, shard)
    index = read_json(folder / "model.safetensors.index.json")
    index["weight_map"]["head.weight"] = index["weight_map"].pop("lm_head.weight")
    write_json(folder / "model.safetensors.index.json", index)


def disguise(folder: Path) -> None:
    torch.save({"weights": torch.ones(2), "code": Trap(folder / "sprung")}, folder / "model-00001-of-00007.safetensors")


def pickled(folder: Path) -> None:
    for path in folder.glob("*safetensors*"):
        path.unlink()
    torch.save({"weights": torch.ones(2), "code": Trap(folder / "sprung")}, folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"model-00003-of-00007\.safetensors: expected \d+ bytes of tensor data, got \d+$"),
        (point, r"model-00002-of-00007\.safetensors: expected weights, got a Git LFS pointer of 1\d\d bytes$"),
        (remove, r"index\.json: expected 7 shards beside it, missing model-00007-of-00007\.safetensors$"),
        (
            escape,
            r"index\.json: expected a \.safetensors file beside it for lm_head\.weight, got .\.\./world_mod\.\.\.",
        ),
        (
            swap,
            r"world_model_v2: expected 29 tensors of the configured architecture, got 25 with 6 missing: "
            r"action_projection\.0\.weight, .* and 1 more; 2 unexpected: action_projection\.bias, .*weight$",
        ),
        (widen, r"6 of another shape: .*gate_proj\.weight expected \(97, 64\) got \(384, 64\), .*more$"),
        (drop, r"got 29 with 1 missing: lm_head\.weight; 1 unexpected: head\.weight$"),
        (disguise, r"00001-of-00007\.safetensors: expected safetensors, got a pickle of PyTorch, which is not read$"),
        (pickled, r"found only pytorch_model\.bin: pickled weights are not read, convert them to safetensors$"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_wrong_files_are_one_line_here_and_where_they_would_be_loaded(known, repository, terra_check, damage, message):
    folder = repository / "world_model_v2"
    damage(folder)
    code, found = terra_check(*paths(repository))
    assert code == 1
    (failed,) = (detail for status, detail in found.values() if status == "failed")
    with pytest.raises(CheckpointError, match=message) as caught:
        load_config(folder)
    assert failed.endswith(str(caught.value).rpartition("/")[2])
    assert "\n" not in failed
    assert not (folder / "sprung").exists()


def test_the_published_tokenizers_are_not_mistaken_for_each_other(known, repository, terra_check):
    assert terra_check(*paths(repository, "terra_v1"))[0] == 0
    code, found = terra_check(*paths(repository, "terra_v2"), "tokenizer.subfolder=lfq_tokenizer_B_256")
    assert code == 1
    message = "the published LlamaActionV2ForCausalLM was trained with lfq_tokenizer_B_256_ema"
    assert found["pair", "fit"] == ("failed", f"tokenizer {repository / 'lfq_tokenizer_B_256'}: {message}")
    recorded = load_config(repository / "world_model_v2")
    recorded.tokenizer_sha256 = "0" * 64
    with pytest.raises(CheckpointError, match="was trained with tokenizer 000000000000, got"):
        check_pairing(repository / "lfq_tokenizer_B_256_ema", EngineSpec.of(recorded))


def test_a_tokenizer_of_another_size_does_not_fit(known, repository, terra_check):
    folder = repository / "lfq_tokenizer_B_256_ema"
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", config | {"image_size": [144, 256]})
    code, found = terra_check(*paths(repository))
    assert code == 1
    message = r"the world model expects 576 tokens a frame of a codebook of 1024, got 144 of 1024"
    assert found["pair", "fit"] == ("failed", f"tokenizer {folder}: {message}")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("num_frames=1", "num_frames: expected a whole number of at least 2, got 1"),
        ("num_windows=0", "num_windows: expected a whole number of at least 1, got 0"),
        ("window=4", "window: expected at most num_frames=3, got 4"),
        ("context=tests", "context and trajectory (or actions): expected both or neither, got one"),
        ("hashes=1", "hashes: expected true or false, got 1"),
        ("dtype=float8", "dtype: expected one of float32, bfloat16, float16 or null, got 'float8'"),
    ],
)
def test_unusable_settings_are_one_line(monkeypatch, capsys, setting, message):
    monkeypatch.setattr(sys, "argv", ["terra-check", setting])
    with pytest.raises(SystemExit) as stop:
        command("check", COMMANDS["check"].run)
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"error: {message}\n"


# --- the bit order, by models that were trained on either


def tokenizer_of(bit_order: BitOrder) -> LFQTokenizer:
    """A tokenizer of random weights, whose tokens depend enough on a picture to be learnable."""
    torch.manual_seed(0)
    return LFQTokenizer(
        LFQTokenizerConfig(
            encoder_decoder_config=EncoderDecoderConfig(ch=32, z_channels=6, num_res_blocks=1, ch_mult=(1, 1, 1)),
            quantizer_config=QuantizerConfig(dim=6, codebook_size=64, bit_order=bit_order),
            image_size=(16, 28),
        )
    ).eval()


def train(bit_order: BitOrder, num_steps: int) -> LlamaActionV2ForCausalLM:
    """On crops, of any size, of the shipped contexts but one."""
    names = ("city", "drive", "dusk", "fog", "night")
    pictures = torch.cat(
        [load_context(CONTEXTS / name, num_frames=3, image_size=(72, 128), fps=10.0) for name in names]
    )
    actions = torch.from_numpy(load_trajectory(CONTEXTS / "city/right.json").actions(3))
    tokenizer = tokenizer_of(bit_order)
    torch.manual_seed(0)
    layout = {"num_image_patches": 28, "num_spatio_embeddings": 34, "num_temporal_embeddings": 3}
    size = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "max_position_embeddings": 3 * 34}
    model = LlamaActionV2ForCausalLM(tiny_config(**layout, **size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(num_steps):
        scale = int(torch.randint(1, 5, ()))
        top, left = (int(torch.randint(0, side - scale * part + 1, ())) for side, part in ((72, 16), (128, 28)))
        crops = pictures[:, :, top : top + 16 * scale, left : left + 28 * scale]
        tokens = tokenizer.encode(F.interpolate(crops, (16, 28), mode="area")).unflatten(0, (len(names), 3))
        ids = pack_blocks(tokens, 6)
        model(input_ids=ids, actions=actions.expand(len(names), -1, -1, -1), labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.fixture(scope="module", params=["msb_first", "lsb_first"])
def trained(request, tmp_path_factory) -> tuple[BitOrder, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    with torch.random.fork_rng():
        train(request.param, num_steps=150).save_pretrained(folder)
    return request.param, folder


def pair_of(model: Path, tokenizer: Path) -> list[str]:
    day = CONTEXTS / "day"
    return [
        f"world_model.pretrained={model}",
        f"tokenizer.pretrained={tokenizer}",
        f"context={day}",
        f"trajectory={day / 'left.json'}",
        "window=2",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("configured", ["msb_first", "lsb_first"])
def test_the_order_that_a_model_was_trained_with_is_found(trained, tmp_path, terra_check, configured):
    order, model = trained
    tokenizer_of(configured).save_pretrained(tmp_path / "tokenizer")
    code, found = terra_check(*pair_of(model, tmp_path / "tokenizer"))
    status, detail = found["pair", "bit order"]
    assert (code, status) == ((0, "passed") if configured == order else (1, "failed"))
    bits = read_json(tmp_path / "report.json")["bit_order"]
    assert bits["meant"] == order
    if configured != order:
        wrong = f"expected quantizer_config.bit_order '{order}', got '{configured}', which is worse by "
        assert detail.startswith(f"{tmp_path / 'tokenizer/config.json'}: {wrong}")


def test_an_untrained_model_decides_nothing(tmp_path, terra_check):
    train("msb_first", num_steps=0).save_pretrained(tmp_path / "model")
    tokenizer_of("msb_first").save_pretrained(tmp_path / "tokenizer")
    code, found = terra_check(*pair_of(tmp_path / "model", tmp_path / "tokenizer"))
    assert code == 0
    status, detail = found["pair", "bit order"]
    assert status == "unknown"
    assert detail.startswith("neither is 0.5 nats better than the other and than chance; nats a token: ")


def test_a_world_of_keys_tells_its_actions(tmp_path, terra_check, monkeypatch, capsys):
    space = Keys(names=["forward", "left"])
    layout = {
        "num_image_patches": 28,
        "num_action_tokens": 1,
        "num_spatio_embeddings": 29,
        "num_temporal_embeddings": 3,
    }
    torch.manual_seed(0)
    config = tiny_config(**layout, max_position_embeddings=3 * 29, action_dim=2, action_space=space.model_dump())
    LlamaActionV2ForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer_of("msb_first").save_pretrained(tmp_path / "tokenizer")
    save_actions(tmp_path / "keys.json", space, 10.0, np.ones((5, 2)))
    *parts, path, window = pair_of(tmp_path / "model", tmp_path / "tokenizer")
    code, found = terra_check(*parts, f"actions={tmp_path / 'keys.json'}", window)
    assert code == 0
    assert "nats a token" in found["pair", "bit order"][1]
    monkeypatch.setattr(sys, "argv", ["terra-check", *parts, path, window])
    with pytest.raises(SystemExit) as stop:
        command("check", COMMANDS["check"].run)
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("error: actions: expected the file of the actions, ")


@torch.no_grad()
@pytest.mark.parametrize("architecture", [LlamaActionForCausalLM, LlamaActionV2ForCausalLM])
def test_next_frame_loss_is_that_of_the_logits(architecture):
    torch.manual_seed(0)
    model = architecture(tiny_config()).eval()
    tokens, actions = torch.randint(0, 64, (3, 3, 4)), torch.randn(2, 6, 3)
    ids = Prompt(tokens, actions).ids(6)[None]
    logits = model(input_ids=ids, actions=actions[None]).logits[0, :, :64]
    predicting = [frame * 18 + token - 1 for frame in (1, 2) for token in range(12)]
    expected = F.cross_entropy(logits[predicting], tokens[1:].flatten())
    assert next_frame_loss(model, tokens, actions) == pytest.approx(expected.item(), rel=1e-5)
