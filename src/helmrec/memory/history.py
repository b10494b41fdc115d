"""What a prefix is verified against: the chained hash of a windowed history, and the rows it was made from.

The chain is seeded by everything constant (user, model, window anchor, context) and then folds in every
feature, action and timestamp, so state i equals state j only if all that went before is equal too.
"""

from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from helmrec.types import IntArray

States = NDArray[np.uint64]
Epochs = NDArray[np.uint32]


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """The cacheable tokens of one request: user-context tokens, then the window's events."""

    user_id: int
    context_rows: IntArray  # (context,)
    event_rows: IntArray  # (features, events)
    states: States  # (context + events,) chain state after each token

    @property
    def num_tokens(self) -> int:
        return self.states.size


def chain(seed: tuple[int, ...], num_context: int, columns: IntArray) -> States:
    """States after each of `num_context` context tokens and each event. columns: (fields, events)."""
    return _chain(np.array(seed, np.int64), num_context, columns)


@numba.njit(cache=True, inline="always")
def mix_field(word: int, salt: int) -> np.uint64:
    """Scatter one word over 64 bits; the salt tells apart fields that hold the same value.

    Two full rounds: with one, small words stay almost linear, and an item up by one beside a time down by
    one would cancel out in the sum over an event's fields.
    """
    mixed = np.uint64(word) + np.uint64(salt) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0x87C37B91114253D5)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0x4CF5AD432745937F)
    return mixed ^ (mixed >> np.uint64(32))


@numba.njit(cache=True, inline="always")
def fold_state(state: np.uint64, mixed: np.uint64) -> np.uint64:
    """Advance the chain. Only this is serial; the words of an event are mixed independently before it."""
    state ^= mixed
    return ((state << np.uint64(27)) | (state >> np.uint64(37))) * np.uint64(5) + np.uint64(0x52DCE729)


@numba.njit(cache=True)
def _chain(seed: IntArray, num_context: int, columns: IntArray) -> States:
    num_fields, num_events = columns.shape
    states = np.zeros(num_context + num_events, np.uint64)
    state = np.uint64(0)
    for i in range(seed.size):
        state = fold_state(state, mix_field(seed[i], i))
    for i in range(num_context):
        state = fold_state(state, mix_field(i, seed.size))
        states[i] = state
    of_events = states[num_context:]
    for field in range(num_fields):  # field by field: these loops become vector instructions
        for i in range(num_events):
            of_events[i] += mix_field(columns[field, i], field)
    for i in range(num_events):
        state = fold_state(state, of_events[i])
        of_events[i] = state
    return states


def common_tokens(a: States, b: States) -> int:
    """Tokens two chains share. Equal states imply equal pasts, so bisection finds the last equal one."""
    low, high = 0, min(a.size, b.size)
    if high and a[high - 1] == b[high - 1]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


class RowEpochs:
    """When each row last changed, so that KV made from an older value is never reused.

    The array spans the id space but memory backs only the parts that were ever updated.
    """

    def __init__(self, num_rows: int) -> None:
        self._changed = np.zeros(num_rows, np.uint32)
        self.current = 0

    def mark(self, rows: IntArray) -> None:
        """These rows have new values from now on."""
        self.current += 1
        self._changed[rows] = self.current

    def fresh_tokens(self, history: History, made_at: Epochs) -> int:
        """Leading tokens of `history` none of whose rows changed after `made_at` (one epoch per token)."""
        return int(_fresh(self._changed, history.context_rows, history.event_rows, made_at))


@numba.njit(cache=True)
def _fresh(changed: Epochs, context_rows: IntArray, event_rows: IntArray, made_at: Epochs) -> int:
    num_context = context_rows.size
    for token in range(made_at.size):
        if token < num_context:
            if changed[context_rows[token]] > made_at[token]:
                return token
        else:
            for field in range(event_rows.shape[0]):
                if changed[event_rows[field, token - num_context]] > made_at[token]:
                    return token
    return made_at.size
