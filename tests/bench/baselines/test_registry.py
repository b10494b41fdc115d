"""Every baseline on made-up nodes whose best split is known."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helmrec.control.policy import Limited, Limits, Policy
from helmrec.control.static import Static, StaticSettings
from helmrec_bench.baselines.heuristics import PID, HillClimber, HillSettings, OneCache, OneCacheSettings, PIDSettings
from helmrec_bench.baselines.model_based import ArgminSettings, MarginalUtility, MissCurveArgmin
from tests.control.bowl import COST, ROWS, TOKENS, Bowl, drive

MIDDLE, ROW_HUNGRY, PREFIX_HUNGRY = Bowl(), Bowl(emb_scale=0.5, kv_scale=0.1), Bowl(emb_scale=0.12, kv_scale=0.5)
POLICIES: dict[str, Callable[[], Policy]] = {
    "static": lambda: Static(StaticSettings(alpha=0.95)),
    "kv-only": lambda: OneCache("kv"),
    "emb-only": lambda: OneCache("emb"),
    "pid": lambda: PID(COST, PIDSettings(integral=3.0, proportional=2.0, derivative=1.0)),
    "hill": lambda: HillClimber(HillSettings(settle_windows=0, trial_windows=1, first_step=0.7)),
    "marginal": lambda: MarginalUtility(COST),
    "argmin": lambda: MissCurveArgmin(COST, ArgminSettings(slew=1.0)),
}


def test_the_bowls_have_their_bottoms_apart() -> None:
    assert PREFIX_HUNGRY.bottom() < MIDDLE.bottom() - 0.1 < ROW_HUNGRY.bottom() - 0.2


def test_static_goes_there_once_and_stays() -> None:
    policy = Static(StaticSettings(alpha=0.3))
    move = policy.decide(MIDDLE.window(0.5))
    assert move is not None
    assert move.alpha == 0.3
    assert policy.decide(MIDDLE.window(0.3)) is None


@pytest.mark.parametrize("bowl", [MIDDLE, ROW_HUNGRY, PREFIX_HUNGRY])
@pytest.mark.parametrize("start", [0.1, 0.9])
def test_argmin_reaches_the_bottom_at_its_slew_and_then_rests(bowl: Bowl, start: float) -> None:
    path = [start, *drive(MissCurveArgmin(COST, ArgminSettings(min_gain=0.0)), bowl, start, 40)]
    assert max(abs(b - a) for a, b in pairwise(path)) <= 0.05 + 1e-12
    assert abs(path[-1] - bowl.bottom()) < 0.02 + 0.01
    assert path[-1] == path[-10]


def test_argmin_stays_within_its_deadbands() -> None:
    bottom = MIDDLE.bottom()
    near, off = MIDDLE.window(bottom + 0.04), MIDDLE.window(bottom + 0.2)
    assert MissCurveArgmin(COST, ArgminSettings(min_gain=0.0, min_distance=0.05)).decide(near) is None
    assert MissCurveArgmin(COST, ArgminSettings(min_gain=0.0, min_distance=0.03)).decide(near) is not None
    share = 1 - MIDDLE.latency_ms(bottom) / MIDDLE.latency_ms(bottom + 0.2)
    assert MissCurveArgmin(COST, ArgminSettings(min_gain=share * 1.05)).decide(off) is None
    assert MissCurveArgmin(COST, ArgminSettings(min_gain=share * 0.95)).decide(off) is not None


def test_argmin_expects_what_its_step_brings() -> None:
    stats = MIDDLE.window(0.9)
    move = MissCurveArgmin(COST, ArgminSettings(slew=0.1)).decide(stats)
    assert move is not None
    assert move.alpha == pytest.approx(0.8)
    assert move.expected_gain_ms == pytest.approx(MIDDLE.latency_ms(0.9) - MIDDLE.latency_ms(0.8), rel=0.02)


def test_a_hedge_goes_part_of_the_way() -> None:
    whole = MissCurveArgmin(COST, ArgminSettings(slew=1.0)).decide(MIDDLE.window(0.9))
    part = MissCurveArgmin(COST, ArgminSettings(slew=1.0, hedge=0.6)).decide(MIDDLE.window(0.9))
    assert whole is not None
    assert part is not None
    assert 0.9 - part.alpha == pytest.approx(0.6 * (0.9 - whole.alpha))


@pytest.mark.parametrize("bowl", [MIDDLE, ROW_HUNGRY, PREFIX_HUNGRY])
def test_marginal_utility_walks_to_the_bottom_of_a_bowl_in_small_steps(bowl: Bowl) -> None:
    path = drive(MarginalUtility(COST), bowl, 0.5, 60)
    assert abs(path[-1] - bowl.bottom()) < 0.06
    assert max(abs(b - a) for a, b in pairwise(path)) <= 0.02 + 1e-12


def test_marginal_utility_never_walks_beyond_the_curves() -> None:
    for bowl, end in ((Bowl(emb_scale=1.0, kv_scale=0.005), 0.9), (Bowl(emb_scale=0.005, kv_scale=1.0), 0.1)):
        path = drive(MarginalUtility(COST), bowl, 0.5, 60)
        assert path[-1] == pytest.approx(end)
        assert 0.1 <= min(path) <= max(path) <= 0.9


def test_marginal_utility_comes_back_to_the_curves_from_outside() -> None:
    for start, sign in ((0.0, 1), (1.0, -1)):
        move = MarginalUtility(COST).decide(MIDDLE.window(start))
        assert move is not None
        assert (move.alpha - start) * sign == pytest.approx(0.02)


def test_one_cache_s_optimum_ignores_the_other_s() -> None:
    """Both let their own cache have the least that is nearly enough; the bowl's bottom is neither."""
    bowl, exact = Bowl(emb_scale=0.1, kv_scale=0.1), OneCacheSettings(tolerance=0.02, slew=1.0)
    kv = drive(OneCache("kv", exact), bowl, 0.5, 3)[-1]
    emb = drive(OneCache("emb", exact), bowl, 0.5, 3)[-1]
    best = {"kv": bowl.computed(0.1) / TOKENS, "emb": bowl.missed(0.9) / ROWS}
    assert bowl.computed(kv) / TOKENS <= best["kv"] + 0.02 < bowl.computed(kv + 0.1) / TOKENS
    assert bowl.missed(emb) / ROWS <= best["emb"] + 0.02 < bowl.missed(emb - 0.1) / ROWS
    assert emb < 0.5 < kv


def test_one_cache_settles_where_it_is_near_enough() -> None:
    path = drive(OneCache("kv"), MIDDLE, 0.83, 30)
    assert path[-1] == path[-5]


def balance(bowl: Bowl, setpoint: float) -> float:
    """Where missed rows and computed tokens cost in the set proportion."""
    grid = np.linspace(0, 1, 2_001)
    rows = np.array([bowl.missed(alpha) for alpha in grid]) * COST.missed_row_ms
    tokens = np.array([bowl.computed(alpha) for alpha in grid]) * COST.token_ms
    return float(grid[np.argmin(np.abs((rows - tokens) / (rows + tokens) - setpoint))])


@pytest.mark.parametrize("start", [0.05, 0.95])
@pytest.mark.parametrize("setpoint", [-0.4, 0.0, 0.4])
def test_pid_settles_where_both_caches_cost_as_set(start: float, setpoint: float) -> None:
    path = drive(PID(COST, PIDSettings(setpoint=setpoint, deadband=0.0)), MIDDLE, start, 200)
    assert abs(path[-1] - balance(MIDDLE, setpoint)) < 0.005
    assert np.ptp(path[-50:]) < 0.005


def test_pid_adds_its_three_terms() -> None:
    """Computed tokens stay, missed rows are set so that the imbalance is as wished."""
    settings = PIDSettings(proportional=0.07, integral=0.05, derivative=0.03, smoothing=1.0, deadband=0.0)
    policy, errors, stats = PID(COST, settings), [0.5, 0.2, -0.4], MIDDLE.window(0.5)
    tokens_ms = COST.token_ms * stats.new_tokens_per_request
    changes = []
    for error in errors:
        missed = tokens_ms * (1 + error) / (1 - error) / COST.missed_row_ms
        move = policy.decide(replace(stats, missed_rows_per_request=missed))
        assert move is not None
        changes.append(move.alpha - 0.5)
    wanted = [
        0.05 * 0.5,
        0.05 * 0.2 + 0.07 * (0.2 - 0.5) + 0.03 * (0.2 - 2 * 0.5 + 0.5),
        0.05 * -0.4 + 0.07 * (-0.4 - 0.2) + 0.03 * (-0.4 - 2 * 0.2 + 0.5),
    ]
    assert changes == pytest.approx(wanted)


def test_pid_stays_close_under_noise() -> None:
    path = drive(PID(COST), replace(MIDDLE, noise=0.2), 0.9, 400)
    assert abs(float(np.mean(path[200:])) - balance(MIDDLE, 0.0)) < 0.03
    assert np.std(path[200:]) < 0.03


def test_pid_does_not_wind_up_at_a_wall() -> None:
    """Held for long at a limit by traffic that wants more, it leaves as soon as traffic turns."""
    policy = Limited(PID(COST, PIDSettings(integral=0.1)), Limits(min_alpha=0.1, max_alpha=0.6))
    held = drive(policy, Bowl(emb_scale=1.5, kv_scale=0.1), 0.5, 500)
    assert held[-1] == 0.6
    policy.limits = Limits(min_alpha=0.1, max_alpha=0.6)
    assert drive(policy, PREFIX_HUNGRY, 0.6, 8)[-1] < 0.55


@pytest.mark.parametrize("bowl", [MIDDLE, ROW_HUNGRY, PREFIX_HUNGRY])
def test_hill_climber_finds_the_minimum_under_noise(bowl: Bowl) -> None:
    best_ms = bowl.latency_ms(bowl.bottom())
    for seed in range(3):
        path = drive(HillClimber(), replace(bowl, noise=0.05), 0.5, 1_500, seed)
        mean_ms = np.mean([bowl.latency_ms(alpha) for alpha in path[500:]])
        assert mean_ms < 1.05 * best_ms


def test_hill_climber_does_not_judge_while_caches_settle() -> None:
    policy = HillClimber(HillSettings(settle_windows=2, trial_windows=3))
    moves = [policy.decide(MIDDLE.window(0.5, float(window))) is not None for window in range(10)]
    assert moves == [False, False, False, False, True] * 2


def test_hill_climber_leaves_latency_out_while_caches_settle() -> None:
    """The second split is better once settled, however bad it was at first: the climber goes on the same way."""
    policy = HillClimber(HillSettings(settle_windows=2, trial_windows=3))
    moves = []
    for window, mean_ms in enumerate([90, 90, 10, 10, 10, 90, 90, 9, 9, 9]):
        stats = MIDDLE.window(0.5, float(window))
        moves.append(policy.decide(replace(stats, traffic=replace(stats.traffic, mean_ms=float(mean_ms)))))
    assert moves[4] is not None
    assert moves[9] is not None
    assert moves[4].alpha > 0.5
    assert moves[9].alpha > 0.5


def test_hill_climber_turns_round_at_a_wall() -> None:
    policy = HillClimber(HillSettings(settle_windows=0, trial_windows=1))
    move = policy.decide(replace(MIDDLE.window(0.55), alpha_max=0.6))
    assert move is not None
    assert move.alpha == pytest.approx(0.47)


def test_reset_makes_a_policy_new() -> None:
    for name, make in POLICIES.items():
        used, fresh, noisy = make(), make(), replace(MIDDLE, noise=0.1)
        drive(used, noisy, 0.2, 17, seed=1)
        used.reset()
        assert drive(used, noisy, 0.7, 30, seed=2) == drive(fresh, noisy, 0.7, 30, seed=2), name


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "static"])
def test_nobody_moves_on_a_window_that_says_nothing(name: str) -> None:
    stats = MIDDLE.window(0.5)
    silent = replace(stats, traffic=replace(stats.traffic, num_requests=0, num_served=0, mean_ms=0.0), curves=None)
    policy = POLICIES[name]()
    assert [policy.decide(silent) for _ in range(20)] == [None] * 20


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=15, deadline=None)
@given(
    scales=st.tuples(st.floats(0.05, 2), st.floats(0.05, 2)),
    rate=st.floats(1, 2_000),
    start=st.floats(0.2, 0.7),
    seed=st.integers(0, 2**31),
)
def test_no_policy_ever_leaves_its_limits(
    name: str, scales: tuple[float, float], rate: float, start: float, seed: int
) -> None:
    limits = Limits(min_alpha=0.2, max_alpha=0.7, max_step=0.08)
    bowl = Bowl(*scales, rate=rate, noise=0.2)
    path = [start, *drive(Limited(POLICIES[name](), limits), bowl, start, 60, seed)]
    steps = [abs(b - a) for a, b in pairwise(path)]
    assert min(path) >= 0.2
    assert max(path) <= 0.7
    assert max(steps) <= 0.08 + 1e-12
