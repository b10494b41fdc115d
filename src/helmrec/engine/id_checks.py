"""Checks the ids of requests and converts them to rows: ranges, types, lengths, order of time, unknown ids.

It knows lines of ids and their tables, not requests.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from helmrec.errors import RequestError
from helmrec.model.config import TableConfig
from helmrec.types import Ids, IntArray

MAX_ID = np.iinfo(np.int64).max
REFUSE = -1  # in place of a row for unknown ids
_NO_ROWS = np.empty(0, np.int64)
_INFINITE = np.float32(np.inf)


class IdLines(NamedTuple):
    """Describes the lines of a block of ids: their names in messages, their bounds and their first rows."""

    names: tuple[str, ...]
    limits: IntArray  # (lines,) ids are smaller than these
    offsets: IntArray  # (lines,) first row of each table
    tables: tuple[str, ...]  # whose ids they are; other lines are called as their field is
    unknown: IntArray  # (lines,) row within its table for ids beyond the limit; REFUSE: they are refused


class ContextTable(NamedTuple):
    field: str  # its name in messages
    name: str
    num_rows: int
    offset: int
    unknown_row: int | None


def context_table(table: TableConfig, offset: int) -> ContextTable:
    return ContextTable(f"context[{table.name!r}]", table.name, table.num_rows, offset, table.unknown_row)


def context_rows(tables: Sequence[ContextTable], context: Mapping[str, int], unknown: dict[str, int]) -> IntArray:
    if not tables:
        return _NO_ROWS
    return np.array([_context_id(table, context[table.name], unknown) + table.offset for table in tables])


def _context_id(table: ContextTable, value: int, unknown: dict[str, int]) -> int:
    if table.unknown_row is None:
        return whole_number(table.field, value, table.num_rows - 1)
    if (known := whole_number(table.field, value, MAX_ID)) < table.num_rows:
        return known
    unknown[table.name] = unknown.get(table.name, 0) + 1
    return table.unknown_row


def flat_ids(field: str, values: Ids) -> NDArray[np.integer]:
    """Return the ids as a flat array of integers that fit signed 64 bits."""
    if not isinstance(values, np.ndarray):
        values = _listed(field, values)
    if values.ndim != 1:
        raise RequestError(field, values.shape, "a flat list of integers is needed")
    if values.dtype == np.int64 or values.size == 0:
        return values
    if values.dtype.kind not in "iu":
        first = values[0]
        shown = first.item() if isinstance(first, np.generic) else first  # an array of objects holds them as they are
        raise RequestError(field, shown, f"integers of 64 bits are needed, not {values.dtype}")
    if values.dtype == np.uint64 and values.max() > MAX_ID:
        raise RequestError(field, int(values.max()), "integers of 64 bits are needed")
    return values


def _listed(field: str, values: object) -> IntArray:
    """Convert a list of plain integers; NumPy alone would also accept booleans and round floats."""
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise RequestError(field, values, "a flat list of integers is needed")
    for kind in set(map(type, values)):
        if kind is not int and not issubclass(kind, np.integer):
            at, wrong = next((i, value) for i, value in enumerate(values) if type(value) is kind)
            raise RequestError(f"{field}[{at}]", wrong, f"integers of 64 bits are needed, not {kind.__name__}")
    try:
        return np.array(values, np.int64)
    except OverflowError:
        raise RequestError(field, max(values, key=abs), "integers of 64 bits are needed") from None


def take_rows(lines: IdLines, given: Sequence[Ids], unknown: dict[str, int]) -> IntArray:  # (lines, ids)
    """Check that the lines have equal length and ids in range, and return their rows, one line each.

    The ids are copied before they are checked, since a client may reuse its arrays. `unknown` counts ids by table that
    were read as the table's row for unknown ids.
    """
    ids = [flat_ids(name, values) for name, values in zip(lines.names, given, strict=True)]
    num = ids[0].size
    for name, line in zip(lines.names, ids, strict=True):
        if line.size != num:
            raise RequestError(name, line.size, f"one value per item is needed, {num} in all")
    block: IntArray = np.concatenate(ids, dtype=np.int64, casting="unsafe").reshape(len(ids), num)
    num_unknown = np.zeros(len(ids), np.int64)
    outside = _shift(block, lines.limits, lines.offsets, lines.unknown, num_unknown)
    if outside < block.size:
        at_line, at = divmod(outside, num)
        problem = f"values run from 0 to {lines.limits[at_line] - 1}"
        raise RequestError(f"{lines.names[at_line]}[{at}]", int(block[at_line, at]), problem)
    if num_unknown.any():
        for table, num_ids in zip(lines.tables, num_unknown.tolist(), strict=True):
            if num_ids:
                unknown[table] = unknown.get(table, 0) + num_ids
    return block


@numba.njit(cache=True, nogil=True)
def _shift(block: IntArray, limits: IntArray, offsets: IntArray, unknown: IntArray, num_unknown: IntArray) -> int:
    """Add each line's offset to its ids, line by line up to the first line with an id that is refused.

    Return the flat index of that id, or the number of ids. Ids of the limit or more become the line's row in `unknown`
    if it has one, and are counted. A line is checked as a whole without an early exit, because only such loops become
    vector instructions.
    """
    for line in range(block.shape[0]):
        ids, limit = block[line], np.uint64(limits[line])
        is_outside = False
        for i in range(ids.size):
            is_outside |= bool(np.uint64(ids[i]) >= limit)  # negative ids become large
        if is_outside:
            if unknown[line] >= 0:
                for i in range(ids.size):
                    if ids[i] >= limits[line]:
                        ids[i] = unknown[line]
                        num_unknown[line] += 1
            at = _first_outside(ids, limits[line])
            if at < ids.size:
                return line * ids.size + at
        for i in range(ids.size):
            ids[i] += offsets[line]
    return block.size


@numba.njit(cache=True, nogil=True)
def _first_outside(ids: IntArray, limit: int) -> int:
    """Return the index of the first id outside [0, limit), or the number of ids."""
    for i in range(ids.size):
        if ids[i] < 0 or ids[i] >= limit:
            return i
    return ids.size


@numba.njit(cache=True, nogil=True)
def _first_step_back(values: IntArray) -> int:
    """Return the index of the first value smaller than the one before it, or the number of values."""
    for i in range(1, values.size):
        if values[i] < values[i - 1]:
            return i
    return values.size


def has_infinite(values: NDArray[np.floating], bound: float) -> bool:
    """Whether a number is not finite, or its size is not below `bound`. float16: only whether one is not finite."""
    flat = np.ascontiguousarray(values).reshape(-1)
    if flat.dtype == np.float16:
        return bool(_has_full_exponent(flat.view(np.uint16)))
    return bool(_has_beyond(flat.astype(np.float32, copy=False), np.float32(bound)))


def are_finite(scores: NDArray[np.float32]) -> bool:
    """Whether all of these numbers, which lie one after another, are finite."""
    return not _has_beyond(scores.reshape(-1), _INFINITE)


@numba.njit(cache=True, nogil=True)
def _has_full_exponent(bits: NDArray[np.uint16]) -> bool:
    """Whether one of these float16 is infinite or no number. No early exit, so that it becomes vector instructions."""
    is_found = False
    for i in range(bits.size):
        is_found |= (bits[i] & 0x7C00) == 0x7C00
    return is_found


@numba.njit(cache=True, nogil=True)
def _has_beyond(values: NDArray[np.float32], bound: np.float32) -> bool:
    is_found = False
    for i in range(values.size):
        is_found |= not abs(values[i]) < bound
    return is_found


def check_forward(timestamps: IntArray) -> None:
    at = _first_step_back(timestamps)
    if at < timestamps.size:
        raise RequestError(f"timestamps[{at}]", int(timestamps[at]), f"time runs backwards from {timestamps[at - 1]}")


def whole_number(field: str, value: object, limit: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= int(value) <= limit:
        raise RequestError(field, value, f"an integer from 0 to {limit} is needed")
    return int(value)
