"""The measurement of row streams: the order of its runs, what it judges, and a whole run of a small model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helmrec_bench.measure.cards.row_stream import EXACT, LAGGING, WITHOUT, judged, order_of
from helmrec_bench.measure.controller.turns import LiveCourse
from helmrec_bench.measure.training import UpdateRate, distinct_items
from helmrec_bench.registry import REGISTERED


def a_run(mean_ms: float, p99_ms: float | None, lag_s: float | None = None) -> dict[str, Any]:
    return {"mean_ms": mean_ms, "p99_ms": p99_ms, "stream": None if lag_s is None else {"lag_p99_s": lag_s}}


def test_pairs_take_turns_in_who_is_first() -> None:
    kinds = [kind for kind, _ in order_of(3)]
    assert kinds == [WITHOUT, LAGGING, LAGGING, WITHOUT, WITHOUT, LAGGING, EXACT]
    assert len(set(order_of(3))) == 7


@pytest.mark.parametrize(
    ("lagging", "is_met"),
    [
        ((10.2, 21.0, 0.3), True),
        ((10.4, 21.0, 0.3), False),
        ((10.2, 23.0, 0.3), False),
        ((10.2, None, 0.3), False),
        ((10.2, 21.0, 1.2), False),
    ],
)
def test_medians_are_judged_by_the_bounds(lagging: tuple[float, float | None, float], is_met: bool) -> None:
    runs = {f"{WITHOUT} {i}": a_run(10.0, 20.0) for i in range(3)}
    assert judged(runs) == {}
    runs |= {f"{LAGGING} {i}": a_run(*lagging) for i in range(3)} | {f"{EXACT} 0": a_run(50.0, None, 0.1)}
    found = judged(runs)
    assert found["is_met"] is is_met
    assert found["over_without"][EXACT] == {"mean_ms": 5.0, "p99_ms": None}


def test_the_trainer_draws_popular_items_once_each() -> None:
    found = distinct_items(np.random.default_rng(0), 500, 1_000)
    assert np.unique(found).size == found.size == 500
    assert found.min() >= 0
    assert found.max() < 1_000
    assert UpdateRate(200_000.0, 10_000).num_kept(512) == 209
    assert UpdateRate(100.0, 5).num_kept(64) == 1_200


def test_a_course_is_cut_at_a_time() -> None:
    requests: list[Any] = ["a", "b", "c"]
    course = LiveCourse([], requests, np.array([0.5, 1.0, 1.5]), ["all"] * 3)
    assert course.until(1.0).requests == requests[:2]
    assert course.until(1.0).due_s.tolist() == [0.5, 1.0]
    assert course.until(0.1).requests == requests[:1], "at least one"
    assert course.until(9.0).requests == requests


@pytest.mark.slow
def test_a_small_model_goes_through_and_a_second_call_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    small = ["--quick", "--seconds", "1", "--pairs", "1", "--out", str(out)]
    REGISTERED["row-stream"].run([*small, "--limit-s", "0"])
    assert not out.exists()
    REGISTERED["row-stream"].run(small)
    first = json.loads(out.read_text())
    assert len(first["runs"]) == 3
    assert first["runs"][f"{LAGGING} 0"]["stream"]["deltas"] > 0
    REGISTERED["row-stream"].run(small)
    assert json.loads(out.read_text())["runs"] == first["runs"], "what is done is kept"
    REGISTERED["row-stream"].run([*small, "--anew", "--exact-seconds", "0.2"])
    anew = json.loads(out.read_text())["runs"]
    assert all(anew[name] != first["runs"][name] for name in anew), "nothing of before is kept"
    assert anew[f"{EXACT} 0"]["offered"] < anew[f"{LAGGING} 0"]["offered"]


@pytest.mark.slow
def test_freshness_is_measured_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    REGISTERED["freshness"].run(["--seconds", "1", "--rates", "0", "2000", "--lags", "0", "60", "--out", str(out)])
    reuse = {(each["rate"], each["lag_s"]): each["token_reuse_rate"] for each in json.loads(out.read_text())["points"]}
    assert reuse[2000.0, 0.0] < reuse[2000.0, 60.0] < reuse[0.0, 0.0] + 0.05
