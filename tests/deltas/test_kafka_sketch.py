"""The sketch of a Kafka source is a source: mypy holds it against the protocol, and messages in memory run it."""

from dataclasses import dataclass

import pytest
from examples.kafka_deltas import KafkaDeltas, Message

from helmrec.deltas.delta import encode
from helmrec.deltas.source import DeltaSource, in_order
from helmrec.errors import DeltaCorrupt, DeltaGap, DeltaUnavailable
from tests.deltas.places import delta


@dataclass
class Kept:
    at: int
    data: bytes

    def error(self) -> object | None:
        return None

    def value(self) -> bytes | None:
        return self.data

    def offset(self) -> int | None:
        return self.at


class Topic:
    """What a broker keeps of a topic: the messages from `first` on."""

    def __init__(self, messages: list[bytes], first: int = 0) -> None:
        self.messages, self.first, self.is_down = messages, first, False

    def assign(self, partitions: list[tuple[str, int, int]]) -> None:
        self._next = partitions[0][2]

    def poll(self, timeout: float) -> Message | None:
        self._next += 1
        return None if self.is_down else Kept(self._next - 1, self.messages[self._next - 1])

    def get_watermark_offsets(self, partition: object, timeout: float) -> tuple[int, int] | None:
        return self.first, len(self.messages)

    def close(self) -> None: ...


def test_the_sketch_is_followed() -> None:
    topic = Topic([encode(delta(i)) for i in range(1, 6)])
    source: DeltaSource = KafkaDeltas(topic, "rows", lambda *place: place)
    assert source.newest() == 5
    assert [each.sequence for each in in_order(source.read(0), 0)] == [1, 2, 3, 4, 5]
    assert [each.sequence for each in in_order(source.read(3), 3)] == [4, 5]
    assert list(source.read(5)) == []
    topic.first = 3
    with pytest.raises(DeltaGap, match="delta 2 is missing: the next one is delta 4"):
        list(in_order(source.read(1), 1))
    topic.messages[4] = b"half"
    with pytest.raises(DeltaCorrupt, match="kafka topic rows, offset 4 is corrupt"):
        list(source.read(3))
    topic.is_down = True
    with pytest.raises(DeltaUnavailable, match="no answer"):
        list(source.read(3))
    source.close()
