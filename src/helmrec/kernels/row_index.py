"""The index of resident rows, in plain torch: which slot holds a row. Kernels use its twin: `triton_row_index.py`.

It has two forms behind one interface. The dense index has an entry for every row of the tables: one read a lookup. The
compact index has entries for resident rows only: a row may be in either of two buckets of eight entries, the first of
them if that has room. Its size depends on the slots, not on the tables. Nothing here knows heat or row data.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

ABSENT = -1  # no row, or no slot
WAYS = 8  # entries of a bucket: its rows are one sector of memory, its slots the next
_SLOTS_PER_BUCKET = 4  # so that at most half of the entries are used
_SMALL_BYTES = 256 << 20  # a dense index up to this size is not worth a slower lookup
_LEAST_GAIN = 2  # times that the dense index must be larger than the compact one


class IndexForm(StrEnum):
    """The forms of the index."""

    DENSE = "dense"
    COMPACT = "compact"


def index_form(num_rows: int, num_slots: int) -> IndexForm:
    """Return the form for tables and pool of this size: dense, unless it is large and compact takes less than half."""
    dense, compact = DenseIndex.bytes_for(num_rows, num_slots), CompactIndex.bytes_for(num_rows, num_slots)
    return IndexForm.COMPACT if dense > max(_SMALL_BYTES, _LEAST_GAIN * compact) else IndexForm.DENSE


class Inserted(NamedTuple):
    """The result of an insertion, for each row. A row that was in the index already is neither."""

    is_new: Tensor  # (rows,) bool
    is_refused: Tensor  # (rows,) bool: both of its buckets are full


class IndexEntries(NamedTuple):
    """Everything an index holds."""

    rows: Tensor  # (entries,) int64
    slots: Tensor  # (entries,) int64


@dataclass(frozen=True, slots=True, eq=False)
class DenseIndex:
    """A slot for every row of the tables. Methods take rows, int32 or int64; ABSENT is padding."""

    data: Tensor  # (rows + 1,) int32: slot or ABSENT; the last entry is for padding and always ABSENT
    num_buckets: ClassVar[int] = 0

    @staticmethod
    def allocate(num_rows: int, num_slots: int, device: torch.device) -> "DenseIndex":
        return DenseIndex(torch.full((num_rows + 1,), ABSENT, dtype=torch.int32, device=device))

    @staticmethod
    def bytes_for(num_rows: int, num_slots: int) -> int:
        """Return the bytes that `allocate` takes."""
        return 4 * (num_rows + 1)

    def clone(self) -> "DenseIndex":
        return DenseIndex(self.data.clone())

    def slots_of(self, rows: Tensor) -> Tensor:  # (rows,) int32
        """Return the slots of rows, ABSENT where there is none."""
        return self.data[self._places(rows)]

    def insert(self, rows: Tensor, slots: Tensor) -> Inserted:
        """Enter rows with their slots; of equal rows the first. Waits for the device."""
        is_new = _are_first(rows) & (self.slots_of(rows) == ABSENT)
        self.data[rows[is_new].long()] = slots[is_new].int()
        return Inserted(is_new, torch.zeros_like(is_new))

    def clear(self, rows: Tensor) -> None:
        """Remove rows."""
        self.data.index_fill_(0, self._places(rows), ABSENT)

    def move(self, rows: Tensor, slots: Tensor) -> None:
        """Give rows of the index other slots."""
        self.data[self._places(rows)] = slots.int()
        self.data[-1:].fill_(ABSENT)

    def entries(self) -> IndexEntries:
        """Return all entries, on the host, and check the entry for padding."""
        assert self.data[-1] == ABSENT, "the entry for padding was written"
        rows = (self.data != ABSENT).nonzero().flatten()
        return IndexEntries(rows.cpu(), self.data[rows].long().cpu())

    def _places(self, rows: Tensor) -> Tensor:
        return torch.where(rows == ABSENT, len(self.data) - 1, rows).long()


@dataclass(frozen=True, slots=True, eq=False)
class CompactIndex:
    """Entries of resident rows in buckets. Methods take rows, int32 or int64; ABSENT is padding.

    A removed row leaves its entry free: there are no chains, so nothing has to be moved or marked.
    """

    data: Tensor  # (buckets + 1, 2, WAYS) int32: rows or ABSENT, and slots; the last bucket is for padding, always free

    @staticmethod
    def allocate(num_rows: int, num_slots: int, device: torch.device) -> "CompactIndex":
        shape = (_num_buckets(num_slots) + 1, 2, WAYS)
        return CompactIndex(torch.full(shape, ABSENT, dtype=torch.int32, device=device))

    @staticmethod
    def bytes_for(num_rows: int, num_slots: int) -> int:
        """Return the bytes that `allocate` takes."""
        return 8 * WAYS * (_num_buckets(num_slots) + 1)

    @property
    def num_buckets(self) -> int:
        return len(self.data) - 1

    def clone(self) -> "CompactIndex":
        return CompactIndex(self.data.clone())

    def slots_of(self, rows: Tensor) -> Tensor:  # (rows,) int32
        """Return the slots of rows, ABSENT where there is none."""
        places = self._places(rows)
        return torch.where(places == self._padding, ABSENT, self.data.view(-1)[places + WAYS])

    def insert(self, rows: Tensor, slots: Tensor) -> Inserted:
        """Enter rows with their slots; of rows that are equal or want one entry, the first. Waits for the device."""
        buckets, flat = buckets_of(rows, self.num_buckets), self.data.view(-1)
        is_new, is_refused = (torch.zeros(len(rows), dtype=torch.bool, device=rows.device) for _ in range(2))
        pending = (_are_first(rows) & (self.slots_of(rows) == ABSENT)).nonzero().flatten()
        for choice in range(buckets.shape[1]):
            full = [pending[:0]]
            while len(pending):
                bucket = buckets[pending, choice]
                is_free = self.data[bucket, 0] == ABSENT
                has_room = is_free.any(1)
                full.append(pending[~has_room])
                pending, places = pending[has_room], (2 * WAYS * bucket + is_free.int().argmax(1))[has_room]
                wins = _are_first(places)
                flat[places[wins]], flat[places[wins] + WAYS] = rows[pending[wins]].int(), slots[pending[wins]].int()
                is_new[pending[wins]] = True
                pending = pending[~wins]
            pending = torch.cat(full).sort().values
        is_refused[pending] = True
        return Inserted(is_new, is_refused)

    def clear(self, rows: Tensor) -> None:
        """Remove rows."""
        self.data.view(-1).index_fill_(0, self._places(rows), ABSENT)

    def move(self, rows: Tensor, slots: Tensor) -> None:
        """Give rows of the index other slots."""
        self.data.view(-1)[self._places(rows) + WAYS] = slots.int()

    def entries(self) -> IndexEntries:
        """Return all entries, on the host, and check that each is in a bucket of its row."""
        assert (self.data[-1, 0] == ABSENT).all(), "the bucket for padding was written"
        data = self.data.cpu()
        bucket, way = (data[:, 0] != ABSENT).nonzero(as_tuple=True)
        rows = data[bucket, 0, way].long()
        assert (buckets_of(rows, self.num_buckets) == bucket[:, None]).any(1).all(), "a row is in a foreign bucket"
        return IndexEntries(rows, data[bucket, 1, way].long())

    @property
    def _padding(self) -> int:
        """The place of rows that are not in the index."""
        return 2 * WAYS * self.num_buckets

    def _places(self, rows: Tensor) -> Tensor:  # (rows,) int64
        """Return where rows are in the flat data; WAYS further are their slots."""
        buckets = buckets_of(rows, self.num_buckets)
        is_row = (self.data[buckets, 0] == rows[:, None, None]).flatten(1) & (rows != ABSENT)[:, None]
        way = is_row.int().argmax(1, keepdim=True)
        place = (2 * WAYS * buckets.gather(1, way // WAYS) + way % WAYS).squeeze(1)
        return torch.where(is_row.any(1), place, self._padding)


RowIndex = DenseIndex | CompactIndex
INDEXES: dict[IndexForm, type[DenseIndex | CompactIndex]] = {
    IndexForm.DENSE: DenseIndex,
    IndexForm.COMPACT: CompactIndex,
}


def _num_buckets(num_slots: int) -> int:
    return max(1, -(-num_slots // _SLOTS_PER_BUCKET))


def _are_first(values: Tensor) -> Tensor:  # (values,) bool
    """Return which values are the first of their kind."""
    is_first = torch.zeros(len(values), dtype=torch.bool, device=values.device)
    is_first[np.unique(values.cpu().numpy(), return_index=True)[1]] = True
    return is_first


def buckets_of(rows: Tensor, num_buckets: int) -> Tensor:  # (rows, 2) int64
    """Return the buckets in which rows may be, the preferred one first."""
    hashes = torch.stack([mixed_rows(rows.long()), mixed_rows(rows.long() ^ SECOND)], 1)
    return hashes * num_buckets >> 32


def places_of(rows: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Return the places of both hashes of rows, (rows,) int64; `num` is a power of two."""
    return mixed_rows(rows) & (num - 1), mixed_rows(rows ^ SECOND) & (num - 1)


SECOND = 0x5BD1E995  # distinguishes the second hash from the first


def mixed_rows(rows: Tensor) -> Tensor:
    """Return 32-bit hashes of rows, (rows,) int64: two rounds of multiply and shift."""
    for shift, factor in ((16, MIX_A), (15, MIX_B)):
        rows = ((rows ^ rows >> shift) * factor) & 0xFFFFFFFF
    return rows ^ rows >> 16


MIX_A, MIX_B = 0x7FEB352D, 0x846CA68B
