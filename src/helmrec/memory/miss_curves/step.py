"""One request at every alpha, as far as it must be known at once: KV is served, and rows that some alpha reads are put
aside for `RowShadows`. Compiled; all state comes in. Does not know what a row costs or when waiting rows are read.
"""

from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from helmrec.memory.miss_curves.kv import History, KVState, serve_history
from helmrec.memory.sampling import is_sampled

Rows = NDArray[np.int64]
Counts = NDArray[np.int64]
Sums = NDArray[np.float64]
Visit = tuple[int, int, int, int, bool]  # a `History`

NUM_SUMS = 4  # reused tokens, users hit, rows read, sampled rows missed
_BLOCK = 32  # tokens looked at together


class Pending(NamedTuple):
    """Requests whose rows wait to be read."""

    rows: Rows  # (room,)
    ends: Counts  # (steps + 1,) of each request in `rows`, with a leading 0
    first_read: Counts  # (steps, columns) where each alpha begins to read
    num_steps: Counts  # (1,)

    @classmethod
    def empty(cls, num_rows: int, num_steps: int, num_columns: int) -> "Pending":
        return cls(
            np.empty(num_rows, np.int64),
            np.zeros(num_steps + 1, np.int64),
            np.empty((num_steps, num_columns), np.int64),
            np.zeros(1, np.int64),
        )


class Shadows(NamedTuple):
    """What compiled code is handed."""

    kv: KVState
    pending: Pending
    sums: Sums


@numba.njit(cache=True, inline="always")
def shadows(arrays: tuple[Any, ...]) -> Shadows:
    """Arrays come as one plain tuple: named ones cost three times as much to hand over."""
    return Shadows(KVState(*arrays[:5]), Pending(*arrays[5:9]), arrays[9])


@numba.njit(cache=True)
def serve(state: Shadows, history: History, num_rows: tuple[int, int], decay: float) -> Counts:
    """Serve the history at every alpha and add it up; returns the tokens each finds resident.

    `num_rows`: of the whole history and of the candidates, sampled or not.
    """
    sums, num_columns = state.sums, state.sums.shape[1]
    reused = serve_history(state.kv, history) if history.num_tokens else np.zeros(num_columns, np.int64)
    for column in range(num_columns):
        computed_share = 1 - reused[column] / max(1, history.num_tokens)
        sums[0, column] = sums[0, column] * decay + reused[column]
        sums[1, column] = sums[1, column] * decay + (reused[column] > 0)
        sums[2, column] = sums[2, column] * decay + (num_rows[1] + num_rows[0] * computed_share)
    return reused


@numba.njit(cache=True)
def put_aside(pending: Pending, reused: Counts, span: tuple[int, int], num_rows: tuple[int, int]) -> None:
    """End a request whose sampled rows lie in `pending.rows`.

    `span`: the token its history rows begin with, and the last; `num_rows`: its history rows there, and all.
    """
    step, (first_token, num_tokens), (num_history, num_all) = pending.num_steps[0], span, num_rows
    # Where a history is resident in part, its sampled rows are cut in proportion: exact if all rows are sampled.
    given = max(1, num_tokens - first_token)
    for column in range(reused.size):
        share = max(0, reused[column] - first_token) / given
        pending.first_read[step, column] = int(share * num_history + 0.5)
    pending.ends[step + 1] = pending.ends[step] + num_all
    pending.num_steps[0] = step + 1


@numba.njit(cache=True)
def observe(
    arrays: tuple[Any, ...], visit: Visit, counts: tuple[int, int, int], rows: tuple[Rows, Rows], decay: float
) -> bool:
    """A request whose rows were sampled; False, too late, if rows are missing that some alpha reads.

    `counts`: rows of the whole history and of the candidates, and the token that `rows[0]` begins with.
    """
    state, history = shadows(arrays), History(*visit)
    reused = serve(state, history, (counts[0], counts[1]), decay)
    begin, num_history, num_all = state.pending.ends[state.pending.num_steps[0]], rows[0].size, rows[0].size
    num_all += rows[1].size
    state.pending.rows[begin : begin + num_history] = rows[0]
    state.pending.rows[begin + num_history : begin + num_all] = rows[1]
    put_aside(state.pending, reused, (counts[2], history.num_tokens), (num_history, num_all))
    return reused.min() >= counts[2]


@numba.njit(cache=True, nogil=True)
def sample(
    arrays: tuple[Any, ...], visit: Visit, rows: tuple[Rows, Rows, Rows, Rows], threshold: np.uint64, decay: float
) -> None:
    """A request with all its rows: of context, events (features, tokens), request and candidates (features, tokens)."""
    state, history = shadows(arrays), History(*visit)
    context, events, single, candidates = rows
    num_history = context.size + events.size
    reused = serve(state, history, (num_history, single.size + candidates.size), decay)
    first = min(reused.min(), history.num_tokens)
    out = state.pending.rows[state.pending.ends[state.pending.num_steps[0]] :]
    num = _sample(context[first:], threshold, out, 0)
    num = num_history = _sample_columns(events, max(0, first - context.size), threshold, out, num)
    num = _sample(single, threshold, out, num)
    num = _sample_columns(candidates, 0, threshold, out, num)
    put_aside(state.pending, reused, (first, history.num_tokens), (num_history, num))


@numba.njit(cache=True)
def _sample(rows: Rows, threshold: np.uint64, out: Rows, num: int) -> int:
    """Put those in the sample from out[num] on; returns where they end."""
    for row in rows:
        if is_sampled(row, threshold):
            out[num] = row
            num += 1
    return num


@numba.njit(cache=True)
def _sample_columns(rows: Rows, first: int, threshold: np.uint64, out: Rows, num: int) -> int:
    """The same of (features, tokens), token by token from `first` on.

    Most blocks have none. Counting over lines of a fixed length is done several at a time, choosing is not.
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
