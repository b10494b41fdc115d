import numpy as np
import pytest

from helmrec.control.explain import Explanation
from helmrec.control.policy import Limited, Limits, Move, WindowStats
from helmrec.sim.scenario import Scenario
from helmrec.traffic.workload import Phase, Workload
from helmrec_bench.judging.contest import WINDOW_S, Course, Score, Wanderer, scaled
from helmrec_bench.judging.contest_report import hindsight, row, spent


def scenario(rate: float = 60) -> Scenario:
    calm = Phase(name="calm", duration_s=15, rate=rate, hot_users=100)
    workload = Workload(name="small", opening=(calm.model_copy(update={"duration_s": 5.0}),), phases=(calm,), repeat=2)
    return Scenario(
        name="small",
        engine={"pool_bytes": "4GB", "max_batch_requests": 8},
        workload=workload,
        warm_up_s=5,
        row_sample=1 / 256,
    )


class Noting:
    """Goes to 0.3 and notes what it was shown."""

    def __init__(self) -> None:
        self.seen: list[WindowStats] = []

    def decide(self, stats: WindowStats) -> Move | None:
        self.seen.append(stats)
        return Move(0.3, "there")

    def reset(self) -> None:
        self.seen.clear()


@pytest.fixture(scope="module")
def course() -> Course:
    return Course(scenario(), seed=0)


def test_denser_traffic_is_the_same_traffic_denser() -> None:
    workload = scenario().workload
    assert workload is not None
    assert scaled(workload, 1.5).phases[0].rate == (90, 90)
    assert scaled(workload, 1.5).opening[0].rate == (90, 90)
    assert scaled(workload, 1) is workload
    assert Course(scenario(), 0, 2.0).trace.num_requests == pytest.approx(
        2 * Course(scenario(), 0).trace.num_requests, rel=0.1
    )


def test_windows_of_a_score_add_up_to_its_mean(course: Course) -> None:
    score = course.static(0.5)
    assert len(score.costs) == len(score.alphas) == 30 / WINDOW_S
    scored = np.count_nonzero(course.trace.time_s >= 5)
    assert sum(score.costs) / scored == pytest.approx(score.mean_ms, rel=1e-6)
    assert set(np.round(score.alphas, 2)) == {0.5}
    assert score.meets(score.p99_ms)
    assert not score.meets(score.p99_ms - 0.01)


def test_policies_start_at_the_untuned_split_within_limits_and_are_shown_curves_and_timed(course: Course) -> None:
    policy = Noting()
    score = course.judge(policy)
    assert policy.seen[0].alpha == pytest.approx(0.5, abs=0.01)
    assert policy.seen[1].alpha_target == pytest.approx(0.4, abs=0.01), "a tenth a window is the limit"
    assert policy.seen[-1].curves is not None
    assert score.alphas[-1] == pytest.approx(0.3, abs=0.01)
    assert 0 < score.decision_us[0] <= score.decision_us[1]


def test_what_a_wanderer_saw_begins_after_the_warm_up(course: Course) -> None:
    stats = course.watch(Wanderer(0))
    assert stats[0].traffic.start_s == 5
    assert len(stats) == 30
    assert len({round(one.alpha_target, 3) for one in stats}) > 10


def score(costs: tuple[float, ...], alpha: float, p99_ms: float = 50) -> Score:
    return Score(sum(costs), p99_ms, 0.99, 0, list(costs), [alpha] * len(costs))


def test_regret_and_gap_are_held_against_sweeps_summed_over_seeds() -> None:
    statics = {
        0.2: [score((10, 30), 0.2), score((12, 28), 0.2)],
        0.6: [score((20, 15), 0.6), score((18, 17), 0.6)],
    }
    seen = hindsight(statics)
    assert seen.exact.alpha.tolist() == [0.2, 0.6]
    assert seen.best_alpha == 0.6
    found = row(statics[0.2], statics[0.6], seen, oracle_cost=60.0)
    assert found.regret_quasi_static == pytest.approx(80 / (22 + 32) - 1)
    assert found.regret_switching == pytest.approx(80 / 60 - 1)
    assert found.gap == pytest.approx(0.2)
    assert found.share_inside == 0.5
    assert spent(statics[0.6]) == 70
    assert found.p99_change.mean == pytest.approx(0)


class Foretelling(Noting):
    """Says of each window that it was predicted a quarter too long, but nothing of the first."""

    explanation: Explanation | None = None

    def decide(self, stats: WindowStats) -> Move | None:
        traffic = stats.traffic
        predicted_ms = 1.25 * traffic.mean_ms if self.seen else None
        self.explanation = Explanation(traffic.end_s, stats.alpha_target, traffic.mean_ms, predicted_ms, 1.0, [], None)
        return super().decide(stats)


def test_predictions_are_held_against_what_came(course: Course) -> None:
    shown, silent = course.shown(Limited(Foretelling(), Limits())), course.shown(Noting())
    for one in (shown, silent):
        course.replay(one, 0.5)
    assert shown.prediction_error(from_s=0.0) == pytest.approx(0.25)
    assert shown.prediction_error(from_s=1e9) is None
    assert silent.prediction_error(from_s=0.0) is None
