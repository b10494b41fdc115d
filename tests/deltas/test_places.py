"""What every place of deltas promises: order, no writing over, whole deltas only, skips that all readers see."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from helmrec.deltas.folder import DeltaFolder
from helmrec.deltas.producer import DeltaProducer, make_part, skip_to
from helmrec.deltas.source import DeltaSink, in_order, open_source
from helmrec.errors import ConfigError, DeltaCorrupt, DeltaGap, DeltaOutOfOrder, DeltaUnavailable, RequestError
from tests.deltas.places import KINDS, delta, part, place, same


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with place(request.param, tmp_path) as address:
        yield address


@pytest.fixture
def sink(url: str) -> Iterator[DeltaSink]:
    opened = open_source(url, is_made=True)
    yield opened
    opened.close()


def test_deltas_are_read_in_order_from_any_position(sink: DeltaSink) -> None:
    assert (sink.newest(), list(sink.read(0))) == (0, [])
    made = [delta(i) for i in range(1, 21)]
    for each in made:
        sink.write(each)
    assert sink.newest() == 20
    for after in (0, 7, 19, 20, 99):
        found = list(sink.read(after))
        assert len(found) == max(0, 20 - after)
        assert all(same(a, b) for a, b in zip(found, made[after:], strict=True))


def test_no_delta_is_written_over(sink: DeltaSink) -> None:
    first = delta(1)
    sink.write(first)
    with pytest.raises(DeltaOutOfOrder, match="there already") as caught:
        sink.write(delta(1, part(99)))
    assert caught.value.sequence == 1
    assert same(next(sink.read(0)), first)


def test_two_producers_cannot_write_the_same_number(url: str) -> None:
    with DeltaProducer(url) as a, DeltaProducer(url) as b:
        assert a.stream == b.stream
        assert a.push("item", [1, 2], np.ones((2, 3)), step=5) == 1
        with pytest.raises(DeltaOutOfOrder):
            b.push("item", [1], np.zeros((1, 3)), step=6)
    with DeltaProducer(url) as later:
        assert later.newest == 1
        assert later.push("item", torch.tensor([4]), torch.ones((1, 3), dtype=torch.bfloat16), step=7) == 2


def test_two_producers_at_once_lose_nothing(url: str) -> None:
    counts: list[int] = []

    def run() -> None:
        with DeltaProducer(url) as producer:
            done = 0
            while done < 10:
                try:
                    producer.push("item", [done], np.ones((1, 3)), step=done)
                    done += 1
                except DeltaOutOfOrder:
                    producer.newest += 1
            counts.append(done)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    found = open_source(url)
    assert counts == [10, 10]
    assert [each.sequence for each in in_order(found.read(0), 0)] == list(range(1, 21))
    found.close()


def test_a_gap_is_named_and_skipped_for_every_reader(url: str, sink: DeltaSink) -> None:
    for sequence in (1, 2, 5):
        sink.write(delta(sequence, stream=sink.stream()))
    with pytest.raises(DeltaGap, match="delta 3 is missing: the next one is delta 5") as caught:
        list(in_order(sink.read(0), 0))
    assert caught.value.sequence == 3
    with pytest.raises(DeltaGap, match="to the newest, 5, can be skipped, got 6"):
        skip_to(sink, 2, 6)
    assert skip_to(sink, 0, 4) == [3, 4]
    other = open_source(url)
    found = list(in_order(other.read(0), 0))
    other.close()
    assert [(each.sequence, each.num_rows) for each in found] == [(1, 4), (2, 4), (3, 0), (4, 0), (5, 4)]


def test_a_delta_that_can_be_read_is_skipped_only_where_so_asked(sink: DeltaSink) -> None:
    sink.write(delta(1, stream=sink.stream()))
    assert skip_to(sink, 0, 1) == []
    assert next(sink.read(0)).num_rows
    assert skip_to(sink, 0, 1, also_readable=True) == [1]
    assert next(sink.read(0)).num_rows == 0


def test_only_the_newest_deltas_are_kept_where_so_asked(url: str) -> None:
    with DeltaProducer(url, keep=3) as producer:
        for step in range(8):
            producer.push("item", [step], np.ones((1, 3)), step=step)
    found = open_source(url)
    assert [each.sequence for each in found.read(0)] == [6, 7, 8]
    assert found.newest() == 8
    found.close()


def test_a_corrupt_file_is_named_and_skipped(tmp_path: Path) -> None:
    folder = DeltaFolder(tmp_path)
    for sequence in (1, 2, 3):
        folder.write(delta(sequence, stream=folder.stream()))
    path = tmp_path / folder._file(2)
    path.write_bytes(path.read_bytes()[:-1])
    reading = in_order(folder.read(0), 0)
    assert next(reading).sequence == 1
    with pytest.raises(DeltaCorrupt, match=f"{path.name} is corrupt: checksum") as caught:
        next(reading)
    assert caught.value.sequence == 2
    assert skip_to(folder, 1, 2) == [2]
    assert [each.sequence for each in in_order(folder.read(0), 0)] == [1, 2, 3]
    assert (tmp_path / f"{path.name}.skipped").exists()


def test_a_corrupt_entry_is_named_and_skipped(tmp_path: Path) -> None:
    with place("redis", tmp_path) as url:
        sink = open_source(url)
        from helmrec.deltas.redis import RedisDeltas  # noqa: PLC0415 - an extra

        assert isinstance(sink, RedisDeltas)
        sink.write(delta(1, stream=sink.stream()))
        sink._client.xadd(sink._key, {b"delta": b"half"}, id="2-0")
        sink._client.xadd(sink._key, {b"other": b""}, id="3-0")
        for sequence in (2, 3):
            with pytest.raises(DeltaCorrupt, match=f"delta {sequence} is corrupt: it has . bytes"):
                list(sink.read(sequence - 1))
        assert skip_to(sink, 1, 3) == [2, 3]
        assert [each.sequence for each in in_order(sink.read(0), 0)] == [1, 2, 3]
        sink.close()


def test_a_folder_is_listed_rarely_and_a_number_behind_a_gap_is_seen_a_little_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, lists = 0.0, 0
    reader, writer = DeltaFolder(tmp_path, clock=lambda: now), DeltaFolder(tmp_path)
    list_all = DeltaFolder._sequences

    def counted(self: DeltaFolder) -> list[int]:
        nonlocal lists
        lists += self is reader
        return list_all(self)

    monkeypatch.setattr(DeltaFolder, "_sequences", counted)
    writer.write(delta(1))
    assert reader.newest() == 1
    for sequence in range(2, 50):
        writer.write(delta(sequence))
        assert reader.newest() == sequence
        assert [each.sequence for each in reader.read(sequence - 1)] == [sequence]
    assert lists == 1
    writer.write(delta(52))
    assert (reader.newest(), list(reader.read(49))) == (49, [])
    now = 0.5
    assert reader.newest() == 52
    assert [each.sequence for each in reader.read(49)] == [52]
    (tmp_path / writer._file(52)).unlink()
    assert reader.newest() == 49, "a number that is gone is noticed at once"


def test_half_written_files_are_not_seen(tmp_path: Path) -> None:
    folder = DeltaFolder(tmp_path)
    folder.write(delta(1))
    for name in (f".{folder._file(2)}.ab12", "2.delta.safetensors", folder._file(2) + ".skipped", "notes.txt"):
        (tmp_path / name).write_bytes(b"half")
    assert (folder.newest(), [each.sequence for each in folder.read(0)]) == (1, [1])


def test_a_full_or_vanished_folder_is_named(tmp_path: Path) -> None:
    folder = DeltaFolder(tmp_path / "here", is_made=True)
    (tmp_path / "here").rmdir()
    for call in (folder.newest, lambda: folder.write(delta(1)), lambda: list(folder.read(0))):
        with pytest.raises(DeltaUnavailable, match="here"):
            call()


def test_a_redis_that_ended_is_named(tmp_path: Path) -> None:
    with place("redis", tmp_path) as url:
        sink = open_source(url)
        sink.write(delta(1))
    for call in (sink.newest, sink.stream, lambda: sink.write(delta(2)), lambda: list(sink.read(0))):
        with pytest.raises(DeltaUnavailable):
            call()


def test_reordering_and_other_streams_are_named() -> None:
    with pytest.raises(DeltaOutOfOrder, match="delta 2 comes behind delta 3"):
        list(in_order([delta(1), delta(3), delta(2)], 0))
    with pytest.raises(DeltaOutOfOrder, match="delta 2 is of stream other, not of stream abc"):
        list(in_order([delta(1), delta(2, stream="other")], 0))
    with pytest.raises(DeltaOutOfOrder, match="not of stream mine"):
        list(in_order([delta(1)], 0, "mine"))
    assert [each.sequence for each in in_order([delta(1), delta(2), delta(2), delta(3)], 1)] == [1, 2, 2, 3]


@pytest.mark.parametrize(("place", "named"), [("kafka://x", "folder or a Redis"), ("/nowhere/at/all", "no folder")])
def test_a_place_that_is_none_is_named(place: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        open_source(place)


@pytest.mark.parametrize(
    ("ids", "values", "named"),
    [
        ([1.5], [[1.0]], "ids: integers are needed, got 'float64'"),
        ([1], [["a"]], "values: "),
        ([1], [[np.nan]], r"values\[0, 0\]: finite numbers are needed, got nan"),
        ([1], [[1.0], [2.0]], "values: one row for each of 1 ids"),
        (np.array([2**63], np.uint64), [[1.0]], "ids: integers of 64 bits"),
    ],
)
def test_wrong_rows_are_not_pushed(tmp_path: Path, ids: object, values: object, named: str) -> None:
    with DeltaProducer(str(tmp_path / "new")) as producer, pytest.raises(RequestError, match=named):
        producer.push("item", ids, values, step=1)
    assert DeltaFolder(tmp_path / "new").newest() == 0
    assert make_part("item", [1], [[1]]).values.dtype == np.float32


def test_the_sample_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "row-updates.md").read_text()
    sample, *_ = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    exec(compile(sample, "docs/row-updates.md", "exec"), {})
    (pushed,) = DeltaFolder(tmp_path / "deltas").read(0)
    assert (pushed.step, pushed.num_rows) == (1000, 2)
