"""Which rows a node holds, in a few kilobytes: enough to say how many of a request's rows are absent there.

A fixed hash picks some rows. A node sets one bit for each picked row it holds; a request brings the hashes of its own
picked rows. One bit a row, not a Bloom filter's ten: what is wanted is a count, so false hits need not be rare, only
known, and the rows they make room for lower the error more (decision 14). Knows rows and bits, nothing of nodes.
"""

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from helmrec.errors import ConfigError
from helmrec.memory.sampling import row_hash, sampling_threshold
from helmrec.types import IntArray

Words = NDArray[np.uint64]

DEFAULT_BITS = 1 << 16
DEFAULT_SAMPLES = 128
_ROWS_PER_BIT = 0.7  # where the error of an estimate is least, whatever the share of absent rows is
_WORD_BITS = 64


class RowSketch(NamedTuple):
    """A node's resident rows. Immutable by agreement; a few KB."""

    words: Words  # (bits / 64,)
    threshold: np.uint64  # rows whose hash is at most this have a bit
    fill: float  # share of bits that are set, 0..1

    @property
    def num_bytes(self) -> int:
        return self.words.nbytes + 16


class RowSample(NamedTuple):
    """Rows a request would read: some of them, picked by hash, with the token each belongs to."""

    hashes: Words  # (samples,)
    position: IntArray  # (samples,) history token, or the number of history tokens for a candidate
    threshold: np.uint64


def build_sketch(rows: IntArray, num_bits: int = DEFAULT_BITS) -> RowSketch:
    """Of distinct resident rows, in any order."""
    if num_bits < _WORD_BITS or num_bits & (num_bits - 1):
        raise ConfigError(f"bits of a sketch must be a power of two of at least {_WORD_BITS}, got {num_bits}")
    threshold = sampling_threshold(min(1.0, _ROWS_PER_BIT * num_bits / max(1, rows.size)))
    words = np.zeros(num_bits // _WORD_BITS, np.uint64)
    num_set = _set_bits(words, rows, threshold)
    return RowSketch(words, threshold, num_set / num_bits)


def sketch_of_hashes(hashes: Words, num_rows: int, most: np.uint64, num_bits: int = DEFAULT_BITS) -> RowSketch:
    """The same of the hashes of some of `num_rows` resident rows: of all of them whose hash is at most `most`."""
    threshold = min(sampling_threshold(min(1.0, _ROWS_PER_BIT * num_bits / max(1, num_rows))), most)
    words = np.zeros(num_bits // _WORD_BITS, np.uint64)
    return RowSketch(words, threshold, _set_hashed_bits(words, hashes, threshold) / num_bits)


def no_sample() -> RowSample:
    """Of a request whose rows are unknown."""
    return RowSample(np.empty(0, np.uint64), np.empty(0, np.int64), np.uint64(0))


def sample_rows(history: IntArray, candidates: IntArray, num_samples: int = DEFAULT_SAMPLES) -> RowSample:
    """About `num_samples` of a request's rows; shapes (tokens, rows per token) and (candidates, rows per token).

    Repeats stay: a row that is read twice and absent is missed twice.
    """
    num_rows = history.size + candidates.size
    if not num_rows:
        return no_sample()
    threshold = sampling_threshold(min(1.0, num_samples / num_rows))
    per_token = max(1, history.size // max(1, len(history)))
    old_hashes, old_places = _picked(np.ascontiguousarray(history).reshape(-1), threshold)
    new_hashes, new_places = _picked(np.ascontiguousarray(candidates).reshape(-1), threshold)
    position = np.concatenate([old_places // per_token, np.full(new_places.size, len(history), np.int64)])
    return RowSample(np.concatenate([old_hashes, new_hashes]), position, threshold)


@numba.njit(cache=True)
def _set_bits(words: Words, rows: IntArray, threshold: np.uint64) -> int:
    num_set = 0
    for row in rows:
        word = row_hash(row)
        if word <= threshold:
            place, bit = _bit_of(word, words.size)
            num_set += not words[place] & bit
            words[place] |= bit
    return num_set


@numba.njit(cache=True)
def _set_hashed_bits(words: Words, hashes: Words, threshold: np.uint64) -> int:
    num_set = 0
    for word in hashes:
        if word <= threshold:
            place, bit = _bit_of(word, words.size)
            num_set += not words[place] & bit
            words[place] |= bit
    return num_set


@numba.njit(cache=True)
def _picked(rows: IntArray, threshold: np.uint64) -> tuple[Words, IntArray]:
    hashes, places = np.empty(rows.size, np.uint64), np.empty(rows.size, np.int64)
    count = 0
    for i in range(rows.size):
        word = row_hash(rows[i])
        if word <= threshold:
            hashes[count], places[count] = word, i
            count += 1
    return hashes[:count].copy(), places[:count].copy()


@numba.njit(cache=True, inline="always")
def _bit_of(word: np.uint64, num_words: int) -> tuple[int, np.uint64]:
    """Low bits of a hash place it; the high ones, compared with the threshold, have picked it."""
    place = (word >> np.uint64(6)) & np.uint64(num_words - 1)
    return int(place), np.uint64(1) << (word & np.uint64(63))


class SketchTable(NamedTuple):
    """Sketches of all nodes, one node beside the other: a request's row is looked up in all of them at once."""

    words: Words  # (words, nodes)
    threshold: Words  # (nodes,) 0: no sketch
    fill: NDArray[np.float64]  # (nodes,)


class Belief(NamedTuple):
    """What is thought of a request's rows before its sample is looked at."""

    num_rows: float  # read
    absent_share: float  # 0..1
    weight: float  # samples the share is worth


@numba.njit(cache=True)
def count_clear(table: SketchTable, sample: RowSample, first_token: IntArray) -> IntArray:
    """Sampled rows without a bit, by node, of tokens from `first_token` (by node) on and of candidates."""
    num_words, num_nodes = table.words.shape
    num_clear = np.zeros(num_nodes, np.int64)
    for i in range(sample.hashes.size):
        word, position = sample.hashes[i], sample.position[i]
        place, bit = _bit_of(word, num_words)
        for node in range(num_nodes):  # no branches: half of them would be guessed wrong
            is_clear = (table.words[place, node] & bit) == np.uint64(0)
            num_clear[node] += is_clear & (word <= table.threshold[node]) & (position >= first_token[node])
    return num_clear


@numba.njit(cache=True)
def absent_rows(num_clear: int, fill: float, rate: float, belief: Belief) -> float:
    """How many of a request's rows are not resident, if this many of those picked have no bit.

    Picked rows without a bit are absent for sure. Absent rows meet a set bit as often as bits are set, and were picked
    at a known rate: scaled by both, their number estimates all. Rows read often do not spoil it: they are resident.
    """
    if fill >= 1 or rate <= 0:
        return belief.num_rows * belief.absent_share
    absent = num_clear / (1 - fill) + belief.weight * belief.absent_share
    return belief.num_rows * min(1.0, absent / max(1e-9, belief.num_rows * rate + belief.weight))


@numba.njit(cache=True)
def shared_rate(one: np.uint64, other: np.uint64) -> float:
    """Share of all rows that is picked under both thresholds; none if one of them is 0."""
    return 0.0 if min(one, other) == np.uint64(0) else (float(min(one, other)) + 1) / 2.0**64
