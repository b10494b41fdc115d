"""The host tier's bookkeeping: which page is held, which leaves, and when taking one back pays."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helmrec.memory import kv_host_tier
from helmrec.memory.kv_host_tier import HostPage, KVHostTier, PageKey, PageSave
from helmrec.memory.prefix_hash import chain
from helmrec.types import UserId
from tests.memory.test_chained_hash import KEY

STATES = chain(KEY, (1,), 0, np.arange(24).reshape(1, -1))
PAGE_TOKENS = 4


def key(page: int, epoch: int = 0) -> PageKey:
    return PageKey(1, int(STATES[(page + 1) * PAGE_TOKENS - 1]), page=100 + page, epoch=epoch)


def test_a_run_of_held_pages_is_found_and_ends_at_the_first_gap() -> None:
    tier = KVHostTier(num_slots=8)
    for page in (0, 1, 3):
        assert tier.save(key(page)) is not None
    assert len(tier.find(1, STATES, 0, PAGE_TOKENS)) == 2
    assert len(tier.find(1, STATES, 3, PAGE_TOKENS)) == 1
    assert tier.find(1, STATES, 2, PAGE_TOKENS) == []
    assert len(tier.find(1, STATES[:7], 0, PAGE_TOKENS)) == 1, "a page the history does not fill"


def test_another_history_finds_nothing() -> None:
    tier = KVHostTier(num_slots=8)
    tier.save(key(0))
    assert tier.find(1, chain(KEY, (2,), 0, np.arange(24).reshape(1, -1)), 0, PAGE_TOKENS) == []


def test_no_user_finds_a_page_of_another_even_where_states_are_equal() -> None:
    tier = KVHostTier(num_slots=8)
    tier.save(key(0))
    assert tier.find(2, STATES, 0, PAGE_TOKENS) == []
    tier.save(key(0)._replace(user_id=2))
    assert tier.find(1, STATES, 0, PAGE_TOKENS) == []
    assert len(tier.find(2, STATES, 0, PAGE_TOKENS)) == tier.num_pages == 1, (
        "the page of one state is the latest user's"
    )
    tier.check()
    tier.forget(2)
    assert tier.num_pages == 0
    tier.check()


def test_a_held_page_is_not_copied_twice_but_a_newer_one_replaces_it() -> None:
    tier = KVHostTier(num_slots=4)
    first = tier.save(key(0, epoch=3))
    assert first is not None
    assert tier.save(key(0, epoch=3)) is None
    assert tier.save(key(0, epoch=5)) == PageSave(page=100, slot=first.slot)
    assert tier.find(1, STATES, 0, PAGE_TOKENS) == [HostPage(first.slot, 5)]
    tier.check()


def test_the_least_recently_wanted_page_leaves_first() -> None:
    tier = KVHostTier(num_slots=2)
    tier.save(key(0))
    tier.save(key(1))
    tier.find(1, STATES[:4], 0, PAGE_TOKENS)
    tier.save(key(2))
    assert len(tier.find(1, STATES, 0, PAGE_TOKENS)) == 1
    assert tier.evicted_pages == 1
    tier.check()


def test_no_tier_holds_nothing() -> None:
    tier = KVHostTier(num_slots=0)
    assert tier.save(key(0)) is None
    assert tier.find(1, STATES, 0, PAGE_TOKENS) == []


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=40), st.integers(0, 4))
def test_no_slot_is_ever_lost(saves: list[tuple[int, int]], num_slots: int) -> None:
    tier = KVHostTier(num_slots)
    for page, epoch in saves:
        tier.save(key(page, epoch))
        tier.check()
        assert tier.num_pages <= num_slots


@pytest.mark.parametrize(("page_s", "is_worth_it"), [(1e-6, True), (1.0, False)])
def test_pages_are_taken_back_where_that_is_cheaper(page_s: float, is_worth_it: bool) -> None:
    tier = KVHostTier(num_slots=4)
    tier.costs.page_s = page_s
    for tokens in (100, 200, 400, 800):
        tier.costs.steps.observe(tokens, tokens**2 / 2, 1e-5 * tokens)
    assert tier.is_worth_it(0, 400, 4) == is_worth_it
    assert KVHostTier(4, "always").is_worth_it(0, 400, 4)
    assert not KVHostTier(4, "never").is_worth_it(0, 400, 4)


def test_a_save_that_was_not_made_is_taken_back() -> None:
    host_tier = KVHostTier(num_slots=4)
    saves = [save for state in range(3) if (save := host_tier.save(PageKey(1, state, page=state, epoch=0))) is not None]
    host_tier.withdraw(saves[1:])
    host_tier.check()
    assert host_tier.num_pages == 1
    assert [len(host_tier.find(1, np.array([state], np.uint64), 0, 1)) for state in range(3)] == [1, 0, 0]


def test_users_with_the_same_hash_are_forgotten_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_host_tier, "hash", lambda _: 5, raising=False)
    tier = KVHostTier(num_slots=8)
    users: list[UserId] = [5, "5", "ann"]
    for page, user in enumerate(users):
        tier.save(key(page)._replace(user_id=user))
    tier.forget("5")
    assert tier.num_pages == 2
    tier.check()
    tier.forget(5)
    assert tier.num_pages == 1
    tier.check()
