"""The KV cache's chained hash, in two steps: one word per event, and the fold over words.

A word depends on its event alone, so it is the same for every user, model version, window and context; only
the fold is seeded. `fold_words(seed_state(seed), event_words(columns))` are the states of
`memory.history.chain(seed, 0, columns)`. Knows nothing of files.
"""

import numba
import numpy as np
from numpy.typing import NDArray

from helmrec.memory.history import States, fold_state, mix_field
from helmrec.types import IntArray

Words = NDArray[np.uint64]


def event_words(columns: IntArray) -> Words:
    """One word per event. columns: (fields, events)."""
    return compiled_words(columns)


def seed_state(seed: tuple[int, ...]) -> int:
    """The state a chain with this seed starts from."""
    return int(_seed_state(np.array(seed, np.int64)))


def fold_words(state: int, words: Words) -> States:
    """States after each event that follows `state`."""
    return compiled_fold(np.uint64(state), words)


@numba.njit(cache=True)
def compiled_words(columns: IntArray) -> Words:
    num_fields, num_events = columns.shape
    words = np.zeros(num_events, np.uint64)
    for field in range(num_fields):  # field by field: these loops become vector instructions
        for i in range(num_events):
            words[i] += mix_field(columns[field, i], field)
    return words


@numba.njit(cache=True)
def _seed_state(seed: IntArray) -> np.uint64:
    state = np.uint64(0)
    for i in range(seed.size):
        state = fold_state(state, mix_field(seed[i], i))
    return state


@numba.njit(cache=True)
def compiled_fold(state: np.uint64, words: Words) -> States:
    states = np.empty(words.size, np.uint64)
    for i in range(words.size):
        state = fold_state(state, words[i])
        states[i] = state
    return states
