"""The table of resident rows on the device: claim and publish in plain torch. Twin: `triton_row_table.py`.

A step finds its rows (`row_lookup.py`), collects the missed rows to admit (`claim`) and assigns the coldest of the
given slots to them (`publish`). Nothing waits for the host. Nothing here knows pages, tables or row data.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from helmrec.errors import ConfigError
from helmrec.kernels.row_gather import MAX_ROWS, SKIP
from helmrec.kernels.row_index import ABSENT, INDEXES, IndexForm, RowIndex, index_form, places_of

EMPTY = -torch.inf  # heat of a slot without a row: the coldest there is
UNUSABLE = torch.inf  # heat of an entry of `Victims` that is no slot


class Admission(IntEnum):
    """When a missed row is given a slot."""

    ALWAYS = 0
    SECOND_TOUCH = 1  # at its second miss
    FREQUENCY = 2  # when it was read more often lately than the row in the slot


class Control(IntEnum):
    """Entries of `RowTable.control`, which the host sends with every step."""

    NOW = 0  # heat of a row that is read now
    GENERATION = 1  # of `seen`, which of the two is being filled
    IS_FILLING = 2  # slots are empty: any missed row may claim one
    HAND = 3  # ordinal of the owned slot at which the search for cold slots starts
    CAPACITY = 4  # owned slots


class RowTally(IntEnum):
    """Entries of `RowTable.tally`. Only GHOSTS ever decreases."""

    ADMITTED = 0
    EVICTED = 1
    REFILLED = 2  # of those admitted, read ahead of demand
    MOVED = 3  # from one slot to another
    GHOSTS = 4  # pushed and not popped; the next is written at this place of the ring
    REFUSED = 5  # not admitted, since a compact index had no entry free for them


@dataclass(frozen=True, slots=True, eq=False)
class RowTable:
    """Device tensors that are accessed in one stream."""

    num_rows: int  # of all tables
    index: RowIndex  # slot by row
    row_of: Tensor  # (slots + 1,) int32: row or ABSENT; the last entry is unused
    heat: Tensor  # (slots + 1,) float32: log2 of decayed touches, or the time of the last one; EMPTY
    seen: Tensor  # (2, words) int32: bits of recently missed rows, in two generations; for SECOND_TOUCH
    touches: Tensor  # (power of two,) uint8: two counters of recent touches of absent rows; for FREQUENCY
    ghosts: Tensor  # (ring,) int32: recently evicted rows, about coldest first; ABSENT where unused
    control: Tensor  # (5,) float64
    tally: Tensor  # (6,) int64

    @classmethod
    def allocate(
        cls,
        num_rows: int,
        num_slots: int,
        device: torch.device,
        admission: Admission,
        form: IndexForm | None = None,
    ) -> "RowTable":
        """Return an empty table. form: of the index; None: as the sizes demand."""
        if max(num_rows, num_slots) > MAX_ROWS:
            raise ConfigError(f"a row table has at most {MAX_ROWS} rows and slots, got {num_rows} and {num_slots}")

        def full(shape: int | tuple[int, int], value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((shape,) if isinstance(shape, int) else shape, value, dtype=dtype, device=device)

        return cls(
            num_rows=num_rows,
            index=INDEXES[form or index_form(num_rows, num_slots)].allocate(num_rows, num_slots, device),
            row_of=full(num_slots + 1, ABSENT, torch.int32),
            heat=full(num_slots + 1, EMPTY, torch.float32),
            seen=full((2, _seen_words(num_slots, admission)), 0, torch.int32),
            touches=full(_num_counters(num_slots, admission), 0, torch.uint8),
            ghosts=full(max(1, num_slots), ABSENT, torch.int32),
            control=full(len(Control), 0, torch.float64),
            tally=full(len(RowTally), 0, torch.int64),
        )

    @staticmethod
    def bytes_for(num_rows: int, num_slots: int, admission: Admission) -> int:
        """Return the bytes that `allocate` takes."""
        index_bytes = INDEXES[index_form(num_rows, num_slots)].bytes_for(num_rows, num_slots)
        words = 2 * (num_slots + 1) + 2 * _seen_words(num_slots, admission) + max(1, num_slots)
        return index_bytes + 4 * words + _num_counters(num_slots, admission)

    @property
    def num_bytes(self) -> int:
        parts = (self.index.data, self.row_of, self.heat, self.seen, self.touches, self.ghosts)
        return sum(part.nbytes for part in parts)

    def age(self) -> None:
        """Halve the counters of touches."""
        self.touches.bitwise_right_shift_(1).bitwise_and_(0x77)


def _seen_words(num_slots: int, admission: Admission) -> int:
    """Return the words of a generation, with at least eight bits per slot."""
    return 1 << max(10, (num_slots // 4).bit_length()) if admission == Admission.SECOND_TOUCH else 1


def _num_counters(num_slots: int, admission: Admission) -> int:
    """Return the bytes of `RowTable.touches`: at least sixteen per slot, each with two counters of four bits."""
    return 1 << max(10, (16 * num_slots - 1).bit_length()) if admission == Admission.FREQUENCY else 1


MOST_TOUCHES = 15  # that a counter can hold
LEVELS = MOST_TOUCHES + 1


@dataclass(frozen=True, slots=True, eq=False)
class Missed:
    """Rows that a step reads from the host, each once: the first `count` entries, bucket by bucket of addresses."""

    sources: Tensor  # (entries,) int32: ~row
    places: Tensor  # (entries,) int64: the first entry of the step that asks for the row
    count: Tensor  # (1,) int32


@dataclass(frozen=True, slots=True, eq=False)
class Claims:
    """Missed rows to admit, up to the length of the tensors; with FREQUENCY hottest first, else unordered."""

    rows: Tensor  # (limit,) int32
    entries: Tensor  # (limit,) int32: where the step has read the row; ~entry if it may only take an empty slot
    heat: Tensor  # (limit,) float32: of the row, with FREQUENCY
    counters: (
        Tensor  # (1 + 2 * LEVELS,) int32: claims, which may exceed `limit`; scratch: claims by touches, and placed
    )
    touches: Tensor  # (limit,) int32, scratch

    @classmethod
    def allocate(cls, limit: int, device: torch.device) -> "Claims":
        def zeros(num: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(num, dtype=dtype, device=device)

        return cls(zeros(limit), zeros(limit), zeros(limit, torch.float32), zeros(1 + 2 * LEVELS), zeros(limit))

    @property
    def count(self) -> Tensor:  # (1,)
        return self.counters[:1]

    def clear(self) -> None:
        self.counters.zero_()

    def first(self, num: int) -> "Claims":
        """Return claims of at most `num` rows in the same memory."""
        return Claims(self.rows[:num], self.entries[:num], self.heat[:num], self.counters, self.touches[:num])


@dataclass(frozen=True, slots=True, eq=False)
class Victims:
    """Slots that may be reassigned, coldest first."""

    slots: Tensor  # (limit,) int64
    heat: Tensor  # (limit,) float32; UNUSABLE where there is none


def claim(table: RowTable, missed: Missed, claims: Claims, *, admission: Admission) -> None:
    """List the missed rows that ask for a slot and are not resident; the caller has cleared `claims`.

    With SECOND_TOUCH only rows missed before claim, or any while slots are empty. With FREQUENCY every row claims with
    a heat, that of a resident row that was read as often, and the hottest come first.
    """
    if admission == Admission.FREQUENCY:
        _claim_by_frequency(table, missed, claims)
        return
    rows, entries = ~missed.sources[: int(missed.count)].long(), missed.places[: int(missed.count)]
    is_asked = missed.sources[: len(rows)] != SKIP
    rows, entries = rows[is_asked], entries[is_asked]
    earned = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    if admission == Admission.SECOND_TOUCH:
        earned = _are_seen_again(table.seen, int(table.control[Control.GENERATION]), rows)
    wanted = (earned | bool(table.control[Control.IS_FILLING])) & (table.index.slots_of(rows) == ABSENT)
    rows, entries, limit = rows[wanted], torch.where(earned, entries, ~entries)[wanted], len(claims.rows)
    claims.count.fill_(len(rows))
    claims.rows[: len(rows)] = rows[:limit].int()
    claims.entries[: len(rows)] = entries[:limit].int()


def _claim_by_frequency(table: RowTable, missed: Missed, claims: Claims) -> None:
    num = int(missed.count)
    rows, kept = ~missed.sources[:num].long(), min(num, len(claims.rows))
    touches = (counted_touches(table.touches, rows) + 1).clamp_max(MOST_TOUCHES)
    raise_touches(table.touches, rows, touches)
    most, order = touches[:kept].sort(descending=True, stable=True)
    claims.count.fill_(num)
    claims.rows[:kept] = rows[order].int()
    claims.entries[:kept] = missed.places[order].int()
    claims.heat[:kept] = table.control[Control.NOW].float() + most.float().log2()


def counted_touches(touches: Tensor, rows: Tensor) -> Tensor:  # (rows,) int64
    """Return how often absent rows were touched lately: the lesser of two counters, each shared with other rows."""
    first, second = places_of(rows, len(touches))
    return torch.minimum(touches[first] & 15, touches[second] >> 4).long()


def raise_touches(touches: Tensor, rows: Tensor, least: Tensor) -> None:
    """Raise the counters of rows to at least these values; of rows that share a counter, any may win."""
    first, second = places_of(rows, len(touches))
    least = least.to(torch.uint8)
    low = touches[first]
    touches[first] = (low & 0xF0) | torch.maximum(low & 15, least)
    high = touches[second]
    touches[second] = (high & 15) | torch.maximum(high >> 4, least) << 4


def publish(table: RowTable, claims: Claims, victims: Victims, copies: Tensor, *, by_heat: bool = False) -> None:
    """Give claims victims' slots; copies[i], int32, becomes the entry to copy into victims.slots[i], or SKIP.

    by_heat: claims are hottest first, and one that is no hotter than its victim is refused. What was counted for the
    victim goes on as touches of an absent row. A refill may claim a row twice: one of the claims gets a slot. A row for
    which a compact index has no entry leaves its slot empty: victims go first, so that an index is never fuller than
    the slots.
    """
    copies.fill_(SKIP)
    num = min(int(claims.count), len(claims.rows))
    rows, entries = claims.rows[:num].long(), claims.entries[:num]
    slots, cold, now = victims.slots[:num], victims.heat[:num], table.control[Control.NOW].float()
    may = claims.heat[:num] > cold if by_heat else (entries >= 0) | (cold == EMPTY)
    given = may & (cold != UNUSABLE)
    evicted = table.row_of[slots[given]].long()
    left = evicted != ABSENT
    if by_heat:
        counted = (cold[given][left] - now).exp2().round().clamp_max(MOST_TOUCHES)
        raise_touches(table.touches, evicted[left], counted)
    evicted = evicted[left]
    table.index.clear(evicted)
    first = int(table.tally[RowTally.GHOSTS])
    table.ghosts[(first + torch.arange(len(evicted), device=slots.device)) % len(table.ghosts)] = evicted.int()
    table.tally[RowTally.GHOSTS] += len(evicted)
    table.tally[RowTally.EVICTED] += len(evicted)
    table.row_of[slots[given]], table.heat[slots[given]] = ABSENT, EMPTY
    inserted = table.index.insert(rows[given], slots[given])
    given[given.clone()] = inserted.is_new
    table.tally[RowTally.REFUSED] += inserted.is_refused.sum()
    table.tally[RowTally.ADMITTED] += given.sum()
    table.row_of[slots[given]] = rows[given].int()
    table.heat[slots[given]] = claims.heat[:num][given] if by_heat else now
    copies[:num] = torch.where(given, torch.where(entries >= 0, entries, ~entries), SKIP)


def window(table: RowTable, pages: Tensor, rows_per_page: int, slots: Tensor, heat: Tensor) -> None:
    """slots[i], heat[i] = the owned slot that is i places after the hand, and its heat; UNUSABLE if there are fewer.

    pages: int64, the owned ones first. slots: int64.
    """
    capacity, hand = (table.control[i].long() for i in (Control.CAPACITY, Control.HAND))
    places = torch.arange(len(slots), device=slots.device)
    ordinals = (hand + places) % capacity.clamp_min(1)
    slots.copy_(pages[ordinals // rows_per_page] * rows_per_page + ordinals % rows_per_page)
    heat.copy_(torch.where(places < capacity, table.heat[slots], UNUSABLE))


def _are_seen_again(seen: Tensor, generation: int, rows: Tensor) -> Tensor:  # (rows,) bool
    """Mark rows in this generation; return whether each was marked in either."""
    words = seen.numpy().view(np.uint32)
    bits = [each.numpy() for each in places_of(rows, 32 * seen.shape[1])]
    marks = [(place >> 5, np.uint32(1) << (place & 31).astype(np.uint32)) for place in bits]
    was = [np.logical_and.reduce([words[i, word] & bit != 0 for word, bit in marks]) for i in range(2)]
    for word, bit in marks:
        np.bitwise_or.at(words[generation], word, bit)
    return torch.from_numpy(was[0] | was[1])
