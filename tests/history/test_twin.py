"""The store against a dict of lists, under random operations and reopenings."""

import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from helmrec.errors import HelmRecError, RequestError, StaleVersion
from helmrec.history.config import HistoryConfig
from helmrec.history.embedded import EmbeddedHistory
from helmrec.history.events import Events, NewEvents
from helmrec.history.pages import PAGE_EVENTS
from helmrec.history.store import HistoryStore
from helmrec.history.values import Appended
from tests.history.helpers import SCHEMA
from tests.history.places import num_pages_kept, running_redis

KEEP = 300
users = st.integers(0, 3)
lengths = st.one_of(st.integers(1, 5), st.sampled_from([PAGE_EVENTS - 1, PAGE_EVENTS, PAGE_EVENTS + 1, 400]))
CONFIG = HistoryConfig(sync="os", max_events_per_user=KEEP, map_bytes=1 << 20, read_timeout_ms=30_000)


class Event(NamedTuple):
    item: int
    category: int
    action: int
    timestamp: int


def sent(events: list[Event]) -> NewEvents:
    items, categories, actions, timestamps = (list(line) for line in zip(*events, strict=True))
    return NewEvents(items, actions, timestamps, {"category": categories})


def came(events: Events) -> list[Event]:
    lines = (events.items, events.features["category"], events.actions, events.timestamps)
    return [Event(*values) for values in zip(*(line.tolist() for line in lines), strict=True)]


class Twin:
    """What a store should do, in the plainest way: nothing is ever packed, hashed or dropped."""

    def __init__(self) -> None:
        self.users: dict[int, list[Event]] = {}

    def first_kept(self, user: int) -> int:
        return max(0, (len(self.users[user]) - KEEP) // PAGE_EVENTS * PAGE_EVENTS)

    def append(self, user: int, base: int, new: list[Event]) -> Appended:
        kept = self.users.get(user, [])
        end = base + len(new)
        if base != len(kept):
            if kept and self.first_kept(user) <= base and end <= len(kept) and kept[base:end] == new:
                return Appended(base, len(kept), is_repeat=True)
            raise StaleVersion(user, base, len(kept))
        if kept and new[0].timestamp < kept[-1].timestamp:
            raise RequestError("timestamps[0]", new[0].timestamp, "time runs backwards")
        self.users[user] = kept + new
        return Appended(base, end, is_repeat=False)


class StoreBesideTwin(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.store = self.open()
        self.twin = Twin()
        self.sent_before: list[tuple[int, int, list[Event]]] = []

    def open(self) -> HistoryStore:
        return EmbeddedHistory(self.folder.name, SCHEMA, CONFIG)

    def both_append(self, user: int, base: int, new: list[Event]) -> None:
        wanted: Appended | HelmRecError
        try:
            wanted = self.twin.append(user, base, new)
        except HelmRecError as error:
            wanted = error
        outcome = self.store.submit(user, base, sent(new))
        if isinstance(wanted, Appended):
            assert outcome.result() == wanted
            return
        told = outcome.exception()
        assert type(told) is type(wanted)
        if isinstance(wanted, StaleVersion):
            assert isinstance(told, StaleVersion)
            assert (told.current, told.base) == (wanted.current, wanted.base)

    @rule(
        user=users,
        num=lengths,
        seed=st.integers(0, 999),
        behind=st.sampled_from([0, 0, 0, 0, 1, -1, 130]),
        late=st.integers(-1, 9),
    )
    def append(self, user: int, num: int, seed: int, behind: int, late: int) -> None:
        kept = self.twin.users.get(user, [])
        start = max(0, (kept[-1].timestamp if kept else 5) + late)
        new = [Event((seed + 7 * i) % 1_000, seed % 20, i % 4, start + i // 2) for i in range(num)]
        base = max(0, len(kept) - behind)
        self.sent_before.append((user, base, new))
        self.both_append(user, base, new)

    @rule(data=st.data())
    def send_again(self, data: st.DataObject) -> None:
        if self.sent_before:
            self.both_append(*data.draw(st.sampled_from(self.sent_before)))

    @rule(user=users)
    def delete(self, user: int) -> None:
        assert self.store.delete(user) == (self.twin.users.pop(user, None) is not None)

    @rule(user=users, num=st.integers(0, 700))
    def read_last(self, user: int, num: int) -> None:
        kept = self.twin.users.get(user, [])
        first = max(self.twin.first_kept(user), len(kept) - num) if kept else 0
        found = self.store.read_last(user, num)
        assert (found.first_event, came(found)) == (first, kept[first:])

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = self.open()

    @invariant()
    def both_know_the_same(self) -> None:
        assert list(self.store.user_ids()) == sorted(self.twin.users)
        for user, kept in self.twin.users.items():
            state = self.store.state(user)
            assert state is not None
            assert (state.version, state.first_event) == (len(kept), self.twin.first_kept(user))
            assert state.last_timestamp == kept[-1].timestamp

    def teardown(self) -> None:
        with self.store:
            self.store.check()
            pages = [
                -(-len(kept) // PAGE_EVENTS) - self.twin.first_kept(u) // PAGE_EVENTS
                for u, kept in self.twin.users.items()
            ]
            assert num_pages_kept(self.store) == sum(pages), "pages of nobody are kept"
        self.folder.cleanup()


StoreBesideTwin.TestCase.settings = settings(max_examples=20, stateful_step_count=30)
TestStoreBesideTwin = StoreBesideTwin.TestCase


class RedisBesideTwin(StoreBesideTwin):
    """The same with a server that all examples share; each has a place of its own there."""

    url = ""

    def open(self) -> HistoryStore:
        from helmrec.history.redis import RedisHistory  # noqa: PLC0415 - an extra

        return RedisHistory(self.url, SCHEMA, CONFIG, self.folder.name)


def test_a_redis_beside_the_twin() -> None:
    pytest.importorskip("redis", reason="helmrec[cluster] is not installed")
    with tempfile.TemporaryDirectory(prefix="redis-") as folder, running_redis(Path(folder)) as url:
        RedisBesideTwin.url = url
        run_state_machine_as_test(RedisBesideTwin, settings=settings(max_examples=10, stateful_step_count=30))
