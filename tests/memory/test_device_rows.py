"""The cache with its index on the device, here on the CPU with the plain kernels."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from helmrec.kernels.row_gather import gather_rows
from helmrec.kernels.row_index import ABSENT, CompactIndex, IndexForm
from helmrec.kernels.row_kernels import row_kernels
from helmrec.kernels.row_lookup import Lookup
from helmrec.kernels.row_table import Admission, Control, RowTally
from helmrec.memory.device_rows import DeviceRows, RowPolicy
from helmrec.types import IntArray

ROWS, PER_PAGE, PAGES, DIM = 2_000, 16, 20, 4
PLAIN = row_kernels("torch")
LRU = RowPolicy(is_lru=True, admission=Admission.ALWAYS)
FILTERED = RowPolicy(is_lru=True)
POLICIES = [LRU, FILTERED, *(RowPolicy(is_lru=False, admission=admission) for admission in Admission)]


class Driven:
    """A cache and the arena and master around it; every row is its own id, so that wrong data shows."""

    def __init__(self, num_pages: int, policy: RowPolicy = LRU, form: IndexForm = IndexForm.DENSE) -> None:
        self.master = torch.arange(ROWS, dtype=torch.float32)[:, None].expand(ROWS, DIM).contiguous()
        self.arena = torch.full((PAGES * PER_PAGE, DIM), -1.0)
        self.rows = DeviceRows(ROWS, self.arena, PER_PAGE, policy, PLAIN, form)
        self.rows.add_pages(range(num_pages))

    def read(self, wanted: IntArray) -> int:
        """One step; returns how many were hits."""
        asked = torch.from_numpy(wanted).int()
        self.rows.table.control.copy_(torch.from_numpy(self.rows.next_control(wanted.size)))
        lookup, out = Lookup.allocate(wanted.size, asked.device), torch.empty(wanted.size, DIM)
        missed, repeats = lookup.missed, lookup.repeats
        self.rows.find(asked, lookup)
        gather_rows(self.arena, self.master, lookup.sources, out)
        gather_rows(self.arena, self.master, missed.sources, out, places=missed.places, count=missed.count)
        gather_rows(out, out, repeats.sources, out, places=repeats.places, count=repeats.count)
        assert torch.equal(out, self.master[asked.long()])
        self.rows.assign(missed)
        self.rows.keep(out)
        hits = wanted.size - int(missed.count)
        self.rows.observe(hits, wanted.size - hits, self.rows.table.tally.numpy().copy())
        return hits

    def refill(self, num: int) -> None:
        self.rows.observe(0, 0, self.rows.table.tally.numpy().copy())
        self.rows.refill(num, self.master)

    def resident(self) -> set[int]:
        row_of = self.rows.table.row_of
        return set(row_of[row_of != ABSENT].tolist())

    def check(self) -> None:
        self.rows.check()
        slots = (self.rows.table.row_of != ABSENT).nonzero().flatten()
        assert torch.equal(self.arena[slots, 0], self.rows.table.row_of[slots].float()), "a slot holds another row"


def zipf_steps(num: int, size: int, seed: int = 0, exponent: float = 1.1) -> Iterator[IntArray]:
    rng = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, ROWS + 1) ** exponent
    names = rng.permutation(ROWS)
    for _ in range(num):
        yield names[rng.choice(ROWS, size, p=weights / weights.sum())]


def test_rows_that_were_read_are_found_again() -> None:
    driven = Driven(4)
    wanted = np.arange(30)
    assert driven.read(wanted) == 0
    assert driven.read(wanted) == 30
    assert driven.rows.num_resident == 30
    driven.check()


def test_a_filter_lets_in_what_is_missed_again_once_all_slots_are_full() -> None:
    driven = Driven(1, FILTERED)
    driven.read(np.arange(PER_PAGE))
    assert driven.resident() == set(range(PER_PAGE)), "empty slots cost nobody anything"
    driven.read(np.array([100, 101]))
    assert not driven.resident() & {100, 101}
    driven.read(np.array([101, 102]))
    assert driven.resident() & {100, 101, 102} == {101}
    driven.check()


def test_the_memory_of_missed_rows_turns_over() -> None:
    driven = Driven(1, FILTERED)
    driven.read(np.arange(PER_PAGE))
    driven.read(np.array([100]))
    for generation in (1, 0):
        driven.rows.observe(0, 1 << 20, driven.rows.table.tally.numpy().copy())
        assert driven.rows.next_control(1)[Control.GENERATION] == generation
    driven.read(np.array([100]))
    assert 100 not in driven.resident(), "forgotten after two turns"


class LruTwin:
    """Exact LRU, step by step as the cache sees it: what a step read is touched first, then what it missed enters."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._rows: OrderedDict[int, None] = OrderedDict()

    def read(self, wanted: IntArray) -> int:
        hits = wanted.size - len(set(wanted.tolist()) - self._rows.keys())  # a step reads a missed row once
        for row in wanted.tolist():
            self._rows[row] = None
            self._rows.move_to_end(row)
        while len(self._rows) > self._capacity:
            self._rows.popitem(last=False)
        return hits


@pytest.mark.parametrize("policy", POLICIES)
def test_its_hit_rate_is_within_a_point_of_exact_lru_or_above(policy: RowPolicy) -> None:
    driven, twin = Driven(10, policy), LruTwin(10 * PER_PAGE)
    ours = theirs = total = 0
    for wanted in zipf_steps(150, 60):
        total += wanted.size
        ours += driven.read(wanted)
        theirs += twin.read(wanted)
    driven.check()
    assert ours / total > theirs / total - 0.01


@pytest.mark.parametrize("policy", POLICIES)
def test_both_forms_of_the_index_give_the_same_hits_evictions_and_rows(policy: RowPolicy) -> None:
    rng = np.random.default_rng(0)
    dense, compact = (Driven(8, policy, form) for form in IndexForm)
    for i, wanted in enumerate(zipf_steps(80, 60)):
        assert dense.read(wanted) == compact.read(wanted)
        num = int(rng.integers(1, 3))
        for driven in (dense, compact):
            if i % 16 == 7:
                driven.rows.add_pages(range(len(driven.rows._pages), len(driven.rows._pages) + num))
                driven.refill(10)
            elif i % 16 == 15:
                driven.rows.give_up_pages(num)
        assert torch.equal(dense.rows.table.row_of, compact.rows.table.row_of)
        assert torch.equal(dense.rows.table.heat, compact.rows.table.heat)
        assert torch.equal(dense.rows.table.tally, compact.rows.table.tally), "none was refused"
    dense.check()
    compact.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_an_index_without_free_entries_costs_hits_and_nothing_else(policy: RowPolicy) -> None:
    whole, short = Driven(8, policy, IndexForm.COMPACT), Driven(8, policy, IndexForm.COMPACT)
    few = CompactIndex.allocate(ROWS, 24, torch.device("cpu"))  # 48 entries for 128 slots
    short.rows.table = replace(short.rows.table, index=few)
    hits = np.zeros(2)
    for i, wanted in enumerate(zipf_steps(60, 40)):
        hits += whole.read(wanted), short.read(wanted)
        if i == 40:
            short.rows.give_up_pages(2)
            short.rows.add_pages([6, 7])
            short.refill(20)
        short.check()
    assert hits[0] > hits[1] > 0
    assert short.rows.table.tally[RowTally.REFUSED] == short.rows.refused > 0
    assert 24 < len(short.resident()) <= 48


@pytest.mark.parametrize("policy", POLICIES)
def test_after_a_shrink_it_hits_like_a_cache_born_at_that_size(policy: RowPolicy) -> None:
    shrunk, born = Driven(16, policy), Driven(6, policy)
    for i, wanted in enumerate(zipf_steps(120, 60)):
        shrunk.read(wanted)
        born.read(wanted)
        if i >= 110:
            shrunk.rows.give_up_pages(1)
            shrunk.check()
    assert shrunk.rows.capacity == born.rows.capacity
    both = [(shrunk.read(wanted), born.read(wanted)) for wanted in zipf_steps(40, 60, seed=0)]
    rates = np.array(both).mean(axis=0) / 60
    assert rates[0] > rates[1] - 0.01


def test_a_shrink_keeps_the_hottest_rows() -> None:
    driven = Driven(4)
    for first in (0, 16, 32, 48):  # pages fill one after the other
        driven.read(np.arange(first, first + 16))
    hot = np.concatenate([np.arange(48, 60), np.arange(0, 8), np.arange(20, 30)])
    driven.read(hot)
    assert sorted(driven.rows.give_up_pages(2)) == [2, 3]
    driven.check()
    assert set(hot.tolist()) <= driven.resident()
    assert len(driven.resident()) == 2 * PER_PAGE
    assert driven.rows.table.tally[RowTally.MOVED] >= 12


def test_all_pages_may_go_and_come_back() -> None:
    driven = Driven(3)
    driven.read(np.arange(40))
    assert sorted(driven.rows.give_up_pages(3)) == [0, 1, 2]
    driven.check()
    assert driven.rows.capacity == 0
    assert driven.read(np.arange(40)) == 0
    assert driven.resident() == set()
    driven.rows.add_pages([7, 5])
    driven.read(np.arange(20))
    assert driven.read(np.arange(20)) == 20
    driven.check()


def test_a_cache_that_grew_takes_back_what_was_evicted_last() -> None:
    driven = Driven(6)
    driven.read(np.arange(96))
    driven.read(np.arange(40, 96))
    driven.rows.give_up_pages(4)
    kept = driven.resident()
    driven.rows.add_pages([10, 11])
    driven.refill(24)
    driven.check()
    back = driven.resident() - kept
    assert len(back) == 24
    assert back <= set(range(40, 96)), "these were hotter than the first forty"
    driven.refill(1_000)
    driven.check()
    assert len(driven.resident()) == driven.rows.capacity
    assert driven.rows.table.tally[RowTally.REFILLED] == 32


def test_refill_evicts_nobody_and_what_it_brings_goes_first() -> None:
    driven = Driven(4)
    driven.read(np.arange(64))
    driven.rows.give_up_pages(2)
    kept = driven.resident()
    driven.refill(50)
    assert driven.resident() == kept
    driven.rows.add_pages([9])
    driven.refill(50)
    back = driven.resident() - kept
    driven.read(np.arange(500, 500 + PER_PAGE))
    driven.check()
    assert not driven.resident() & back
    assert kept <= driven.resident()


@pytest.mark.parametrize("form", IndexForm)
@pytest.mark.parametrize("seed", range(10))
def test_it_stays_sound_under_random_reads_moves_and_refills(seed: int, form: IndexForm) -> None:
    rng = np.random.default_rng(seed)
    driven = Driven(8, POLICIES[seed % len(POLICIES)], form)
    free = list(range(8, PAGES))
    for wanted in zipf_steps(60, 40, seed):
        driven.read(wanted[: rng.integers(0, 40)])
        kind, num = rng.integers(0, 4), int(rng.integers(1, 4))
        if kind == 0 and num <= len(free):
            driven.rows.add_pages([free.pop() for _ in range(num)])
        elif kind == 1 and num * PER_PAGE <= driven.rows.capacity:
            free += driven.rows.give_up_pages(num)
        elif kind == 2:
            driven.refill(int(rng.integers(0, 50)))
        driven.check()


def test_heat_is_rebased_before_it_loses_precision() -> None:
    driven = Driven(2)
    driven.read(np.arange(32))
    driven.rows._now = 2.0**16 - 2
    driven.read(np.arange(16))
    driven.read(np.arange(100, 108))
    assert driven.rows._now < 2
    driven.check()
    assert set(range(16)) <= driven.resident(), "what was read before the rebase is still hotter than what was not"


def test_pages_that_come_in_several_pieces_are_all_refilled() -> None:
    driven = Driven(8)
    driven.read(np.arange(128))
    driven.rows.give_up_pages(6)
    driven.read(np.arange(96, 128))
    for page in range(10, 14):
        driven.rows.add_pages([page])
    for _ in range(3):  # some of those evicted last are resident again
        driven.refill(1_000)
    driven.check()
    assert len(driven.resident()) == 6 * PER_PAGE
