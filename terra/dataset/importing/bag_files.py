"""Bags as streams of messages: MCAP files, ROS 1 .bag, and ROS 2 bags of MCAP or SQLite (mcap.dev, ros.org).

MCAP is read record by record by `mcap`, in the order of the file, so that a file that was cut off is read as far as it
goes. `rosbags` reads the other containers, and turns ROS messages of all of them into objects by the definitions that
the bag brings along. No more than a chunk of a bag is in memory.
"""

import base64
import binascii
import io
import json
import logging
import re
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from terra.dataset.format import check_name
from terra.errors import DatasetError
from terra.extras import extras_named
from tokenizer.files import open_regular, read_text
from tokenizer.limits import LIMITS

logger = logging.getLogger(__name__)

SUFFIXES = (".bag", ".db3", ".mcap")
_METADATA = "metadata.yaml"  # of a ROS 2 bag, which is a folder
_ATTACHMENT = 9  # MCAP's code of a record that holds a file
_CUT_OFF = "the file is cut off"
_LATEST = 1 << 62  # ns
_HEADER = 9  # bytes of an MCAP record before its content: code, length
_NAME_RULE = re.compile(r"[^A-Za-z0-9_.-]+")


class UndecodableError(Exception):
    """The error of a message that is not as its schema says; the reason is one line."""


@dataclass(frozen=True, eq=False)
class Channel:
    """A topic of a bag.

    Attributes:
        topic: its name, such as "/camera/image".
        type: its messages' type, such as "sensor_msgs/Image" (of ROS 1 and ROS 2) or "foxglove.RawImage".
        decode: makes an object with attributes, or a dict, of a message's bytes. Raises UndecodableError, and
            DatasetError if no message of the channel can be decoded.
    """

    topic: str
    type: str
    decode: Callable[[bytes], Any]


@dataclass(frozen=True, eq=False)
class Message:
    """A message as a bag has it: when it was logged (ns, by the recorder's clock; 0: unknown), and its bytes."""

    channel: Channel
    log_time: int
    data: bytes


@dataclass(frozen=True)
class Lost:
    """A place in a bag where messages are lost: damaged, cut off, or a missing file."""

    reason: str


@dataclass(frozen=True)
class Recording:
    """One recording: a bag of one file, or of several that follow each other.

    Attributes:
        name: the drive's name.
        path: the file or the folder.
        files: the files, in order.
    """

    name: str
    path: Path
    files: tuple[Path, ...]

    def messages(self, topics: Collection[str] | None = None) -> Iterator[Message | Lost]:
        """Yield the messages of some topics (None: all): of MCAP in the file's order, else by the time of logging.

        Raises:
            DatasetError: a file that is no bag.
        """
        for file in self.files:
            if not file.exists():
                yield Lost(f"{file.name}, which {_METADATA} names, is missing")
            elif file.suffix.lower() == ".mcap":
                yield from _mcap_messages(file, topics)
            else:
                yield from _ros_messages(file, topics)


def find_recordings(folder: Path) -> tuple[Recording, ...]:
    """The recordings in a folder and its subfolders, by name.

    A folder with metadata.yaml is one recording, however many files it was split into; any other file is one, too.

    Raises:
        DatasetError: none, two of one name, or metadata.yaml that names no files.
    """
    roots = [path.parent for path in sorted(folder.rglob(_METADATA)) if not _hidden(path, folder)]
    found = [_ros2_recording(folder, root) for root in roots]
    for path in sorted(folder.rglob("*")):
        is_bag = path.suffix.lower() in SUFFIXES and path.is_file() and not _hidden(path, folder)
        if is_bag and not any(root in path.parents for root in roots):
            found.append(Recording(_name(path.relative_to(folder).with_suffix("")), path, (path,)))
    if not found:
        raise DatasetError(f"{folder}: expected bags ({', '.join(SUFFIXES)}, or folders with {_METADATA}), got none")
    by_name: dict[str, Recording] = {}
    for recording in found:
        if recording.name in by_name:
            paths = f"{by_name[recording.name].path} and {recording.path}"
            raise DatasetError(f"{folder}: expected bags of different names, got {paths}")
        by_name[recording.name] = recording
    return tuple(by_name[name] for name in sorted(by_name))


def field(message: Any, name: str) -> Any:
    """A field of a decoded message. Raises AttributeError if it has none of this name."""
    if isinstance(message, Mapping):
        if name not in message:
            raise AttributeError(name)
        return message[name]
    return getattr(message, name)


def fields(message: Any) -> tuple[str, ...]:
    """The names of a decoded message's fields; () if it is a number, a text or an array."""
    if isinstance(message, Mapping):
        return tuple(message)
    if hasattr(message, "DESCRIPTOR"):
        return tuple(each.name for each in message.DESCRIPTOR.fields)
    return tuple(name for name in getattr(message, "__dataclass_fields__", ()) if not name.startswith("__"))


def binary(message: Any, name: str = "data") -> bytes:
    """A field that holds bytes, which JSON has in base64. Raises UndecodableError."""
    data = field(message, name)
    if not isinstance(data, str):
        return bytes(data)
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise UndecodableError(f"{name}: expected base64: {error}") from None


def header_time(message: Any) -> int | None:
    """The time (ns) that a message's own header.stamp or timestamp has; 0 if it is not set, None if it has none."""
    for names in (("header", "stamp"), ("timestamp",)):
        try:
            stamp = message
            for name in names:
                stamp = field(stamp, name)
            known = fields(stamp)
            seconds = next(name for name in ("sec", "seconds", "secs") if name in known)
            rest = next(name for name in ("nanosec", "nsec", "nanos", "nsecs") if name in known)
            return _known(int(field(stamp, seconds)) * 10**9 + int(field(stamp, rest)))
        except (AttributeError, StopIteration, TypeError, ValueError):
            continue
    return None


def _known(time: int) -> int:
    """A time (ns) before the year 2116, else 0."""
    return time if 0 <= time < _LATEST else 0


def _hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _name(path: Path) -> str:
    """A drive's name of a path within the input folder."""
    return check_name(_NAME_RULE.sub("_", "_".join(path.parts)).strip("_.-") or "bag", "name of a bag")


def _ros2_recording(folder: Path, root: Path) -> Recording:
    path = root / _METADATA
    text = read_text(path, DatasetError, max_bytes=LIMITS.json_bytes)
    try:
        facts = yaml.load(text, yaml.CSafeLoader)["rosbag2_bagfile_information"]
        names = [str(name) for name in facts["relative_file_paths"]]
        packed = bool(facts.get("compression_format"))
    except (yaml.YAMLError, KeyError, TypeError, AttributeError, RecursionError, ValueError):
        raise DatasetError(f"{path}: expected the description of a ROS 2 bag, with relative_file_paths") from None
    # Older recorders write the bag's own folder before the name.
    files = [root / Path(name).name for name in names]
    if not files:
        raise DatasetError(f"{path}: expected files in relative_file_paths, got none")
    name = _name(root.relative_to(folder)) if root != folder else _name(Path(root.resolve().name))
    if not packed and all(file.suffix.lower() == ".mcap" for file in files):
        return Recording(name, root, tuple(files))
    return Recording(name, root, (root,))  # rosbags reads the folder


def _mcap_messages(path: Path, topics: Collection[str] | None) -> Iterator[Message | Lost]:
    with extras_named("kind=mcap"):
        from mcap.exceptions import EndOfFile, RecordLengthLimitExceeded
        from mcap.records import Channel as McapChannel, Chunk, DataEnd, Message as McapMessage, Schema
        from mcap.stream_reader import StreamReader

    schemas: dict[int, Any] = {}
    channels: dict[int, Channel] = {}
    with open_regular(path, DatasetError, "an MCAP file") as file:

        def read_on(*, skip_magic: bool) -> Iterator[Any]:
            return StreamReader(file, skip_magic, emit_chunks=True, record_size_limit=LIMITS.bag_record_bytes).records

        size = path.stat().st_size
        records, begun = read_on(skip_magic=False), False
        while True:
            try:
                record = next(records)
            except RecordLengthLimitExceeded:
                code, length = _next_record(file)
                if file.tell() + length > size:
                    yield Lost(_CUT_OFF)
                    return
                file.seek(length, 1)
                if code != _ATTACHMENT:
                    yield Lost(f"a record of {length} bytes, more than {LIMITS.bag_record_bytes}")
                records = read_on(skip_magic=True)
                continue
            except Exception as error:  # of a reader that trusts lengths
                if not begun:
                    raise DatasetError(f"{path}: expected an MCAP file, got {_kind(file)}") from None
                is_cut = isinstance(error, EndOfFile | StopIteration)
                yield Lost(_CUT_OFF if is_cut else f"the file is damaged: {_reason(error)}")
                return
            begun = True
            if isinstance(record, DataEnd):
                return
            try:
                inner = _unpacked(record) if isinstance(record, Chunk) else (record,)
            except Exception as error:  # of three decompressors, and of records within a damaged chunk
                yield Lost(f"a damaged chunk: {_reason(error)}")
                continue
            for each in inner:
                if isinstance(each, Schema):
                    schemas[each.id] = each
                elif isinstance(each, McapChannel):
                    schema = schemas.get(each.schema_id)
                    channels[each.id] = _mcap_channel(path, each.topic, each.message_encoding, schema)
                elif isinstance(each, McapMessage) and each.channel_id in channels:
                    channel = channels[each.channel_id]
                    if topics is None or channel.topic in topics:
                        yield Message(channel, _known(each.log_time), each.data)


def _next_record(file: BinaryIO) -> tuple[int, int]:
    """Code and length of a record whose first bytes were just read."""
    file.seek(-_HEADER, 1)
    return struct.unpack("<BQ", file.read(_HEADER))


def _unpacked(chunk: Any) -> list[Any]:
    """The records of a chunk, which is unpacked to no more bytes than the bound allows. Raises any exception."""
    import lz4.frame
    import zstandard
    from mcap.stream_reader import breakup_chunk

    most = LIMITS.bag_record_bytes
    if chunk.compression == "zstd":
        reader = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(chunk.data), read_across_frames=True)
        chunk.data = reader.read(most + 1)
    elif chunk.compression == "lz4":
        chunk.data = lz4.frame.LZ4FrameDecompressor().decompress(chunk.data, max_length=most + 1)
    elif chunk.compression:
        raise ValueError(f"expected zstd, lz4 or no compression, got {chunk.compression!r}")
    if len(chunk.data) > most:
        raise ValueError(f"expected at most {most} unpacked bytes, got more")
    if len(chunk.data) != chunk.uncompressed_size:
        raise ValueError(f"expected {chunk.uncompressed_size} unpacked bytes, got {len(chunk.data)}")
    chunk.compression = ""
    return breakup_chunk(chunk, validate_crc=True)


def _mcap_channel(path: Path, topic: str, encoding: str, schema: Any) -> Channel:
    name = schema.name.replace("/msg/", "/") if schema is not None else ""
    decoders: list[Callable[[bytes], Any]] = []

    def decode(data: bytes) -> Any:
        if not decoders:
            decoders.append(_mcap_decoder(f"{path}: {topic}", encoding, schema))
        return _guarded(decoders[0], data)

    return Channel(topic, name, decode)


def _mcap_decoder(where: str, encoding: str, schema: Any) -> Callable[[bytes], Any]:
    kinds = (encoding, schema.encoding if schema is not None else "")
    if encoding == "json":
        return json.loads
    try:
        if kinds == ("protobuf", "protobuf"):
            with extras_named("kind=mcap"):
                from mcap_protobuf.decoder import DecoderFactory
            decoder = DecoderFactory().decoder_for(encoding, schema)
            assert decoder is not None
            return decoder
        if kinds in (("cdr", "ros2msg"), ("cdr", "ros2idl"), ("ros1", "ros1msg")):
            return _ros_decoder(encoding, schema)
    except Exception as error:  # of parsers of three languages
        raise DatasetError(f"{where}: expected a definition of its messages, got: {_reason(error)}") from None
    raise DatasetError(
        f"{where}: expected messages in CDR (schema ros2msg or ros2idl), ROS 1, protobuf or JSON, got "
        f"{encoding or 'no encoding'} (schema {kinds[1] or 'none'})"
    )


def _ros_decoder(encoding: str, schema: Any) -> Callable[[bytes], Any]:
    with extras_named("kind=mcap"):
        from rosbags.typesys import Stores, get_types_from_idl, get_types_from_msg, get_typestore

    text, name = schema.data.decode(), re.sub(r"^([^/]+)/(?!msg/|action/|srv/)", r"\1/msg/", schema.name)
    types: dict[str, Any] = {}
    if schema.encoding == "ros2idl":
        for part in re.split(r"^=+\nIDL: .*\n", text, flags=re.MULTILINE):
            types.update(get_types_from_idl(part) if part.strip() else {})
    else:
        types.update(get_types_from_msg(text, name))
    store = get_typestore(Stores.EMPTY)
    store.register(types)
    read = store.deserialize_cdr if encoding == "cdr" else store.deserialize_ros1
    return lambda data: read(data, name)


def _ros_messages(path: Path, topics: Collection[str] | None) -> Iterator[Message | Lost]:
    """The messages of a ROS 1 .bag, a .db3, or a ROS 2 folder."""
    with extras_named("kind=mcap"):
        from rosbags.highlevel import AnyReader
        from rosbags.typesys import Stores, get_typestore

    # Recorders before ROS 2 Iron left definitions out: then the types are those of ROS's own packages.
    reader = AnyReader([path], default_typestore=get_typestore(Stores.LATEST))
    try:
        reader.open()
    except Exception as error:  # of rosbags, SQLite and the parsers of definitions
        raise DatasetError(f"{path}: expected a ROS bag, got: {_reason(error)}") from None
    with closing(reader):
        channels = {
            id(each): Channel(
                each.topic,
                each.msgtype.replace("/msg/", "/"),
                partial(_guarded, partial(_ros_read, reader, each.msgtype)),
            )
            for each in reader.connections
            if topics is None or each.topic in topics
        }
        wanted = [each for each in reader.connections if id(each) in channels]
        messages = reader.messages(wanted) if wanted else iter(())
        while True:
            try:
                connection, log_time, data = next(messages)
            except StopIteration:
                return
            except Exception as error:
                yield Lost(f"the file is damaged: {_reason(error)}")
                return
            if len(data) > LIMITS.bag_record_bytes:
                yield Lost(f"a message of {len(data)} bytes, more than {LIMITS.bag_record_bytes}")
                continue
            if id(connection) in channels:
                yield Message(channels[id(connection)], _known(log_time), data)


def _ros_read(reader: Any, kind: str, data: bytes) -> Any:
    return reader.deserialize(data, kind)


def _guarded(decode: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return decode(data)
    except Exception as error:  # of generated code over the bytes of others
        raise UndecodableError(_reason(error)) from None


def _kind(file: BinaryIO) -> str:
    file.seek(0)
    head = file.read(16)
    return "an empty file" if not head else f"a file that begins with {head[:8]!r}"


def _reason(error: BaseException) -> str:
    line = str(error).strip().partition("\n")[0]
    return (line or type(error).__name__)[:200]
