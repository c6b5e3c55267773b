"""Checkpoint folders (config.json and safetensors): finding, checking, reading and writing.

The world model uses this module too. Only safetensors files are read, and a folder's headers are checked in full before
a weight is loaded.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import reprlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from tokenizer import files
from tokenizer.errors import CheckpointError, OutputError
from tokenizer.files import (
    decode_text,
    file_sha256,
    make_folder,
    open_regular,
    parse_json,
    replacing,
    write_json as write_json,
)

if TYPE_CHECKING:
    # Files are found and their headers checked before torch is imported.
    from torch import Tensor

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
CHECKPOINT_FILES = CONFIG_NAME, INDEX_NAME, "model*.safetensors", "generation_config.json"
"""Shell patterns of the names in a checkpoint folder."""

Layout = dict[str, tuple[int, ...]]

BOOKKEEPING = frozenset(
    {"_name_or_path", "architectures", "auto_map", "dtype", "model_type", "name_or_path"}
    | {"torch_dtype", "transformers_version"}
)
"""Keys of a config.json that Hugging Face's writers add; they say nothing about the architecture.

`auto_map` names code beside the weights; it is never followed.
"""

_BEARS_CODE = re.compile(
    r"trust_remote_code|quantization|quant_method|custom_|kernel|fusion|adapter|peft|gguf|plugin|attn_impl|experts_impl"
    r"|_target_|transformers_weights|base_model_name|distributed_config|tp_plan|processor_class|auto_class|runtime_env"
)

_MAX_NAME = 255  # characters of a file's name
_PICKLED_SUFFIXES = frozenset({".bin", ".ckpt", ".pkl", ".pt", ".pth"})
_PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x04")  # torch.save's zip file; pickles of protocols 2 and 4
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_ITEM_BYTES = {
    **{"F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4},
    **{"F16": 2, "BF16": 2, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1},
    **{"F8_E4M3": 1, "F8_E4M3FNUZ": 1, "F8_E5M2": 1, "F8_E5M2FNUZ": 1},
}
FLOATS = "BF16", "F16", "F32", "F64"
"""The dtypes of a safetensors header that weights of a network may have."""

_NUM_NAMES_SHOWN, _NAME_CHARS_SHOWN = 5, 200
_MAX_DIMENSIONS = 8
_MAX_HEADER_BYTES, _MAX_TENSORS = 16 << 20, 100_000
"""Bounds on a safetensors header and on a checkpoint's tensors; no settings, as no checkpoint comes near them."""


def resolve_checkpoint(path_or_hub_id: str | Path, subfolder: str | None = None, revision: str | None = None) -> Path:
    """Return a checkpoint's local folder, and download it first if the name is a Hub id ("owner/name").

    An existing folder always wins and never touches the network; a `Path` is never taken for a Hub id. Only JSON and
    safetensors files are downloaded. Raises CheckpointError if there is no such folder or repository, or it has no
    config.json or no safetensors.
    """
    root = Path(path_or_hub_id)
    if root.is_dir():
        if revision is not None:
            raise CheckpointError(f"expected no revision with a local folder, got {revision!r} with {root}")
    elif isinstance(path_or_hub_id, str) and _HUB_ID.fullmatch(path_or_hub_id):
        root = _download(path_or_hub_id, subfolder, revision)
    else:
        raise CheckpointError(f"expected a checkpoint folder or a Hub id owner/name, found no folder {path_or_hub_id}")
    folder = root / subfolder if subfolder else root
    if not folder.is_dir():
        raise CheckpointError(f"expected the subfolder {subfolder!r} in {path_or_hub_id}, found none in {root}")
    if not (folder / CONFIG_NAME).is_file():
        raise CheckpointError(f"expected {CONFIG_NAME} in {folder}, found none")
    weight_files(folder)
    return folder


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file. Raises CheckpointError, which names the file and the line of a syntax error."""
    return files.read_json(path, CheckpointError)


def read_config(path: Path) -> dict[str, Any]:
    """Read a checkpoint's config.json; keys that bear code, or name something to fetch, are refused.

    Raises:
        CheckpointError: see `read_json`, and with the name of such a key, unless its value is null or false.
    """
    content = read_json(path)
    try:
        refuse_code(content)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return content


def refuse_code(content: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a key that bears code or names something to fetch, and is neither null nor false."""
    for key, value in content.items():
        if _BEARS_CODE.search(key) and value is not None and value is not False:
            raise CheckpointError(
                f"{key}: expected no key that bears code or fetches something, got {reprlib.repr(value)}"
            )


def read_layout(folder: Path, dtypes: Collection[str] = _ITEM_BYTES) -> Layout:
    """Read the names and shapes of a checkpoint's tensors from the safetensors headers alone.

    The files are model.safetensors, or the shards that model.safetensors.index.json lists. Raises CheckpointError if a
    file is missing, truncated or corrupt (by the byte counts), if a tensor has none of the `dtypes`, or if the index
    disagrees with the shards.
    """
    layout: Layout = {}
    for path in weight_files(folder):
        header = read_header(path, dtypes)
        repeated = sorted(layout.keys() & header.keys())
        if repeated:
            raise CheckpointError(f"{path}: expected tensors that no other shard has, got {_shorten(repeated)}")
        layout |= header
        if len(layout) > _MAX_TENSORS:
            raise CheckpointError(f"{path}: expected at most {_MAX_TENSORS} tensors, got more")
    index = folder / INDEX_NAME
    if index.is_file():
        listed = _weight_map(index).keys()
        if listed != layout.keys():
            differing = sorted(listed ^ layout.keys())
            raise CheckpointError(f"{index}: expected the shards' tensors, differs in {_shorten(differing)}")
    return layout


def verify_layout(folder: Path, expected: Mapping[str, tuple[int, ...]], dtypes: Collection[str] = _ITEM_BYTES) -> None:
    """Compare a checkpoint's names and shapes with those of an architecture, without loading weights.

    Raises CheckpointError with the first few missing, unexpected and mismatched tensors and their counts, in one line,
    or with a tensor that has none of the `dtypes`.
    """
    found = read_layout(folder, dtypes)
    if found != expected:
        raise CheckpointError(f"{folder}: {layout_difference(expected, found)}")


def layout_difference(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> str:
    """Describe in one line how two layouts differ: the first missing, unexpected, mismatched tensors, and counts."""
    mismatched = [
        f"{name} expected {expected[name]} got {found[name]}"
        for name in expected
        if name in found and expected[name] != found[name]
    ]
    differences = {
        "missing": [name for name in expected if name not in found],
        "unexpected": [name for name in found if name not in expected],
        "of another shape": mismatched,
    }
    parts = [f"{len(names)} {kind}: {_shorten(names)}" for kind, names in differences.items() if names]
    return f"expected {len(expected)} tensors of the configured architecture, got {len(found)} with " + "; ".join(parts)


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """Load all tensors of a checkpoint, sharded or not, on the CPU in their stored dtype.

    Raises CheckpointError if a file can't be read or holds NaN or infinity.

    Each tensor is copied to memory of its own, because a safetensors file aligns tensors to 8 bytes only, and on some
    CPUs the last bit of a product depends on whether its factors begin at a multiple of 64 bytes.
    """
    from safetensors.torch import load_file

    read_layout(folder)
    tensors: dict[str, Tensor] = {}
    for path in weight_files(folder):
        try:
            loaded = load_file(path)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: expected a safetensors file, got: {_first_line(error)}") from None
        for name, tensor in loaded.items():
            check_finite(path, name, tensor)
            tensors[name] = tensor.clone()
    return tensors


def check_finite(where: Path, name: str, tensor: Tensor) -> None:
    """Refuse weights from which a network would compute nothing.

    Raises CheckpointError, which names the tensor and the file or folder `where`, for NaN or infinity.
    """
    import torch

    checked = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    if tensor.dtype not in checked or not tensor.numel():
        return
    low, high = tensor.aminmax()  # much faster than torch.isfinite; NaN comes through
    if not (torch.isfinite(low) and torch.isfinite(high)):
        raise CheckpointError(f"{where}: {_short(name)}: expected finite numbers, got {low.item()} to {high.item()}")


def checkpoint_sha256(folder: Path) -> str:
    """Hash config.json and the weight files: SHA-256, in hexadecimal, of their names and SHA-256s, sorted by name."""
    total = hashlib.sha256()
    for path in sorted([folder / CONFIG_NAME, *weight_files(folder)]):
        digest = file_sha256(path, CheckpointError)
        total.update(f"{digest}  {path.name}\n".encode())
    return total.hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write tensors as one safetensors file, whole or not at all; missing folders are made. Raises OutputError."""
    from safetensors.torch import save_file

    plain = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    make_folder(path.parent)
    with replacing(path) as temporary:
        try:
            save_file(plain, temporary, metadata)
        except SafetensorError as error:
            raise OutputError(f"{path}: expected a writable file, got: {_first_line(error)}") from error


def _download(hub_id: str, subfolder: str | None, revision: str | None) -> Path:
    import httpx
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    prefix = f"{subfolder.strip('/')}/" if subfolder else ""
    try:
        return Path(
            huggingface_hub.snapshot_download(
                hub_id,
                revision=revision,
                allow_patterns=[f"{prefix}*.json", f"{prefix}*.safetensors"],
                # The patterns' * also matches "/", so subfolders, which hold other checkpoints, are excluded.
                ignore_patterns=[f"{prefix}*/*"],
            )
        )
    except (OSError, httpx.HTTPError, HFValidationError) as error:
        raise CheckpointError(
            f"expected a local folder or a reachable Hub repository, found no folder {hub_id}, "
            f"and the Hub gave: {_first_line(error)}"
        ) from error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint; raise CheckpointError if one is missing."""
    single, index = folder / WEIGHTS_NAME, folder / INDEX_NAME
    if single.is_file() and index.is_file():
        raise CheckpointError(f"{folder}: expected either {WEIGHTS_NAME} or {INDEX_NAME}, found both")
    if single.is_file():
        return [single]
    if index.is_file():
        shards = [folder / name for name in sorted(set(_weight_map(index).values()))]
        missing = [shard.name for shard in shards if not shard.is_file()]
        if missing:
            raise CheckpointError(f"{index}: expected {len(shards)} shards beside it, missing {_shorten(missing)}")
        return shards
    pickled = sorted(path.name for path in folder.glob("*") if path.suffix in _PICKLED_SUFFIXES)
    found = (
        f"only {_shorten(pickled)}: pickled weights are not read, convert them to safetensors" if pickled else "neither"
    )
    raise CheckpointError(f"{folder}: expected {WEIGHTS_NAME} or {INDEX_NAME}, found {found}")


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        got = reprlib.repr(weight_map)
        raise CheckpointError(f"{index}: expected weight_map as an object of tensor and file names, got {got}")
    if len(weight_map) > _MAX_TENSORS:
        raise CheckpointError(f"{index}: expected at most {_MAX_TENSORS} tensors, got {len(weight_map)}")
    for name, shard in weight_map.items():
        is_name = isinstance(shard, str) and Path(shard).name == shard and len(shard) <= _MAX_NAME
        if not is_name or not shard.endswith(".safetensors"):
            expected = f"a .safetensors file beside it for {_short(name)}"
            raise CheckpointError(f"{index}: expected {expected}, got {reprlib.repr(shard)}")
    return weight_map


def read_header(path: Path, dtypes: Collection[str] = _ITEM_BYTES) -> Layout:
    """Read names and shapes from one safetensors file, and check that the tensors fill the file exactly.

    Format: 8 bytes of little-endian header length, that much JSON, then the data (safetensors' README).

    Raises:
        CheckpointError: the file is missing, truncated or corrupt, or a tensor has none of the `dtypes`.
    """
    with open_regular(path, CheckpointError) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if start == b"version ":
            raise CheckpointError(f"{path}: expected weights, got a Git LFS pointer of {size} bytes")
        if len(start) < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
            if start.startswith(_PICKLE_STARTS):
                raise CheckpointError(f"{path}: expected safetensors, got a pickle of PyTorch, which is not read")
            within = f"within the file's {size} bytes and {_MAX_HEADER_BYTES}"
            raise CheckpointError(f"{path}: expected a safetensors header {within}, got a length of {length}")
        text = decode_text(file.read(length), f"{path}: header", CheckpointError)
    header = parse_json(text, f"{path}: header", CheckpointError)
    return _check_header(path, header, size - 8 - length, dtypes)


def _check_header(path: Path, header: Any, num_data_bytes: int, dtypes: Collection[str]) -> Layout:
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__: expected texts by name, got {reprlib.repr(metadata)}")
    layout: Layout = {}
    spans = []
    try:
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            shape = tuple(map(_natural, entry["shape"]))
            begin, end = map(_natural, entry["data_offsets"])
            if len(shape) > _MAX_DIMENSIONS:
                raise ValueError(f"{len(shape)} dimensions")
            num_bytes = math.prod(shape) * _ITEM_BYTES[entry["dtype"]]
            if end - begin != num_bytes:
                raise CheckpointError(
                    f"{path}: expected {num_bytes} bytes of {_short(name)} {shape}, got {end - begin}"
                )
            if entry["dtype"] not in dtypes:
                expected = ", ".join(dtypes)
                raise CheckpointError(f"{path}: {_short(name)}: expected one of {expected}, got {entry['dtype']}")
            spans.append((begin, end))
            layout[name] = shape
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        got = repr(error)[:200]
        raise CheckpointError(f"{path}: expected dtype, shape and data_offsets of tensors, got: {got}") from None
    covered = 0
    for begin, end in sorted(spans):
        if begin != covered:
            raise CheckpointError(f"{path}: expected tensor data at byte {covered} of the data, got it at {begin}")
        covered = end
    if covered != num_data_bytes:
        raise CheckpointError(f"{path}: expected {covered} bytes of tensor data, got {num_data_bytes}")
    return layout


def _natural(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{reprlib.repr(value)} where a size or an offset is due")
    return value


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:500] or type(error).__name__


def _short(name: str) -> str:
    return name if len(name) <= _NAME_CHARS_SHOWN else f"{name[:_NAME_CHARS_SHOWN]}..."


def _shorten(names: list[str]) -> str:
    more = f" and {len(names) - _NUM_NAMES_SHOWN} more" if len(names) > _NUM_NAMES_SHOWN else ""
    return ", ".join(map(_short, names[:_NUM_NAMES_SHOWN])) + more
