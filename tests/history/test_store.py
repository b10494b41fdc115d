"""What every store promises, held against the embedded one and against a Redis."""

from dataclasses import replace

import numpy as np
import pytest

from helmrec.engine.intake import Intake
from helmrec.errors import HistoryError, RequestError, StaleVersion
from helmrec.history.config import HistoryConfig
from helmrec.history.events import EventSchema, NewEvents
from helmrec.history.pages import PAGE_EVENTS
from helmrec.history.store import HistoryStore
from helmrec.history.values import Appended
from helmrec.types import RankRequest, UserId
from tests.helpers import tiny_config
from tests.history.helpers import SCHEMA, events_of, same
from tests.history.places import Open, num_pages_kept


def test_an_append_is_acknowledged_with_the_new_version(store: HistoryStore) -> None:
    assert store.append(1, 0, events_of(1, 0, 3)) == Appended(0, 3, is_repeat=False)


def test_events_are_read_as_they_were_appended(store: HistoryStore) -> None:
    at = 0
    for num in (1, PAGE_EVENTS - 2, 1, 1, 300, 5):
        assert store.append(8, at, events_of(8, at, num)).version == at + num
        at += num
    for last in (1, 5, 50, PAGE_EVENTS, 200, at):
        found = store.read_last(8, last)
        assert (found.first_event, found.num_events, found.version) == (at - last, last, at)
        assert same(found, events_of(8, at - last, last))


def test_more_than_there_is_gives_all_there_is(store: HistoryStore) -> None:
    store.append(1, 0, events_of(1, 0, 10))
    assert same(store.read_last(1, 1_000), events_of(1, 0, 10))
    assert (store.read_last(1, 0).num_events, store.read_last(1, 0).version) == (0, 10)


def test_an_unknown_user_has_no_events(store: HistoryStore) -> None:
    assert store.state(1) is None
    found = store.read_last(1, 10)
    assert (found.version, found.num_events, list(found.features)) == (0, 0, ["category"])


@pytest.mark.parametrize("base", [0, 4, 6, 99])
def test_a_stale_base_is_refused_with_the_current_version(store: HistoryStore, base: int) -> None:
    store.append(1, 0, events_of(1, 0, 5))
    with pytest.raises(StaleVersion, match=f"user 1 is at version 5, not at base version {base}") as told:
        store.append(1, base, events_of(1, 50, 2))
    assert told.value.current == 5
    assert same(store.read_last(1, 10), events_of(1, 0, 5))


def test_the_same_append_is_kept_once_however_often_it_comes(store: HistoryStore) -> None:
    store.append(1, 0, events_of(1, 0, 200))
    first = store.append(1, 200, events_of(1, 200, 7))
    assert store.append(1, 200, events_of(1, 200, 7)) == replace(first, is_repeat=True)
    store.append(1, 207, events_of(1, 207, 1))
    assert store.append(1, 200, events_of(1, 200, 7)) == Appended(200, 208, is_repeat=True)
    assert same(store.read_last(1, 999), events_of(1, 0, 208))


def test_a_repeat_that_brings_more_is_stale(store: HistoryStore) -> None:
    store.append(1, 0, events_of(1, 0, 5))
    with pytest.raises(StaleVersion):
        store.append(1, 3, events_of(1, 3, 4))


def test_a_repeat_must_be_equal_in_every_field(store: HistoryStore) -> None:
    new = events_of(1, 0, 5)
    store.append(1, 0, new)
    for other in (
        replace(new, items=np.asarray(new.items) ^ 1),
        replace(new, actions=np.asarray(new.actions) ^ 1),
        replace(new, timestamps=np.asarray(new.timestamps) + 1),
        replace(new, features={"category": np.asarray(new.features["category"]) // 2}),
    ):
        with pytest.raises(StaleVersion):
            store.append(1, 0, other)


def test_time_that_runs_backwards_is_refused_with_both_values(store: HistoryStore) -> None:
    store.append(1, 0, NewEvents([1], [1], [500], {"category": [1]}))
    with pytest.raises(RequestError, match=r"timestamps\[0\]: time runs backwards from .* 500, got 499"):
        store.append(1, 1, NewEvents([1], [1], [499], {"category": [1]}))
    assert store.append(1, 1, NewEvents([1], [1], [500], {"category": [1]})).version == 2


def test_a_deleted_user_is_gone_and_may_come_again(store: HistoryStore) -> None:
    for user in (1, 2, 3):
        store.append(user, 0, events_of(user, 0, 300))
    assert store.delete(2)
    assert not store.delete(2)
    assert store.state(2) is None
    assert list(store.user_ids()) == [1, 3]
    assert num_pages_kept(store) == 6
    assert store.append(2, 0, events_of(2, 0, 1)).version == 1
    assert same(store.read_last(2, 9), events_of(2, 0, 1))
    assert same(store.read_last(1, 999), events_of(1, 0, 300))
    assert same(store.read_last(3, 999), events_of(3, 0, 300))


def test_users_are_listed_in_order_however_many(store: HistoryStore) -> None:
    ids = [2**63 - 1, *range(0, 5_000, 2)]
    for waiting in [store.submit(user, 0, events_of(user, 0, 1)) for user in ids]:
        waiting.result()
    assert list(store.user_ids()) == sorted(ids)


def test_equal_seals_are_equal_histories_however_they_were_appended(store: HistoryStore) -> None:
    at, seals = 0, []
    for num in (3, 200, 1):
        store.append(6, at, events_of(6, at, num))
        at += num
        state = store.state(6)
        assert state is not None
        seals.append(state.seal)
    assert state is not None
    assert (state.version, state.last_timestamp) == (at, int(events_of(6, 0, at).timestamps[-1]))
    store.delete(6)
    store.append(6, 0, events_of(6, 0, at))
    assert store.state(6) == state
    store.append(7, 0, events_of(6, 0, at))
    other = store.state(7)
    assert other is not None
    assert len({*seals, other.seal}) == 4, "the user is part of it"


def test_a_request_from_the_store_is_the_one_a_client_would_send(store: HistoryStore) -> None:
    config = tiny_config()
    intake = Intake(config, version=3, max_history=1_000)
    new = events_of(5, 0, 40)
    small = replace(new, items=np.asarray(new.items) % 300)
    store.append(5, 0, small)
    found = store.read_last(5, config.window)
    sent = RankRequest(
        user_id=5,
        items=small.items,
        actions=small.actions,
        timestamps=small.timestamps,
        features=small.features,
        candidates=[1, 2],
        candidate_features={"category": [1, 2]},
        context={"country": 1, "hour": 2},
    )
    kept = replace(
        sent,
        items=found.items,
        actions=found.actions,
        timestamps=found.timestamps,
        features=found.features,
        first_event=found.first_event,
    )
    a, b = intake.prepare(kept), intake.prepare(sent)
    assert a.window_start == b.window_start
    assert np.array_equal(a.history.states, b.history.states)


@pytest.mark.parametrize("user_id", [-1, 2**63, True, 1.0, "", "x" * 257, "\udc80", b"1"])
def test_ids_that_are_none_are_refused(store: HistoryStore, user_id: object) -> None:
    for call in (store.state, store.delete, lambda user: store.read_last(user, 1)):
        with pytest.raises(RequestError, match="user_id"):
            call(user_id)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="base_version"):
        store.append(1, -1, events_of(1, 0, 1))


def test_old_events_leave_by_the_page(opened: Open) -> None:
    config = HistoryConfig(sync="os", max_events_per_user=200)
    with opened(config) as store:
        for at in range(0, 1_000, 50):
            store.append(1, at, events_of(1, at, 50))
            state = store.state(1)
            assert state is not None
            assert state.first_event % PAGE_EVENTS == 0
            assert min(200, at + 50) <= at + 50 - state.first_event < 200 + PAGE_EVENTS
        found = store.read_last(1, 10_000)
        assert same(found, events_of(1, found.first_event, found.num_events))
        assert num_pages_kept(store) <= 3
        with pytest.raises(StaleVersion):
            store.append(1, 0, events_of(1, 0, 50))  # it may be a repeat; nobody can tell any more
        store.check()


def test_a_closed_store_says_so(opened: Open) -> None:
    store = opened()
    waiting = [store.submit(user, 0, events_of(user, 0, 1)) for user in range(20)]
    store.close()
    store.close()
    assert all(w.result().version == 1 for w in waiting), "what was submitted is finished first"
    for call in (
        lambda: store.read_last(1, 1),
        lambda: store.append(1, 1, events_of(1, 1, 1)),
        lambda: store.delete(1),
    ):
        with pytest.raises(HistoryError, match="closed"):
            call()


def test_what_is_kept_outlives_the_object(opened: Open) -> None:
    for at in range(0, 400, 80):
        with opened() as store:
            assert same(store.read_last(1, 999), events_of(1, 0, at))
            store.append(1, at, events_of(1, at, 80))


def test_tables_may_grow_between_two_openings(opened: Open) -> None:
    with opened() as store:
        store.append(1, 0, events_of(1, 0, 1))
    larger = EventSchema(num_items=2_000, num_actions=5, features=SCHEMA.features)
    with opened(schema=larger) as store:
        store.append(1, 1, NewEvents([1_999], [4], [2_000], {"category": [1]}))
        assert store.read_last(1, 1).items.tolist() == [1_999]


STRINGS: list[UserId] = [7, "7", "a", "ann", "annabel", "thirteen byte", "zoë", "x" * 256, '"7', "a/b"]


def test_users_by_number_and_by_string_have_histories_of_their_own(store: HistoryStore) -> None:
    for at, user in enumerate(STRINGS):
        store.append(user, 0, events_of(at, 0, PAGE_EVENTS + at))
    for at, user in enumerate(STRINGS):
        assert same(store.read_last(user, 1_000), events_of(at, 0, PAGE_EVENTS + at))
    assert list(store.user_ids()) == [7, *sorted(STRINGS[1:], key=lambda user: (len(str(user).encode()), user))]
    assert store.stats().num_users == len(STRINGS)
    store.check()


def test_deleting_a_string_leaves_strings_that_begin_with_it(store: HistoryStore) -> None:
    for at, user in enumerate(STRINGS):
        store.append(user, 0, events_of(at, 0, 5))
    assert store.delete("ann")
    assert not store.delete("ann")
    assert store.state("ann") is None
    assert [user for user in STRINGS if store.state(user) is not None] == [user for user in STRINGS if user != "ann"]
    assert store.delete("7")
    assert store.state(7) is not None
    store.check()


def test_seals_tell_users_with_equal_events_apart(store: HistoryStore) -> None:
    seals = set[int]()
    for user in STRINGS:
        store.append(user, 0, events_of(1, 0, 5))
        state = store.state(user)
        assert state is not None
        seals.add(state.seal)
    assert len(seals) == len(STRINGS)
