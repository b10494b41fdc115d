"""The table of resident rows on the device: claim and publish in plain torch. Twin: `triton_row_table.py`.

A step finds its rows (`row_lookup.py`), collects the missed rows to admit (`claim`) and assigns the coldest of the
given slots to them (`publish`). Nothing waits for the host. Nothing here knows pages, tables or row data.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from helmrec.kernels.row_gather import SKIP

ABSENT = -1  # of `slot_of`: not resident; of `row_of`: empty
CLAIMED = -2  # of `slot_of`: a slot is being assigned; counts as absent
EMPTY = -torch.inf  # heat of a slot without a row: the coldest there is
UNUSABLE = torch.inf  # heat of an entry of `Victims` that is no slot


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


@dataclass(frozen=True, slots=True, eq=False)
class RowTable:
    """Device tensors that are accessed in one stream."""

    slot_of: Tensor  # (rows + 1,) int32: slot, ABSENT or CLAIMED; the last entry is unused and always CLAIMED
    row_of: Tensor  # (slots + 1,) int32: row or ABSENT; the last entry is unused
    heat: Tensor  # (slots + 1,) float32: log2 of decayed touches, or the time of the last one; EMPTY
    seen: Tensor  # (2, words) int32: bits of recently missed rows, in two generations
    ghosts: Tensor  # (ring,) int32: recently evicted rows, about coldest first; ABSENT where unused
    control: Tensor  # (5,) float64
    tally: Tensor  # (5,) int64

    @classmethod
    def allocate(cls, num_rows: int, num_slots: int, device: torch.device) -> "RowTable":
        def full(shape: int | tuple[int, int], value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((shape,) if isinstance(shape, int) else shape, value, dtype=dtype, device=device)

        slot_of = full(num_rows + 1, ABSENT, torch.int32)
        slot_of[-1] = CLAIMED
        return cls(
            slot_of=slot_of,
            row_of=full(num_slots + 1, ABSENT, torch.int32),
            heat=full(num_slots + 1, EMPTY, torch.float32),
            seen=full((2, _seen_words(num_slots)), 0, torch.int32),
            ghosts=full(max(1, num_slots), ABSENT, torch.int32),
            control=full(len(Control), 0, torch.float64),
            tally=full(len(RowTally), 0, torch.int64),
        )

    @staticmethod
    def bytes_for(num_rows: int, num_slots: int) -> int:
        """Return the bytes that `allocate` takes."""
        words = (num_rows + 1) + 2 * (num_slots + 1) + 2 * _seen_words(num_slots) + max(1, num_slots)
        return 4 * words

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self.slot_of, self.row_of, self.heat, self.seen, self.ghosts))


def _seen_words(num_slots: int) -> int:
    """Return the words of a generation, with at least eight bits per slot."""
    return 1 << max(10, (num_slots // 4).bit_length())


@dataclass(frozen=True, slots=True, eq=False)
class Missed:
    """Rows that a step reads from the host, each once: the first `count` entries, bucket by bucket of addresses."""

    sources: Tensor  # (entries,) int32: ~row
    places: Tensor  # (entries,) int64: the first entry of the step that asks for the row
    count: Tensor  # (1,) int32


@dataclass(frozen=True, slots=True, eq=False)
class Claims:
    """Missed rows to admit, unordered, up to the length of the tensors."""

    rows: Tensor  # (limit,) int32
    entries: Tensor  # (limit,) int32: where the step has read the row; ~entry if it may only take an empty slot
    count: Tensor  # (1,) int32: number of claims, which may exceed `limit`; zeroed by the caller

    @classmethod
    def allocate(cls, limit: int, device: torch.device) -> "Claims":
        return cls(*(torch.zeros(num, dtype=torch.int32, device=device) for num in (limit, limit, 1)))


@dataclass(frozen=True, slots=True, eq=False)
class Victims:
    """Slots that may be reassigned, coldest first."""

    slots: Tensor  # (limit,) int64
    heat: Tensor  # (limit,) float32; UNUSABLE where there is none


def claim(table: RowTable, missed: Missed, claims: Claims, *, is_filtered: bool) -> None:
    """Claim a slot for each missed row once; with a filter, only for rows missed before, or while slots are empty."""
    generation, filling = (int(table.control[i]) for i in (Control.GENERATION, Control.IS_FILLING))
    for source, entry in zip(missed.sources[: int(missed.count)].tolist(), missed.places.tolist(), strict=False):
        if source == SKIP:
            continue
        row = ~source
        earned = not is_filtered or _is_seen_again(table.seen, generation, row)
        if not (earned or filling) or table.slot_of[row] != ABSENT:
            continue
        place = int(claims.count)
        claims.count.add_(1)
        if place < len(claims.rows):
            table.slot_of[row] = CLAIMED
            claims.rows[place] = row
            claims.entries[place] = entry if earned else ~entry


def publish(table: RowTable, claims: Claims, victims: Victims, copies: Tensor) -> None:
    """Give each claim a victim's slot; copies[i], int32, becomes the entry to copy into victims.slots[i], or SKIP."""
    copies.fill_(SKIP)
    for i in range(min(int(claims.count), len(claims.rows))):
        row, entry, slot = int(claims.rows[i]), int(claims.entries[i]), int(victims.slots[i])
        heat = float(victims.heat[i])
        if heat == UNUSABLE or (entry < 0 and heat != EMPTY):
            table.slot_of[row] = ABSENT
            continue
        evicted = int(table.row_of[slot])
        if evicted != ABSENT:
            table.slot_of[evicted] = ABSENT
            table.ghosts[int(table.tally[RowTally.GHOSTS]) % len(table.ghosts)] = evicted
            table.tally[RowTally.GHOSTS] += 1
            table.tally[RowTally.EVICTED] += 1
        table.slot_of[row] = slot
        table.row_of[slot] = row
        table.heat[slot] = table.control[Control.NOW].float()
        table.tally[RowTally.ADMITTED] += 1
        copies[i] = entry if entry >= 0 else ~entry


def _is_seen_again(seen: Tensor, generation: int, row: int) -> bool:
    """Mark the row in this generation; return whether it was marked in either."""
    bits = [(place >> 5, np.uint32(1 << (place & 31))) for place in places_of(row, 32 * seen.shape[1])]
    words = seen.view(torch.int32).numpy().view(np.uint32)
    was = [all(words[i, word] & bit for word, bit in bits) for i in range(2)]
    for word, bit in bits:
        words[generation, word] |= bit
    return any(was)


def places_of(row: int, num_bits: int) -> tuple[int, int]:
    """Return the positions of a row's two bits; `num_bits` is a power of two."""
    return mixed(row) & (num_bits - 1), mixed(row ^ SECOND) & (num_bits - 1)


SECOND = 0x5BD1E995  # distinguishes the second hash from the first


def mixed(value: int) -> int:
    """Return a 32-bit hash (two rounds of multiply and shift)."""
    for shift, factor in ((16, MIX_A), (15, MIX_B)):
        value = ((value ^ value >> shift) * factor) & 0xFFFFFFFF
    return value ^ value >> 16


MIX_A, MIX_B = 0x7FEB352D, 0x846CA68B
