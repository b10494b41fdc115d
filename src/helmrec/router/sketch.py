"""Sketches of a few kilobytes that estimate how many of a request's rows are absent from a node.

A fixed hash samples rows. A node sets one bit for each sampled row it holds; a request carries the hashes of its own
sampled rows. One bit per row instead of the ten of a Bloom filter: the estimate is a count, so the rate of false hits
must be known but need not be low, and more rows per byte lower the error further (decision 14). Knows rows and bits,
not nodes.
"""

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from helmrec.errors import ConfigError
from helmrec.memory.sampling import row_hash, sampling_threshold
from helmrec.router.settings import DEFAULT_BITS
from helmrec.types import IntArray

Words = NDArray[np.uint64]

DEFAULT_SAMPLES = 128
ROWS_PER_BIT = 0.7  # minimises the error of the estimate for every share of absent rows
_WORD_BITS = 64


class RowSketch(NamedTuple):
    """The resident rows of a node. Not to be changed once built; a few KB."""

    words: Words  # (bits / 64,)
    threshold: np.uint64  # rows whose hash is at most this have a bit
    fill: float  # share of bits that are set, 0..1

    @property
    def num_bytes(self) -> int:
        return self.words.nbytes + 16

    def packed(self) -> "PackedSketch":
        return PackedSketch(self.words.tobytes(), int(self.threshold), self.fill)


class PackedSketch(NamedTuple):
    """A sketch in plain values, to be sent to another process."""

    words: bytes
    threshold: int
    fill: float

    def unpacked(self) -> RowSketch:
        return RowSketch(np.frombuffer(self.words, np.uint64), np.uint64(self.threshold), self.fill)


class RowSample(NamedTuple):
    """Sample of the rows a request would read, with the token each belongs to."""

    hashes: Words  # (samples,)
    position: IntArray  # (samples,) history token, or the number of history tokens for a candidate
    threshold: np.uint64


def build_sketch(rows: IntArray, num_bits: int = DEFAULT_BITS, rows_per_bit: float = ROWS_PER_BIT) -> RowSketch:
    """Build the sketch of distinct resident rows, given in any order."""
    if num_bits < _WORD_BITS or num_bits & (num_bits - 1):
        raise ConfigError(f"bits of a sketch must be a power of two of at least {_WORD_BITS}, got {num_bits}")
    threshold = sampling_threshold(min(1.0, rows_per_bit * num_bits / max(1, rows.size)))
    words = np.zeros(num_bits // _WORD_BITS, np.uint64)
    return RowSketch(words, threshold, _set_bits(words, rows, threshold) / num_bits)


def sketch_of_hashes(hashes: Words, num_rows: int, most: np.uint64, num_bits: int = DEFAULT_BITS) -> RowSketch:
    """Build a sketch from the hashes of those of `num_rows` resident rows whose hash is at most `most`."""
    threshold = min(sampling_threshold(min(1.0, ROWS_PER_BIT * num_bits / max(1, num_rows))), most)
    words = np.zeros(num_bits // _WORD_BITS, np.uint64)
    return RowSketch(words, threshold, _set_hashed_bits(words, hashes, threshold) / num_bits)


def no_sample() -> RowSample:
    """Return the sample of a request whose rows are unknown."""
    return RowSample(np.empty(0, np.uint64), np.empty(0, np.int64), np.uint64(0))


def sample_rows(history: IntArray, candidates: IntArray, num_samples: int = DEFAULT_SAMPLES) -> RowSample:
    """Sample about `num_samples` of a request's rows.

    Shapes are (tokens, rows per token) and (candidates, rows per token). Duplicates are kept: an absent row that is
    read twice is missed twice.
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
        num_set += _set_bit(words, row_hash(row), threshold)
    return num_set


@numba.njit(cache=True)
def _set_hashed_bits(words: Words, hashes: Words, threshold: np.uint64) -> int:
    num_set = 0
    for word in hashes:
        num_set += _set_bit(words, word, threshold)
    return num_set


@numba.njit(cache=True, inline="always")
def _set_bit(words: Words, word: np.uint64, threshold: np.uint64) -> int:
    """Set the bit of a hash that is sampled. 1 if it was clear."""
    if word > threshold:
        return 0
    place, bit = _bit_of(word, words.size)
    was_clear = not words[place] & bit
    words[place] |= bit
    return int(was_clear)


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
    """Return word and bit of a hash, from its low bits. The sampling threshold compares the high bits."""
    place = (word >> np.uint64(6)) & np.uint64(num_words - 1)
    return int(place), np.uint64(1) << (word & np.uint64(63))


class SketchTable(NamedTuple):
    """Sketches of all nodes, as columns: a row is looked up in all of them at once."""

    words: Words  # (words, nodes)
    threshold: Words  # (nodes,) 0: no sketch
    fill: NDArray[np.float64]  # (nodes,)


class RowPrior(NamedTuple):
    """Prior estimate of the absent rows of a request, before its sample is counted."""

    num_rows: float  # that the request reads
    absent_share: float  # 0..1
    weight: float  # in samples


@numba.njit(cache=True)
def count_clear(table: SketchTable, sample: RowSample, first_token: IntArray) -> IntArray:
    """Count sampled rows without a bit, per node, of candidates and of tokens from `first_token` (per node) on."""
    num_words, num_nodes = table.words.shape
    num_clear = np.zeros(num_nodes, np.int64)
    for i in range(sample.hashes.size):
        word, position = sample.hashes[i], sample.position[i]
        place, bit = _bit_of(word, num_words)
        for node in range(num_nodes):  # no branches: half of them would be mispredicted
            is_clear = (table.words[place, node] & bit) == np.uint64(0)
            num_clear[node] += is_clear & (word <= table.threshold[node]) & (position >= first_token[node])
    return num_clear


@numba.njit(cache=True)
def absent_rows(num_clear: int, fill: float, rate: float, prior: RowPrior) -> float:
    """Estimate how many of a request's rows are not resident, given the number of sampled rows without a bit.

    A sampled row without a bit is absent. An absent row has a set bit by chance with probability `fill`, and was
    sampled at a known rate, so the count is divided by `1 - fill` and by the rate. Rows that are read often do not
    bias the estimate: they are resident.
    """
    if fill >= 1 or rate <= 0:
        return prior.num_rows * prior.absent_share
    absent = num_clear / (1 - fill) + prior.weight * prior.absent_share
    return prior.num_rows * min(1.0, absent / max(1e-9, prior.num_rows * rate + prior.weight))


@numba.njit(cache=True)
def shared_rate(one: np.uint64, other: np.uint64) -> float:
    """Return the share of all rows that is sampled under both thresholds; 0 if one of them is 0."""
    return 0.0 if min(one, other) == np.uint64(0) else (float(min(one, other)) + 1) / 2.0**64
