import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helmrec.memory.ledger import Owner, PageLedger


def test_a_new_ledger_owns_nothing() -> None:
    ledger = PageLedger(3)
    assert ledger.num_free == 3
    assert ledger.owners().tolist() == [Owner.FREE] * 3
    ledger.check()


def test_allocated_pages_belong_to_their_owner_until_freed() -> None:
    ledger = PageLedger(4)
    pages = ledger.allocate(Owner.KV, 3)
    assert len(set(pages)) == 3
    assert ledger.count(Owner.KV) == 3
    ledger.free(pages[:2])
    assert ledger.num_free == 3
    assert ledger.owners()[pages[2]] == Owner.KV
    ledger.check()


def test_allocating_nothing_gives_no_pages() -> None:
    ledger = PageLedger(2)
    assert ledger.allocate(Owner.EMB, 0) == []
    assert ledger.num_free == 2


def test_drained_pages_wait_for_their_epoch() -> None:
    ledger = PageLedger(4)
    pages = ledger.allocate(Owner.EMB, 4)
    ledger.drain(pages[:1], epoch=5)
    ledger.drain(pages[1:3], epoch=7)
    ledger.retire(4)
    assert ledger.count(Owner.DRAINING) == 3
    ledger.retire(5)
    assert (ledger.num_free, ledger.count(Owner.DRAINING)) == (1, 2)
    ledger.retire(9)
    assert (ledger.num_free, ledger.count(Owner.DRAINING)) == (3, 0)
    ledger.check()


def test_kv_pages_cannot_be_drained_nor_emb_pages_freed() -> None:
    ledger = PageLedger(2)
    [emb], [kv] = ledger.allocate(Owner.EMB, 1), ledger.allocate(Owner.KV, 1)
    with pytest.raises(AssertionError, match="not EMB"):
        ledger.drain([kv], 0)
    with pytest.raises(AssertionError, match="not KV"):
        ledger.free([emb])


def test_more_pages_than_are_free_is_a_bug_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="asked for 3 pages, 2 are free"):
        PageLedger(2).allocate(Owner.KV, 3)


def test_owners_are_a_copy() -> None:
    ledger = PageLedger(2)
    ledger.owners()[:] = Owner.KV
    ledger.check()


@given(st.lists(st.tuples(st.sampled_from(["emb", "kv", "free", "drain", "retire"]), st.integers(0, 5))))
def test_no_page_is_ever_lost(operations: list[tuple[str, int]]) -> None:
    ledger, epoch = PageLedger(12), 0
    for kind, num in operations:
        emb = np.flatnonzero(ledger.owners() == Owner.EMB).tolist()
        kv = np.flatnonzero(ledger.owners() == Owner.KV).tolist()
        if kind in ("emb", "kv"):
            ledger.allocate(Owner.EMB if kind == "emb" else Owner.KV, min(num, ledger.num_free))
        elif kind == "free":
            ledger.free(kv[:num])
        elif kind == "drain":
            epoch += num % 2
            ledger.drain(emb[:num], epoch)
        else:
            ledger.retire(num)
        ledger.check()
        assert sum(ledger.count(owner) for owner in Owner) == ledger.num_pages == 12
