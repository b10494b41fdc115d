from collections.abc import Iterable

import numpy as np
import pytest

from helmrec.traffic.popularity import (
    Draws,
    block_mass,
    draw_backlog,
    draw_block,
    draw_candidates,
    draw_lane_candidates,
    mix,
    prepare_draws,
    rules_at,
    user_word,
)
from helmrec.traffic.trace import Catalogue, EmpiricalLaw, Epoch, Law, ZipfLaw

MASK = (1 << 64) - 1


def catalogue(law: Law, *epochs: Epoch, num_items: int = 1_024) -> Catalogue:
    return Catalogue(num_items=num_items, num_lanes=16, laws=(law,), epochs=(Epoch(), *epochs))


def plain_mix(word: int, salt: int) -> int:
    mixed = (word + salt * 0x9E3779B97F4A7C15) & MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
    return mixed ^ (mixed >> 31)


def plain_block(draws: Draws, epoch: int, word: int) -> int:
    share = float(draws.flash_share[epoch])
    flash = plain_mix(word, 0xF1A5)
    if share and (flash & 0xFFFFFFFF) / 2**32 < share:
        step = ((flash >> 32) * int(draws.flash_blocks[epoch])) >> 32
        return (int(draws.flash_first[epoch]) + step) % draws.num_blocks
    law, cell = int(draws.law[epoch]), ((word >> 32) * draws.num_blocks) >> 32
    keep, other = draws.alias[law, cell]
    if (word & 0xFFFFFFFF) / 2**32 >= keep:
        cell = int(other)
    return (cell - int(draws.drift_blocks[epoch])) % draws.num_blocks


def plain_candidates(draws: Draws, epoch: int, seed: int, count: int) -> list[int]:
    """One after the other; a repeat is drawn again, up to 16 times, and then moved to the next free block."""
    items: list[int] = []
    for index in range(count):
        lane = (seed + index) % draws.num_lanes
        drawn = [plain_block(draws, epoch, plain_mix(index + (attempt << 32), seed)) for attempt in range(16)]
        drawn += [(drawn[-1] + step) % draws.num_blocks for step in range(1, draws.num_blocks + 1)]
        choices = [block * draws.num_lanes + lane for block in drawn]
        items.append(next((item for item in choices if item not in items), choices[-1]))
    return items


def blocks_of(draws: Draws, epoch: int, words: Iterable[int]) -> list[int]:
    """The compiled draws of some words."""
    alias, rules = draws.alias[draws.law[epoch]], rules_at(draws, epoch)
    return [int(draw_block(alias, rules, np.uint64(word))) for word in words]


EPOCHS = (
    Epoch(drift_blocks=5),
    Epoch(drift_blocks=200),
    Epoch(flash_share=0.4, flash_first=60, flash_blocks=10),
)


def test_the_hash_equals_its_plain_twin() -> None:
    pairs = [(0, 0), (1, 0), (0, 1), (2**62, 2**63 + 5), (12_345, 678)]
    assert [int(mix(np.uint64(a), np.uint64(b))) for a, b in pairs] == [plain_mix(a, b) for a, b in pairs]


@pytest.mark.parametrize("epoch", range(4))
def test_draws_equal_their_plain_twin(epoch: int) -> None:
    draws = prepare_draws(catalogue(ZipfLaw(exponent=1.1), *EPOCHS))
    words = [plain_mix(i, 9) for i in range(500)]
    assert blocks_of(draws, epoch, words) == [plain_block(draws, epoch, w) for w in words]


@pytest.mark.parametrize("epoch", range(4))
@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 100, 1_024, 1_100])
def test_candidate_sets_equal_their_plain_twin(epoch: int, count: int) -> None:
    draws = prepare_draws(catalogue(ZipfLaw(exponent=1.1), *EPOCHS))
    for seed in (0, 7, 2**64 - 3):
        items = np.empty(count, np.int64)
        draw_candidates(draws, epoch, np.uint64(seed), items)
        assert items.tolist() == plain_candidates(draws, epoch, seed, count)


def test_a_lane_of_a_candidate_set_can_be_had_alone() -> None:
    draws, blocks = prepare_draws(catalogue(ZipfLaw(exponent=1.1))), np.empty(8, np.int64)
    items = np.empty(100, np.int64)
    draw_candidates(draws, 0, np.uint64(99), items)
    for lane in range(16):
        count = draw_lane_candidates(draws.alias[0], rules_at(draws, 0), np.uint64(99), 100, lane, blocks)
        assert (blocks[:count] * 16 + lane).tolist() == items[items % 16 == lane].tolist()


def test_candidates_of_a_set_are_different_items() -> None:
    draws, items = prepare_draws(catalogue(ZipfLaw(exponent=1.3))), np.empty(200, np.int64)
    for seed in range(20):
        draw_candidates(draws, 0, np.uint64(seed), items)
        assert np.unique(items).size == 200


@pytest.mark.parametrize(
    "law",
    [
        ZipfLaw(exponent=0),
        ZipfLaw(exponent=1),
        ZipfLaw(exponent=1.2, shift=10),
        EmpiricalLaw(ends=(16, 160, 1_024), mass=(0.5, 0.3, 0.2)),
    ],
)
def test_drawn_blocks_follow_the_law(law: Law) -> None:
    draws, num_draws = prepare_draws(catalogue(law)), 50_000
    words = np.random.default_rng(0).integers(0, 2**64, num_draws, np.uint64)
    counts = np.bincount(blocks_of(draws, 0, words), minlength=64)
    expected = block_mass(law, catalogue(law)) * num_draws
    assert (((counts - expected) ** 2 / expected).sum()) < 64 + 4 * np.sqrt(2 * 64)  # chi-squared, four sigma


def test_an_empirical_law_gives_each_span_its_mass() -> None:
    law = EmpiricalLaw(ends=(16, 160, 1_024), mass=(0.5, 0.3, 0.2))
    mass = block_mass(law, catalogue(law))
    assert np.allclose([mass[0], mass[1:10].sum(), mass[10:].sum()], [0.5, 0.3, 0.2])


def test_drift_brings_fresh_items_to_the_top_and_ages_the_others() -> None:
    draws = prepare_draws(catalogue(ZipfLaw(exponent=1.5), Epoch(drift_blocks=1)))
    words = np.random.default_rng(0).integers(0, 2**64, 20_000, np.uint64)
    before, after = (np.bincount(blocks_of(draws, epoch, words), minlength=64) for epoch in (0, 1))
    assert before.argmax() == 0
    assert after.argmax() == 63  # the coldest block has become the freshest
    assert np.array_equal(np.roll(before, -1), after)


def test_histories_visit_the_lanes_in_turn_and_any_part_can_be_had_alone() -> None:
    draws, whole, part = prepare_draws(catalogue(ZipfLaw(exponent=1))), np.empty((3, 100), int), np.empty((3, 30), int)
    draw_backlog(draws, 5, 100, 0, whole)
    draw_backlog(draws, 5, 100, 50, part)
    assert np.array_equal(whole[:, 50:80], part)
    assert (np.diff(whole[0] % 16) % 16 == 1).all()
    assert int(whole[0, 0] % 16) == int(user_word(draws, 5)) % 16
    assert (np.diff(whole[2]) >= 0).all()
    assert whole[2, -1] < draws.start_time_s
    assert whole[1].max() < draws.num_actions
