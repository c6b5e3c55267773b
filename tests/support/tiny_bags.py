"""Bags for tests: MCAP files by `mcap`, ROS messages by `rosbags`, and pictures that carry their own number."""

import base64
import io
import json
import struct
import subprocess
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2
from mcap.writer import CompressionType, Writer
from PIL import Image
from rosbags.typesys import Stores, get_types_from_msg, get_typestore

WIDTH, HEIGHT, BITS = 64, 32, 8
EPOCH = 1_700_000_000 * 10**9  # ns


def coded(number: int) -> np.ndarray:
    """A picture of eight blocks, black or white: the bits of its number."""
    row = np.repeat([235 if number >> bit & 1 else 20 for bit in range(BITS)], WIDTH // BITS)
    return np.broadcast_to(row[None, :, None], (HEIGHT, WIDTH, 3)).astype(np.uint8)


def number(picture: np.ndarray) -> int:
    """The number in a picture that `coded` made, whatever its size."""
    height, width = picture.shape[:2]
    blocks = picture.reshape(height, BITS, width // BITS, 3)[height // 4 : -height // 4, :, width // BITS // 4 : -2]
    return sum(int(block.mean() > 127) << bit for bit, block in enumerate(np.moveaxis(blocks, 1, 0)))


def packed(picture: np.ndarray, kind: str = "JPEG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, kind)
    return buffer.getvalue()


@cache
def ros(*, ros1: bool = False) -> Any:
    """A store of ROS's types, and of one that is not ROS's."""
    store = get_typestore(Stores.ROS1_NOETIC if ros1 else Stores.ROS2_JAZZY)
    store.register(get_types_from_msg("float64 speed\nuint8 gear\nint16[3] trim\nstring label\n", "my_car/msg/Pedals"))
    return store


def stamp(ns: int) -> Any:
    return ros().types["builtin_interfaces/msg/Time"](sec=ns // 10**9, nanosec=ns % 10**9)


def header(ns: int) -> Any:
    return ros().types["std_msgs/msg/Header"](stamp=stamp(ns), frame_id="camera")


def compressed(ns: int, data: bytes, words: str = "jpeg") -> Any:
    kind = ros().types["sensor_msgs/msg/CompressedImage"]
    return kind(header=header(ns), format=words, data=np.frombuffer(data, np.uint8))


def image(ns: int, encoding: str, data: bytes, step: int, width: int = WIDTH, height: int = HEIGHT) -> Any:
    kind, pixels = ros().types["sensor_msgs/msg/Image"], np.frombuffer(data, np.uint8)
    return kind(
        header=header(ns), height=height, width=width, encoding=encoding, is_bigendian=0, step=step, data=pixels
    )


def twist(x: float, turn: float = 0.0) -> Any:
    types = ros().types
    vector = types["geometry_msgs/msg/Vector3"]
    return types["geometry_msgs/msg/Twist"](linear=vector(x=x, y=0.0, z=0.0), angular=vector(x=0.0, y=0.0, z=turn))


def joints(ns: int, names: Sequence[str], positions: Sequence[float]) -> Any:
    return ros().types["sensor_msgs/msg/JointState"](
        header=header(ns), name=list(names), position=np.array(positions, np.float64), velocity=np.zeros(0),
        effort=np.zeros(0),
    )  # fmt: skip


def pedals(speed: float, gear: int = 1) -> Any:
    return ros().types["my_car/msg/Pedals"](speed=speed, gear=gear, trim=np.array([1, 2, 3], np.int16), label="a")


def write_mcap(
    path: Path, messages: Iterable[tuple[str, int, Any]], *, chunk_size: int = 4096, finish: bool = True, **options: Any
) -> Path:
    """Write (topic, log time in ns, message): a ROS 2 message, a protobuf message, or (schema name, dict) as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    options.setdefault("compression", CompressionType.ZSTD)
    with path.open("wb") as file:
        writer = Writer(file, chunk_size=chunk_size, **options)
        writer.start(profile="", library="test")
        channels: dict[str, int] = {}
        for topic, log_time, message in messages:
            schema, encoding, data = _encoded(message)
            if topic not in channels:
                schema_id = writer.register_schema(*schema)
                channels[topic] = writer.register_channel(topic, encoding, schema_id)
            writer.add_message(channels[topic], log_time, data, log_time)
        if finish:
            writer.finish()
    return path


def _encoded(message: Any) -> tuple[tuple[str, str, bytes], str, bytes]:
    if isinstance(message, tuple):
        name, content = message
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        return (name, "jsonschema", b'{"type": "object"}'), "json", data
    if hasattr(message, "DESCRIPTOR"):
        files = descriptor_pb2.FileDescriptorSet()
        for file in (timestamp_pb2.DESCRIPTOR, message.DESCRIPTOR.file):
            file.CopyToProto(files.file.add())
        schema = message.DESCRIPTOR.full_name, "protobuf", files.SerializeToString()
        return schema, "protobuf", message.SerializeToString()
    text, _ = ros().generate_msgdef(message.__msgtype__, ros_version=2)
    data = bytes(ros().serialize_cdr(message, message.__msgtype__))
    return (message.__msgtype__, "ros2msg", text.encode()), "cdr", data


@cache
def foxglove(name: str, *fields: tuple[str, str]) -> Any:
    """A protobuf class foxglove.NAME with a timestamp and some fields: (name, "string" | "bytes" | "fixed32")."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name=f"foxglove/{name}.proto", package="foxglove", syntax="proto3")
    file.dependency.append("google/protobuf/timestamp.proto")
    kind = file.message_type.add(name=name)
    kind.field.add(name="timestamp", number=1, type=11, type_name=".google.protobuf.Timestamp", label=1)
    for place, (field, word) in enumerate(fields, start=2):
        kind.field.add(name=field, number=place, type=getattr(kinds, f"TYPE_{word.upper()}"), label=1)
    pool = descriptor_pool.DescriptorPool()
    timestamp = descriptor_pb2.FileDescriptorProto()
    timestamp_pb2.DESCRIPTOR.CopyToProto(timestamp)
    pool.Add(timestamp)
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"foxglove.{name}"))


def protobuf(name: str, ns: int, **values: Any) -> Any:
    words = {str: "string", bytes: "bytes", int: "fixed32", float: "double"}
    message = foxglove(name, *((field, words[type(value)]) for field, value in values.items()))(**values)
    message.timestamp.seconds, message.timestamp.nanos = divmod(ns, 10**9)
    return message


def in_json(name: str, ns: int, **values: Any) -> tuple[str, dict[str, Any]]:
    content = {
        key: base64.b64encode(each).decode() if isinstance(each, bytes) else each for key, each in values.items()
    }
    return f"foxglove.{name}", {"timestamp": {"sec": ns // 10**9, "nsec": ns % 10**9}, **content}


@cache
def access_units(codec: str, count: int, group: int = 10, size: int = 4) -> tuple[bytes, ...]:
    """Pictures 0, 1, ... as access units without B-frames, with a key frame each `group`."""
    encoders = {
        "h264": "libx264 -bf 0 -sc_threshold 0 -bsf:v h264_metadata=aud=insert -f h264",
        "h265": "libx265 -x265-params log-level=none:bframes=0:scenecut=0 -bsf:v hevc_metadata=aud=insert -f hevc",
        "vp9": "libvpx-vp9 -deadline realtime -lag-in-frames 0 -f ivf",
        "av1": "libaom-av1 -usage realtime -cpu-used 8 -lag-in-frames 0 -f ivf",
    }
    large = [np.kron(coded(each), np.ones((size, size, 1), np.uint8)) for each in range(count)]
    source = f"-v error -f rawvideo -pix_fmt rgb24 -s {WIDTH * size}x{HEIGHT * size} -r 20 -i pipe:0"
    options = f"{source} -pix_fmt yuv420p -g {group} -c:v {encoders[codec]} pipe:1"
    command = [imageio_ffmpeg.get_ffmpeg_exe(), *options.split()]
    raw = b"".join(each.tobytes() for each in large)
    data = subprocess.run(command, input=raw, stdout=subprocess.PIPE, check=True).stdout
    if codec in ("vp9", "av1"):
        units, at = [], 32
        while at < len(data):
            (length,) = struct.unpack_from("<I", data, at)
            units.append(data[at + 12 : at + 12 + length])
            at += 12 + length
        return tuple(units)
    delimiter = b"\x00\x00\x00\x01" + (b"\x09" if codec == "h264" else b"\x46\x01")
    return tuple(delimiter + part for part in data.split(delimiter)[1:])
