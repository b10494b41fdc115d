import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from helmrec.config import EngineConfig
from helmrec.errors import AlphaOutOfRange, ConfigError, PoolTooSmall
from helmrec.memory.boundary import moves_between_steps
from helmrec.memory.embedding_cache import ABSENT
from helmrec.memory.ledger import Owner
from helmrec.memory.pool import Demand, Pool, _least_pages
from helmrec.memory.row_cache import Slots
from tests.helpers import host_rows, tiny_config, tiny_geometry
from tests.memory.test_kv_cache import make_history

GEOMETRY = tiny_geometry(tiny_config())
PAGE = GEOMETRY.page_bytes
DEMAND = Demand(num_rows=2_000, request_tokens=17, batch_tokens=64)


class Copies:
    """A mover that keeps which row lies where, as the arena would."""

    def __init__(self, num_slots: int) -> None:
        self.row_at = np.full(num_slots, -1, np.int64)

    def copy_rows(self, source: Slots, target: Slots) -> None:
        assert not np.intersect1d(source, target).size
        self.row_at[target] = self.row_at[source]


def make_pool(num_pages: int = 20, alpha: float = 0.4, mover: Copies | None = None, **settings: Any) -> Pool:
    config = EngineConfig(
        pool_bytes=num_pages * PAGE, alpha=alpha, page_tokens=4, **{"row_admission": "always"} | settings
    )
    return Pool(config, GEOMETRY, DEMAND, mover or Copies(num_pages * GEOMETRY.rows_per_page))


def serve(pool: Pool, user_id: int, events: Sequence[int]) -> int:
    """Returns the tokens reused."""
    plan = pool.kv.plan(make_history(user_id, events), 0.0)
    assert plan is not None
    pool.kv.commit(plan, 0.0)
    return plan.num_resident


def read(pool: Pool, rows: np.ndarray[Any, np.dtype[np.int64]], mover: Copies | None = None) -> None:
    missed = rows[host_rows(pool).lookup(rows) == ABSENT]
    admission = host_rows(pool).admit(missed, np.arange(missed.size))
    if mover:
        mover.row_at[admission.slots] = admission.rows
    host_rows(pool).publish(admission)


def settle(pool: Pool, budget_bytes: int = 1 << 30) -> int:
    """Returns how many steps it took."""
    steps = 0
    while not pool.is_settled:
        pool.advance(budget_bytes, epoch=0)
        pool.ledger.retire(0)
        pool.check()
        steps += 1
        assert steps < 1_000
    return steps


def test_a_new_pool_gives_emb_its_share_and_kv_the_rest() -> None:
    pool = make_pool(num_pages=20, alpha=0.4)
    assert (pool.alpha, pool.alpha_target, pool.ledger.num_free) == (0.4, 0.4, 12)
    assert pool.rows.capacity == 8 * GEOMETRY.rows_per_page
    assert pool.is_settled
    pool.check()


def test_a_pool_too_small_for_one_request_says_what_it_needs_and_got() -> None:
    with pytest.raises(PoolTooSmall, match=rf"pool_bytes must be at least {6 * PAGE} .*got {5 * PAGE}$"):
        make_pool(num_pages=5, alpha=0)
    make_pool(num_pages=6, alpha=0.1).check()


def test_a_pool_of_no_pages_is_too_small() -> None:
    config = EngineConfig(pool_bytes=1, page_tokens=4)
    with pytest.raises(PoolTooSmall, match=r"got 1$"):
        Pool(config, GEOMETRY, DEMAND, Copies(0))


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan"), float("inf")])
def test_alpha_outside_0_to_1_is_named(alpha: float) -> None:
    pool = make_pool()
    with pytest.raises(AlphaOutOfRange, match=f"alpha must be between 0 and 1, got {alpha}"):
        pool.aim(alpha)
    assert pool.alpha_target == 0.4


def test_alpha_that_leaves_kv_no_room_for_a_request_is_named() -> None:
    pool = make_pool(num_pages=20)
    assert pool.alpha_max == 0.75
    pool.aim(0.75)
    with pytest.raises(AlphaOutOfRange, match=r"alpha must be at most 0\.7500, got 0\.9: it leaves 2 pages for KV"):
        pool.aim(0.9)
    with pytest.raises(ConfigError, match=r"got 1\.0"):
        make_pool(alpha=1.0)


def test_growing_emb_takes_the_coldest_prefixes_when_no_page_is_free() -> None:
    pool = make_pool(num_pages=20, alpha=0.1, kv_admission="always")
    for user_id in range(8):
        serve(pool, user_id, range(16))
    pool.aim(0.75)
    settle(pool)
    assert pool.alpha == 0.75
    assert pool.kv.resident_tokens(make_history(0, range(16))) == 0
    assert pool.stats().bytes_by_cause["boundary-grow"] == 13 * PAGE


def test_shrinking_emb_gives_its_pages_to_kv() -> None:
    pool = make_pool(num_pages=20, alpha=0.7)
    read(pool, np.arange(1_000))
    pool.aim(0.1)
    settle(pool)
    assert (pool.alpha, pool.ledger.num_free) == (0.1, 18)
    assert pool.rows.num_resident == pool.rows.capacity == 2 * GEOMETRY.rows_per_page


@pytest.mark.parametrize(("start", "target"), [(0.1, 0.7), (0.7, 0.1)])
def test_the_boundary_moves_in_steps_of_the_budget(start: float, target: float) -> None:
    pool = make_pool(num_pages=20, alpha=start)
    read(pool, np.arange(500))
    pool.aim(target)
    before = pool.ledger.count(Owner.EMB)
    pool.advance(3 * PAGE, epoch=0)
    assert abs(pool.ledger.count(Owner.EMB) - before) == 3
    assert pool.alpha_target == pytest.approx(target)
    pool.ledger.retire(0)
    assert settle(pool, budget_bytes=3 * PAGE) == 3


def test_a_budget_below_one_page_still_moves_a_page() -> None:
    pool = make_pool(num_pages=20, alpha=0.4)
    pool.aim(0.5)
    pool.advance(1, epoch=0)
    assert pool.ledger.count(Owner.EMB) == 9


@pytest.mark.parametrize(("start", "target"), [(0.3, 0.7), (0.7, 0.3)])
def test_after_a_long_step_the_boundary_makes_several_moves(start: float, target: float) -> None:
    pool = make_pool(num_pages=200, alpha=start)
    before = pool.ledger.count(Owner.EMB)
    pool.aim(target)
    num = moves_between_steps(pool.ledger.num_pages, 1, 0.25)
    pool.advance(PAGE, epoch=0, since_s=0.25)
    assert num > 1
    assert abs(pool.ledger.count(Owner.EMB) - before) == num
    pool.check()


def test_shrinking_emb_waits_for_the_running_step() -> None:
    pool = make_pool(num_pages=20, alpha=0.5)
    pool.aim(0.2)
    pool.advance(1 << 30, epoch=7)
    assert (pool.alpha, pool.ledger.count(Owner.DRAINING), pool.is_settled) == (0.2, 6, False)
    free = pool.ledger.num_free
    pool.ledger.retire(6)
    assert pool.ledger.num_free == free
    pool.ledger.retire(7)
    assert pool.ledger.num_free == free + 6
    assert pool.is_settled
    pool.check()


def test_growing_emb_never_takes_pinned_pages() -> None:
    pool = make_pool(num_pages=20, alpha=0.1)
    plans = [pool.kv.plan(make_history(user_id, range(17)), 0.0) for user_id in range(3)]
    pool.aim(0.75)
    pool.advance(1 << 30, epoch=0)
    pool.check()
    assert pool.ledger.count(Owner.EMB) == 5
    for plan in plans:
        assert plan is not None
        pool.kv.commit(plan, 0.0)
    settle(pool)
    assert pool.alpha == 0.75


def test_prefixes_are_reused_after_a_move_as_in_a_pool_born_there() -> None:
    moved, born = make_pool(40, alpha=0.1), make_pool(40, alpha=0.8)
    moved.aim(0.8)
    settle(moved)
    for _ in range(3):
        reused = [serve(pool, 1, range(17)) for pool in (moved, born)]
    assert reused == [17, 17]


def test_a_boundary_that_turns_round_leaves_room_for_a_request_while_pages_drain() -> None:
    pool = make_pool(num_pages=20, alpha=0.7)
    pool.aim(0.0)
    pool.advance(6 * PAGE, epoch=1)
    pool.aim(0.7)
    pool.advance(20 * PAGE, epoch=1)
    assert pool.ledger.count(Owner.DRAINING) == 6
    assert serve(pool, 1, range(17)) == 0, "the longest request still fits"
    pool.ledger.retire(1)
    pool.advance(20 * PAGE, epoch=1)
    assert pool.is_settled
    pool.check()


def test_stats_show_the_pool_as_it_is() -> None:
    pool = make_pool(num_pages=20, alpha=0.4)
    serve(pool, 1, range(6))
    serve(pool, 1, range(6))
    read(pool, np.array([3, 4]))
    read(pool, np.array([3]))
    stats = pool.stats()
    assert (stats.num_pages, stats.emb_pages, stats.kv_pages, stats.free_pages) == (20, 8, 2, 10)
    assert (stats.row_hits, stats.row_misses, stats.resident_rows) == (1, 2, 2)
    assert stats.row_hit_rate == pytest.approx(1 / 3)
    assert (stats.reused_tokens, stats.total_tokens, stats.token_reuse_rate) == (6, 12, 0.5)
    assert (stats.alpha_min, stats.alpha_max, stats.page_bytes) == (0.0, 0.75, PAGE)


def test_rates_of_an_unused_pool_are_zero() -> None:
    stats = make_pool().stats()
    assert stats.row_hit_rate == stats.token_reuse_rate == 0


def test_survivors_of_a_shrink_take_their_data_along() -> None:
    mover = Copies(20 * GEOMETRY.rows_per_page)
    pool = make_pool(num_pages=20, alpha=0.5, mover=mover)
    read(pool, np.arange(160), mover)
    hot = np.arange(0, 160, 5)
    read(pool, hot, mover)
    pool.aim(0.1)
    settle(pool)
    assert sorted(host_rows(pool).by_heat().tolist()) == hot.tolist()
    assert np.array_equal(mover.row_at[host_rows(pool).peek(hot)], hot)
    assert pool.stats().bytes_by_cause["boundary-compact"] > 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("order", ["lru", "frequency"])
def test_no_page_and_no_row_is_lost_while_the_boundary_moves(order: str, seed: int) -> None:
    rng, epoch = np.random.default_rng(seed), 0
    mover = Copies(20 * GEOMETRY.rows_per_page)
    pool = make_pool(num_pages=20, mover=mover, row_order=order)
    for _ in range(200):
        number = int(rng.integers(10))
        match rng.choice(["aim", "advance", "retire", "read", "serve"]):
            case "aim":
                pool.aim(number / 10 * pool.alpha_max)
            case "advance":
                epoch += 1
                pool.advance(number * PAGE, epoch)
            case "retire":
                pool.ledger.retire(epoch - number // 3)
            case "read":
                read(pool, rng.integers(0, 400, 8 * number), mover)
            case "serve" if pool.ledger.num_free + pool.ledger.count(Owner.KV) >= 5:
                serve(pool, number % 3, range(number, number + 9))
        pool.check()
        rows = host_rows(pool).by_heat()
        assert np.array_equal(mover.row_at[host_rows(pool).peek(rows)], rows), "a row's data is not in its slot"


def test_the_old_name_of_unmatched_histories_still_works_and_warns() -> None:
    stats = make_pool().stats()
    with pytest.warns(DeprecationWarning, match="unmatched_histories"):
        assert stats.strangers == stats.unmatched_histories == 0


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.4, 0.5, 0.93, 0.999])
@pytest.mark.parametrize("request_pages", [1, 17, 400])
def test_the_smallest_pool_that_is_named_has_room_and_no_smaller_one_has(request_pages: int, alpha: float) -> None:
    def room(num_pages: int) -> int:
        return num_pages - math.floor(alpha * num_pages + 0.5)

    least = _least_pages(request_pages, alpha)
    assert room(least) >= request_pages
    assert least == request_pages + 1 or room(least - 1) < request_pages
