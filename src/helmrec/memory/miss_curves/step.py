"""One request at every alpha, compiled: serve its KV at once, and collect the rows that some alpha reads.

`RowShadows` reads the collected rows later. All state is passed in.
"""

from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from helmrec.memory.miss_curves.kv import HistoryVisit, KVShadowState, serve_history
from helmrec.memory.sampling import is_sampled

Rows = NDArray[np.int64]
Counts = NDArray[np.int64]
Sums = NDArray[np.float64]
Visit = tuple[int, int, int, int]  # the fields of a `HistoryVisit`

NUM_SUMS = 4  # reused tokens, users hit, rows read, sampled rows missed
_BLOCK = 32  # tokens that are compared together


class Pending(NamedTuple):
    """Requests whose rows wait to be read."""

    rows: Rows  # (room,)
    ends: Counts  # (steps + 1,) of each request in `rows`, with a leading 0
    first_read: Counts  # (steps, columns) the first row that each alpha reads
    num_steps: Counts  # (1,)

    @classmethod
    def empty(cls, num_rows: int, num_steps: int, num_columns: int) -> "Pending":
        """Room for so many rows, steps and columns."""
        return cls(
            np.empty(num_rows, np.int64),
            np.zeros(num_steps + 1, np.int64),
            np.empty((num_steps, num_columns), np.int64),
            np.zeros(1, np.int64),
        )


class Shadows(NamedTuple):
    """All arrays of `JointMissCurves`."""

    kv: KVShadowState
    pending: Pending
    sums: Sums


@numba.njit(cache=True, inline="always")
def shadows(arrays: tuple[Any, ...]) -> Shadows:
    """Name the arrays of one plain tuple: named tuples take three times as long to pass from Python."""
    return Shadows(KVShadowState(*arrays[:7]), Pending(*arrays[7:11]), arrays[11])


@numba.njit(cache=True)
def serve(
    state: Shadows, history: HistoryVisit, num_history_rows: int, num_candidate_rows: int, decay: float
) -> Counts:
    """Serve a history at every alpha and add it to the sums; return the resident tokens found at each.

    Both numbers count all rows, sampled or not.
    """
    sums, num_columns = state.sums, state.sums.shape[1]
    reused = serve_history(state.kv, history) if history.num_tokens else np.zeros(num_columns, np.int64)
    for column in range(num_columns):
        computed_share = 1 - reused[column] / max(1, history.num_tokens)
        sums[0, column] = sums[0, column] * decay + reused[column]
        sums[1, column] = sums[1, column] * decay + (reused[column] > 0)
        sums[2, column] = sums[2, column] * decay + (num_candidate_rows + num_history_rows * computed_share)
    return reused


@numba.njit(cache=True)
def put_aside(
    pending: Pending, reused: Counts, first_token: int, num_tokens: int, num_history: int, num_all: int
) -> None:
    """Close a request whose `num_all` sampled rows were added to `pending.rows`.

    The first `num_history` of them belong to tokens [first_token, num_tokens) of its history.
    """
    step = pending.num_steps[0]
    # Sampled rows of a partly resident history are cut in proportion: exact if all rows are sampled.
    given = max(1, num_tokens - first_token)
    for column in range(reused.size):
        share = max(0, reused[column] - first_token) / given
        pending.first_read[step, column] = int(share * num_history + 0.5)
    pending.ends[step + 1] = pending.ends[step] + num_all
    pending.num_steps[0] = step + 1


@numba.njit(cache=True, nogil=True)
def observe(
    arrays: tuple[Any, ...], visit: Visit, rows: tuple[Rows, Rows, Rows, Rows], threshold: np.uint64, decay: float
) -> None:
    """Serve a request. `rows`: those of `CurveRequest`, in a plain tuple for the same reason as `arrays`."""
    state, history = shadows(arrays), HistoryVisit(*visit)
    context, events, single, candidates = rows
    num_history = context.size + events.size
    reused = serve(state, history, num_history, single.size + candidates.size, decay)
    first = min(reused.min(), history.num_tokens)
    out = state.pending.rows[state.pending.ends[state.pending.num_steps[0]] :]
    num = _sample(context[first:], threshold, out, 0)
    num = num_history = _sample_columns(events, max(0, first - context.size), threshold, out, num)
    num = _sample(single, threshold, out, num)
    num = _sample_columns(candidates, 0, threshold, out, num)
    put_aside(state.pending, reused, first, history.num_tokens, num_history, num)


@numba.njit(cache=True)
def _sample(rows: Rows, threshold: np.uint64, out: Rows, num: int) -> int:
    """Append the sampled rows at out[num]; return the new end."""
    for row in rows:
        if is_sampled(row, threshold):
            out[num] = row
            num += 1
    return num


@numba.njit(cache=True)
def _sample_columns(rows: Rows, first: int, threshold: np.uint64, out: Rows, num: int) -> int:
    """Append the sampled rows of (features, tokens), token by token from `first` on; return the new end.

    Most blocks have no sampled row. Counting over blocks of a fixed length is vectorised, selecting is not.
    """
    num_features, num_tokens = rows.shape
    start = first
    while start < num_tokens:
        end = min(start + _BLOCK, num_tokens)
        num_sampled = 0
        if end - start == _BLOCK:
            for feature in range(num_features):
                line = rows[feature][start:end]
                for at in range(_BLOCK):
                    num_sampled += int(is_sampled(line[at], threshold))
        if num_sampled or end - start < _BLOCK:
            for token in range(start, end):
                for feature in range(num_features):
                    if is_sampled(rows[feature, token], threshold):
                        out[num] = rows[feature, token]
                        num += 1
        start = end
    return num
