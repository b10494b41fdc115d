"""Derives items from hashes under the popularity of a catalogue.

Counter-based: any event of a backlog and any candidate can be derived alone, in any order, always with the same result.
This module knows no models and no rows.
"""

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from helmrec.traffic.trace import Catalogue, EmpiricalLaw, Law
from helmrec.types import IntArray

Word = int | np.integer
Index = int | np.integer

_MAX_REDRAWS = 16  # of a candidate that is in its set already; then the next free block is used


class Draws(NamedTuple):
    """The popularity of a catalogue as arrays, for compiled code: one alias table per law, one line per epoch."""

    num_lanes: int
    num_blocks: int
    num_actions: int
    seed: int
    start_time_s: int
    backlog_gap_s: int
    alias: NDArray[np.float64]  # (laws, blocks, 2) chance that a cell keeps its draw, and the cell that gets the rest
    law: IntArray  # (epochs,)
    drift_blocks: IntArray  # (epochs,) below num_blocks
    flash_share: NDArray[np.float64]  # (epochs,)
    flash_first: IntArray  # (epochs,)
    flash_blocks: IntArray  # (epochs,)


class Rules(NamedTuple):
    """The settings of one epoch besides its law. Numbers only, since compiled loops count references to arrays."""

    num_lanes: int
    num_blocks: int
    drift_blocks: int
    flash_share: float
    flash_first: int
    flash_blocks: int


def prepare_draws(catalogue: Catalogue) -> Draws:
    """Compute the alias tables and epochs of a catalogue."""
    epochs = catalogue.epochs
    return Draws(
        num_lanes=catalogue.num_lanes,
        num_blocks=catalogue.num_blocks,
        num_actions=catalogue.num_actions,
        seed=catalogue.seed,
        start_time_s=catalogue.start_time_s,
        backlog_gap_s=catalogue.backlog_gap_s,
        alias=np.stack([_alias_table(block_mass(law, catalogue)) for law in catalogue.laws]),
        law=np.array([e.law for e in epochs], np.int64),
        drift_blocks=np.array([e.drift_blocks % catalogue.num_blocks for e in epochs], np.int64),
        flash_share=np.array([e.flash_share for e in epochs], np.float64),
        flash_first=np.array([e.flash_first for e in epochs], np.int64),
        flash_blocks=np.array([e.flash_blocks for e in epochs], np.int64),
    )


def block_mass(law: Law, catalogue: Catalogue) -> NDArray[np.float64]:
    """Share of draws that go to each block; the items of a block are equally popular."""
    ends = np.arange(catalogue.num_blocks + 1) * catalogue.num_lanes
    total = _cumulative(law, ends.astype(np.float64))
    mass = np.diff(total)
    return mass / mass.sum()


def _cumulative(law: Law, ranks: NDArray[np.float64]) -> NDArray[np.float64]:
    """Total weight of the ranks below each of `ranks`, up to a constant factor."""
    if isinstance(law, EmpiricalLaw):
        return np.interp(ranks, np.array((0, *law.ends)), np.cumsum((0.0, *law.mass)))
    x, power = ranks + law.shift, 1 - law.exponent
    return np.log(x) if power == 0 else x**power / power


@numba.njit(cache=True)
def _alias_table(mass: NDArray[np.float64]) -> NDArray[np.float64]:
    """Alias table by Vose's method: a draw costs one cell and one comparison for any number of blocks."""
    n = mass.size
    table = np.empty((n, 2), np.float64)
    table[:, 0], table[:, 1] = mass * n, np.arange(n)
    keep, other = table[:, 0], table[:, 1]
    small, large = np.empty(n, np.int64), np.empty(n, np.int64)
    num_small = num_large = 0
    for i in range(n):
        if keep[i] < 1.0:
            small[num_small] = i
            num_small += 1
        else:
            large[num_large] = i
            num_large += 1
    while num_small and num_large:
        num_small -= 1
        low, high = small[num_small], large[num_large - 1]
        other[low] = high
        keep[high] -= 1.0 - keep[low]
        if keep[high] < 1.0:
            num_large -= 1
            small[num_small] = high
            num_small += 1
    for i in range(num_small):  # left over by rounding
        keep[small[i]] = 1.0
    for i in range(num_large):
        keep[large[i]] = 1.0
    return table


@numba.njit(cache=True, inline="always")
def mix(word: Word, salt: Word) -> np.uint64:
    """Hash (word, salt) to 64 bits."""
    mixed = np.uint64(word) + np.uint64(salt) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@numba.njit(cache=True, inline="always")
def scale(word: np.uint64, limit: int) -> np.int64:
    """A number in [0, limit) from the upper half of a word; limit up to 2^32."""
    return np.int64(((word >> np.uint64(32)) * np.uint64(limit)) >> np.uint64(32))


@numba.njit(cache=True, inline="always")
def coin(word: np.uint64) -> float:
    """A number in [0, 1) from the lower half of a word."""
    return np.float64(word & np.uint64(0xFFFFFFFF)) * 2.0**-32


@numba.njit(cache=True, inline="always")
def rules_at(draws: Draws, epoch: Index) -> Rules:
    """The settings of an epoch."""
    return Rules(
        draws.num_lanes,
        draws.num_blocks,
        draws.drift_blocks[epoch],
        draws.flash_share[epoch],
        draws.flash_first[epoch],
        draws.flash_blocks[epoch],
    )


@numba.njit(cache=True, inline="always")
def draw_block(alias: NDArray[np.float64], rules: Rules, word: np.uint64) -> np.int64:
    """The block that a word draws from the table (blocks, 2) of a law. New items enter at the top and drift down."""
    if rules.flash_share > 0.0:
        flash = mix(word, 0xF1A5)
        if coin(flash) < rules.flash_share:
            return (rules.flash_first + scale(flash, rules.flash_blocks)) % rules.num_blocks
    cell = scale(word, rules.num_blocks)
    if coin(word) >= alias[cell, 0]:
        cell = np.int64(alias[cell, 1])
    cell -= rules.drift_blocks
    return cell if cell >= 0 else cell + rules.num_blocks


@numba.njit(cache=True, inline="always")
def user_word(draws: Draws, user: int) -> np.uint64:
    """The hash from which all events of a user and its first lane are derived."""
    return mix(user, draws.seed + 1)


@numba.njit(cache=True, inline="always")
def lane_of(num_lanes: int, word: np.uint64, index: int) -> np.int64:
    """The lane of an event or candidate: each history and candidate set visits the lanes in turn."""
    return np.int64((word + np.uint64(index)) & np.uint64(num_lanes - 1))


@numba.njit(cache=True, inline="always")
def draw_event(alias: NDArray[np.float64], rules: Rules, word: np.uint64, index: int) -> np.int64:
    """The item of event `index` of the user with hash `word`."""
    return draw_block(alias, rules, mix(index, word)) * rules.num_lanes + lane_of(rules.num_lanes, word, index)


@numba.njit(cache=True, inline="always")
def draw_action(num_actions: int, word: np.uint64, index: int) -> int:
    """The action of event `index`. Action k is half as frequent as action k - 1."""
    bits, action = mix(index, word + np.uint64(0xAC7)), 0
    while action < num_actions - 1 and bits & np.uint64(1):
        bits >>= np.uint64(1)
        action += 1
    return action


@numba.njit(cache=True)
def draw_lane_candidates(
    alias: NDArray[np.float64], rules: Rules, seed: np.uint64, num_candidates: int, lane: int, blocks: IntArray
) -> int:
    """Draw the blocks of a candidate set's items in one lane, all different if possible; return how many.

    The i-th of them is candidate first + i * num_lanes of the set, where `first` is its first candidate in this lane.
    """
    first = (lane - lane_of(rules.num_lanes, seed, 0)) & (rules.num_lanes - 1)
    count = 0
    for index in range(first, num_candidates, rules.num_lanes):
        block = draw_block(alias, rules, mix(index, seed))
        attempt = 1
        while _holds(blocks, count, block) and attempt < _MAX_REDRAWS + rules.num_blocks:
            if attempt < _MAX_REDRAWS:
                block = draw_block(alias, rules, mix(index + (attempt << 32), seed))
            else:
                block = (block + 1) % rules.num_blocks
            attempt += 1
        blocks[count] = block
        count += 1
    return count


@numba.njit(cache=True, inline="always")
def _holds(blocks: IntArray, count: int, block: Index) -> bool:
    found = False
    for i in range(count):
        found |= blocks[i] == block
    return found


@numba.njit(cache=True)
def draw_candidates(draws: Draws, epoch: int, seed: np.uint64, items: IntArray) -> None:
    """Fill `items` with the candidate set of a seed."""
    blocks = np.empty(items.size // draws.num_lanes + 1, np.int64)
    alias, rules = draws.alias[draws.law[epoch]], rules_at(draws, epoch)
    for lane in range(rules.num_lanes):
        first = (lane - lane_of(rules.num_lanes, seed, 0)) & (rules.num_lanes - 1)
        for i in range(draw_lane_candidates(alias, rules, seed, items.size, lane, blocks)):
            items[first + i * rules.num_lanes] = blocks[i] * rules.num_lanes + lane


@numba.njit(cache=True)
def draw_backlog(draws: Draws, user: int, backlog: int, first: int, events: IntArray) -> None:
    """Fill `events` (3, n) with items, actions and timestamps of a user's backlog, from event `first` on.

    `backlog` is its length. A backlog is drawn at epoch 0 and ends before the trace starts.
    """
    word, alias, rules = user_word(draws, user), draws.alias[draws.law[0]], rules_at(draws, 0)
    start_s, gap_s, num_actions = draws.start_time_s, draws.backlog_gap_s, draws.num_actions
    for i in range(events.shape[1]):
        index = first + i
        time_s = start_s - (backlog - index) * gap_s + scale(mix(index, word + np.uint64(0x6A9)), gap_s)
        events[0, i] = draw_event(alias, rules, word, index)
        events[1, i] = draw_action(num_actions, word, index)
        events[2, i] = time_s if time_s > 0 else 0
