"""Recognition of bags: MCAP, ROS 1 .bag, ROS 2 folders; topics with pictures, and fields that are known as actions."""

from collections import Counter
from typing import Any

from terra.dataset.importing.bags import Topic, list_topics
from terra.dataset.importing.recognize.found import Camera, Found, Listing, counted, some
from terra.errors import ConfigError, DatasetError
from terra.progress import ProgressLine
from terra.views import MOST_VIEWS

_SUFFIXES = (".mcap", ".bag", ".db3")
_LARGE = 1.0  # GB, beyond which it is said at once how much is read
_NAMES = {".mcap": "MCAP", ".bag": "ROS 1", ".db3": "ROS 2"}
_FIELDS = {
    "ackermann_msgs/AckermannDriveStamped": (".drive.steering_angle", ".drive.speed"),
    "ackermann_msgs/AckermannDrive": (".steering_angle", ".speed"),
    "geometry_msgs/TwistStamped": (".twist.linear.x", ".twist.angular.z"),
    "geometry_msgs/Twist": (".linear.x", ".angular.z"),
    "sensor_msgs/Joy": (".axes",),
    "sensor_msgs/JointState": (".position",),
    "std_msgs/Float64MultiArray": (".data",),
    "std_msgs/Float32MultiArray": (".data",),
}
"""Fields that are actions, by the type of message; the types that more surely hold commands come first."""
_COMMANDS = ("cmd", "command", "action", "control")  # words in the names of topics that hold commands


def recognize(listing: Listing) -> Found | None:
    """Bags in a folder or one level deeper. Raises DatasetError if none has pictures, ConfigError without the extra."""
    files = listing.with_suffix(_SUFFIXES)
    folders = [name for name in listing.folders if listing.inside(name).with_suffix(_SUFFIXES)]
    if not files and not folders:
        return None
    paths = [listing.folder / name for name in files]
    paths += [listing.folder / name / file for name in folders for file in listing.inside(name).with_suffix(_SUFFIXES)]
    kinds = Counter(_NAMES[path.suffix.lower()] for path in paths)
    size = sum(path.stat().st_size for path in paths) / 1e9
    try:
        with ProgressLine("reading bags", 1.0, every_seconds=10.0 if size < _LARGE else 0.0) as line:
            line.show(0.0, f"{size:.1f} GB: each bag is read through")
            recordings = list_topics(listing.folder)
    except ConfigError as error:  # the extra is missing
        raise ConfigError(f"{listing.folder}: {' and '.join(kinds)} bags: {error}") from None
    topics: dict[str, Topic] = {}
    counts: Counter[str] = Counter()
    for each in recordings.values():
        for topic in each:
            topics.setdefault(topic.name, topic)
            counts[topic.name] += topic.count
    pictures = [topic for topic in topics.values() if topic.is_picture]
    others = [topic for topic in topics.values() if not topic.is_picture]
    if not pictures:
        raise DatasetError(f"{listing.folder}: expected a topic with pictures, got {some(map(_titled, others))}")
    known = sorted((topic for topic in others if topic.type in _FIELDS), key=_likely)
    comments = []
    settings: dict[str, Any] = {"video": pictures[0].name}
    if known:
        settings["action"] = [known[0].name + field for field in _FIELDS[known[0].type]]
    if len(pictures) > 1:
        names = ",".join(topic.name for topic in pictures[:MOST_VIEWS])
        comments.append(f"several cameras in one picture: bags.video=[{names}]")
    rest = [topic for topic in others if topic not in known[:1]]
    if rest:
        comments.append(f"other topics, of which bags.action= takes fields: {some(map(_titled, rest), 8)}")
    return Found(
        kind="mcap",
        title=f"{counted(len(recordings), 'bag')} ({' and '.join(kinds)})",
        folder=listing.folder,
        settings={"bags": settings},
        cameras=tuple(
            Camera(topic.name, _size(topic), f"{topic.rate:.3g} pictures a second, {topic.type}", number == 0)
            for number, topic in enumerate(pictures)
        ),
        comments=tuple(comments),
    )


def _likely(topic: Topic) -> tuple[bool, int, str]:
    """The order of topics by how surely they hold commands."""
    return not any(word in topic.name.lower() for word in _COMMANDS), list(_FIELDS).index(topic.type), topic.name


def _titled(topic: Topic) -> str:
    return f"{topic.name} ({topic.type}, {topic.rate:.3g} a second)"


def _size(topic: Topic) -> tuple[int, int] | None:
    if topic.picture_size is None:
        return None
    width, _, height = topic.picture_size.partition("x")
    return int(height), int(width)
