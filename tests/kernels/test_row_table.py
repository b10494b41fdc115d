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

from helmrec.errors import ConfigError
from helmrec.kernels import row_index, row_lookup, row_table, triton_row_index, triton_row_table
from helmrec.kernels.row_gather import SKIP
from helmrec.kernels.row_index import ABSENT, WAYS, CompactIndex, IndexForm, RowIndex
from helmrec.kernels.row_table import (
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


@pytest.fixture(params=IndexForm)
def form(request: pytest.FixtureRequest) -> IndexForm:
    return IndexForm(request.param)


def make_table(form: IndexForm, num_resident: int = 40, admission: Admission = Admission.SECOND_TOUCH) -> RowTable:
    """Some rows in some slots, all of different heat."""
    table = RowTable.allocate(ROWS, SLOTS, CPU, admission, form)
    rows, slots = torch.randperm(ROWS)[:num_resident], torch.randperm(SLOTS)[:num_resident]
    assert table.index.insert(rows, slots).is_new.all()
    table.row_of[slots] = rows.int()
    table.heat[slots] = torch.randperm(num_resident).float()
    table.control[Control.NOW] = 50
    table.control[Control.CAPACITY] = SLOTS
    return table


PARTS = [field.name for field in fields(RowTable) if field.name not in {"num_rows", "index"}]


def twin_of(table: RowTable) -> RowTable:
    return replace(table, **{name: getattr(table, name).clone() for name in (*PARTS, "index")})


def assert_same(ours: RowTable, twin: RowTable) -> None:
    for name in PARTS:
        assert torch.equal(getattr(ours, name), getattr(twin, name)), name
    assert held(ours.index) == held(twin.index)


def held(index: RowIndex) -> list[tuple[int, int]]:
    """Rows and slots; in which of its entries a row is may differ."""
    return sorted(zip(*(part.tolist() for part in index.entries()), strict=True))


def absent_rows(table: RowTable) -> Tensor:
    return (table.index.slots_of(torch.arange(ROWS)) == ABSENT).nonzero().flatten()


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
def test_missed_rows_claim_as_the_twin_says(form: IndexForm, admission: Admission, is_filling: bool) -> None:
    ours = make_table(form, admission=admission)
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


def test_a_row_that_one_step_asks_for_twice_has_been_missed_once(form: IndexForm) -> None:
    ours = make_table(form, 0)
    rows, claims = torch.tensor([5, 9, 5, -1, 5], dtype=torch.int32), Claims.allocate(8, CPU)
    triton_row_table.claim(ours, missed_of(ours, rows), claims, admission=Admission.SECOND_TOUCH)
    assert int(claims.count) == 0
    triton_row_table.claim(ours, missed_of(ours, rows[2:3]), claims, admission=Admission.SECOND_TOUCH)
    assert claims.rows[: int(claims.count)].tolist() == [5]


def test_claims_beyond_the_limit_are_given_up(form: IndexForm) -> None:
    ours = make_table(form, 0)
    twin = twin_of(ours)
    missed = missed_of(ours, torch.arange(100, dtype=torch.int32))
    claims, expected = claim_both(ours, twin, missed, 10, admission=Admission.ALWAYS)
    assert int(claims.count) == 100
    assert sorted(claims.rows.tolist()) == sorted(expected.rows.tolist())


@pytest.mark.parametrize("num_resident", [0, 40, SLOTS])
def test_published_rows_take_the_coldest_slots(form: IndexForm, num_resident: int) -> None:
    ours = make_table(form, num_resident)
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
    assert torch.equal(ours.index.slots_of(ours.row_of[resident]), resident.int())
    assert len(held(ours.index)) == len(resident) == int((ours.heat != EMPTY).sum())


def test_rows_read_more_often_than_the_coldest_take_their_slots(form: IndexForm) -> None:
    ours = make_table(form, SLOTS, Admission.FREQUENCY)
    ours.heat[:SLOTS] += 50  # so that the coldest were read once by now, and the others more often
    twin = twin_of(ours)
    absent = absent_rows(ours)[:30].int()
    given, counted = [], ours.touches.clone()
    for num_rows in (30, 20, 10):  # ten rows are read three times
        missed = missed_of(ours, absent[:num_rows])
        claims, expected = claim_both(ours, twin, missed, 32, Admission.FREQUENCY)
        victims = all_victims(ours, 32)
        copies, expected_copies = torch.zeros(32, dtype=torch.int32), torch.ones(32, dtype=torch.int32)
        triton_row_table.publish(ours, claims, victims, copies, by_heat=True)
        row_table.publish(twin, expected, victims, expected_copies, by_heat=True)
        assert torch.equal(copies, expected_copies)
        assert_same(ours, twin)
        given.append(int((copies != SKIP).sum()))
        assert (ours.touches != counted).any(), "touches of absent rows are counted"
    # Slots have heat 50, 51, 52, ... A row read once has 50, one read twice 51, one read three times 51.6.
    assert given == [0, 1, 2], "the first slot is taken at 51, and then both slots of heat 51 at 51.6"
    assert len(held(ours.index)) == SLOTS


@pytest.mark.parametrize("limit", [700, 5_000])
def test_rows_read_most_often_claim_first(limit: int) -> None:
    ours = RowTable.allocate(5_000, 5_000, CPU, Admission.FREQUENCY)
    ours.control[Control.NOW] = 50
    ours.touches.copy_(torch.randint(0, 256, ours.touches.shape, dtype=torch.uint8))
    twin = twin_of(ours)
    rows, taken = list[int](), (set[int](), set[int]())
    for row in torch.randperm(5_000).tolist():  # no two share a counter, so that their order does not matter
        places = [int(place) for place in row_index.places_of(torch.tensor([row]), len(ours.touches))]
        if len(rows) < 1_000 and not any(place in known for place, known in zip(places, taken, strict=True)):
            rows.append(row)
            for place, known in zip(places, taken, strict=True):
                known.add(place)
    missed = missed_of(ours, torch.tensor(rows).int())
    claims, expected = claim_both(ours, twin, missed, limit, Admission.FREQUENCY)
    num = min(1_000, limit)
    assert int(claims.count) == int(expected.count)
    assert torch.equal(claims.heat[:num], expected.heat[:num])
    assert (claims.heat[: num - 1] >= claims.heat[1:num]).all()
    assert len(claims.heat[:num].unique()) > 5
    entry_of: list[dict[int, int]] = [
        dict(zip(each.rows[:num].tolist(), each.entries[:num].tolist(), strict=True)) for each in (claims, expected)
    ]
    assert entry_of[0] == entry_of[1]
    assert len(entry_of[0]) == num


@pytest.mark.parametrize(("hand", "pages"), [(0, [2, 0, 3]), (11, [2, 0, 3]), (5, [1]), (0, [])])
def test_the_window_begins_at_the_hand_and_ends_with_the_owned_slots(hand: int, pages: list[int]) -> None:
    table, per_page = make_table(IndexForm.DENSE, SLOTS), SLOTS // 4
    listed = torch.tensor([*pages, *[0] * (4 - len(pages))])
    table.control[Control.HAND], table.control[Control.CAPACITY] = hand, len(pages) * per_page
    owned = [page * per_page + i for page in pages for i in range(per_page)]
    for module in (row_table, triton_row_table):
        slots, heat = torch.full((20,), -5), torch.zeros(20)
        module.window(table, listed, per_page, slots, heat)
        num = min(20, len(owned))
        assert slots[:num].tolist() == [owned[(hand + i) % len(owned)] for i in range(num)]
        assert torch.equal(heat[:num], table.heat[slots[:num]])
        assert (heat[num:] == UNUSABLE).all()


def test_what_was_counted_for_a_row_outlives_its_eviction_and_fades(form: IndexForm) -> None:
    table = make_table(form, SLOTS, Admission.FREQUENCY)
    table.heat[:SLOTS] = 50 + 2.0  # four touches each
    claims = Claims.allocate(4, CPU)
    claims.count.fill_(1)
    claims.rows[0], claims.heat[0] = int(absent_rows(table)[0]), 60.0
    victims = all_victims(table, 4)
    evicted = table.row_of[victims.slots[:1]].long()
    for publish in (row_table.publish, triton_row_table.publish):
        one = twin_of(table)
        publish(one, claims, victims, torch.zeros(4, dtype=torch.int32), by_heat=True)
        assert row_table.counted_touches(one.touches, evicted).tolist() == [4]
        one.age()
        assert row_table.counted_touches(one.touches, evicted).tolist() == [2]


def test_a_claim_without_a_victim_is_given_up(form: IndexForm) -> None:
    ours = make_table(form, SLOTS)
    twin = twin_of(ours)
    missed = missed_of(ours, torch.arange(ROWS, dtype=torch.int32))
    claims, expected = claim_both(ours, twin, missed, 8, admission=Admission.ALWAYS)
    victims = all_victims(ours, 8)
    victims.heat[3:] = UNUSABLE
    copies = torch.zeros(8, dtype=torch.int32)
    triton_row_table.publish(ours, claims, victims, copies)
    row_table.publish(twin, expected, victims, copies.clone())
    assert (copies != SKIP).tolist() == [True] * 3 + [False] * 5
    assert len(held(ours.index)) == len(held(twin.index)) == SLOTS


def test_places_beyond_the_claims_copy_nothing(form: IndexForm) -> None:
    ours = make_table(form, 0)
    claims = Claims.allocate(3_000, CPU)
    row_table.claim(ours, missed_of(ours, torch.arange(4, dtype=torch.int32)), claims, admission=Admission.ALWAYS)
    copies = torch.zeros(3_000, dtype=torch.int32)
    triton_row_table.publish(ours, claims, all_victims(ours, SLOTS), copies)
    assert (copies[:4] >= 0).all()
    assert (copies[4:] == SKIP).all()


def test_a_row_that_a_refill_asks_for_twice_gets_one_slot(form: IndexForm) -> None:
    ours = make_table(form, 0)
    twin = twin_of(ours)
    missed = Missed(~torch.tensor([7, 9, 7, 7, 4]).int(), torch.arange(5), torch.tensor([5], dtype=torch.int32))
    claims, expected = claim_both(ours, twin, missed, 8, Admission.ALWAYS)
    victims = all_victims(ours, 8)
    copies, expected_copies = torch.zeros(8, dtype=torch.int32), torch.ones(8, dtype=torch.int32)
    triton_row_table.publish(ours, claims, victims, copies)
    row_table.publish(twin, expected, victims, expected_copies)
    assert sorted(row for row, _ in held(ours.index)) == [4, 7, 9]
    assert (copies != SKIP).sum() == ours.tally[RowTally.ADMITTED] == 3
    assert ours.tally[RowTally.REFUSED] == 0, "its second claim was not short of an entry"
    assert torch.equal(copies, expected_copies)
    assert_same(ours, twin)


@pytest.mark.parametrize("by_heat", [False, True])
def test_rows_without_a_free_entry_are_refused_and_leave_their_slots_empty(by_heat: bool) -> None:
    ours = replace(make_table(IndexForm.COMPACT, 0), index=CompactIndex.allocate(ROWS, 8, CPU))
    ours.index.insert(torch.arange(200, 205), torch.arange(5))
    ours.row_of[:5], ours.heat[:5] = torch.arange(200, 205).int(), 3.0
    missed = missed_of(ours, torch.arange(64, dtype=torch.int32))
    claims = Claims.allocate(64, CPU)
    row_table.claim(ours, missed, claims, admission=Admission.ALWAYS)
    claims.heat.fill_(100.0)
    twin, victims = twin_of(ours), all_victims(ours, 64)
    copies, expected = torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    triton_row_table.publish(ours, claims, victims, copies, by_heat=by_heat)
    row_table.publish(twin, claims, victims, expected, by_heat=by_heat)
    assert torch.equal(ours.tally, twin.tally)
    given = copies != SKIP
    assert given.sum() == 2 * WAYS, "both buckets are full"
    assert ours.tally[RowTally.REFUSED] == 64 - 2 * WAYS
    assert ours.tally[RowTally.ADMITTED] == 2 * WAYS
    assert ours.tally[RowTally.EVICTED] == 5
    for table in (ours, twin):
        resident = (table.row_of != ABSENT).nonzero().flatten()
        assert torch.equal(table.index.slots_of(table.row_of[resident]), resident.int())
        assert len(held(table.index)) == len(resident) == 2 * WAYS
        assert (table.heat[resident] > EMPTY).all()
        assert int((table.heat != EMPTY).sum()) == len(resident)


def test_more_rows_than_an_int32_counts_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most 2147483647 rows and slots, got 2147483648 and 4"):
        RowTable.allocate(2**31, 4, CPU, Admission.ALWAYS)


@triton.jit
def _hash_kernel(rows, out, NUM: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    i = tl.arange(0, NUM)
    tl.store(out + i, triton_row_index.mixed(tl.load(rows + i).to(tl.uint32)).to(tl.int64))


def test_the_hash_of_a_row_agrees_with_the_twin_for_large_ids() -> None:
    rows = torch.tensor([2**31 - 2, 123_456_789, 1, 0])
    out = torch.zeros_like(rows)
    _hash_kernel[(1,)](rows.int(), out, NUM=4)
    assert torch.equal(out, row_index.mixed_rows(rows))
    assert len(set(out.tolist())) == 4
