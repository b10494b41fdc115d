"""The cache with its index on a card: exact data, sound books, and the hit rate of its plain twin."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from helmrec.engine.capture import GraphMaker
from helmrec.kernels.row_codec import RowCodec
from helmrec.kernels.row_index import ABSENT, CompactIndex, IndexForm
from helmrec.kernels.row_kernels import row_kernels
from helmrec.kernels.row_lookup import Lookup
from helmrec.kernels.row_table import Admission, RowTally
from helmrec.memory.device_rows import DeviceRows, RowPolicy
from helmrec.memory.row_master import LockedBuffer
from helmrec.types import IntArray

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROWS, PER_PAGE, PAGES, DIM = 100_000, 64, 400, 16


class Driven:
    """A cache on one device, its kernels by name; every row is its own id, so that wrong data shows."""

    def __init__(
        self,
        kernels: str,
        num_pages: int,
        policy: RowPolicy,
        form: IndexForm = IndexForm.DENSE,
        *,
        index_slots: int | None = None,
    ) -> None:
        """index_slots: size a compact index for so many slots instead of all."""
        device = torch.device("cuda" if kernels == "triton" else "cpu")
        self._buffer = LockedBuffer(ROWS * DIM * 4)
        self.master = self._buffer.rows(RowCodec(DIM, torch.int32))
        self.master.copy_(torch.arange(ROWS, dtype=torch.int32)[:, None].expand(ROWS, DIM))
        if device.type == "cuda":
            self._buffer.lock()
        self.arena = torch.full((PAGES * PER_PAGE, DIM), -1, dtype=torch.int32, device=device)
        self._kernels = row_kernels(kernels)
        self.rows = DeviceRows(ROWS, self.arena, PER_PAGE, policy, self._kernels, form)
        if index_slots is not None:
            index = CompactIndex.allocate(ROWS, index_slots, device)
            self.rows.table = replace(self.rows.table, index=index)
        self.rows.add_pages(range(num_pages))
        torch.cuda.synchronize()
        if device.type == "cuda":
            maker = GraphMaker()
            self.rows.capture_moves(2, maker.capture)
            self.rows.capture_refill(64, self.master, maker.capture)
            torch.cuda.synchronize()

    def read(self, wanted: IntArray) -> int:
        """One step; returns how many were hits."""
        asked: Tensor = torch.from_numpy(wanted).int().to(self.arena.device)
        with torch.cuda.stream(self.rows.stream):
            self.rows.table.control.copy_(torch.from_numpy(self.rows.next_control(wanted.size)))
            lookup, out = Lookup.allocate(wanted.size, asked.device), self.arena.new_empty((wanted.size, DIM))
            missed, repeats, gather = lookup.missed, lookup.repeats, self._kernels
            self.rows.find(asked, lookup)
            gather.gather_rows(self.arena, self.master, lookup.sources, out)
            gather.gather_few(self.arena, self.master, missed.sources, out, places=missed.places, count=missed.count)
            gather.gather_rows(out, out, repeats.sources, out, places=repeats.places, count=repeats.count)
            self.rows.assign(missed)
            self.rows.keep(out)
        torch.cuda.synchronize()
        assert int(missed.count) + int(repeats.count) == int((lookup.sources < 0).sum())
        assert int(missed.count) == len(set(wanted[lookup.is_missed.cpu().numpy()]))
        assert torch.equal(out.cpu(), torch.from_numpy(wanted).int()[:, None].expand(-1, DIM))
        num = int(missed.count)
        self.rows.observe(wanted.size - num, num, self.rows.table.tally.cpu().numpy().copy())
        return wanted.size - num

    def check(self) -> None:
        torch.cuda.synchronize()
        self.rows.check()
        slots = (self.rows.table.row_of != ABSENT).nonzero().flatten()
        assert torch.equal(self.arena[slots, 0], self.rows.table.row_of[slots]), "a slot holds another row"


def zipf(rng: np.random.Generator, num: int) -> IntArray:
    return (rng.zipf(1.2, num) * 7919) % ROWS


POLICIES = [RowPolicy(is_lru=True, admission=Admission.ALWAYS), RowPolicy(is_lru=True)]
POLICIES += [RowPolicy(is_lru=False, admission=admission) for admission in Admission]


@pytest.mark.parametrize("policy", POLICIES)
def test_its_hit_rate_is_within_a_point_of_the_plain_twins(policy: RowPolicy) -> None:
    rng = np.random.default_rng(0)
    plain = Driven("torch", 40, policy)
    cards = [Driven("triton", 40, policy, form) for form in IndexForm]
    all_three, hits = [plain, *cards], np.zeros(3)
    steps = [zipf(rng, 3_000) for _ in range(30)]
    for wanted in steps:
        hits += [driven.read(wanted) for driven in all_three]
    for wanted in steps[:10]:  # shrinks while it serves
        for driven in all_three:
            driven.rows.give_up_pages(2)
        hits += [driven.read(wanted) for driven in all_three]
    for card in cards:
        card.check()
    rates = hits / (40 * 3_000)
    print(f"hit rate {rates[0]:.4f} plain, on the card {rates[1]:.4f} dense, {rates[2]:.4f} compact")  # noqa: T201
    assert abs(rates - rates[0]).max() < 0.01


@pytest.mark.parametrize("form", IndexForm)
@pytest.mark.parametrize("seed", range(5))
def test_it_stays_sound_under_random_reads_moves_and_refills(seed: int, form: IndexForm) -> None:
    rng = np.random.default_rng(seed)
    driven = Driven("triton", 40, POLICIES[seed], form)
    free = list(range(40, PAGES))
    for _ in range(60):
        driven.read(zipf(rng, int(rng.integers(0, 5_000))))
        kind, num = rng.integers(0, 4), int(rng.choice([2, 2, 1, 7]))
        if kind == 0:
            driven.rows.add_pages([free.pop() for _ in range(num)])
            driven.rows.observe(0, 0, driven.rows.table.tally.cpu().numpy().copy())
            driven.rows.refill(64, driven.master)
        elif kind == 1 and num * PER_PAGE <= driven.rows.capacity:
            free += driven.rows.give_up_pages(num)
        elif kind == 2:
            driven.rows.refill(int(rng.integers(0, 3_000)), driven.master)
        driven.check()
    assert driven.rows.table.tally[RowTally.REFILLED] > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_an_index_short_of_entries_refuses_rows_and_stays_sound(policy: RowPolicy) -> None:
    """Many programs want the last entries of every bucket at once."""
    rng = np.random.default_rng(2)
    driven = Driven("triton", PAGES, policy, IndexForm.COMPACT, index_slots=2_000)
    for _ in range(8):
        driven.read(rng.integers(0, ROWS, 20_000))
        driven.check()
        driven.read(zipf(rng, 5_000))
        driven.check()
    tally = driven.rows.table.tally.tolist()
    assert tally[RowTally.REFUSED] > 1_000
    assert 3_600 < tally[RowTally.ADMITTED] - tally[RowTally.EVICTED] <= 4_000, "nearly all entries are used"


@pytest.mark.parametrize("form", IndexForm)
def test_a_row_that_a_refill_asks_for_many_times_gets_one_slot(form: IndexForm) -> None:
    driven = Driven("triton", PAGES, POLICIES[0], form)
    driven.rows.expect(np.random.default_rng(3).permutation(np.tile(np.arange(300), 16)))
    driven.rows.refill(300 * 16, driven.master)
    driven.check()
    assert driven.rows.table.tally[RowTally.ADMITTED] == 300
    assert driven.rows.table.tally[RowTally.REFUSED] == 0
