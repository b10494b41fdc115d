"""Row deltas from a Kafka topic: the one class that a stream of your own needs.

The topic has one partition, so that its messages have an order, and `cleanup.policy=delete` with a retention that is
longer than the time between two snapshots. A message is what `helmrec.deltas.delta.encode` returns; the producer of
the topic numbers them. Only the calls of `confluent_kafka.Consumer` that are used here are described, so that this
file needs no package. A test follows it with messages in memory.
"""

from collections.abc import Iterator
from typing import Any, Protocol

from helmrec.deltas.delta import Delta, decode
from helmrec.errors import DeltaUnavailable

TIMEOUT_S = 1.0


class Message(Protocol):
    """A message of confluent_kafka."""

    def error(self) -> object | None: ...
    def value(self) -> bytes | None: ...
    def offset(self) -> int | None: ...


class Consumer(Protocol):
    """The calls of confluent_kafka.Consumer that are used."""

    def assign(self, partitions: list[Any]) -> None: ...
    def poll(self, timeout: float) -> Message | None: ...
    def get_watermark_offsets(self, partition: Any, timeout: float) -> tuple[int, int] | None: ...
    def close(self) -> None: ...


class KafkaDeltas:
    """A `helmrec.deltas.source.DeltaSource` over partition 0 of a topic."""

    def __init__(self, consumer: Consumer, topic: str, partition_at: Any) -> None:
        """`partition_at` is called with topic, partition and offset: it is `confluent_kafka.TopicPartition`."""
        self.name = f"kafka topic {topic}"
        self._consumer, self._topic, self._partition_at = consumer, topic, partition_at

    def read(self, after: int) -> Iterator[Delta]:
        """Yield the messages behind `after`. Delta N has the offset N - 1: the topic holds nothing else."""
        first, end = self._range()
        at = max(first, min(after, end))  # what is no longer kept is named as a gap by the caller
        self._consumer.assign([self._partition_at(self._topic, 0, at)])
        while at < end:
            message = self._consumer.poll(TIMEOUT_S)
            if message is None or message.error() is not None:
                raise DeltaUnavailable(f"{self.name}: {'no answer' if message is None else message.error()}")
            at = (message.offset() or 0) + 1
            yield decode(message.value() or b"", f"{self.name}, offset {at - 1}", at)

    def newest(self) -> int:
        return self._range()[1]

    def close(self) -> None:
        self._consumer.close()

    def _range(self) -> tuple[int, int]:
        """The offset of the oldest message, and that of the next one."""
        found = self._consumer.get_watermark_offsets(self._partition_at(self._topic, 0, 0), TIMEOUT_S)
        if found is None:
            raise DeltaUnavailable(f"{self.name} does not answer")
        return found
