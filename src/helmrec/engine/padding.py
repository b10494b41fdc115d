"""Pads a laid-out step to the size of a graph, directly into the block that is copied to the device.

Pure: compiled loops over arrays. Padding reads nothing and writes to the last token's row, which is unused. The whole
block is filled, because sizes share its memory and the values of another size may be invalid indices.
"""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from helmrec.engine.assemble import Assembly, copy, fill
from helmrec.types import IntArray


class StepArrays(NamedTuple):
    """The token arrays that a step sends to the device, laid out or padded; names as in `Assembly`."""

    event_at: IntArray
    actions: IntArray
    positions: IntArray
    gaps: IntArray
    context_at: IntArray
    write_slots: IntArray
    cu_tokens: NDArray[np.int32]
    num_resident: NDArray[np.int32]
    num_new: NDArray[np.int32]
    page_table: NDArray[np.int32]

    @classmethod
    def of(cls, step: Assembly) -> "StepArrays":
        return cls(*_token_arrays(step))

    @classmethod
    def staged(cls, block: Mapping[str, NDArray[Any]]) -> "StepArrays":
        return cls(**{name: block[name] for name in cls._fields})


_token_arrays = attrgetter(*StepArrays._fields)
NOWHERE = np.empty(0, np.int64)  # the places of no context token
_NONE = np.empty(0, np.int32)
EMPTY = StepArrays(  # a step of no sequences
    NOWHERE, NOWHERE, NOWHERE, NOWHERE, NOWHERE, NOWHERE, np.zeros(1, np.int32), _NONE, _NONE, _NONE.reshape(0, 0)
)


def context_places(step: Assembly, max_sequences: int) -> IntArray:
    """Return the place of each context token: a context table has one place per sequence."""
    return step.context_table * max_sequences + step.context_owner


@numba.njit(cache=True)
def pad_tokens(target: StepArrays, step: StepArrays, context_at: IntArray) -> None:
    """Fill all of `target` from a step. context_at: the place of each context token among the target's."""
    nowhere = target.write_slots.size - 1
    _pad(target.event_at, step.event_at, nowhere)
    _pad(target.actions, step.actions, 0)
    _pad(target.positions, step.positions, 0)
    _pad(target.gaps, step.gaps, 0)
    fill(target.context_at, nowhere)
    for i in range(context_at.size):
        target.context_at[context_at[i]] = step.context_at[i]
    _pad(target.write_slots, step.write_slots, -1)
    _pad(target.cu_tokens, step.cu_tokens, step.cu_tokens[-1])
    _pad(target.num_resident, step.num_resident, 0)
    _pad(target.num_new, step.num_new, 0)
    num_sequences = step.page_table.shape[0]
    for i in range(target.page_table.shape[0]):
        _pad(target.page_table[i], step.page_table[i] if i < num_sequences else step.cu_tokens[:0], 0)


@numba.njit(cache=True)
def _pad(target: NDArray[np.integer], values: NDArray[np.integer], filler: int) -> None:
    copy(target, values)
    fill(target[values.size :], filler)


class RowLayout(NamedTuple):
    """Where the rows of a step lie when each feature has room for `size` events."""

    num_features: int
    num_events: int
    size: int
    context_at: IntArray  # the place of each context row after those of events


@numba.njit(cache=True)
def pad_rows(target: NDArray[np.integer], values: NDArray[np.integer], layout: RowLayout, filler: int) -> None:
    """Copy one value per row of a step, in the order of `Assembly.rows`, to the place of that row in a padded step."""
    num_events, size = layout.num_events, layout.size
    for feature in range(layout.num_features):
        of_feature = values[feature * num_events : (feature + 1) * num_events]
        _pad(target[feature * size : (feature + 1) * size], of_feature, filler)
    of_context = target[layout.num_features * size :]
    fill(of_context, filler)
    for i in range(layout.context_at.size):
        of_context[layout.context_at[i]] = values[layout.num_features * num_events + i]


@numba.njit(cache=True)
def pad_candidates(
    at: IntArray, rows: NDArray[np.int64], candidates: IntArray, head_at: IntArray, row_starts: IntArray
) -> None:
    """Fill in what the head reads: the token of each candidate, and its row in each feature of the head.

    candidates: their columns among the events. head_at: their tokens. row_starts: where the rows of each of those
    features start.
    """
    _pad(at, head_at, 0)
    for i in range(row_starts.size):
        _pad(rows[i], candidates + row_starts[i], 0)
