"""Policies that take turns live: what a call that is cut short leaves to the next one."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helmrec_bench.measure.controller import turns
from helmrec_bench.measure.controller.turns import SCREENED, LiveCourse, LiveRun, earlier, figures, take_turns


class CountedStand:
    """Serves nothing; the constant 0.4 is the fastest."""

    def __init__(self) -> None:
        self.made: list[tuple[float, str]] = []

    def course(self, duration_s: float) -> LiveCourse:
        return LiveCourse([], [], np.array([duration_s]), ["all"])

    def run(self, course: LiveCourse, policy: str) -> LiveRun:
        self.made.append((float(course.due_s[0]), policy))
        alpha = float(policy.partition(":")[2] or 0.4)
        return LiveRun(np.array([1.0 + abs(alpha - 0.4)]))


def flags_for(out: Path, limit_s: float) -> Namespace:
    asked = {"seconds": 120.0, "score_after": 60.0, "screen_s": 20.0, "repeats": 2, "limit_s": limit_s}
    return Namespace(out=out, policies=["best", "helm"], **asked)


@pytest.fixture(autouse=True)
def described(monkeypatch: pytest.MonkeyPatch) -> None:
    plain: dict[str, Any] = {"scored": {}, "whole": {}, "moves": []}
    monkeypatch.setattr(turns, "describe", lambda course, run, after_s: dict(plain))


def test_a_call_makes_only_the_runs_that_are_missing() -> None:
    stand, found = CountedStand(), dict[str, Any]()
    screened = [(20.0, f"static:{alpha:g}") for alpha in SCREENED]
    assert not take_turns(stand, flags_for(Path(), 100.0), found, lambda: None), "no long run fits the time"
    assert stand.made == screened
    assert take_turns(stand, flags_for(Path(), 1e9), found, lambda: None)
    assert stand.made[len(screened) :] == [(120.0, "static:0.4"), (120.0, "helm")] * 2
    found["runs"]["helm"].pop()
    stand.made.clear()
    assert take_turns(stand, flags_for(Path(), 1e9), found, lambda: None)
    assert stand.made == [(120.0, "helm")]


def test_a_file_of_other_courses_is_not_continued(tmp_path: Path) -> None:
    out = tmp_path / "live.json"
    flags = flags_for(out, 1e9)
    assert earlier(flags) == {}
    of_one = {"duration_s": 120.0, "score_after_s": 60.0, "screen_s": 20.0, "runs": {}}
    for found, is_same in (
        ({"setups": {"24": of_one}}, True),
        ({"setups": {"24": of_one | {"duration_s": 90.0}}}, False),
    ):
        out.write_text(json.dumps(found))
        assert (earlier(flags) == found) == is_same


def test_a_run_that_serves_nobody_has_no_latencies() -> None:
    found = figures(np.full(3, np.nan))
    assert (found["offered"], found["served"], found["slo_satisfaction"]) == (3, 0, 0.0)
    assert found["mean_ms"] is found["p50_ms"] is found["p99_ms"] is None


def test_a_constant_that_served_nobody_is_not_the_best() -> None:
    class Starved(CountedStand):
        def run(self, course: LiveCourse, policy: str) -> LiveRun:
            run = super().run(course, policy)
            return LiveRun(np.array([np.nan])) if policy == "static:0.1" else run

    stand, found = Starved(), dict[str, Any]()
    assert take_turns(stand, flags_for(Path(), 1e9), found, lambda: None)
    assert (120.0, "static:0.4") in stand.made
