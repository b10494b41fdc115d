import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from helmrec.clock import Clock, ManualClock
from helmrec.errors import HistoryError, QueueFull, StaleVersion
from helmrec.history.commit import GroupCommit
from helmrec.history.config import HistoryConfig
from helmrec.history.embedded import EmbeddedHistory
from helmrec.history.file import HistoryFile
from tests.history.helpers import SCHEMA, events_of


class Watched(HistoryFile):
    """Counts what is forced to the disk, and fails when told to."""

    num_syncs = 0
    failing = False

    def sync(self) -> None:
        if self.failing:
            raise HistoryError("the disk is gone")
        self.num_syncs += 1
        super().sync()


Make = Callable[..., GroupCommit]


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Watched]:
    file = Watched(tmp_path, SCHEMA, HistoryConfig(sync="interval", sync_interval_s=5))
    yield file
    file.close()


@pytest.fixture
def make(file: Watched) -> Iterator[Make]:
    made: list[GroupCommit] = []

    def make(clock: Clock | None = None, **settings: Any) -> GroupCommit:
        made.append(GroupCommit(file, HistoryConfig(**settings), clock or ManualClock()))
        return made[-1]

    yield make
    for writer in made:
        writer.close()


class Gate:
    """Work that keeps the writer busy until it is opened."""

    def __init__(self) -> None:
        self.is_reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, txn: object) -> str:
        self.is_reached.set()
        assert self.opened.wait(30)
        return "gate"


def busy(writer: GroupCommit) -> Gate:
    gate = Gate()
    writer.submit(gate)
    assert gate.is_reached.wait(30)
    return gate


def test_what_waits_shares_a_transaction(make: Make) -> None:
    writer = make()
    gate = busy(writer)
    waiting = [writer.submit(lambda txn: txn.id()) for _ in range(50)]
    gate.opened.set()
    assert len({done.result() for done in waiting}) == 1
    assert writer.num_commits == 2


def test_a_transaction_takes_no_more_than_it_may(make: Make) -> None:
    writer = make(max_commit_appends=20)
    gate = busy(writer)
    waiting = [writer.submit(lambda txn: txn.id()) for _ in range(50)]
    gate.opened.set()
    assert [len({w.result() for w in waiting[i : i + 20]}) for i in (0, 20, 40)] == [1, 1, 1]
    assert writer.num_commits == 4


def test_nobody_hears_before_the_commit(make: Make, file: Watched) -> None:
    writer = make()
    gate = busy(writer)
    seen: list[bytes | None] = []

    def look(_: Future[bool]) -> None:
        with file.reading() as txn:
            value = txn.get(b"some user", db=file.tables.users)
            seen.append(None if value is None else bytes(value))

    done = writer.submit(lambda txn: txn.put(b"some user", b"x", db=file.tables.users))
    done.add_done_callback(look)
    gate.opened.set()
    assert done.result()
    writer.close()
    assert seen == [b"x"]


def test_one_wrong_append_fails_alone(make: Make) -> None:
    def refuse(txn: object) -> None:
        raise StaleVersion(1, 2, 3)

    writer = make()
    gate = busy(writer)
    a, b, c = writer.submit(lambda _: 1), writer.submit(refuse), writer.submit(lambda _: 3)
    gate.opened.set()
    assert (a.result(), c.result()) == (1, 3)
    assert isinstance(b.exception(), StaleVersion)


def test_a_bug_is_told_to_everyone_it_hit_and_the_writer_lives_on(make: Make) -> None:
    def bug(txn: object) -> None:
        raise ZeroDivisionError

    writer = make()
    gate = busy(writer)
    hit: list[Future[Any]] = [writer.submit(lambda _: 1), writer.submit(bug)]
    gate.opened.set()
    assert [type(done.exception()) for done in hit] == [ZeroDivisionError] * 2
    assert writer.submit(lambda _: 2).result() == 2


def test_what_is_cancelled_in_time_is_not_done(make: Make) -> None:
    writer = make()
    gate = busy(writer)
    ran: list[int] = []
    cancelled, other = writer.submit(lambda _: ran.append(1)), writer.submit(lambda _: ran.append(2))
    assert cancelled.cancel()
    gate.opened.set()
    other.result()
    assert ran == [2]


def test_a_queue_that_is_full_says_so(make: Make) -> None:
    writer = make(queue_limit=3)
    gate = busy(writer)
    waiting = [writer.submit(lambda _: 0) for _ in range(3)]
    with pytest.raises(QueueFull, match="3 appends wait"):
        writer.submit(lambda _: 0)
    gate.opened.set()
    assert [w.result() for w in waiting] == [0, 0, 0]


def test_the_disk_is_forced_once_an_interval(make: Make, file: Watched, clock: ManualClock) -> None:
    writer = make(clock, sync="interval", sync_interval_s=5)
    counts = []
    for _ in range(12):
        writer.submit(lambda _: 0).result()
        counts.append(file.num_syncs)
        clock.advance(2)
    writer.close()
    assert file.num_syncs in (3, 4)  # the writer looks at the clock before or after it is moved on
    assert counts == sorted(counts)


@pytest.mark.parametrize("sync", ["commit", "os"])
def test_other_policies_force_nothing_by_the_clock(make: Make, file: Watched, clock: ManualClock, sync: str) -> None:
    writer = make(clock, sync=sync)
    for _ in range(3):
        writer.submit(lambda _: 0).result()
        clock.advance(100)
    writer.close()
    assert file.num_syncs == 0


def test_an_idle_writer_still_forces_what_it_took(make: Make, file: Watched) -> None:
    class Running:
        """Every look at it, 0.4 seconds have passed."""

        now_s = 0.0

        def now(self) -> float:
            self.now_s += 0.4
            return self.now_s

    writer = make(Running(), sync="interval", sync_interval_s=1)
    writer.submit(lambda _: 0).result()
    for _ in range(500):
        if file.num_syncs:
            break
        threading.Event().wait(0.01)
    assert file.num_syncs == 1


def test_after_a_failed_sync_nothing_more_is_acknowledged(make: Make, file: Watched, clock: ManualClock) -> None:
    writer = make(clock, sync="interval", sync_interval_s=1)
    file.failing = True
    writer.submit(lambda _: 0).result()
    clock.advance(2)
    outcomes = [writer.submit(lambda _: 0).exception() for _ in range(3)]
    assert isinstance(outcomes[-1], HistoryError)
    assert "the disk is gone" in str(outcomes[-1])


@pytest.mark.parametrize(("sync", "is_forced"), [("commit", True), ("interval", False), ("os", False)])
def test_the_policy_reaches_the_database(tmp_path: Path, sync: Any, is_forced: bool) -> None:
    file = HistoryFile(tmp_path, SCHEMA, HistoryConfig(sync=sync))
    assert file.env.flags()["sync"] is is_forced
    file.close()


def test_many_threads_append_and_read_at_once(tmp_path: Path) -> None:
    config = HistoryConfig(sync="os", map_bytes=1 << 20)
    with EmbeddedHistory(tmp_path, SCHEMA, config) as store:

        def grow(user: int) -> None:
            for at in range(0, 600, 20):
                store.append(user, at, events_of(user, at, 20))
                found = store.read_last(user, 5)
                outcomes.append(found.version == at + 20)

        outcomes: list[bool] = []
        threads = [threading.Thread(target=grow, args=(user,)) for user in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(outcomes) == 6 * 30
        assert all(outcomes)
        store.check()
