"""Both forms of the index of resident rows against a dictionary, and in Triton's interpreter against each other."""

import os

import numpy as np
import pytest
import torch
from torch import Tensor

if torch.cuda.is_available():
    pytest.skip("with a GPU, tests/gpu runs the same kernels compiled", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when Triton and each kernel is imported, so before that
pytest.importorskip("triton", reason="Triton is not installed here")

import triton
import triton.language as tl

from helmrec.kernels import triton_row_index
from helmrec.kernels.row_index import ABSENT, INDEXES, WAYS, CompactIndex, IndexForm, RowIndex, buckets_of, index_form

ROWS, SLOTS, CPU, BLOCK = 5_000, 300, torch.device("cpu"), 64


def held(index: RowIndex) -> dict[int, int]:
    rows, slots = index.entries()
    assert len(set(rows.tolist())) == len(rows), "a row has two entries"
    return dict(zip(rows.tolist(), slots.tolist(), strict=True))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("form", IndexForm)
def test_it_holds_what_a_dictionary_holds(form: IndexForm, dtype: torch.dtype) -> None:
    rng, index, expected = np.random.default_rng(0), INDEXES[form].allocate(ROWS, 2 * SLOTS, CPU), dict[int, int]()
    for _ in range(40):
        rows, slots = rng.integers(0, ROWS, 80), rng.permutation(SLOTS)[:80]
        inserted = index.insert(torch.from_numpy(rows).to(dtype), torch.from_numpy(slots))
        for row, slot, is_new in zip(rows.tolist(), slots.tolist(), inserted.is_new.tolist(), strict=True):
            assert is_new == (row not in expected)
            expected.setdefault(row, slot)
        assert not inserted.is_refused.any()
        moved = rng.permutation([*expected])[:20]
        index.move(padded(moved, dtype), padded(moved % SLOTS, dtype))
        expected |= {row: row % SLOTS for row in moved.tolist()}
        gone = rng.permutation([*expected])[: max(0, len(expected) - SLOTS + 80)]
        index.clear(padded(np.append(gone, ROWS - 1 if ROWS - 1 not in expected else gone), dtype))
        for row in gone.tolist():
            del expected[row]
        assert held(index) == expected
        every = torch.arange(-1, ROWS).to(dtype)
        assert index.slots_of(every).tolist() == [expected.get(row, ABSENT) for row in every.tolist()]


def padded(values: Tensor | np.ndarray, dtype: torch.dtype) -> Tensor:
    return torch.cat([torch.as_tensor(values), torch.tensor([ABSENT, ABSENT])]).to(dtype)


def rows_of_bucket(index: CompactIndex, bucket: int) -> Tensor:
    """Rows that may be in no other bucket."""
    return (buckets_of(torch.arange(ROWS), index.num_buckets) == bucket).all(1).nonzero().flatten()


def test_a_row_whose_buckets_are_full_is_refused_until_one_leaves() -> None:
    index = CompactIndex.allocate(ROWS, 16, CPU)
    rows = rows_of_bucket(index, 2)[: WAYS + 3]
    inserted = index.insert(rows, torch.arange(len(rows)))
    assert inserted.is_new.tolist() == [True] * WAYS + [False] * 3
    assert inserted.is_refused.tolist() == [False] * WAYS + [True] * 3
    index.clear(rows[4:5])
    assert index.insert(rows[-1:], torch.tensor([9])).is_new.all()
    assert index.slots_of(rows).tolist() == [0, 1, 2, 3, ABSENT, 5, 6, 7, ABSENT, ABSENT, 9]


def test_few_rows_are_refused_while_all_slots_are_used_and_rows_come_and_go() -> None:
    """With one bucket for a row it would be about one of thirty."""
    rng, num_slots = np.random.default_rng(1), 4_096
    index = CompactIndex.allocate(10**9, num_slots, CPU)
    row_of, refused, tried = np.full(num_slots, ABSENT), 0, 0
    for _ in range(96):
        slots, rows = rng.permutation(num_slots)[:512], np.unique(rng.integers(0, 10**9, 600))[:512]
        rng.shuffle(rows)
        empty = np.flatnonzero(row_of == ABSENT)
        slots = empty[:512] if len(empty) >= 512 else slots
        index.clear(torch.from_numpy(row_of[slots]))
        inserted = index.insert(torch.from_numpy(rows), torch.from_numpy(slots))
        row_of[slots] = np.where(inserted.is_new.numpy(), rows, ABSENT)
        refused, tried = refused + int(inserted.is_refused.sum()), tried + len(rows)
    assert 0 < refused < 0.004 * tried
    assert (row_of != ABSENT).mean() > 0.99


@triton.jit
def _insert_kernel(index, rows, slots, wanted, is_new, is_refused, BUCKETS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803, PLR0917
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    asked = tl.load(wanted + i) != 0
    new, refused = triton_row_index.insert(index, tl.load(rows + i), tl.load(slots + i), asked, BUCKETS)
    tl.store(is_new + i, new.to(tl.int8))
    tl.store(is_refused + i, refused.to(tl.int8))


@triton.jit
def _clear_kernel(index, rows, wanted, found, BUCKETS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    asked, row = tl.load(wanted + i) != 0, tl.load(rows + i)
    tl.store(found + i, triton_row_index.slots_of(index, row, asked, BUCKETS))
    triton_row_index.clear(index, row, asked, BUCKETS)


@pytest.mark.parametrize("num_slots", [8, 40, SLOTS])
@pytest.mark.parametrize("form", IndexForm)
def test_kernels_insert_find_and_clear_as_the_twin_does(form: IndexForm, num_slots: int) -> None:
    torch.manual_seed(num_slots)
    ours = INDEXES[form].allocate(ROWS, num_slots, CPU)
    twin = ours.clone()
    for _ in range(6):
        rows, slots = torch.randint(0, 400, (4 * BLOCK,)).int(), torch.randint(0, num_slots, (4 * BLOCK,)).int()
        rows[0] = ROWS - 1
        wanted, found = torch.randint(0, 4, (4 * BLOCK,)).to(torch.int8).clamp_max(1), torch.zeros(4 * BLOCK).int()
        is_new, is_refused = torch.zeros_like(wanted), torch.zeros_like(wanted)
        _insert_kernel[(4,)](ours.data, rows, slots, wanted, is_new, is_refused, BUCKETS=ours.num_buckets, BLOCK=BLOCK)
        asked = wanted != 0
        expected = twin.insert(rows[asked], slots[asked])
        assert int(is_new.sum()) == int(expected.is_new.sum())
        if num_slots == SLOTS or form == IndexForm.DENSE:  # else it depends on the order in which rows come
            assert held(ours).keys() == held(twin).keys()
        assert not (is_new & is_refused).any()
        assert not is_new[~asked].any()
        assert not is_refused[~asked].any()
        present = {
            row: slot for row, slot, new in zip(rows.tolist(), slots.tolist(), is_new.tolist(), strict=True) if new
        }
        assert present.items() <= held(ours).items()
        left = held(ours)
        gone = torch.unique(rows[:90])
        asked_gone = torch.ones(BLOCK * 2, dtype=torch.int8)
        asked_gone[len(gone) :] = 0
        gone = torch.cat([gone, torch.zeros(2 * BLOCK - len(gone), dtype=torch.int32)])
        _clear_kernel[(2,)](ours.data, gone, asked_gone, found, BUCKETS=ours.num_buckets, BLOCK=BLOCK)
        num = int(asked_gone.sum())
        assert found[:num].tolist() == [left.get(row, ABSENT) for row in gone[:num].tolist()]
        assert (found[num : 2 * BLOCK] == ABSENT).all()
        for row in gone[:num].tolist():
            left.pop(row, None)
        assert held(ours) == left
        twin = ours.clone()


def test_the_form_follows_the_sizes() -> None:
    assert index_form(1_000_000, 1_000) == IndexForm.DENSE, "a small index is not worth a slower lookup"
    assert index_form(10**9, 40_000_000) == IndexForm.COMPACT
    assert index_form(10**9, 130_000_000) == IndexForm.DENSE, "a pool of so many slots needs a compact index as large"
    for num_slots in (0, 1, 4, 5, 1_000):
        for form, index in INDEXES.items():
            made = index.allocate(ROWS, num_slots, CPU)
            assert made.data.nbytes == index.bytes_for(ROWS, num_slots), form
    assert CompactIndex.bytes_for(10**9, 10**7) < 0.041 * INDEXES[IndexForm.DENSE].bytes_for(10**9, 10**7)


@pytest.mark.parametrize("num_buckets", [1, 3, 1_000, 10**7])
def test_rows_spread_over_all_buckets(num_buckets: int) -> None:
    buckets = buckets_of(torch.arange(10**9 - 20_000, 10**9), num_buckets)
    assert 0 <= int(buckets.min()) <= int(buckets.max()) < num_buckets
    assert len(buckets.unique()) > 0.9 * min(num_buckets, 40_000)
