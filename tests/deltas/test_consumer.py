"""A consumer applies every delta once and in order; what is wrong with the stream stops it, and nothing else."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from helmrec.deltas import consumer as consumer_module
from helmrec.deltas.consumer import ConsumerLimits, RowConsumer, StreamStart
from helmrec.deltas.delta import Delta, TablePart
from helmrec.deltas.folder import DeltaFolder
from helmrec.deltas.producer import DeltaProducer, skip_to
from helmrec.engine.engine import Engine
from helmrec.engine.intake import RowUpdate
from helmrec.engine.runner import StagedRows
from helmrec.errors import DeltaCorrupt, DeltaUnavailable, RowLogError
from helmrec.types import RowPosition
from tests.deltas.places import part
from tests.helpers import tiny_engine, tiny_model

ROW_DIM = 16


class Listed:
    """A third party's source: deltas in the order in which it has them, and errors at some of them."""

    name = "a list"

    def __init__(self, *deltas: Delta | Exception) -> None:
        self.deltas: list[Delta | Exception] = list(deltas)
        self.reads_from: int | None = None  # it goes back to here at every read, if that is set

    def read(self, after: int) -> Iterator[Delta]:
        start = after if self.reads_from is None else self.reads_from
        for each in list(self.deltas):
            if isinstance(each, Exception):
                raise each
            if each.sequence > start:
                yield each

    def newest(self) -> int:
        return max((each.sequence for each in self.deltas if isinstance(each, Delta)), default=0)

    def close(self) -> None: ...


def numbered(sequence: int, stream: str = "s") -> Delta:
    return Delta(stream, sequence, sequence, time.time(), (part(sequence, 4, ROW_DIM),))


@pytest.fixture
def engine() -> Iterator[Engine]:
    with tiny_engine(tiny_model()) as made:
        yield made
        made.check()


def rows_after(deltas: Sequence[Delta], first: torch.Tensor) -> torch.Tensor:
    """The item table after these deltas, one row at a time."""
    table = first.clone()
    for each in deltas:
        for one in each.parts:
            for row, value in zip(one.ids, torch.from_numpy(np.array(one.values)), strict=True):
                table[row] = table[row] + value if one.is_difference else value
    return table


def item_rows(engine: Engine) -> torch.Tensor:
    return engine._master.gather(np.arange(300))


def until(consumer: RowConsumer, is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not is_so():
        consumer.apply(time.monotonic())
        assert time.monotonic() < end, consumer.stats()
        time.sleep(0.001)


def reaches(consumer: RowConsumer, position: int) -> None:
    until(consumer, lambda: consumer.stats().position >= position)


def stops(consumer: RowConsumer) -> str:
    until(consumer, lambda: consumer.stats().stop is not None)
    for _ in range(5):
        consumer.apply(time.monotonic())
    reason = consumer.stats().stop
    assert reason is not None
    return reason


@pytest.fixture
def follow(engine: Engine) -> Iterator[Callable[..., RowConsumer]]:
    made: list[RowConsumer] = []

    def start(source: Listed | DeltaFolder, first: StreamStart | None = None, **limits: float) -> RowConsumer:
        made.append(RowConsumer(source, engine, first, ConsumerLimits(**limits)))
        made[-1].start()
        return made[-1]

    yield start
    for each in made:
        each.close()
        assert not each._thread.is_alive()


def test_deltas_are_applied_in_order_and_once(engine: Engine, follow: Callable[..., RowConsumer]) -> None:
    first, deltas = item_rows(engine), [numbered(i) for i in range(1, 9)]
    source = Listed(*deltas[:3], deltas[1], *deltas[3:], deltas[7])
    source.reads_from = 0  # at least once, as many queues promise
    consumer = follow(source)
    reaches(consumer, 8)
    assert torch.equal(item_rows(engine), rows_after(deltas, first))
    until(consumer, lambda: consumer.stats().duplicates > 20)
    stats = consumer.stats()
    assert (stats.position, stats.newest, stats.deltas, stats.rows, stats.stop) == (8, 8, 8, 32, None)
    assert (stats.lag_deltas, stats.lag_s) == (0, 0.0)
    assert engine.row_position == RowPosition(8)


@pytest.mark.parametrize(
    ("wrong", "named", "reached"),
    [
        ([numbered(3)], "DeltaGap: delta 2 is missing: the next one is delta 3", 1),
        ([numbered(3), numbered(2)], "DeltaOutOfOrder: delta 2 comes behind delta 3", 1),
        ([DeltaCorrupt("x is corrupt: checksum", 2), numbered(3)], "DeltaCorrupt: x is corrupt: checksum", 1),
        ([DeltaUnavailable("it is down")], "DeltaUnavailable: it is down", 1),
        ([numbered(2, "other")], "DeltaOutOfOrder: delta 2 is of stream other, not of stream s", 1),
        ([ZeroDivisionError("a bug")], "ZeroDivisionError: a bug", 1),
        ([Delta("s", 2, 2, 0.0, (part(2, 4, ROW_DIM + 1),))], "delta 2 does not fit the model: values: shape", 1),
        ([Delta("s", 2, 2, 0.0, (part(2, 4, ROW_DIM, "none"),))], "does not fit the model: table: the model has no", 1),
    ],
)
def test_what_is_wrong_stops_it_until_it_is_mended(
    engine: Engine,
    follow: Callable[..., RowConsumer],
    wrong: list[Delta | Exception],
    named: str,
    reached: int,
) -> None:
    source = Listed(numbered(1), *wrong)
    first = item_rows(engine)
    consumer = follow(source)
    assert named in stops(consumer)
    stats = consumer.stats()
    assert (stats.position, stats.deltas, stats.stops) == (reached, reached, 1), "nothing behind the fault is applied"
    assert torch.equal(item_rows(engine), rows_after([numbered(1)], first))
    assert consumer.stats().lag_s > 0
    source.deltas = [numbered(i) for i in (1, 2, 3)]
    reaches(consumer, 3)
    until(consumer, lambda: consumer.stats().stop is None)
    assert torch.equal(item_rows(engine), rows_after([numbered(i) for i in (1, 2, 3)], first))


FAULTS: dict[str, list[Delta | Exception]] = {
    "DeltaGap": [numbered(3)],
    "DeltaOutOfOrder": [numbered(3), numbered(2)],
    "DeltaCorrupt": [DeltaCorrupt("x is corrupt: checksum", 2)],
}


@pytest.mark.parametrize("named", FAULTS)
def test_a_fault_becomes_a_lag_alarm_once_a_minute(
    named: str,
    follow: Callable[..., RowConsumer],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(consumer_module, "_LAG_ALARM_S", 0.2)
    monkeypatch.setattr(consumer_module, "_LOOK_EVERY_S", 0.05)
    consumer = follow(Listed(numbered(1), *FAULTS[named]))
    with caplog.at_level(logging.WARNING, "helmrec.deltas"):
        assert stops(consumer).startswith(named)
        until(consumer, lambda: consumer.stats().lag_s > 0.3)
        for _ in range(3):
            consumer.apply(time.monotonic())
    alarms = [vars(line) for line in caplog.records if line.message == "rows lag behind training"]
    assert len(alarms) == 1
    assert alarms[0]["reason"].startswith(named)
    consumer.apply(time.monotonic() + 61)
    assert sum(line.message == "rows lag behind training" for line in caplog.records) == 2


def test_deltas_that_a_source_has_and_the_reader_has_not_are_lag(follow: Callable[..., RowConsumer]) -> None:
    """A slow place shows as lag, too, before its deltas have been read."""
    gate = threading.Event()

    class Slow(Listed):
        def read(self, after: int) -> Iterator[Delta]:
            gate.wait(20)
            yield from super().read(after)

    consumer = follow(Slow(numbered(1)))
    until(consumer, lambda: consumer.stats().lag_s > 0.05)
    assert (consumer.stats().lag_deltas, consumer.stats().stop) == (1, None)
    gate.set()
    reaches(consumer, 1)
    until(consumer, lambda: consumer.stats().lag_s == 0.0)


def test_a_gap_whose_end_moves_is_one_stop(follow: Callable[..., RowConsumer]) -> None:
    """As where old deltas are removed behind a server that waits for one of them."""
    source = Listed(numbered(1), numbered(4))
    consumer = follow(source)
    assert "the next one is delta 4" in stops(consumer)
    source.deltas = [numbered(1), numbered(6)]
    until(consumer, lambda: "the next one is delta 6" in str(consumer.stats().stop))
    assert consumer.stats().stops == 1


def test_a_log_that_cannot_be_written_stops_it_until_there_is_room(
    engine: Engine, follow: Callable[..., RowConsumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, deltas, apply_rows = item_rows(engine), [numbered(i) for i in range(1, 4)], engine.apply_rows
    is_full = [True]

    def apply(staged: RowUpdate | StagedRows, after: RowPosition) -> None:
        if after.sequence == 2 and is_full[0]:
            raise RowLogError("the log cannot be written: No space left on device; no row was changed")
        apply_rows(staged, after)

    monkeypatch.setattr(engine, "apply_rows", apply)
    consumer = follow(Listed(*deltas))
    assert "delta 2 cannot be kept: the log cannot be written: No space left" in stops(consumer)
    assert engine.row_position == RowPosition(1)
    is_full[0] = False
    reaches(consumer, 3)
    assert torch.equal(item_rows(engine), rows_after(deltas, first))
    assert consumer.stats().stop is None


def test_a_source_that_lost_its_deltas_is_named(follow: Callable[..., RowConsumer]) -> None:
    source = Listed(*(numbered(i) for i in range(1, 6)))
    consumer = follow(source)
    reaches(consumer, 5)
    source.deltas = [numbered(1)]
    assert "a list ends at delta 1, but delta 5 was read before: it has lost deltas" in stops(consumer)


def test_a_difference_that_cannot_be_added_stops_it_and_can_be_skipped(
    engine: Engine, follow: Callable[..., RowConsumer], tmp_path: Path
) -> None:
    huge = np.full((1, ROW_DIM), 3e38, np.float32)
    with DeltaProducer(str(tmp_path)) as producer:
        producer.push("item", [1], huge, step=1)
        producer.push("item", [1], huge, step=2, add=True)
        producer.push("item", [2], huge / 2, step=3)
    folder = DeltaFolder(tmp_path)
    consumer = follow(folder)
    reason = stops(consumer)
    assert "delta 2 does not fit: values: the sum must be finite, got 'a difference to row 1'" in reason
    time.sleep(0.7)
    until(consumer, lambda: consumer._rejected == 2)
    assert (consumer.stats().position, consumer.stats().stops) == (1, 1), "the same fault is told once"
    assert skip_to(folder, 1, 2, also_readable=True) == [2]
    reaches(consumer, 3)
    until(consumer, lambda: consumer.stats().stop is None)
    assert consumer.stats().skipped == 1
    assert torch.equal(item_rows(engine)[1], torch.from_numpy(huge[0]))


def test_large_deltas_come_in_slices_and_say_so(engine: Engine, follow: Callable[..., RowConsumer]) -> None:
    ids = np.arange(100, dtype=np.int64)
    values = np.random.default_rng(0).standard_normal((100, ROW_DIM)).astype(np.float32)
    large = Delta("s", 1, 0, time.time(), (TablePart("item", ids, values), part(5, 4, ROW_DIM, "category")))
    large.parts[1].ids[:] = np.arange(4)
    consumer = follow(Listed(large), slice_rows=30)
    positions: list[RowPosition] = []
    while not positions or positions[-1].sequence == 0:
        consumer.apply(time.monotonic())
        if engine.row_position not in positions:
            positions.append(engine.row_position)
            done = engine.row_position.offset
            assert torch.equal(item_rows(engine)[:done], torch.from_numpy(values)[:done])
    assert [at.offset for at in positions if at != RowPosition()] == [30, 60, 90, 0]
    assert torch.equal(item_rows(engine)[:100], torch.from_numpy(values))


def test_a_budget_slows_it_down_and_shows_as_lag(follow: Callable[..., RowConsumer]) -> None:
    source = Listed(*(numbered(i) for i in range(1, 101)))
    consumer = follow(source, rows_per_s=400.0, slice_rows=4)
    started_s = time.monotonic()
    reaches(consumer, 26)
    took_s = time.monotonic() - started_s
    assert took_s >= 25 * 4 / 400 * 0.9, "104 rows, 4 of them at once"
    assert consumer.stats().lag_deltas > 0


def test_reading_ahead_is_bounded(follow: Callable[..., RowConsumer]) -> None:
    consumer = follow(Listed(*(numbered(i) for i in range(1, 101))), ahead_rows=10)
    time.sleep(0.3)
    assert len(consumer._ahead) == 2, "8 rows, since 12 are too many"
    reaches(consumer, 100)


def test_a_node_catches_up_before_it_serves(engine: Engine, follow: Callable[..., RowConsumer]) -> None:
    first = item_rows(engine)
    consumer = follow(Listed(*(numbered(i) for i in range(1, 51))), StreamStart("s", 20))
    consumer.catch_up()
    assert engine.row_position == RowPosition(50)
    assert torch.equal(item_rows(engine), rows_after([numbered(i) for i in range(21, 51)], first))
    stopped = follow(Listed(numbered(1), numbered(3)))
    stopped.catch_up()
    assert stopped.stats().position == 1
    follow(Listed()).catch_up()


def test_two_engines_under_one_stream_agree(tmp_path: Path) -> None:
    """A third that starts late from the beginning agrees with them, too."""
    engines = [tiny_engine(tiny_model()) for _ in range(3)]
    rng = np.random.default_rng(3)
    with DeltaProducer(str(tmp_path)) as producer:
        consumers = [RowConsumer(DeltaFolder(tmp_path), engine) for engine in engines]
        for consumer in consumers[:2]:
            consumer.start()
        for step in range(30):
            ids = rng.choice(300, 5, replace=False)
            producer.push("item", ids, rng.standard_normal((5, ROW_DIM)), step=step, add=step % 3 == 0)
    consumers[2].start()
    for consumer in consumers:
        reaches(consumer, 30)
    assert {engine.row_position for engine in engines} == {RowPosition(30)}
    assert torch.equal(item_rows(engines[0]), item_rows(engines[1]))
    assert torch.equal(item_rows(engines[0]), item_rows(engines[2]))
    for consumer, engine in zip(consumers, engines, strict=True):
        consumer.close()
        engine.close()
