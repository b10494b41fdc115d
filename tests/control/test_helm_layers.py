"""Each layer of the controller by itself, and the record of moves."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from helmrec.control.latency import ALPHAS, Bias, LatencyModel, Prediction
from helmrec.control.layers import EQUAL_SHARE, SETTLED, Bursts, Payback, Proposal, Residual, Rule, View, propose
from helmrec.control.moves import MoveLog
from helmrec.control.policy import WindowStats
from helmrec.steps import Step
from helmrec.types import FloatArray
from tests.control.bowl import Bowl
from tests.control.served import Served

SERVED = Served(Bowl())
FLAT = np.full(ALPHAS.size, 10.0)


def window(alpha: float = 0.5, start_s: float = 0.0, **traffic: float) -> WindowStats:
    """One second; `traffic` is set as given."""
    made = SERVED.window(alpha, start_s)
    return replace(made, traffic=replace(made.traffic, **traffic))  # type: ignore[arg-type]


def prediction(mean_ms: FloatArray, stages_ms: FloatArray | None = None) -> Prediction:
    return Prediction(mean_ms if stages_ms is None else stages_ms, mean_ms)


def chosen(mean_ms: FloatArray, at: WindowStats) -> float:
    return Rule().choose(mean_ms, View(at, prediction(mean_ms), idle_s=60.0))


def test_the_rule_goes_where_latency_is_least() -> None:
    bowl = 10 + 200 * (ALPHAS - 0.3) ** 2
    assert chosen(bowl, window(0.7)) == pytest.approx(ALPHAS[np.abs(ALPHAS - 0.3).argmin()], abs=0.035)


def test_of_equals_the_rule_takes_the_one_nearest_the_middle() -> None:
    two = FLAT.copy()
    two[[2, 20]] = 5.0
    assert chosen(two, window(0.5)) == chosen(two, window(0.1)) == ALPHAS[20]
    two[2] = 5.0 / (1 + 1.1 * EQUAL_SHARE)
    assert chosen(two, window(0.5)) == ALPHAS[2]


def test_the_rule_goes_back_to_the_middle_when_nothing_is_lost_there() -> None:
    assert chosen(FLAT, window(0.9)) == pytest.approx(0.5, abs=0.02)


def test_the_rule_stays_where_latency_is_less_than_at_an_equal_about_as_near_to_the_middle() -> None:
    slope = FLAT * (1 + EQUAL_SHARE * ALPHAS)  # all splits are equals, the lowest is the best
    assert chosen(slope, window(0.47)) == 0.47
    assert chosen(slope, window(0.3)) == pytest.approx(0.5, abs=0.02)


def test_in_a_burst_the_rule_moves_for_a_gain_only() -> None:
    for latency, expected in (
        (FLAT, 0.9),
        (10 + 200 * (ALPHAS - 0.3) ** 2, chosen(200 * (ALPHAS - 0.3) ** 2, window(0.9))),
    ):
        at = window(0.9)
        view = View(at, prediction(latency), idle_s=60.0, is_burst=True)
        assert Rule().choose(latency, view) == pytest.approx(expected, abs=0.06)


def test_the_rule_stays_within_the_pool() -> None:
    slope = 20 - 10 * ALPHAS
    inside = chosen(slope, replace(window(0.4), alpha_min=0.3, alpha_max=0.45))
    assert 0.4 < inside <= 0.45
    assert chosen(slope, replace(window(0.4), alpha_min=0.395, alpha_max=0.405)) == 0.4


def test_a_proposal_says_what_it_is_predicted_to_gain() -> None:
    slope = 20 - 10 * ALPHAS
    at = window(0.5)
    made = propose("base", Rule(), slope, View(at, prediction(slope), idle_s=60.0))
    assert made.layer == "base"
    assert made.alpha == ALPHAS[-1]
    assert made.gain_ms == pytest.approx(10 * (ALPHAS[-1] - 0.5))
    assert made.reason == "predicts 11.00 ms there, 15.00 ms here"


def model_of(served: Served = SERVED, seconds: int = 5) -> LatencyModel:
    model = LatencyModel()
    for second in range(seconds):
        model.update(served.window(0.5, float(second)))
    return model


@pytest.mark.parametrize(("promised", "expected"), [(1.0, 1.0), (1.6, 1 / 1.6), (0.7, 1 / 0.7), (5.0, 0.5), (0.1, 2.0)])
def test_the_residual_finds_measured_over_promised_rows_within_a_factor_of_two(
    promised: float, expected: float
) -> None:
    served, residual = Served(Bowl(), promised_rows=promised), Residual()
    model, bias = model_of(served), Bias()
    for second in range(5):
        bias = residual.bias(served.window(0.5, float(second)), model, None)
    assert bias.rows == pytest.approx(expected, rel=0.02)
    assert bias.tokens == pytest.approx(1.0, rel=0.02)
    assert bias.pace == 1.0


def test_the_residual_learns_nothing_of_caches_that_have_not_settled() -> None:
    served, residual = Served(Bowl(), promised_rows=1.6), Residual()
    moving = replace(served.window(0.5, 0.0), alpha_target=0.5 + 2 * SETTLED)
    assert residual.bias(moving, model_of(served), None) == Bias()


def test_the_pace_grows_until_predictions_are_what_is_measured() -> None:
    residual, model, pace = Residual(), model_of(), 1.0
    for second in range(120):
        pace = residual.bias(window(start_s=second, mean_ms=12.0), model, 10.0 * pace).pace
    assert pace == pytest.approx(1.2, rel=0.01)


@pytest.mark.parametrize(("measured_ms", "most"), [(1e6, 2.0), (1e-6, 0.5)])
def test_the_pace_is_bounded_whatever_is_measured(measured_ms: float, most: float) -> None:
    residual, model = Residual(), model_of()
    for second in range(200):
        bias = residual.bias(window(start_s=second, mean_ms=measured_ms), model, 10.0)
    assert bias.pace == most


def test_a_residual_that_goes_on_from_another_one_is_that_one() -> None:
    first, second, model = Residual(), Residual(), model_of()
    for start_s in range(5):
        first.bias(window(start_s=start_s, mean_ms=15.0), model, 10.0)
    second.relearn(first.learned)
    assert second.learned == first.learned != []
    later = window(start_s=5.0, mean_ms=15.0)
    assert second.bias(later, model, 10.0) == first.bias(later, model, 10.0)
    assert Residual().learned == []


BURST = 10 + 40 * (1 - ALPHAS)  # what a burst costs at each split


def mixed(bursts: Bursts, seconds: range, rate: int, newest_ms: FloatArray = FLAT) -> FloatArray:
    """What is chosen on after these seconds, in which every request takes as much work as any other."""
    found = FLAT
    for second in seconds:
        at = window(start_s=float(second), num_requests=rate, num_served=rate)
        bursts.note(at, rate * FLAT, predicted_ms=None)
        found = bursts.mix(at, prediction(newest_ms), FLAT)
    return found


def test_without_a_burst_nothing_is_mixed_in() -> None:
    bursts = Bursts()
    assert mixed(bursts, range(300), 200) is FLAT
    assert bursts.share == 0


def test_in_a_burst_it_is_chosen_on_the_burst_alone() -> None:
    bursts = Bursts()
    mixed(bursts, range(60), 200)
    np.testing.assert_allclose(mixed(bursts, range(60, 61), 500, BURST), BURST)
    mixed(bursts, range(61, 90), 200)
    np.testing.assert_allclose(mixed(bursts, range(90, 91), 500, 2 * BURST), 2 * BURST)


def is_burst(bursts: Bursts, at: WindowStats, offered_ms: FloatArray, predicted_ms: float | None = None) -> bool:
    bursts.note(at, offered_ms, predicted_ms)
    return bursts.is_burst


def test_requests_that_take_more_work_are_a_burst_too() -> None:
    bursts, calm = Bursts(), 100 * FLAT
    for second in range(30):
        assert not is_burst(bursts, window(start_s=float(second), num_requests=400), calm)
    assert not is_burst(bursts, window(start_s=30.0, num_requests=400), 1.2 * calm)
    assert is_burst(bursts, window(start_s=31.0, num_requests=400), 1.6 * calm)
    assert is_burst(bursts, window(start_s=32.0, num_requests=400), 1.3 * calm)  # in a burst, chance has no say
    assert not is_burst(bursts, window(start_s=33.0, num_requests=400), 1.2 * calm)


def test_work_is_compared_where_the_node_stood_before_the_burst() -> None:
    """Elsewhere the burst may cost no more than calm traffic did."""
    bursts, calm = Bursts(), 100 * FLAT
    dear_at_low_splits = calm * np.where(ALPHAS < 0.6, 2.0, 1.0)
    for second in range(30):
        is_burst(bursts, window(0.4, float(second), num_requests=400), calm)
    assert is_burst(bursts, window(0.4, 30.0, num_requests=400), dear_at_low_splits)
    assert is_burst(bursts, window(0.8, 31.0, num_requests=400), dear_at_low_splits)


def test_requests_that_queue_confirm_what_might_be_chance() -> None:
    doubtful = 130 * FLAT
    for predicted_ms, expected in ((40.0, False), (10.0, True)):
        bursts = Bursts()
        for second in range(30):
            is_burst(bursts, window(start_s=float(second), num_requests=50), 100 * FLAT)
        at = window(start_s=30.0, num_requests=50, mean_ms=25.0)
        assert is_burst(bursts, at, doubtful, predicted_ms) == expected


def test_a_burst_that_was_seen_counts_by_its_share_of_requests() -> None:
    bursts = Bursts()
    mixed(bursts, range(60), 200)
    mixed(bursts, range(60, 70), 500, BURST)
    assert bursts.is_burst
    found = mixed(bursts, range(70, 80), 200)
    assert not bursts.is_burst
    assert bursts.share == pytest.approx(5_000 / (5_000 + 70 * 200), rel=0.1)
    np.testing.assert_allclose(found, FLAT + bursts.share * (BURST - FLAT))


def test_only_the_beginning_of_a_long_burst_is_remembered() -> None:
    """Later on the boundary has followed, so calm need not be prepared for it."""
    short, long = Bursts(), Bursts()
    for bursts, lasts in ((short, 15), (long, 60)):
        mixed(bursts, range(120), 200)
        mixed(bursts, range(120, 120 + lasts), 500, BURST)
        mixed(bursts, range(120 + lasts, 121 + lasts), 200)
    assert long.share < short.share


def test_a_burst_is_forgotten_as_calm_goes_on() -> None:
    bursts = Bursts()
    mixed(bursts, range(60), 200)
    mixed(bursts, range(60, 70), 500, BURST)
    shares = []
    for start in range(70, 1_870, 300):
        mixed(bursts, range(start, start + 300), 200)
        shares.append(bursts.share)
    assert all(later < 0.7 * before for before, later in itertools.pairwise(shares))
    assert shares[-1] < 0.01


def test_arrivals_that_grow_slowly_are_no_burst() -> None:
    bursts = Bursts()
    for second in range(600):
        mixed(bursts, range(second, second + 1), 200 + second // 3)
        assert not bursts.is_burst


def test_chance_is_no_burst_where_few_arrive() -> None:
    bursts, rng = Bursts(), np.random.default_rng(0)
    seen = []
    for second in range(600):
        mixed(bursts, range(second, second + 1), int(rng.poisson(4)))
        seen.append(bursts.is_burst)
    assert np.mean(seen) < 0.01


def test_bursts_that_go_on_from_others_are_those() -> None:
    first, second = Bursts(), Bursts()
    assert first.learned == []
    mixed(first, range(60), 200)
    mixed(first, range(60, 70), 500, BURST)
    second.relearn(first.learned)
    assert second.learned == first.learned
    np.testing.assert_array_equal(mixed(second, range(70, 75), 200), mixed(first, range(70, 75), 200))


MODEL = model_of(seconds=10)  # its costs are known


def paid_path(payback: Payback, gain: float, seconds: int, *, start: float = 0.3, filled: float = 1.0) -> list[float]:
    """Where payback goes, second by second, on the way to 0.7, where requests take `gain` less of their time."""
    alpha, path = start, list[float]()
    for second in range(seconds):
        at = view_of_pool(alpha, float(second), filled)
        wanted = Proposal("base", 0.7, "", gain * 10.0 * (0.7 - alpha) / 0.4)
        paid = payback.propose(at, wanted, MODEL)
        alpha = wanted.alpha if paid is None else paid.alpha
        path.append(alpha)
    return path


def view_of_pool(alpha: float, second: float, filled: float = 1.0, *, is_burst: bool = False, queued: int = 0) -> View:
    at = Served(Bowl(filled=filled)).window(alpha, second)
    at = replace(at, traffic=replace(at.traffic, num_queued=queued))
    return View(at, prediction(FLAT), 60.0, is_burst=is_burst)


def test_a_move_waits_until_staying_has_cost_what_half_of_it_costs() -> None:
    payback = Payback()
    path = paid_path(payback, gain=0.02, seconds=600)
    moves = [(second, alpha) for second, alpha in enumerate(path) if alpha != ([0.3, *path])[second]]
    first_s, first = moves[0]
    at = view_of_pool(0.3, 0.0)
    lost_ms = 0.02 * 10.0 * at.window.traffic.arrival_rate * (first_s + 1)
    assert first_s > 1
    assert 2 * MODEL.fill_ms(at.window) * (first - 0.3) == pytest.approx(lost_ms)
    stops = list(dict.fromkeys(path))
    assert all(alpha - before > 0.999 * SETTLED for before, alpha in itertools.pairwise(stops[:-1]))
    assert stops[-1] == 0.7


def test_the_larger_the_gain_the_sooner_a_move_is_made() -> None:
    small, large = (paid_path(Payback(), gain, 60)[-1] for gain in (0.005, 0.02))
    assert 0.3 < small < large < 0.7


def test_pages_that_hold_nothing_change_owner_at_once() -> None:
    assert paid_path(Payback(), 0.1, 1, filled=0.0) == [0.7]


@pytest.mark.parametrize(("is_burst", "goes_at_once"), [(False, True), (True, False)])
def test_with_a_queue_that_no_burst_left_a_move_is_made_at_once(is_burst: bool, goes_at_once: bool) -> None:
    view = view_of_pool(0.3, 0.0, is_burst=is_burst, queued=MODEL.most_requests + 1)
    paid = Payback().propose(view, Proposal("base", 0.7, "", 0.1), MODEL)
    assert (paid is None) == goes_at_once


def test_what_staying_cost_is_forgotten_when_the_other_side_is_wanted() -> None:
    waited, fresh = Payback(), Payback()
    for second in range(20):
        waited.propose(view_of_pool(0.5, float(second)), Proposal("base", 0.9, "", 0.02), MODEL)
    back = Proposal("base", 0.1, "", 0.02)
    assert waited.propose(view_of_pool(0.5, 20.0), back, MODEL) == fresh.propose(view_of_pool(0.5, 20.0), back, MODEL)


def test_nothing_is_said_where_nobody_wants_to_move() -> None:
    assert Payback().propose(view_of_pool(0.5, 0.0), Proposal("base", 0.5, "", 0.0), MODEL) is None


FALLING = 20 - 10 * ALPHAS


def step_window(alpha: float, start_s: float, stage_ms: float, target: float | None = None) -> WindowStats:
    """A window whose requests took so long in their stages."""
    steps = np.zeros((5, len(Step)))
    steps[:, Step.REQUESTS] = 4
    steps[:, Step.COMPUTE_MS] = 4 * stage_ms
    return replace(window(alpha, start_s), steps=steps, alpha_target=alpha if target is None else target)


def noted(log: MoveLog, seconds: range, stage_ms: float, alpha: float = 0.5, target: float | None = None) -> None:
    for second in seconds:
        log.note(step_window(alpha, float(second), stage_ms, target))


def test_a_move_is_recorded_with_what_it_was_predicted_to_gain() -> None:
    log = MoveLog()
    noted(log, range(10), 8.0)
    log.begin(step_window(0.5, 9.0, 8.0), 0.8, "base", prediction(FLAT, FALLING))
    made = log.last
    assert made is not None
    assert (made.time_s, made.start, made.alpha, made.layer) == (10.0, 0.5, 0.8, "base")
    assert made.predicted_gain_ms == pytest.approx(3.0)
    assert made.realised_gain_ms is None
    assert log.idle_since_s == 10.0


def test_what_came_of_a_move_is_known_once_it_has_been_served_from() -> None:
    log = MoveLog()
    noted(log, range(60), 8.0)
    log.begin(step_window(0.5, 59.0, 8.0), 0.8, "base", prediction(FLAT, FALLING))
    noted(log, range(60, 80), 6.0, 0.8)
    assert log.last is not None
    assert log.last.realised_gain_ms is None
    noted(log, range(80, 120), 6.0, 0.8)
    before = log.last
    assert before.realised_gain_ms == pytest.approx(2.0, rel=0.3)
    noted(log, range(120, 160), 4.0, 0.8)
    assert log.last == before


def test_a_move_that_has_not_settled_is_not_judged() -> None:
    log = MoveLog()
    noted(log, range(60), 8.0)
    log.begin(step_window(0.5, 59.0, 8.0), 0.8, "base", prediction(FLAT, FALLING))
    noted(log, range(60, 120), 6.0, 0.6, target=0.8)
    assert log.last is not None
    assert log.last.realised_gain_ms is None


def test_steps_that_follow_each_other_are_one_move() -> None:
    log = MoveLog()
    noted(log, range(30), 8.0)
    for second, alpha in ((30, 0.5), (31, 0.6), (32, 0.7)):
        at = step_window(alpha, float(second), 8.0)
        log.begin(at, alpha + 0.1, "residual", prediction(FLAT, FALLING))
    made = log.last
    assert made is not None
    assert (made.time_s, made.start) == (31.0, 0.5)
    assert made.alpha == pytest.approx(0.8)
    assert made.predicted_gain_ms == pytest.approx(3.0)
    log.begin(step_window(0.8, 60.0, 8.0), 0.7, "base", prediction(FLAT, FALLING))
    assert log.last is not None
    assert (log.last.layer, log.last.start) == ("base", 0.8)
