"""Finds the rows of a step in the table of resident rows, in plain torch. Twin: `triton_row_lookup.py`.

A row that is not resident is read from the host once a step, by the first entry that asks for it; the other entries
copy it on the device. Missed rows are listed bucket by bucket of their addresses, since the bus moves rows in order of
address half again as fast. Nothing here knows pages, tables or row data.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from helmrec.kernels.row_gather import SKIP
from helmrec.kernels.row_table import Control, Missed, RowTable

BUCKETS = 8_192  # of addresses: with 16 GiB of rows, each is a huge page of 2 MiB


@dataclass(frozen=True, slots=True, eq=False)
class Repeats:
    """Entries that ask for a missed row again: the first `count`, unordered."""

    sources: Tensor  # (entries,) int32: the entry that reads the row
    places: Tensor  # (entries,) int64
    count: Tensor  # (1,) int32


@dataclass(frozen=True, slots=True, eq=False)
class Absent:
    """Scratch: every entry that asks for a row that is not resident, unordered."""

    entries: Tensor  # (entries,) int32
    cells: Tensor  # (entries,) int32: where `Lookup.cells` holds its row
    count: Tensor  # (1,) int32


@dataclass(frozen=True, slots=True, eq=False)
class Lookup:
    """Where the rows of a step are, and the memory to find that out."""

    sources: Tensor  # (entries,) int32: the slot of a resident row, else SKIP
    is_missed: Tensor  # (entries,) bool: whether the entry is in `missed`
    missed: Missed
    repeats: Repeats
    absent: Absent
    cells: Tensor  # (2, cells) int32, scratch: a hash table of absent rows, and who asks for each first
    counters: Tensor  # (BUCKETS + 3,) int32, scratch: missed rows by address, and the counts above

    @classmethod
    def allocate(cls, num_entries: int, device: torch.device) -> "Lookup":
        def zeros(num: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(num, dtype=dtype, device=device)

        counters = zeros(BUCKETS + 3)
        counts = counters[BUCKETS:].split(1)
        return cls(
            sources=torch.full((num_entries,), SKIP, dtype=torch.int32, device=device),
            is_missed=zeros(num_entries, torch.bool),
            missed=Missed(zeros(num_entries), zeros(num_entries, torch.int64), counts[0]),
            repeats=Repeats(zeros(num_entries), zeros(num_entries, torch.int64), counts[1]),
            absent=Absent(zeros(num_entries), zeros(num_entries), counts[2]),
            cells=zeros(2 * num_cells(num_entries)).view(2, -1),
            counters=counters,
        )

    def of_size(self, num: int) -> "Lookup":
        """Return a lookup of fewer entries in the same memory."""
        missed, repeats, absent = self.missed, self.repeats, self.absent
        return replace(
            self,
            sources=self.sources[:num],
            is_missed=self.is_missed[:num],
            missed=Missed(missed.sources[:num], missed.places[:num], missed.count),
            repeats=Repeats(repeats.sources[:num], repeats.places[:num], repeats.count),
            absent=Absent(absent.entries[:num], absent.cells[:num], absent.count),
            cells=self.cells.view(-1)[: 2 * num_cells(num)].view(2, -1),
        )

    @property
    def num_bytes(self) -> int:
        lists = (self.missed.sources, self.missed.places, self.repeats.sources, self.repeats.places)
        scratch = (self.absent.entries, self.absent.cells, self.cells, self.counters)
        return sum(part.nbytes for part in (self.sources, self.is_missed, *lists, *scratch))


def num_cells(num_entries: int) -> int:
    """Return the size of the hash table: a power of two, of which at most half is used."""
    return 1 << max(5, (2 * num_entries - 1).bit_length())


def bucket_shift(num_rows: int) -> int:
    """Return by how many bits a row id is shifted to give its bucket."""
    return max(0, (num_rows - 1).bit_length() - (BUCKETS - 1).bit_length())


def find(table: RowTable, rows: Tensor, lookup: Lookup, *, is_lru: bool) -> None:
    """Look rows up, (entries,) int32, where ABSENT is padding; `lookup` says from where each is read.

    Resident rows get hotter; a slot read twice by one step counts once.
    """
    slots = table.index.slots_of(rows)
    hit = slots >= 0
    lookup.sources.copy_(torch.where(hit, slots, SKIP))
    absent, wanted = ((rows >= 0) & ~hit).nonzero().flatten().tolist(), rows.tolist()
    first: dict[int, int] = {}
    for entry in absent:
        first.setdefault(wanted[entry], entry)
    shift = bucket_shift(table.num_rows)
    in_order = sorted(first.items(), key=lambda item: (item[0] >> shift, item[1]))
    _fill(lookup.missed, [(~row, entry) for row, entry in in_order])
    _fill(lookup.repeats, [(first[wanted[entry]], entry) for entry in absent if first[wanted[entry]] != entry])
    lookup.is_missed.zero_()
    lookup.is_missed[lookup.missed.places[: len(first)]] = True
    touched, now = slots[hit].long(), table.control[Control.NOW].float()
    table.heat[touched] = now if is_lru else torch.logaddexp2(table.heat[touched], now)


def count_by_sequence(missed: Missed, cu_events: Tensor, num_features: int, num_events: int, counts: Tensor) -> None:
    """counts[s] = number of missed rows whose first entry belongs to sequence s. counts: (sequences,) int64.

    Entries are rows of `num_events` events, feature after feature, then a row of each sequence, table after table.
    cu_events: (sequences + 1,) int64, where the events of each sequence begin.
    """
    places = missed.places[: int(missed.count)]
    of_event = torch.searchsorted(cu_events[1:].contiguous(), places % num_events, right=True)
    of_context = (places - num_features * num_events) % len(counts)
    owners = torch.where(places < num_features * num_events, of_event, of_context)
    counts.copy_(owners.bincount(minlength=len(counts)))


def _fill(listed: Missed | Repeats, pairs: list[tuple[int, int]]) -> None:
    """Write pairs of source and place."""
    values = torch.tensor(pairs, dtype=torch.int64, device=listed.places.device).view(-1, 2)
    listed.sources[: len(pairs)] = values[:, 0].int()
    listed.places[: len(pairs)] = values[:, 1]
    listed.count.fill_(len(pairs))
