"""Long runs: their search for a limit, what is compared, and that a slower run is the same drift."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from helmrec.traffic.generate import generate
from helmrec.traffic.trace import index_histories
from helmrec.traffic.workload import Phase, Users, Workload
from helmrec_bench.judging.judge import Interval
from helmrec_bench.measure.simulated.long_runs import (
    ALPHAS,
    LIMIT_SEED,
    LOADS,
    OURS,
    HeldLimit,
    LongCase,
    LongPiece,
    compared,
    contest,
    denser,
    lengthened,
    limit_of,
    slower,
    table,
    verdict_of,
)

CASE = LongCase("histories grow", 1201)
SLO_MS = 100.0


class MadeUpRuns:
    """P99 rises with the load and with the distance from 0.4; ours is a fifth lower than at 0.4."""

    def __init__(self) -> None:
        self.pieces: list[LongPiece] = []

    def __call__(self, pieces: Sequence[LongPiece], what: str) -> list[Mapping[str, Any]]:
        self.pieces += pieces
        return [self._one(piece) for piece in pieces]

    def _one(self, piece: LongPiece) -> dict[str, Any]:
        away = abs(float(piece.policy.removeprefix("static:")) - 0.4) if piece.policy != OURS else 0.0
        p99_ms = 80 * piece.load * (1 + away) * (1 + 0.01 * (piece.seed % 5)) * (0.8 if piece.policy == OURS else 1.0)
        return {"p99_ms": p99_ms, "mean_ms": p99_ms / 4, "within_slo": 0.99, "slo_ms": SLO_MS, "alphas": []}


def test_the_limit_is_the_largest_load_that_a_constant_holds() -> None:
    runs = MadeUpRuns()
    limit = limit_of(CASE, runs)
    assert limit is not None
    assert limit.load == max(load for load in LOADS if 80 * load <= SLO_MS)
    assert len(runs.pieces) == len(set(runs.pieces))
    assert {piece.seed for piece in runs.pieces} == {LIMIT_SEED}
    for alpha in ALPHAS:
        bears = SLO_MS / (80 * (1 + abs(alpha - 0.4)))
        assert limit.missed.get(alpha, np.inf) > bears, "a constant is not left out at a load that it holds"
        for load in LOADS:
            assert load > bears or alpha in limit.may_hold(load)


def test_there_is_no_limit_if_no_constant_holds_the_least_load() -> None:
    def hopeless(pieces: Sequence[LongPiece], what: str) -> list[Mapping[str, Any]]:
        return [{"p99_ms": None, "slo_ms": SLO_MS} for _ in pieces]

    assert limit_of(CASE, hopeless) is None


def test_ours_is_held_against_the_constant_with_the_least_p99_on_the_same_seeds() -> None:
    runs = MadeUpRuns()
    found = contest(CASE, HeldLimit(1.0, {0.05: 0.6}), 0.95, range(5), runs)
    assert found["best_constant"] == "static:0.4"
    assert found["p99_change"] == {name: pytest.approx(-0.2) for name in ("mean", "low", "high")}
    assert found["verdict"] == "smaller gain"
    assert "static:0.05" not in found["runs"], "it is known to miss the SLO at a smaller load"
    assert {piece.load for piece in runs.pieces} == {0.95}
    shown = table({"a": {"title": CASE.title, "length": CASE.length, "contests": [found]}})
    assert "-20% (-20% to -20%)" in shown
    assert "20 min" in shown


def test_a_constant_that_the_pool_has_no_room_for_is_not_the_best() -> None:
    ran = {"p99_ms": 50.0, "mean_ms": 10.0, "within_slo": 1.0}
    by_policy: dict[str, list[dict[str, Any]]] = {
        "static:0.95": [ran | {"p99_ms": None, "mean_ms": None}],
        "static:0.5": [ran],
        OURS: [ran],
    }
    assert compared(by_policy)["best_constant"] == "static:0.5"


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (Interval(-0.3, -0.35, -0.25), "real"),
        (Interval(-0.25, -0.3, -0.2), "real on average"),
        (Interval(-0.1, -0.15, -0.05), "smaller gain"),
        (Interval(-0.1, -0.25, -0.02), "smaller gain"),
        (Interval(-0.02, -0.1, 0.06), "no difference shown"),
        (Interval(0.1, 0.05, 0.15), "worse"),
        (Interval(-0.3, -np.inf, np.inf), "one seed: not judged"),
    ],
)
def test_verdicts_follow_from_intervals(change: Interval, verdict: str) -> None:
    assert verdict_of(change) == verdict


def small_workload() -> Workload:
    users = Users(min_history=20, max_history=60, new_events=4.0)
    common: dict[str, Any] = {"hot_users": 10, "hot_share": 0.8, "history": 30, "item_exponent": 1.0}
    phases = (
        Phase(name="opening", duration_s=10, rate=20, **common),
        Phase(name="drift", duration_s=50, rate=(20, 40), drift_items_per_hour=6_000, **common),
    )
    return Workload(name="small", num_items=20_000, item_shift=1, users=users, phases=phases)


def test_a_slower_run_is_the_same_drift_at_the_same_rates() -> None:
    workload = small_workload()
    slow = slower(workload, 4)
    assert [phase.duration_s for phase in slow.phases] == [10, 200]
    assert [phase.rate for phase in slow.phases] == [phase.rate for phase in workload.phases]
    drifted = [phases[1].duration_s * phases[1].drift_items_per_hour for phases in (workload.phases, slow.phases)]
    assert drifted[0] == drifted[1]
    ends = []
    for one in (workload, slow):
        trace = generate(one, 0)
        hot = trace.user[np.bincount(trace.user)[trace.user] > 20]
        events = np.zeros(trace.num_users)
        np.add.at(events, trace.user, trace.num_new)
        ends.append(float(events[np.unique(hot)].mean()))
    assert ends[1] == pytest.approx(ends[0], rel=0.25), "histories have grown as far at the end"


def test_a_denser_run_has_more_requests_of_the_same_kind() -> None:
    workload = small_workload()
    dense = denser(workload, 1.5)
    assert [phase.rate for phase in dense.phases] == [(30, 30), (30, 60)]
    assert generate(dense, 0).num_requests == pytest.approx(1.5 * generate(workload, 0).num_requests, rel=0.1)


def test_a_lengthened_trace_is_a_trace_whose_users_have_more_events() -> None:
    trace = generate(small_workload(), 0)
    longer = lengthened(trace, 500)
    longer.check()
    first = index_histories(longer).visit == 0
    assert (longer.num_new[first] == trace.num_new[first] + 500).all()
    assert (longer.num_new[~first] == trace.num_new[~first]).all()
