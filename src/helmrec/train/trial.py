"""Networks on lessons held out, alone and as the base of the whole policy: what decides which one is shipped."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from helmrec.control.helm import HelmPolicy, HelmSettings
from helmrec.control.network import BasePolicy
from helmrec.control.policy import Limited, Limits, Move, Policy, WindowStats
from helmrec.control.static import Static, StaticSettings
from helmrec.memory.miss_curves import JointCurves
from helmrec.sim.oracle import best_static, cheapest_path, switching_costs
from helmrec.sim.simulate import SimResult, simulate
from helmrec.sim.simulate_curves import curves_at
from helmrec.train.labels import FINE, fine_costs, switch_prices
from helmrec.train.lessons import SPLITS, WINDOW_S, Lesson, cost_by_window

ALONE = HelmSettings(has_residual=False, has_burst=False, has_guardrail=False)
_FROM_S = 30.0  # what is before only warms the caches
_REFUSED_SLOS = 10.0


class Trial(NamedTuple):
    """How a policy did on a lesson."""

    regret: float  # cost beyond the switching-cost oracle's, a share of that
    p99_change: float  # against the best constant in hindsight, a share of its P99


class _Shown:
    """A policy within the limits all are held to, shown a lesson's recorded curves."""

    def __init__(self, policy: Policy, curves: Sequence[JointCurves | None]) -> None:
        self._policy = Limited(policy, Limits())
        self._curves = curves

    def decide(self, stats: WindowStats) -> Move | None:
        curves = curves_at(self._curves, 1.0, stats.traffic.end_s)
        return self._policy.decide(replace(stats, curves=curves))

    def reset(self) -> None:
        """One run each."""


def try_base(lesson: Lesson, base: BasePolicy, settings: HelmSettings) -> Trial:
    """From an even split, as everyone starts who is not tuned."""
    ground = lesson.ground
    shown = _Shown(HelmPolicy(ground.service, settings, base), lesson.curves)
    return _trial(lesson, simulate(ground.trace, ground.born_at(0.5), ground.cost, shown))


def try_constant(lesson: Lesson) -> Trial:
    """The best constant in hindsight, of those that were swept."""
    return _trial(lesson, _best_run(lesson))


def _trial(lesson: Lesson, result: SimResult) -> Trial:
    spent = cost_by_window(result)
    first, last = round(_FROM_S / WINDOW_S), min(spent.size, lesson.costs.shape[0])
    regret = float(spent[first:last].sum() / oracle_cost(lesson, first, last) - 1)
    return Trial(regret, _p99_ms(result) / _p99_ms(_best_run(lesson)) - 1)


def _best_run(lesson: Lesson) -> SimResult:
    first, ground = round(_FROM_S / WINDOW_S), lesson.ground
    alpha = float(best_static(lesson.costs[first:], SPLITS).alpha[0])
    return simulate(ground.trace, ground.born_at(alpha), ground.cost, Static(StaticSettings(alpha=alpha)))


def _p99_ms(result: SimResult) -> float:
    latency_ms = np.nan_to_num(result.outcomes.latency_ms, nan=_REFUSED_SLOS * result.slo_ms)
    return float(np.percentile(latency_ms[result.arrived_s >= _FROM_S], 99))


def oracle_cost(lesson: Lesson, first: int, last: int) -> float:
    """Of the cheapest path over these windows, its moves paid."""
    switching = switching_costs(FINE, switch_prices(lesson.ground))
    return cheapest_path(fine_costs(lesson.costs)[first:last], FINE, switching).total
