"""Windows from two looks at a pool, and limits that hold whatever a policy asks for."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helmrec.control.policy import Limited, Limits, Move, WindowStats
from helmrec.errors import ConfigError
from helmrec.memory.stats import PoolStats
from helmrec.steps import no_steps
from tests.control.bowl import Bowl

EMPTY = PoolStats(
    alpha=0.3,
    alpha_target=0.4,
    alpha_min=0.0,
    alpha_max=0.9,
    num_pages=100,
    free_pages=0,
    emb_pages=30,
    kv_pages=70,
    draining_pages=0,
    page_bytes=1_000,
    page_tokens=16,
    row_hits=0,
    row_misses=0,
    row_evictions=0,
    row_refills=0,
    resident_rows=0,
    row_capacity=0,
    reused_tokens=0,
    total_tokens=0,
    resident_users=0,
    kv_evicted_pages=0,
    kv_refused_prefixes=0,
    stale_cuts=0,
    unmatched_histories=0,
    host_pages=0,
    host_saved_pages=0,
    host_reloaded_pages=0,
    host_evicted_pages=0,
    bytes_by_cause={},
)


class Script:
    """Asks for given splits, one per window."""

    def __init__(self, asked: Sequence[float | None]) -> None:
        self.asked = list(asked)
        self.num_resets = 0

    def decide(self, stats: WindowStats) -> Move | None:
        alpha = self.asked.pop(0)
        return None if alpha is None else Move(alpha, "script")

    def reset(self) -> None:
        self.num_resets += 1


def at(alpha: float, start_s: float = 0.0) -> WindowStats:
    return Bowl().window(alpha, start_s)


def test_a_window_holds_differences_not_sums() -> None:
    before = replace(EMPTY, row_hits=10, row_misses=10, reused_tokens=5, total_tokens=50)
    after = replace(before, row_hits=100, row_misses=20, reused_tokens=65, total_tokens=150)
    traffic = replace(Bowl().window(0.5).traffic, num_requests=14, num_served=10)
    window = WindowStats.between(before, after, traffic, None, no_steps())
    assert (window.emb_hit_rate, window.kv_token_hit_rate) == (0.9, 0.6)
    assert (window.new_tokens_per_request, window.resident_tokens_per_request) == (4.0, 6.0)
    assert window.missed_rows_per_request == 1.0
    assert (window.alpha, window.alpha_target, window.pool_bytes) == (0.3, 0.4, 100_000)
    assert (window.num_pages, window.page_tokens) == (100, 16)
    assert window.traffic.arrival_rate == 14.0, "who was refused has come too"


def test_a_window_without_requests_has_no_rates_to_divide_by() -> None:
    traffic = replace(Bowl().window(0.5).traffic, num_requests=0, num_served=0)
    window = WindowStats.between(EMPTY, EMPTY, traffic, None, no_steps())
    assert (window.emb_hit_rate, window.kv_token_hit_rate, window.missed_rows_per_request) == (0.0, 0.0, 0.0)


def test_a_long_way_is_gone_in_steps_and_says_so() -> None:
    limited = Limited(Script([0.9]), Limits(max_step=0.1))
    assert limited.decide(at(0.5)) == Move(0.6, "script; limited from 0.900")


def test_an_allowed_move_passes_as_it_is() -> None:
    assert Limited(Script([0.55]), Limits()).decide(at(0.5)) == Move(0.55, "script")


def test_a_start_outside_is_led_back_even_if_the_policy_stays() -> None:
    limited = Limited(Script([None]), Limits(min_alpha=0.2, max_step=0.05))
    assert limited.decide(at(0.0)) == Move(0.05, "back inside 0.20..0.98")


def test_the_pool_s_own_bounds_count_too() -> None:
    narrow = replace(at(0.5), alpha_max=0.55)
    move = Limited(Script([0.9]), Limits(max_step=0.5)).decide(narrow)
    assert move is not None
    assert move.alpha == 0.55


def test_reset_reaches_the_policy() -> None:
    script = Script([0.6])
    Limited(script, Limits()).reset()
    assert script.num_resets == 1


def test_limits_that_leave_no_room_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_alpha must be at least min_alpha \(0.6\), not 0.4"):
        Limits(min_alpha=0.6, max_alpha=0.4)


@settings(max_examples=150, deadline=None)
@given(
    asked=st.lists(st.none() | st.floats(-5, 5), min_size=1, max_size=40),
    bounds=st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted),
    max_step=st.floats(0.001, 1),
)
def test_no_answer_ever_leaves_its_limits(asked: list[float | None], bounds: list[float], max_step: float) -> None:
    low, high = bounds
    limits = Limits(min_alpha=low, max_alpha=high, max_step=max_step)
    limited, alpha = Limited(Script(asked), limits), (low + high) / 2
    for number in range(len(asked)):
        move = limited.decide(at(alpha, float(number)))
        before, alpha = alpha, alpha if move is None else move.alpha
        assert low <= alpha <= high
        assert abs(alpha - before) <= max_step + 1e-12
