"""Hostile checkpoints: configurations that come with weights, headers of safetensors, indices, pairs that are none."""

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from corpus import Case, Make, Place

BIG = 10**12
WORDS = {
    "0": "0", "-1": "-1", "1": "1", "3": "3", "1e9": "1000000000", "1e12": "1000000000000", "huge": "9" * 6000, "float": "2.5", "1e400": "1e400",
    "nan": "NaN", "inf": "-Infinity", "null": "null", "true": "true", "text": '"abc"', "list": "[]", "object": "{}", "deep": "[" * 5000 + "]" * 5000,
    "code": '"os.system"', "digits": '"\u0662"', "surrogate": '"\\ud800"', "long": '"' + "x" * 100_000 + '"',
}  # fmt: skip
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings", "num_image_patches", "num_action_tokens", "num_action_embeddings", "num_spatio_embeddings", "num_temporal_embeddings", "action_dim",
)  # fmt: skip
OTHERS = (
    "fps", "rms_norm_eps", "waypoint_times", "hidden_act", "rope_parameters", "architectures", "model_type", "tokenizer_sha256", "bos_token_id",
    "pad_token_id", "attention_bias", "mlp_bias", "attention_dropout", "initializer_range", "tie_word_embeddings", "dtype", "pretraining_tp", "use_cache",
)  # fmt: skip


NUMBERS = {"NaN": b"\xff\xff\xff\x7f", "infinity": b"\0\0\x80\x7f"}
"""Float32s that are no finite numbers."""
METADATA: dict[str, Any] = {"number": {"x": 5}, "list": ["a"], "null": None, "object": {"x": {}}}


def cases(rng: random.Random) -> list[Case]:
    return [*world_models(rng), *tokenizers(rng), *weights(rng), *adapters(rng)]


def model(
    place: Place,
    name: str,
    changes: dict[str, str] | None = None,
    text: "str | bytes | Callable[[], bytes] | None" = None,
) -> Path:
    """A copy of the common tokenizer or world model whose config.json has JSON text in place of some values."""
    folder = place.inputs / name
    shutil.copytree(place.common / name, folder)
    config = json.loads((folder / "config.json").read_text())
    if text is None:
        marks = {key: f"@{number}@" for number, key in enumerate(changes or {})}
        for key, mark in marks.items():
            holder, _, last = key.rpartition("/")
            (config[holder] if holder else config)[last] = mark
        text = json.dumps(config)
        for key, value in (changes or {}).items():
            text = text.replace(json.dumps(marks[key]), value)
    text = text() if callable(text) else text
    (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    return folder


def world_models(rng: random.Random) -> list[Case]:
    made: list[Case] = []

    def add(
        name: str,
        changes: dict[str, str] | None = None,
        text: "str | bytes | Callable[[], bytes] | None" = None,
        must: str | None = None,
        engine: str = "persistence",
    ) -> None:
        def make(place: Place) -> dict[str, object]:
            return {"world_model.pretrained": model(place, "world_model", changes, text), "engine": engine}

        made.append(
            Case("world model configs", name if engine == "persistence" else f"{name} {engine}", make, must=must)
        )

    for key in SIZES:
        for word in ("0", "1e12", *sorted(rng.sample(sorted(WORDS.keys() - {"0", "1e12"}), 4))):
            add(f"{key}={word}", {key: WORDS[word]}, engine=rng.choice(["persistence", "persistence", "jacobi"]))
    for key in OTHERS:
        for word in sorted(rng.sample(sorted(WORDS), 4)):
            add(f"{key}={word}", {key: WORDS[word]}, engine=rng.choice(["persistence", "persistence", "jacobi"]))
    # Sizes that fit one another.
    for patches, frames in ((12, BIG), (BIG, 8), (10**9, 10**9)):
        window = str((patches + 6) * frames)
        add(
            f"window {patches} x {frames}",
            {
                "num_image_patches": str(patches),
                "num_spatio_embeddings": str(patches + 6),
                "num_temporal_embeddings": str(frames),
                "max_position_embeddings": window,
            },
        )
    add(
        "actions 1e7",
        {
            "num_action_tokens": "10000000",
            "num_spatio_embeddings": "10000012",
            "waypoint_times": "[" + ",".join(["1"] * 10**6) + "]",
        },
        must="refuse",
    )
    add(
        "heads 1e12",
        {"num_attention_heads": str(BIG), "num_key_value_heads": str(BIG), "hidden_size": str(BIG), "head_dim": "1"},
        must="refuse",
        engine="jacobi",
    )
    for layers in (10**5, 10**7, 10**9):
        add(f"layers {layers}", {"num_hidden_layers": str(layers)}, must="refuse", engine="jacobi")
        add(f"layers {layers}", {"num_hidden_layers": str(layers)})
    # Keys that carry code, or fetch something, or that transformers interprets.
    for key, value in {
        "attn_implementation": '"somebody/kernels"', "_attn_implementation": '"somebody/kernels:f"', "_attn_implementation_internal": '"somebody/kernels"',
        "experts_implementation": '"somebody/kernels"', "auto_map": '{"AutoModel": "somebody/code--modeling.Model", "AutoConfig": "x.py"}', "trust_remote_code": "true",
        "quantization_config": '{"quant_method": "awq", "load_in_4bit": true}', "_name_or_path": '"somebody/model"', "name_or_path": '"http://127.0.0.1:9/"',
        "custom_pipelines": '{"a": {"impl": "x.y"}}', "num_labels": "1000000000", "id2label": '{"0": "a"}', "label2id": "5", "problem_type": '"x"',
        "is_encoder_decoder": "true", "is_decoder": "true", "pruned_heads": '{"0": [0]}', "rope_scaling": '{"rope_type": "yarn", "factor": 1e300}',
        "rope_theta": "0", "partial_rotary_factor": "0", "output_attentions": "true", "output_hidden_states": "true", "return_dict": "false",
        "torchscript": "true", "use_bfloat16": "1", "torch_dtype": '"float8"', "chunk_size_feed_forward": "1", "sub_configs": '{"a": "b"}',
        "base_model_tp_plan": '{"layers.*": "colwise"}', "tokenizer_class": '"x"', "prefix": '"x"', "bad_words_ids": "[[1]]", "task_specific_params": "7",
        "finetuning_task": '"x"', "__class__": '"x"', "__init__": "null", "to_dict": "null", "layout": "3", "_commit_hash": '"x"', "gguf_file": '"../../x"',
        "transformers_weights": '"../../../etc/passwd"', "adapter_config": '{"base_model_name_or_path": "a/b"}', "unknown_key": "1", "": "1",
        "\\ud800": "1", "layer_types": '["x"]', "sliding_window": "-1", "kernel_config": '{"a": "b/c"}', "use_kernels": "true", "dtype": '"os"',
    }.items():  # fmt: skip
        for engine in ("persistence", "jacobi"):
            add(f"key {key}", {json.loads(f'"{key}"'): value}, engine=engine)
    for name, value in {
        "yarn": '{"rope_type": "yarn", "rope_theta": 1e4, "factor": -1}',
        "nosuch": '{"rope_type": "nosuch"}',
        "dynamic": '{"rope_type": "dynamic", "factor": 1e308, "rope_theta": 1}',
        "longrope": '{"rope_type": "longrope", "short_factor": [], "long_factor": []}',
        "zero": '{"rope_theta": 0, "rope_type": "default"}',
        "negative": '{"rope_theta": -5, "rope_type": "default"}',
        "text": '{"rope_theta": "x", "rope_type": "default"}',
        "nested": '{"full": {"rope_type": "default"}}',
        "llama3": '{"rope_type": "llama3", "rope_theta": 1e4, "factor": 0, "low_freq_factor": 1, "high_freq_factor": 1, "original_max_position_embeddings": 0}',
    }.items():
        add(f"rope {name}", {"rope_parameters": value}, engine="jacobi")
    for word in ("nosuch", "silu ", "__import__", "gelu", "quantized.x"):
        add(f"hidden_act {word}", {"hidden_act": f'"{word}"'}, engine="jacobi")
    for name, value in {
        "unsorted": "[3, 2, 1, 0.5, 0.2, 0.1]",
        "nan": "[NaN, 1, 2, 3, 4, 5]",
        "huge": "[1, 2, 3, 4, 5, 1e300]",
        "negative": "[-1, 0, 1, 2, 2.5, 2.9]",
        "text": '["1", 2, 3, 4, 5, 6]',
        "a million": "[" + "1," * 10**6 + "1]",
        "same": "[1, 1, 1, 1, 1, 1]",
        "null": "[null, 1, 2, 3, 4, 5]",
    }.items():
        add(f"waypoints {name}", {"waypoint_times": value}, must="refuse")
    for fps in ("1e-9", "1e300", "1e-300", "-10", "0", "120", "NaN", "null", '"10"', "true"):
        add(f"fps {fps}", {"fps": fps})
    for name, text in {
        "empty": b"", "half": b'{"hidden_size": 12', "a list": b"[]", "a number": b"7", "null": b"null", "BOM": b"\xef\xbb\xbf{}", "no keys": b"{}",
        "UTF-16": "{}".encode("utf-16"), "latin-1": b'{"a": "\xff"}', "NULs": b"\0" * 100, "60,000 keys": ("{" + ",".join(f'"k{i}":1' for i in range(60_000)) + "}").encode(),
        "lists 100,000 deep": b"[" * 100_000, "objects 100,000 deep": b'{"a":' * 100_000, "deep value": b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        "key twice": b'{"fps": 10, "fps": 20}', "6,000 digits": b'{"hidden_size": ' + b"9" * 6000 + b"}", "pickle": b"\x80\x04K\x01.", "tokenizer's": b'{"model_type": "lfq_tokenizer"}',
        "70 MB of text": lambda: b'{"a": "' + b"x" * (70 << 20) + b'"}', "70 MB of lists": lambda: b'{"a": [' + b"[]," * (23 << 20) + b"[]]}",
    }.items():  # fmt: skip
        add(f"file {name}", text=text, must="refuse")
    return made


def tokenizers(rng: random.Random) -> list[Case]:
    made: list[Case] = []

    def add(
        name: str,
        changes: dict[str, str] | None = None,
        text: "str | bytes | Callable[[], bytes] | None" = None,
        must: str | None = None,
    ) -> None:
        make: Make = lambda place: {"tokenizer.pretrained": model(place, "tokenizer", changes, text)}  # noqa: E731
        made.append(Case("tokenizer configs", name, make, must=must))

    net, quantizer = "encoder_decoder_config", "quantizer_config"
    keys = [f"{net}/{key}" for key in ("ch", "in_channels", "out_ch", "z_channels", "num_res_blocks", "ch_mult")]
    keys += [f"{quantizer}/{key}" for key in ("dim", "codebook_size", "bit_order", "batch_maximization_weight")]
    keys += ["image_size", "same_tokens_as", net, quantizer, "model_type"]
    for key in keys:
        for word in sorted(rng.sample(sorted(WORDS), 4)):
            add(f"{key}={word}", {key: WORDS[word]})
    for name, changes in {
        "net 1e9 blocks": {f"{net}/num_res_blocks": "1000000000"}, "net 1e12 wide": {f"{net}/ch": str(32 * 10**12)}, "32 levels": {f"{net}/ch_mult": "[" + "1," * 31 + "1]"},
        "1e6 levels": {f"{net}/ch_mult": "[" + "1," * 10**6 + "1]"}, "levels 1e12": {f"{net}/ch_mult": f"[1, 1, {BIG}]"}, "image 1e9": {"image_size": "[1000000000, 1000000000]"},
        "image 40000": {"image_size": "[40000, 40000]"}, "image 0": {"image_size": "[0, 16]"}, "image -4": {"image_size": "[-4, -4]"}, "image text": {"image_size": '["12", "16"]'},
        "image of 3": {"image_size": "[12, 16, 3]"}, "image 4x4000000": {"image_size": "[4, 4000000]"}, "dim 62": {f"{quantizer}/dim": "62", f"{quantizer}/codebook_size": str(2**62), f"{net}/z_channels": "62"},
        "auto_map": {"auto_map": '{"AutoModel": "x--y.Z"}'}, "unknown": {"surprise": "1"}, "huge weight": {f"{quantizer}/batch_maximization_weight": "1e400"}, "same tokens": {"same_tokens_as": '"' + "0" * 64 + '"'},
        "same tokens newline": {"same_tokens_as": '"' + "0" * 64 + '\\n"'},
    }.items():  # fmt: skip
        add(name, changes)
    for name, text in {
        "empty": b"",
        "a list": b"[]",
        "deep": b'{"image_size":' + b"[" * 100_000,
        "deep and closed": b'{"image_size":' + b"[" * 900 + b"]" * 900 + b"}",
        "digits": b'{"image_size": [' + b"9" * 6000 + b", 1]}",
        "latin-1": b'{"a": "\xff"}',
        "70 MB": lambda: b'{"a": "' + b"x" * (70 << 20) + b'"}',
        "keys": ("{" + ",".join(f'"k{i}":1' for i in range(200_000)) + "}").encode(),
        "world model's": b'{"model_type": "llama_action"}',
    }.items():
        add(f"file {name}", text=text, must="refuse")
    return made


def _header(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def _reheaded(data: bytes, changes: dict[str, Any]) -> bytes:
    """A safetensors file with other keys in its header."""
    end = 8 + int.from_bytes(data[:8], "little")
    return _header(json.loads(data[8:end]) | changes, data[end:])


def adapters(rng: random.Random) -> list[Case]:
    made: list[Case] = []
    config, weights = "adapter_config.json", "adapter_model.safetensors"

    def add(
        name: str, change: "Callable[[Path, Place], object]", must: str | None = "refuse", engine: str = "jacobi"
    ) -> None:
        def make(place: Place) -> dict[str, object]:
            folder = place.inputs / "adapter"
            shutil.copytree(place.common / "adapter", folder)
            change(folder, place)
            return {"adapter": folder, "engine": engine}

        made.append(Case("adapters", name, make, must=must))

    def write(name: str, content: "bytes | Callable[[bytes], bytes]") -> "Callable[[Path, Place], object]":
        def change(folder: Path, place: Place) -> None:
            path = folder / name
            path.write_bytes(content(path.read_bytes()) if callable(content) else content)

        return change

    def config_of(changes: dict[str, str]) -> "Callable[[Path, Place], object]":
        """A config.json of its own: the base's, with JSON text in place of some values."""
        return lambda folder, place: shutil.copy(model(place, "world_model", changes) / "config.json", folder)

    def keyed(key: str, word: str) -> "Callable[[bytes], bytes]":
        return lambda data: json.dumps(json.loads(data) | {key: "@"}).replace('"@"', word).encode("utf-8", "replace")

    add("whole", lambda folder, place: None, "accept")
    for key in (
        "peft_type",
        "r",
        "lora_alpha",
        "bias",
        "use_dora",
        "rank_pattern",
        "target_parameters",
        "auto_mapping",
    ):
        for word in sorted(rng.sample(sorted(WORDS), 4)):
            add(f"{key}={word}", write(config, keyed(key, WORDS[word])), None)
    add("alpha 1e308", write(config, keyed("lora_alpha", "1e308")))
    for name, metadata in METADATA.items():
        add(f"metadata {name}", write(weights, lambda data, m=metadata: _reheaded(data, {"__metadata__": m})))
    add("NaN", write(weights, lambda data: data[:-40] + b"\xff\x7f" * 20))
    add("1e38", write(weights, _filled))
    add("integers", write(weights, lambda data: data.replace(b'"BF16"', b' "I16"')))
    add("half", write(weights, lambda data: data[: len(data) // 2]))
    add("pickle", write(weights, b"\x80\x04K\x01."))
    add("of another", write(weights, _header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"\0" * 4)))
    for key in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
        add(f"config.json {key}", config_of({key: "true"}))
    for key in ("head_dim", "max_position_embeddings", "num_action_tokens", "rope_parameters", "hidden_size"):
        for word in sorted(rng.sample(sorted(WORDS.keys() - {"null"}), 3)):
            add(f"config.json {key}={word}", config_of({key: WORDS[word]}))
    add("config.json of the base", config_of({}), "accept")
    for name in (config, weights, "config.json", "decoder"):

        def odd(kind: str, name: str = name) -> "Callable[[Path, Place], object]":
            def change(folder: Path, place: Place) -> None:
                path = folder / name
                path.unlink(missing_ok=True)
                if kind == "fifo":
                    os.mkfifo(path)
                elif kind == "folder":
                    path.mkdir()
                else:
                    path.symlink_to({"zero": "/dev/zero", "loop": name, "dangling": "nowhere"}[kind])

            return change

        for kind in ("fifo", "zero", "loop", "dangling", "folder"):
            add(f"{name} {kind}", odd(kind))
            add(f"{name} {kind} persistence", odd(kind), engine="persistence")
    for number in range(20):
        at, byte = rng.random(), rng.randrange(256)
        add(f"byte {number}", write(weights, lambda data, a=at, b=byte: _spoiled(data, a, b)), None)
    return made


def _filled(data: bytes) -> bytes:
    """A safetensors file whose every bfloat16 is 1e38."""
    end = 8 + int.from_bytes(data[:8], "little")
    return data[:end] + b"\x96\x7e" * ((len(data) - end) // 2)


def _spoiled(data: bytes, at: float, byte: int) -> bytes:
    place = int(at * (8 + int.from_bytes(data[:8], "little")))
    return data[:place] + bytes([byte]) + data[place + 1 :]


def weights(rng: random.Random) -> list[Case]:
    made: list[Case] = []

    def add(
        name: str, content: Any, file: str = "model.safetensors", of: str = "tokenizer", keep: bool = False
    ) -> None:
        def make(place: Place) -> dict[str, object]:
            folder = model(place, of)
            if not keep:
                (folder / "model.safetensors").unlink()
            target = folder / file
            data = (
                content(folder, (place.common / of / "model.safetensors").read_bytes())
                if callable(content)
                else content
            )
            if data is not None:
                target.write_bytes(data)
            return {f"{of}.pretrained": folder, "engine": "jacobi"}

        made.append(Case("weights", f"{of} {name}", make, must="refuse"))

    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    for of in ("tokenizer", "world_model"):
        add("missing", None, of=of)
        add("empty", b"", of=of)
        add("half", lambda folder, data: data[: len(data) // 2], of=of)
        add("no data", lambda folder, data: data[: 8 + int.from_bytes(data[:8], "little")], of=of)
        add("length 2**63", struct.pack("<Q", 2**63) + b"{}", of=of)
        add("length 100 MB", lambda folder, data: struct.pack("<Q", 99_999_999) + b" " * 99_999_999, of=of)
        add("pickle", b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94.", of=of)
        add("pickle beside", b"\x80\x04K\x01.", "pytorch_model.bin", of=of)
        add("LFS", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", of=of)
        add(
            "shape huge",
            _header({"a": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 4]}}, b"\0" * 4),
            of=of,
        )
        add(
            "shape minus", _header({"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}, b"\0" * 4), of=of
        )
        add("offsets back", _header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, b"\0" * 4), of=of)
        add(
            "offsets float",
            _header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4.0]}}, b"\0" * 4),
            of=of,
        )
        add("offsets text", _header({"a": {"dtype": "F32", "shape": [1], "data_offsets": "04"}}, b"\0" * 4), of=of)
        add("dtype list", _header({"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, b"\0" * 4), of=of)
        add("dtype none", _header({"a": {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}}, b"\0" * 4), of=of)
        add("F4", _header({"a": {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}}, b"\0" * 4), of=of)
        add("deep", _header(b"[" * 1_000_000), of=of)
        add("digits", _header(b'{"a": ' + b"9" * 6000 + b"}"), of=of)
        add("latin-1", _header(b'{"\xff": 1}'), of=of)
        add("a list", _header([1]), of=of)
        add(
            "many tensors",
            _header({f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(300_000)}),
            of=of,
        )
        add(
            "shape of a million",
            _header({"a": {"dtype": "F32", "shape": [9] * 1_000_000, "data_offsets": [0, 4]}}, b"\0" * 4),
            of=of,
        )
        add("names wild", _header({"\x1b[31m\n" * 1000: entry}, b"\0" * 4), of=of)
        add("of another", lambda folder, data: _header({"a": entry}, b"\0" * 4), of=of)
        for name, number in NUMBERS.items():
            add(name, lambda folder, data, n=number: data[:-40] + n * 10, of=of)
        for name, metadata in METADATA.items():
            add(f"metadata {name}", lambda folder, data, m=metadata: _reheaded(data, {"__metadata__": m}), of=of)
        for name, index in {
            "climbs": {"weight_map": {"a": "../../../etc/passwd.safetensors"}}, "empty": {"weight_map": {}}, "list": {"weight_map": ["a"]}, "missing": {"weight_map": {"a": "b.safetensors"}},
            "itself": {"weight_map": {"a": "model.safetensors.index.json"}}, "numbers": {"weight_map": {"a": 7}}, "nul": {"weight_map": {"a": "a\0.safetensors"}}, "long": {"weight_map": {"a": "a" * 500 + ".safetensors"}},
            "100,000 shards": {"weight_map": {f"t{i}": f"{i}.safetensors" for i in range(100_000)}},
        }.items():  # fmt: skip
            add(f"index {name}", json.dumps(index).encode(), "model.safetensors.index.json", of=of)
        add("index deep", b'{"weight_map":' + b"[" * 100_000, "model.safetensors.index.json", of=of)
        add("both", b"{}", "model.safetensors.index.json", of=of, keep=True)

        def place_case(name: str, make: Make, of: str = of) -> None:
            made.append(Case("weights", f"{of} {name}", make, must="refuse"))

        def special(kind: str, file: str, of: str = of) -> Make:
            def make(place: Place) -> dict[str, object]:
                folder = model(place, of)
                (folder / file).unlink()
                if kind == "fifo":
                    os.mkfifo(folder / file)
                elif kind == "sparse":
                    with (folder / file).open("wb") as stream:
                        stream.truncate(1 << 40)
                else:
                    (folder / file).symlink_to({"zero": "/dev/zero", "loop": file, "mem": "/proc/self/mem"}[kind])
                return {f"{of}.pretrained": folder, "engine": "jacobi"}

            return make

        for kind in ("fifo", "zero", "loop", "sparse"):
            for file in ("config.json", "model.safetensors"):
                place_case(f"{file} {kind}", special(kind, file))
    for name, pretrained in {
        "url": "http://127.0.0.1:9/a",
        "climbs": "../../etc",
        "nul": "'a\\0b'",
        "file": "/etc/passwd",
        "root": "/",
        "empty": "''",
        "dots": "..",
        "list": "[a,b]",
        "null": "null",
        "number": "7",
    }.items():
        for of in ("tokenizer", "world_model"):
            made.append(
                Case(
                    "weights",
                    f"{of} at {name}",
                    lambda place, o=of, p=pretrained: [f"{o}.pretrained={p}"],
                    must="refuse",
                )
            )
    made.append(
        Case(
            "weights",
            "swapped",
            lambda place: {
                "tokenizer.pretrained": place.common / "world_model",
                "world_model.pretrained": place.common / "tokenizer",
            },
            must="refuse",
        )
    )
    made.append(
        Case("weights", "subfolder climbs", lambda place: {"tokenizer.subfolder": "../../../../etc"}, must="refuse")
    )
    return made
