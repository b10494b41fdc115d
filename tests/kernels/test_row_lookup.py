"""Finding the rows of a step against its twin, in Triton's interpreter."""

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

if torch.cuda.is_available():
    pytest.skip("with a GPU, tests/gpu runs the same kernels compiled", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when Triton and each kernel is imported, so before that
pytest.importorskip("triton", reason="Triton is not installed here")

from helmrec.kernels import row_lookup, triton_row_lookup
from helmrec.kernels.row_gather import SKIP
from helmrec.kernels.row_index import IndexForm, mixed_rows
from helmrec.kernels.row_lookup import BUCKETS, Lookup, Repeats, bucket_shift, num_cells
from helmrec.kernels.row_table import Admission, Control, Missed, RowTable

ROWS, SLOTS, CPU = 40_000, 64, torch.device("cpu")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def make_table(form: IndexForm = IndexForm.DENSE, num_resident: int = 40) -> RowTable:
    """The first rows in some slots, all of different heat."""
    table = RowTable.allocate(ROWS, SLOTS, CPU, Admission.ALWAYS, form)
    slots = torch.randperm(SLOTS)[:num_resident]
    assert table.index.insert(torch.arange(num_resident), slots).is_new.all()
    table.row_of[slots] = torch.arange(num_resident).int()
    table.heat[slots] = torch.randperm(num_resident).float()
    table.control[Control.NOW] = 50
    return table


def asked_rows(num: int, kind: str) -> Tensor:
    """Rows of a step: some resident, some padding, many or no repeats."""
    ranges = {"repeats": (-1, 120), "spread": (-1, ROWS)}
    if kind == "one row":
        return torch.full((num,), 17_000, dtype=torch.int32)
    return torch.randint(*ranges[kind], (num,), dtype=torch.int32)


def pairs(listed: Missed | Repeats) -> list[tuple[int, int]]:
    num = int(listed.count)
    return list(zip(listed.sources[:num].tolist(), listed.places[:num].tolist(), strict=True))


@pytest.mark.parametrize("form", IndexForm)
@pytest.mark.parametrize("kind", ["repeats", "spread", "one row"])
@pytest.mark.parametrize("num", [0, 1, 300, 2_500])
def test_each_missed_row_is_read_once_by_the_first_entry_that_asks_for_it(num: int, kind: str, form: IndexForm) -> None:
    rows, ours = asked_rows(num, kind), make_table(form)
    lookup, expected = Lookup.allocate(num, CPU), Lookup.allocate(num, CPU)
    for _ in range(2):  # what a step leaves behind does not reach the next
        triton_row_lookup.find(ours, rows, lookup, is_lru=True)
        row_lookup.find(ours, rows, expected, is_lru=True)
    assert torch.equal(lookup.sources, expected.sources)
    assert torch.equal(lookup.is_missed, expected.is_missed)
    shift = bucket_shift(ROWS)
    assert [~source >> shift for source, _ in pairs(lookup.missed)] == sorted(
        ~source >> shift for source, _ in pairs(lookup.missed)
    )
    assert sorted(pairs(lookup.missed)) == sorted(pairs(expected.missed))
    assert sorted(pairs(lookup.repeats)) == sorted(pairs(expected.repeats))
    first: dict[int, int] = {}
    for entry, row in enumerate(rows.tolist()):
        if row >= 40:
            first.setdefault(row, entry)
    assert {~source: entry for source, entry in pairs(lookup.missed)} == first
    for source, entry in pairs(lookup.repeats):
        assert source == first[int(rows[entry])] < entry
    slots = ours.index.slots_of(torch.arange(40)).tolist()
    for row, source in zip(rows.tolist(), lookup.sources.tolist(), strict=True):
        assert source == (slots[row] if 0 <= row < 40 else SKIP)


@pytest.mark.parametrize("form", IndexForm)
@pytest.mark.parametrize("is_lru", [True, False])
def test_resident_rows_get_hotter_and_nothing_else_of_the_table_changes(is_lru: bool, form: IndexForm) -> None:
    ours = make_table(form)
    twin = replace(ours, index=ours.index.clone(), row_of=ours.row_of.clone(), heat=ours.heat.clone())
    rows = torch.randperm(200)[:150].int()  # whether a repeated row counts twice is chance
    lookup = Lookup.allocate(len(rows), CPU)
    triton_row_lookup.find(ours, rows, lookup, is_lru=is_lru)
    row_lookup.find(twin, rows, lookup, is_lru=is_lru)
    assert torch.allclose(ours.heat, twin.heat, rtol=1e-6)
    assert torch.equal(ours.index.data, twin.index.data)
    assert torch.equal(ours.row_of, twin.row_of)


def test_rows_whose_hashes_collide_are_kept_apart() -> None:
    cells = num_cells(64)
    hashes = mixed_rows(torch.arange(ROWS)) & (cells - 1)
    rows = (hashes == cells - 1).nonzero().flatten()[-64:].int()
    assert len(rows) == 64, "all of them want the last cell"
    lookup = Lookup.allocate(64, CPU)
    triton_row_lookup.find(make_table(), rows, lookup, is_lru=True)
    assert sorted(~source for source, _ in pairs(lookup.missed)) == sorted(rows.tolist())


def test_a_smaller_step_uses_the_memory_of_a_larger_one() -> None:
    whole, table = Lookup.allocate(2_000, CPU), make_table()
    triton_row_lookup.find(table, asked_rows(2_000, "spread"), whole, is_lru=True)
    part, rows = whole.of_size(300), asked_rows(300, "repeats")
    triton_row_lookup.find(table, rows, part, is_lru=True)
    alone = Lookup.allocate(300, CPU)
    row_lookup.find(table, rows, alone, is_lru=True)
    assert sorted(pairs(part.missed)) == sorted(pairs(alone.missed))
    assert torch.equal(part.sources, alone.sources)
    assert torch.equal(part.is_missed, alone.is_missed)


@pytest.mark.parametrize("num_rows", [1, 2, BUCKETS - 1, BUCKETS, BUCKETS + 1, 10**6, 2**31 - 1])
def test_every_row_has_a_bucket(num_rows: int) -> None:
    assert (num_rows - 1) >> bucket_shift(num_rows) < BUCKETS


@pytest.mark.parametrize("lengths", [[5], [3, 0, 7], [0, 0, 4, 1, 0], [40, 60, 1, 99]])
@pytest.mark.parametrize("num_features", [1, 3])
@pytest.mark.parametrize("num_tables", [0, 2])
def test_misses_are_counted_by_sequence(lengths: list[int], num_features: int, num_tables: int) -> None:
    num_sequences, num_events = len(lengths) + 2, sum(lengths) + 6  # padded, as a captured step is
    cu_events = torch.tensor([0, *lengths, 0, 0]).cumsum(0)
    owners = torch.arange(num_sequences).repeat_interleave(cu_events.diff())
    of_events = torch.cat([owners, torch.full((6,), -1)]).repeat(num_features)
    of_entries = torch.cat([of_events, torch.arange(num_sequences).repeat(num_tables)])
    places = torch.randperm(len(of_entries))
    places = places[(of_entries[places] >= 0) & (torch.rand(len(places)) < 0.7)]
    listed = torch.full((len(of_entries),), 999)
    listed[: len(places)] = places
    missed = Missed(torch.zeros_like(listed).int(), listed, torch.tensor([len(places)], dtype=torch.int32))
    expected = of_entries[places].bincount(minlength=num_sequences)
    for module in (row_lookup, triton_row_lookup):
        counts = torch.full((num_sequences,), 77)
        module.count_by_sequence(missed, cu_events, num_features, num_events, counts)
        assert torch.equal(counts, expected), module.__name__
