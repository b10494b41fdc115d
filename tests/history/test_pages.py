import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helmrec.history.pages import (
    PAGE_EVENTS,
    Page,
    UserRecord,
    new_user,
    pack_page,
    pack_user,
    page_key,
    unpack_pages,
    unpack_user,
)
from helmrec.memory.prefix_hash import ChainState, advance, begin_chain
from helmrec.types import IntArray
from helmrec.user_ids import store_key, user_of_key
from tests.memory.test_chained_hash import KEY

FIELDS = 3


def pages_of(columns: IntArray, user_id: int = 4) -> list[bytes]:
    """The plain twin of writing: one chain over everything, cut at page ends."""
    pages, before = [], begin_chain(KEY, (user_id,))
    for first in range(0, columns.shape[1], PAGE_EVENTS):
        some = np.ascontiguousarray(columns[:, first : first + PAGE_EVENTS])
        end = advance(KEY, before, some)
        words = [some.shape[1], *before, *end, *(int(v) for line in some for v in line)]
        pages.append(struct.pack(f"<{len(words)}Q", *words))
        before = end
    return pages


@pytest.mark.parametrize("num_events", [1, PAGE_EVENTS - 1, PAGE_EVENTS, PAGE_EVENTS + 1, 3 * PAGE_EVENTS + 5])
def test_pages_come_back_as_they_were(num_events: int, rng: np.random.Generator) -> None:
    columns = rng.integers(0, 2**63 - 1, (FIELDS, num_events))
    found = unpack_pages(KEY, pages_of(columns), FIELDS, num_events)
    assert found.num_sound == num_events
    assert np.array_equal(found.columns, columns)
    assert found.before == new_user(KEY, 4).end
    assert found.end == advance(KEY, begin_chain(KEY, (4,)), columns)


def test_a_page_is_packed_as_its_plain_twin_says(rng: np.random.Generator) -> None:
    columns = rng.integers(0, 2**63 - 1, (FIELDS, 20))
    start = begin_chain(KEY, (4,))
    assert [pack_page(Page(start, advance(KEY, start, columns), columns))] == pages_of(columns)


WHOLE = np.random.default_rng(3).integers(0, 1_000, (FIELDS, 2 * PAGE_EVENTS + 9))


@given(st.data())
def test_any_changed_bit_is_noticed_where_it_is(data: st.DataObject) -> None:
    pages = pages_of(WHOLE)
    hurt = data.draw(st.integers(0, len(pages) - 1))
    page = bytearray(pages[hurt])
    page[data.draw(st.integers(0, len(page) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    pages[hurt] = bytes(page)
    found = unpack_pages(KEY, pages, FIELDS, WHOLE.shape[1])
    if found.num_sound == WHOLE.shape[1]:  # only the state before the first page has nothing before it to be held to
        assert hurt == 0
        assert found.before != new_user(KEY, 4).end
    else:
        assert found.num_sound <= hurt * PAGE_EVENTS


@given(st.lists(st.binary(max_size=200), max_size=4), st.integers(1, 300))
def test_bytes_that_are_no_pages_give_nothing(values: list[bytes], num_events: int) -> None:
    assert unpack_pages(KEY, values, FIELDS, num_events).num_sound == 0


def test_missing_and_swapped_pages_are_noticed() -> None:
    pages = pages_of(WHOLE)
    assert unpack_pages(KEY, [pages[0], b"", pages[2]], FIELDS, WHOLE.shape[1]).num_sound == PAGE_EVENTS
    assert unpack_pages(KEY, [pages[1], pages[0], pages[2]], FIELDS, WHOLE.shape[1]).num_sound <= PAGE_EVENTS
    assert unpack_pages(KEY, [pages[0], pages[0], pages[2]], FIELDS, WHOLE.shape[1]).num_sound == PAGE_EVENTS


def test_keys_sort_by_user_then_page() -> None:
    ids = [0, 1, 255, 256, 2**63 - 1]
    assert sorted(map(store_key, ids)) == [store_key(i) for i in ids]
    assert page_key(1, 300) < page_key(2, 0)
    assert page_key(1, 255) < page_key(1, 256)
    assert [user_of_key(store_key(i)) for i in ids] == ids


def test_a_user_record_comes_back_and_bad_ones_do_not() -> None:
    record = UserRecord(300, PAGE_EVENTS, ChainState(2**64 - 1, 5), 17)
    assert unpack_user(pack_user(record)) == record
    assert unpack_user(b"short") is None
    assert unpack_user(pack_user(UserRecord(300, 300, ChainState(0, 0), 0))) is None
    assert unpack_user(pack_user(UserRecord(300, PAGE_EVENTS - 1, ChainState(0, 0), 0))) is None
