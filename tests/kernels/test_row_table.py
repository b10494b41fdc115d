"""Finding, claiming and publishing rows against their twins, in Triton's interpreter."""

import os
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

if torch.cuda.is_available():
    pytest.skip("with a GPU, tests/gpu runs the same kernels compiled", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when Triton and each kernel is imported, so before that
pytest.importorskip("triton", reason="Triton is not installed here")

from helmrec.kernels import row_table, triton_row_table
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


@pytest.mark.parametrize("is_lru", [True, False])
@pytest.mark.parametrize("num", [0, 1, 300, 2_500])
def test_found_rows_are_where_the_table_says_and_hotter_for_it(num: int, is_lru: bool) -> None:
    ours = make_table()
    twin = twin_of(ours)
    rows = torch.randint(-1, ROWS, (num,), dtype=torch.int32)
    if not is_lru:
        rows = rows[torch.randperm(num)].unique().int()  # whether a repeated row counts twice is chance
    sources, expected = torch.full_like(rows, 7), torch.full_like(rows, 8)
    missed, expected_missed = Missed.allocate(len(rows), CPU), Missed.allocate(len(rows), CPU)
    triton_row_table.find(ours, rows, sources, missed, is_lru=is_lru)
    row_table.find(twin, rows, expected, expected_missed, is_lru=is_lru)
    assert torch.equal(sources, expected)
    assert torch.allclose(ours.heat, twin.heat, rtol=1e-6)
    for field in fields(missed):
        assert torch.equal(getattr(missed, field.name), getattr(expected_missed, field.name)), field.name
    absent = [row >= 0 and int(twin.slot_of[row]) < 0 for row in rows.tolist()]
    num = int(missed.count)
    assert missed.places[:num].tolist() == [i for i, is_absent in enumerate(absent) if is_absent]
    assert (missed.sources[:num] == ~rows[missed.places[:num]]).all()
    for i, (row, source) in enumerate(zip(rows.tolist(), sources.tolist(), strict=True)):
        assert source == (SKIP if row == ABSENT or absent[i] else int(twin.slot_of[row]))


def test_missed_rows_in_order_are_by_address_and_the_unused_come_last() -> None:
    missed = Missed.allocate(6, CPU)
    missed.sources[:3] = torch.tensor([~7, ~2, ~9], dtype=torch.int32)
    missed.places[:3] = torch.tensor([4, 0, 5])
    missed.count.fill_(3)
    ordered = missed.in_order()
    assert (~ordered.sources[:3]).tolist() == [9, 7, 2]
    assert ordered.places[:3].tolist() == [5, 4, 0]


def claim_both(ours: RowTable, twin: RowTable, missed: Missed, limit: int, is_filtered: bool) -> tuple[Claims, Claims]:
    claims, expected = Claims.allocate(limit, CPU), Claims.allocate(limit, CPU)
    triton_row_table.claim(ours, missed, claims, is_filtered=is_filtered)
    row_table.claim(twin, missed, expected, is_filtered=is_filtered)
    return claims, expected


def missed_of(table: RowTable, rows: Tensor) -> Missed:
    missed = Missed.allocate(len(rows), CPU)
    row_table.find(table, rows, torch.empty_like(rows), missed, is_lru=True)
    return missed


@pytest.mark.parametrize("is_filtered", [False, True])
@pytest.mark.parametrize("is_filling", [False, True])
def test_missed_rows_claim_as_the_twin_says(is_filtered: bool, is_filling: bool) -> None:
    ours = make_table()
    ours.control[Control.IS_FILLING] = float(is_filling)
    twin = twin_of(ours)
    for step in range(4):
        ours.control[Control.GENERATION] = twin.control[Control.GENERATION] = step // 2
        rows = torch.randint(-1, ROWS, (150,)).unique().int()  # which of two entries of a row claims is chance
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


def test_a_row_missed_twice_claims_once_and_by_its_second_entry() -> None:
    ours = make_table(0)
    rows = torch.tensor([5, 9, 5, -1, 5], dtype=torch.int32)
    missed = missed_of(ours, rows)
    claims = Claims.allocate(8, CPU)
    triton_row_table.claim(ours, missed, claims, is_filtered=True)
    assert int(claims.count) == 1
    assert int(claims.rows[0]) == 5


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
