"""One reading of a bag for several cameras: each takes its own messages from it, at its own pace."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from terra.dataset.importing.bag_files import Lost, Message
from tokenizer.limits import LIMITS

Read = Callable[[], Iterator[Message | Lost]]


class SharedReading:
    """Reads a bag once, and holds messages of those topics that others have gone ahead of.

    Where more would have to be held than `LIMITS.bag_record_bytes`, as in a bag that has one topic after another, the
    topic that lags most is read by itself.
    """

    def __init__(self, read: Read, topics: Sequence[str]) -> None:
        self._read = read
        self._messages = read()
        self._held: dict[str, deque[Message]] = {topic: deque() for topic in topics}
        self._num_bytes = 0
        self._taken: set[str] = set()

    def has_begun(self, topic: str) -> bool:
        """Whether messages of a topic were asked for."""
        return topic in self._taken

    def messages(self, topic: str) -> Iterator[Message]:
        """Yield all messages of a topic in the bag's order; to be called once for each topic. Raises DatasetError."""
        self._taken.add(topic)
        return self._own(topic)

    def _own(self, topic: str) -> Iterator[Message]:
        count = 0
        while (held := self._held.get(topic)) is not None:
            if held:
                message = held.popleft()
                self._num_bytes -= len(message.data)
                count += 1
                yield message
            elif not self._read_on():
                return
        alone = (each for each in self._read() if isinstance(each, Message) and each.channel.topic == topic)
        yield from islice(alone, count, None)

    def _read_on(self) -> bool:
        """Read until one more message is held; False at the bag's end."""
        for message in self._messages:
            if isinstance(message, Message) and message.channel.topic in self._held:
                self._held[message.channel.topic].append(message)
                self._num_bytes += len(message.data)
                if self._num_bytes > LIMITS.bag_record_bytes and len(self._held) > 1:
                    sizes = {topic: sum(len(each.data) for each in held) for topic, held in self._held.items()}
                    del self._held[max(sizes, key=lambda topic: sizes[topic])]
                    self._num_bytes = sum(size for topic, size in sizes.items() if topic in self._held)
                return True
        return False
