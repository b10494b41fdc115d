"""What miss curves and the controller cost: requests/s of a saturated engine with them and without, by turns."""

import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from rich.progress import track

from helmrec.cli.console import err
from helmrec.control.rebalancer import Rebalancer
from helmrec.engine.engine import Engine
from helmrec.engine.intake import Prepared
from helmrec.policies import make_policy
from helmrec.serve.control import Steering
from helmrec_bench.measure.controller.turns import SLO_MS, Driver, LiveCourse, LiveRun, serve_all

ALPHA, POLICY = 0.5, "helm"


class SaturatedStand(Protocol):
    """Where the cost is measured."""

    def saturate(self, *, has_controller: bool) -> float:
        """Requests/s of an engine at `ALPHA` that has all requests at once; see `requests_per_s`."""


def cost_of_control(stand: SaturatedStand, repeats: int) -> dict[str, Any]:
    """Requests/s with and without, and the cost in each of `repeats` turns; who begins alternates."""
    found: dict[bool, list[float]] = {True: [], False: []}
    for turn in track(range(repeats), "with and without", console=err, transient=True):
        for has_controller in (turn % 2 == 0, turn % 2 == 1):
            found[has_controller].append(stand.saturate(has_controller=has_controller))
    costs = 1 - np.array(found[True]) / np.array(found[False])
    return {
        "with_per_s": np.round(found[True], 2).tolist(),
        "without_per_s": np.round(found[False], 2).tolist(),
        "costs": costs.round(4).tolist(),
        "median_cost": round(float(np.median(costs)), 4),
    }


def requests_per_s(
    engine: Engine, warm_up: Sequence[Prepared], requests: list[Prepared], *, has_controller: bool
) -> float:
    """Of an engine that has all requests at once. A controller looks and decides; the boundary does not move."""
    serve_all(engine, warm_up)
    course = LiveCourse([], requests, np.zeros(len(requests)), ["saturated"] * len(requests))
    rebalancer = None
    if has_controller:
        Steering(POLICY, SLO_MS).warm_up()
        rebalancer = Rebalancer(engine, make_policy(POLICY), SLO_MS)
        rebalancer.mode = "freeze"
    run = LiveRun(np.full(len(requests), np.nan))
    started_s = time.perf_counter()
    Driver(engine, course, rebalancer, run, drain_s=np.inf).go()
    seconds = time.perf_counter() - started_s
    assert not np.isnan(run.latency_ms).any()
    return len(requests) / seconds
