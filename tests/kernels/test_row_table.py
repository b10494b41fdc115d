"""Claiming and publishing rows against their twins, in Triton's interpreter."""

import os
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

if torch.cuda.is_available():
    pytest.skip("with a GPU, tests/gpu runs the same kernels compiled", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when Triton and each kernel is imported, so before that
pytest.importorskip("triton", reason="Triton is not installed here")

import triton
import triton.language as tl

from helmrec.kernels import row_lookup, row_table, triton_row_table
from helmrec.kernels.row_gather import SKIP
from helmrec.kernels.row_table import (
    ABSENT,
    EMPTY,
    UNUSABLE,
    Admission,
    Claims,
    Control,
    Missed,
    RowTable,
    RowTally,
    Victims,
)

ROWS, SLOTS, CPU = 300, 64, torch.device("cpu")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def make_table(num_resident: int = 40, admission: Admission = Admission.SECOND_TOUCH) -> RowTable:
    """Some rows in some slots, all of different heat."""
    table = RowTable.allocate(ROWS, SLOTS, CPU, admission)
    rows, slots = torch.randperm(ROWS)[:num_resident], torch.randperm(SLOTS)[:num_resident]
    table.slot_of[rows] = slots.int()
    table.row_of[slots] = rows.int()
    table.heat[slots] = torch.randperm(num_resident).float()
    table.control[Control.NOW] = 50
    table.control[Control.CAPACITY] = SLOTS
    return table


def twin_of(table: RowTable) -> RowTable:
    return replace(table, **{field.name: getattr(table, field.name).clone() for field in fields(table)})


def assert_same(ours: RowTable, twin: RowTable) -> None:
    for field in fields(ours):
        assert torch.equal(getattr(ours, field.name), getattr(twin, field.name)), field.name


def all_victims(table: RowTable, limit: int) -> Victims:
    heat, slots = table.heat[:SLOTS].sort(stable=True)
    return Victims(slots[:limit], heat[:limit])


def claim_both(
    ours: RowTable, twin: RowTable, missed: Missed, limit: int, admission: Admission
) -> tuple[Claims, Claims]:
    claims, expected = Claims.allocate(limit, CPU), Claims.allocate(limit, CPU)
    triton_row_table.claim(ours, missed, claims, admission=admission)
    row_table.claim(twin, missed, expected, admission=admission)
    return claims, expected


def missed_of(table: RowTable, rows: Tensor) -> Missed:
    lookup = row_lookup.Lookup.allocate(len(rows), CPU)
    row_lookup.find(table, rows, lookup, is_lru=True)
    return lookup.missed


@pytest.mark.parametrize("admission", Admission)
@pytest.mark.parametrize("is_filling", [False, True])
def test_missed_rows_claim_as_the_twin_says(admission: Admission, is_filling: bool) -> None:
    ours = make_table(admission=admission)
    ours.control[Control.IS_FILLING] = float(is_filling)
    twin = twin_of(ours)
    for step in range(4):
        ours.control[Control.GENERATION] = twin.control[Control.GENERATION] = step // 2
        rows = torch.randint(-1, ROWS, (150,)).int()
        missed = missed_of(twin, rows)
        missed_of(ours, rows)
        claims, expected = claim_both(ours, twin, missed, 512, admission)
        assert int(claims.count) == int(expected.count)
        num = int(claims.count)
        assert set(zip(claims.rows[:num].tolist(), claims.entries[:num].tolist(), strict=True)) == set(
            zip(expected.rows[:num].tolist(), expected.entries[:num].tolist(), strict=True)
        )
        assert torch.equal(claims.heat, expected.heat)
        assert_same(ours, twin)
        for table, made in ((ours, claims), (twin, expected)):
            table.slot_of[made.rows[:num].long()] = ABSENT  # as if none had found a slot


def test_a_row_that_one_step_asks_for_twice_has_been_missed_once() -> None:
    ours = make_table(0)
    rows, claims = torch.tensor([5, 9, 5, -1, 5], dtype=torch.int32), Claims.allocate(8, CPU)
    triton_row_table.claim(ours, missed_of(ours, rows), claims, admission=Admission.SECOND_TOUCH)
    assert int(claims.count) == 0
    triton_row_table.claim(ours, missed_of(ours, rows[2:3]), claims, admission=Admission.SECOND_TOUCH)
    assert claims.rows[: int(claims.count)].tolist() == [5]


def test_claims_beyond_the_limit_are_given_up() -> None:
    ours = make_table(0)
    twin = twin_of(ours)
    missed = missed_of(ours, torch.arange(100, dtype=torch.int32))
    claims, expected = claim_both(ours, twin, missed, 10, admission=Admission.ALWAYS)
    assert int(claims.count) == 100
    assert int((ours.slot_of[:-1] != ABSENT).sum()) == 10
    assert sorted(claims.rows.tolist()) == sorted(expected.rows.tolist())


@pytest.mark.parametrize("num_resident", [0, 40, SLOTS])
def test_published_rows_take_the_coldest_slots(num_resident: int) -> None:
    ours = make_table(num_resident)
    ours.control[Control.IS_FILLING] = 1
    ours.tally[RowTally.GHOSTS] = SLOTS - 3  # so that the ring wraps
    missed = missed_of(ours, torch.randperm(ROWS)[:90].int())
    claims = Claims.allocate(20, CPU)
    row_table.claim(ours, missed, claims, admission=Admission.SECOND_TOUCH)
    twin, victims = twin_of(ours), all_victims(ours, 20)
    copies, expected = torch.zeros(20, dtype=torch.int32), torch.ones(20, dtype=torch.int32)
    triton_row_table.publish(ours, claims, victims, copies)
    row_table.publish(twin, claims, victims, expected)
    assert torch.equal(copies, expected)
    assert_same(ours, twin)
    resident = (ours.row_of != ABSENT).nonzero().flatten()
    assert torch.equal(ours.slot_of[ours.row_of[resident].long()], resident.int())
    assert int((ours.slot_of[:-1] >= 0).sum()) == len(resident) == int((ours.heat != EMPTY).sum())


def test_rows_read_more_often_than_the_coldest_take_their_slots() -> None:
    ours = make_table(SLOTS, Admission.FREQUENCY)
    ours.heat[:SLOTS] += 50  # so that the coldest were read once by now, and the others more often
    twin = twin_of(ours)
    absent = (ours.slot_of[:-1] == ABSENT).nonzero().flatten()[:30].int()
    given, counted = [], ours.touches.clone()
    for num_rows in (30, 20, 10):  # ten rows are read three times
        missed = missed_of(ours, absent[:num_rows])
        claims, expected = claim_both(ours, twin, missed, 32, Admission.FREQUENCY)
        victims = all_victims(ours, 32)
        copies, expected_copies = torch.zeros(32, dtype=torch.int32), torch.ones(32, dtype=torch.int32)
        triton_row_table.publish(ours, claims.hottest_first(), victims, copies, by_heat=True)
        row_table.publish(twin, expected.hottest_first(), victims, expected_copies, by_heat=True)
        assert torch.equal(copies, expected_copies)
        assert_same(ours, twin)
        given.append(int((copies != SKIP).sum()))
        assert (ours.touches != counted).any(), "touches of absent rows are counted"
    # Slots have heat 50, 51, 52, ... A row read once has 50, one read twice 51, one read three times 51.6.
    assert given == [0, 1, 2], "the first slot is taken at 51, and then both slots of heat 51 at 51.6"
    assert int((ours.slot_of[:-1] >= 0).sum()) == SLOTS


def test_what_was_counted_for_a_row_outlives_its_eviction_and_fades() -> None:
    table = make_table(SLOTS, Admission.FREQUENCY)
    table.heat[:SLOTS] = 50 + 2.0  # four touches each
    claims = Claims.allocate(4, CPU)
    claims.count.fill_(1)
    claims.rows[0], claims.heat[0] = int((table.slot_of[:-1] == ABSENT).nonzero()[0]), 60.0
    victims = all_victims(table, 4)
    evicted = table.row_of[victims.slots[:1]].long()
    for publish in (row_table.publish, triton_row_table.publish):
        one = twin_of(table)
        publish(one, claims, victims, torch.zeros(4, dtype=torch.int32), by_heat=True)
        assert row_table.counted_touches(one.touches, evicted).tolist() == [4]
        one.age()
        assert row_table.counted_touches(one.touches, evicted).tolist() == [2]


def test_a_claim_without_a_victim_is_given_up() -> None:
    ours = make_table(SLOTS)
    twin = twin_of(ours)
    missed = missed_of(ours, torch.arange(ROWS, dtype=torch.int32))
    claims, expected = claim_both(ours, twin, missed, 8, admission=Admission.ALWAYS)
    victims = all_victims(ours, 8)
    victims.heat[3:] = UNUSABLE
    copies = torch.zeros(8, dtype=torch.int32)
    triton_row_table.publish(ours, claims, victims, copies)
    row_table.publish(twin, expected, victims, copies.clone())
    assert (copies != SKIP).tolist() == [True] * 3 + [False] * 5
    assert int((ours.slot_of[:-1] >= 0).sum()) == int((twin.slot_of[:-1] >= 0).sum()) == SLOTS
    assert (ours.slot_of[:-1] >= ABSENT).all()


@triton.jit
def _hash_kernel(rows, out, NUM: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    i = tl.arange(0, NUM)
    tl.store(out + i, triton_row_table.mixed(tl.load(rows + i).to(tl.uint32)).to(tl.int64))


def test_the_hash_of_a_row_agrees_with_the_twin_for_large_ids() -> None:
    rows = torch.tensor([2**31 - 2, 123_456_789, 1, 0])
    out = torch.zeros_like(rows)
    _hash_kernel[(1,)](rows.int(), out, NUM=4)
    assert torch.equal(out, row_table.mixed_rows(rows))
    assert len(set(out.tolist())) == 4
