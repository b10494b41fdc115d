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

from helmrec.kernels import row_lookup, row_table, triton_row_table
from helmrec.kernels.row_gather import SKIP
from helmrec.kernels.row_table import ABSENT, EMPTY, UNUSABLE, Claims, Control, Missed, RowTable, RowTally, Victims

ROWS, SLOTS, CPU = 300, 64, torch.device("cpu")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def make_table(num_resident: int = 40) -> RowTable:
    """Some rows in some slots, all of different heat."""
    table = RowTable.allocate(ROWS, SLOTS, CPU)
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


def claim_both(ours: RowTable, twin: RowTable, missed: Missed, limit: int, is_filtered: bool) -> tuple[Claims, Claims]:
    claims, expected = Claims.allocate(limit, CPU), Claims.allocate(limit, CPU)
    triton_row_table.claim(ours, missed, claims, is_filtered=is_filtered)
    row_table.claim(twin, missed, expected, is_filtered=is_filtered)
    return claims, expected


def missed_of(table: RowTable, rows: Tensor) -> Missed:
    lookup = row_lookup.Lookup.allocate(len(rows), CPU)
    row_lookup.find(table, rows, lookup, is_lru=True)
    return lookup.missed


@pytest.mark.parametrize("is_filtered", [False, True])
@pytest.mark.parametrize("is_filling", [False, True])
def test_missed_rows_claim_as_the_twin_says(is_filtered: bool, is_filling: bool) -> None:
    ours = make_table()
    ours.control[Control.IS_FILLING] = float(is_filling)
    twin = twin_of(ours)
    for step in range(4):
        ours.control[Control.GENERATION] = twin.control[Control.GENERATION] = step // 2
        rows = torch.randint(-1, ROWS, (150,)).int()
        missed = missed_of(twin, rows)
        missed_of(ours, rows)
        claims, expected = claim_both(ours, twin, missed, 512, is_filtered)
        assert int(claims.count) == int(expected.count)
        num = int(claims.count)
        assert set(zip(claims.rows[:num].tolist(), claims.entries[:num].tolist(), strict=True)) == set(
            zip(expected.rows[:num].tolist(), expected.entries[:num].tolist(), strict=True)
        )
        assert_same(ours, twin)
        for table, made in ((ours, claims), (twin, expected)):
            table.slot_of[made.rows[:num].long()] = ABSENT  # as if none had found a slot


def test_a_row_that_one_step_asks_for_twice_has_been_missed_once() -> None:
    ours = make_table(0)
    rows, claims = torch.tensor([5, 9, 5, -1, 5], dtype=torch.int32), Claims.allocate(8, CPU)
    triton_row_table.claim(ours, missed_of(ours, rows), claims, is_filtered=True)
    assert int(claims.count) == 0
    triton_row_table.claim(ours, missed_of(ours, rows[2:3]), claims, is_filtered=True)
    assert claims.rows[: int(claims.count)].tolist() == [5]


def test_claims_beyond_the_limit_are_given_up() -> None:
    ours = make_table(0)
    twin = twin_of(ours)
    missed = missed_of(ours, torch.arange(100, dtype=torch.int32))
    claims, expected = claim_both(ours, twin, missed, 10, is_filtered=False)
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
    row_table.claim(ours, missed, claims, is_filtered=True)
    twin, victims = twin_of(ours), all_victims(ours, 20)
    copies, expected = torch.zeros(20, dtype=torch.int32), torch.ones(20, dtype=torch.int32)
    triton_row_table.publish(ours, claims, victims, copies)
    row_table.publish(twin, claims, victims, expected)
    assert torch.equal(copies, expected)
    assert_same(ours, twin)
    resident = (ours.row_of != ABSENT).nonzero().flatten()
    assert torch.equal(ours.slot_of[ours.row_of[resident].long()], resident.int())
    assert int((ours.slot_of[:-1] >= 0).sum()) == len(resident) == int((ours.heat != EMPTY).sum())


def test_a_claim_without_a_victim_is_given_up() -> None:
    ours = make_table(SLOTS)
    twin = twin_of(ours)
    missed = missed_of(ours, torch.arange(ROWS, dtype=torch.int32))
    claims, expected = claim_both(ours, twin, missed, 8, is_filtered=False)
    victims = all_victims(ours, 8)
    victims.heat[3:] = UNUSABLE
    copies = torch.zeros(8, dtype=torch.int32)
    triton_row_table.publish(ours, claims, victims, copies)
    row_table.publish(twin, expected, victims, copies.clone())
    assert (copies != SKIP).tolist() == [True] * 3 + [False] * 5
    assert int((ours.slot_of[:-1] >= 0).sum()) == int((twin.slot_of[:-1] >= 0).sum()) == SLOTS
    assert (ours.slot_of[:-1] >= ABSENT).all()


def test_the_two_hashes_of_a_row_agree_with_the_twin_for_large_ids() -> None:
    table = RowTable.allocate(10, SLOTS, CPU)
    big = torch.tensor([~(2**31 - 2), ~123_456_789, ~0], dtype=torch.int32)
    wide = replace(table, slot_of=torch.full((1,), row_table.CLAIMED, dtype=torch.int32))
    seen = replace(wide, seen=table.seen.clone())
    for row in (~big.long()).tolist():
        row_table._is_seen_again(seen.seen, 0, row)
    marked = torch.zeros_like(table.seen)
    words = marked.numpy().view("uint32")
    for row in (~big.long()).tolist():
        for place in row_table.places_of(row, 32 * table.seen.shape[1]):
            words[0, place >> 5] |= 1 << (place & 31)
    assert torch.equal(seen.seen, marked)
