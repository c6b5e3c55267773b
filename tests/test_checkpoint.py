import json
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import safe_open
from safetensors.torch import save_file

from tokenizer import EncoderDecoderConfig, LFQTokenizer, LFQTokenizerConfig, QuantizerConfig
from tokenizer.checkpoint import (
    checkpoint_sha256,
    load_tensors,
    read_json,
    read_layout,
    resolve_checkpoint,
    verify_layout,
    write_json,
    write_tensors,
)
from tokenizer.errors import CheckpointError, OutputError

TENSORS = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.zeros(3), "b": torch.ones(4, dtype=torch.int32)}
LAYOUT = {"a.weight": (2, 3), "a.bias": (3,), "b": (4,)}
CONFIG = LFQTokenizerConfig(
    encoder_decoder_config=EncoderDecoderConfig(ch=32, z_channels=8, num_res_blocks=1, ch_mult=(1, 1, 2)),
    quantizer_config=QuantizerConfig(dim=8, codebook_size=256, bit_order="lsb_first"),
    image_size=(32, 64),
)


@pytest.fixture
def folder(tmp_path) -> Path:
    write_tensors(tmp_path / "model.safetensors", TENSORS)
    write_json(tmp_path / "config.json", {"model_type": "any"})
    return tmp_path


@pytest.fixture
def sharded(tmp_path) -> Path:
    write_tensors(tmp_path / "model-00001-of-00002.safetensors", {"a.weight": TENSORS["a.weight"]})
    write_tensors(tmp_path / "model-00002-of-00002.safetensors", {name: TENSORS[name] for name in ("a.bias", "b")})
    weight_map = dict.fromkeys(TENSORS, "model-00002-of-00002.safetensors")
    weight_map["a.weight"] = "model-00001-of-00002.safetensors"
    write_json(tmp_path / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    write_json(tmp_path / "config.json", {"model_type": "any"})
    return tmp_path


@pytest.fixture
def tokenizer() -> LFQTokenizer:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LFQTokenizer(CONFIG)


def error_line(caught) -> str:
    message = str(caught.value)
    assert "expected" in message
    assert "\n" not in message
    return message


def test_layout_and_tensors_of_one_file_and_of_shards(folder):
    assert read_layout(folder) == LAYOUT
    loaded = load_tensors(folder)
    assert all(
        torch.equal(loaded[name], tensor) and loaded[name].dtype == tensor.dtype for name, tensor in TENSORS.items()
    )


def test_shards_read_like_one_file(sharded):
    assert resolve_checkpoint(sharded) == sharded
    assert read_layout(sharded) == LAYOUT
    verify_layout(sharded, LAYOUT)
    loaded = load_tensors(sharded)
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())


def test_layout_accepts_what_the_library_writes(tmp_path):
    dtypes = [
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.int8,
        torch.bool,
        torch.complex64,
    ]
    tensors = {f"t{i}": torch.zeros(i, 3).to(dtype) for i, dtype in enumerate(dtypes)} | {"scalar": torch.tensor(1.0)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert read_layout(tmp_path) == {name: tuple(tensor.shape) for name, tensor in tensors.items()}


@pytest.mark.parametrize("kept", [0, 5, 60, -1])
def test_truncated_file_names_the_byte_counts(folder, kept):
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:kept])
    for read in (read_layout, load_tensors):
        with pytest.raises(CheckpointError) as caught:
            read(folder)
        message = error_line(caught)
        assert str(path) in message
        num_data_bytes = sum(tensor.nbytes for tensor in TENSORS.values())
        named = f"expected {num_data_bytes} bytes of tensor data, got {num_data_bytes - 1}"
        assert (named if kept == -1 else f"within the file's {kept} bytes") in message


def header_file(header: object, num_data_bytes: int) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(num_data_bytes)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n", ["Git LFS pointer"]),
        (b"\xff" * 64, ["header within the file's 64 bytes"]),
        (header_file(b"{not json", 0), ["header: line 1, column 2: expected JSON"]),
        (header_file(b"\xff\xfe", 0), ["header: line 1: expected"]),
        (header_file([], 0), ["expected a JSON object, got []"]),
        (header_file({"a": {"shape": [1]}}, 0), ["data_offsets"]),
        (header_file({"a": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}}, 4), ["dtype, shape"]),
        (header_file({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}, 4), ["F99"]),
        (header_file({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, 4), ["8 bytes of a (2,), got 4"]),
        (header_file({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, 8), ["at byte 0", "got it at 4"]),
        (header_file({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, 9), ["expected 4 bytes", "got 9"]),
    ],
)
def test_corrupt_file_is_refused(folder, content, words):
    path = folder / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_layout(folder)
    message = error_line(caught)
    assert all(word in message for word in [str(path), *words])


def test_index_and_shards_must_agree(sharded):
    index = sharded / "model.safetensors.index.json"
    good = read_json(index)

    def refused(weight_map: object) -> str:
        write_json(index, {"weight_map": weight_map})
        with pytest.raises(CheckpointError) as caught:
            read_layout(sharded)
        return error_line(caught)

    assert "c.weight" in refused(good["weight_map"] | {"c.weight": "model-00001-of-00002.safetensors"})
    del good["weight_map"]["a.bias"]
    assert "differs in a.bias" in refused(good["weight_map"])
    assert "missing other.safetensors" in refused(good["weight_map"] | {"b": "other.safetensors"})
    assert "'../x.safetensors'" in refused({"b": "../x.safetensors"})
    assert "'x.bin'" in refused({"b": "x.bin"})
    assert "weight_map" in refused([])
    write_tensors(sharded / "model-00001-of-00002.safetensors", TENSORS)
    assert "no other shard" in refused(good["weight_map"])


def test_single_file_beside_an_index_is_ambiguous(sharded):
    write_tensors(sharded / "model.safetensors", TENSORS)
    with pytest.raises(CheckpointError, match="found both"):
        read_layout(sharded)


def test_verify_layout_names_the_first_differences_and_counts_all(folder):
    verify_layout(folder, LAYOUT)
    expected = {f"m{i}": (1,) for i in range(7)} | {"a.weight": (3, 2), "b": (4,)}
    with pytest.raises(CheckpointError) as caught:
        verify_layout(folder, expected)
    message = error_line(caught)
    assert "7 missing: m0, m1, m2, m3, m4 and 2 more" in message
    assert "1 unexpected: a.bias" in message
    assert "1 of another shape: a.weight expected (3, 2) got (2, 3)" in message
    assert str(folder) in message


def test_resolve_local_folder_and_subfolder(folder):
    assert resolve_checkpoint(folder) == folder
    assert resolve_checkpoint(str(folder)) == folder
    assert resolve_checkpoint(folder.parent, subfolder=folder.name) == folder


def test_resolve_names_what_is_missing(folder):
    def refused(path: str | Path, subfolder: str | None = None, revision: str | None = None) -> str:
        with pytest.raises(CheckpointError) as caught:
            resolve_checkpoint(path, subfolder, revision)
        return error_line(caught)

    assert "found no folder" in refused(folder / "absent")
    assert "found no folder" in refused("absent")
    assert "found no folder" in refused(Path("owner/name"))
    assert "subfolder 'absent'" in refused(folder, subfolder="absent")
    assert "no revision with a local folder, got 'main'" in refused(folder, revision="main")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    message = refused(folder)
    assert "pytorch_model.bin" in message
    assert "not read" in message
    (folder / "pytorch_model.bin").unlink()
    assert "found neither" in refused(folder)
    (folder / "config.json").unlink()
    assert "expected config.json" in refused(folder)


@pytest.mark.parametrize("subfolder", [None, "tokenizer"])
def test_hub_id_downloads_only_json_and_safetensors_of_its_folder(folder, monkeypatch, subfolder):
    files = ["config.json", "model.safetensors", "model.bin", "code.py", "tokenizer/config.json"]
    files += ["tokenizer/model.safetensors", "tokenizer/more/model.safetensors", "world/model.safetensors"]
    asked = {}

    def snapshot_download(repo_id, *, revision, allow_patterns, ignore_patterns):
        kept = huggingface_hub.utils.filter_repo_objects(
            files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        asked.update(repo_id=repo_id, revision=revision, kept=sorted(kept))
        return str(folder if subfolder is None else folder.parent)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    if subfolder:
        folder = folder.rename(folder.parent / subfolder)
    assert resolve_checkpoint("owner/name", subfolder, revision="v1") == folder
    prefix = f"{subfolder}/" if subfolder else ""
    kept = [f"{prefix}config.json", f"{prefix}model.safetensors"]
    assert asked == {"repo_id": "owner/name", "revision": "v1", "kept": kept}


def test_unreachable_hub_is_one_line(monkeypatch):
    def snapshot_download(*_arguments, **_keywords):
        raise LocalEntryNotFoundError("Got: no network\nsecond line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError, match="owner/name, and the Hub gave: Got: no network") as caught:
        resolve_checkpoint("owner/name")
    error_line(caught)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{\n  "a": 1,\n  "b" 2\n}', ["line 3", "JSON"]),
        (b"[1]", ["JSON object", "[1]"]),
        (b'{"a": "\xff"}', ["line 1", "UTF-8", "0xff"]),
        (None, ["readable file"]),
    ],
)
def test_bad_json_names_file_and_line(tmp_path, content, words):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_json(path)
    message = error_line(caught)
    assert all(word in message for word in [str(path), *words])


def test_checkpoint_hash_sees_content_and_names_only(folder):
    first = checkpoint_sha256(folder)
    assert len(first) == 64
    (folder / "notes.txt").write_text("not part of it")
    assert checkpoint_sha256(folder) == first
    write_json(folder / "config.json", {"model_type": "other"})
    second = checkpoint_sha256(folder)
    write_tensors(folder / "model.safetensors", TENSORS | {"b": torch.zeros(4, dtype=torch.int32)})
    assert len({first, second, checkpoint_sha256(folder)}) == 3
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: expected a readable file"):
        checkpoint_sha256(folder)


def test_writing_replaces_at_once_and_leaves_nothing_else(folder):
    before = sorted(path.name for path in folder.iterdir())
    write_tensors(folder / "model.safetensors", {"a": torch.ones(2, 3).T})
    assert load_tensors(folder)["a"].shape == (3, 2)
    assert sorted(path.name for path in folder.iterdir()) == before


def test_weights_are_as_readable_as_other_files(folder):
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode


def test_tensors_begin_where_cpus_like_it(folder):
    # 64 bytes are a vector register and a cache line; in the file they stand 8 to 24 bytes apart.
    assert all(tensor.data_ptr() % 64 == 0 for tensor in load_tensors(folder).values())


def test_failed_write_keeps_the_old_file_and_is_an_output_error(folder):
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    with pytest.raises(OutputError, match=r"config\.json: expected a file or none, got a folder"):
        write_json(folder / "config.json", {})
    with pytest.raises(OutputError, match="expected a writable file"):
        write_tensors(folder / "model.safetensors" / "below.safetensors", TENSORS)
    assert read_layout(folder) == LAYOUT
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_published_file_size(tmp_path):
    with torch.device("meta"):
        published = LFQTokenizer(LFQTokenizerConfig())
    assert sum(tensor.numel() for tensor in published.state_dict().values()) == 65_490_709
    published.to_empty(device="cpu").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    size = path.stat().st_size
    path.unlink()
    assert size == 261_981_092
    assert LFQTokenizerConfig.load(tmp_path / "config.json") == LFQTokenizerConfig()


def test_save_and_load_are_inverse(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "new" / "tokenizer")
    loaded = LFQTokenizer.from_pretrained(tmp_path / "new", subfolder="tokenizer")
    assert loaded.config == tokenizer.config
    assert not loaded.training
    state = tokenizer.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    frames = torch.rand(2, 3, 32, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    assert torch.equal(loaded.encode(frames), tokenizer.encode(frames))
    assert sorted(path.name for path in (tmp_path / "new" / "tokenizer").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    with safe_open(tmp_path / "new" / "tokenizer" / "model.safetensors", "pt") as file:
        assert not file.metadata()


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_half_precision_files_load_in_the_requested_dtype(tokenizer, tmp_path, stored):
    tokenizer.to(stored).save_pretrained(tmp_path)
    state = tokenizer.state_dict()
    assert {tensor.dtype for tensor in load_tensors(tmp_path).values()} == {stored}
    for dtype in (torch.float32, stored):
        loaded = LFQTokenizer.from_pretrained(tmp_path, dtype=dtype)
        assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
        assert all(torch.equal(tensor, state[name].to(dtype)) for name, tensor in loaded.state_dict().items())


def test_channels_last_weights_are_saved_as_any_others(tokenizer, tmp_path):
    state = {name: tensor.clone() for name, tensor in tokenizer.state_dict().items()}
    tokenizer.to(memory_format=torch.channels_last).save_pretrained(tmp_path)
    assert all(torch.equal(tensor, state[name]) for name, tensor in load_tensors(tmp_path).items())


def test_from_pretrained_refuses_before_loading(tokenizer, tmp_path, monkeypatch):
    tokenizer.save_pretrained(tmp_path)

    def never(_folder):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("tokenizer.model.load_tensors", never)
    with pytest.raises(ValueError, match="floating-point dtype"):
        LFQTokenizer.from_pretrained(tmp_path, dtype=torch.int8)
    config = CONFIG.to_dict()
    config["encoder_decoder_config"]["num_res_blocks"] = 2
    write_json(tmp_path / "config.json", config)
    with pytest.raises(CheckpointError, match=r"missing: encoder\.down\.0\.block\.1\.norm1\.weight"):
        LFQTokenizer.from_pretrained(tmp_path)
    write_json(tmp_path / "config.json", {"model_type": "llama_action"})
    with pytest.raises(CheckpointError, match=r"config\.json: expected model_type 'lfq_tokenizer', got 'llama_action'"):
        LFQTokenizer.from_pretrained(tmp_path)


def test_from_pretrained_refuses_integer_weights(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    tensors = load_tensors(tmp_path)
    tensors["encoder.conv_out.bias"] = tensors["encoder.conv_out.bias"].to(torch.int8)
    write_tensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=r"encoder\.conv_out\.bias in a floating-point dtype, got torch\.int8"):
        LFQTokenizer.from_pretrained(tmp_path)
