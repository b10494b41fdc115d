"""What the base policy is taught on: made-up nodes and traffic, drawn at random and never one of the named families.

A lesson is a trace, a node and what a sweep over constant splits found there. Judged families, and the seeds they are
judged on, are nowhere in here.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from helmrec.config import EngineConfig
from helmrec.control.outlook import Floats
from helmrec.control.policy import WindowStats
from helmrec.control.service_cost import ServiceCost
from helmrec.control.static import Static, StaticSettings
from helmrec.memory.miss_curves import JointCurves
from helmrec.model.profiles import profile
from helmrec.sim.cost import CostModel
from helmrec.sim.generate import generate
from helmrec.sim.node_config import NodeConfig
from helmrec.sim.scenario import service_cost
from helmrec.sim.simulate import SimResult, simulate
from helmrec.sim.simulate_curves import record_curves
from helmrec.sim.trace import Trace
from helmrec.sim.workload import Phase, Users, Workload

SPLITS: Floats = np.array((0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9))  # of sweeps
WINDOW_S = 3.0  # of arrivals over which a sweep's costs are added up
_KV_TOKEN_BYTES = 10_240
_TABLES = {"wide": 6.5, "dlrmv3": 2.0}  # rows of all tables per row of the item table
_TAUGHT_FROM = 10_000  # seeds of lessons; judging takes small ones
_ROW_SAMPLE = 1 / 1_024  # share of the rows that is simulated
_MAX_PRESSURE = 1.15  # that an excursion may bring at an even split: a better one may still bear it
_REFUSED_SLOS = 10.0  # a refused request counts as so many SLOs of latency


@dataclass(frozen=True, slots=True, eq=False)
class Ground:
    """Where a lesson takes place."""

    name: str
    trace: Trace
    config: NodeConfig
    cost: CostModel

    @property
    def service(self) -> ServiceCost:
        return service_cost(self.cost, self.config, self.trace)

    def born_at(self, alpha: float) -> NodeConfig:
        engine = self.config.engine.model_copy(update={"alpha": alpha})
        return self.config.model_copy(update={"engine": engine})


class Step(NamedTuple):
    """A window of a run at a constant split, for the fit of crowding."""

    new_tokens: float
    resident_tokens: float
    missed_rows: float
    rate: float
    mean_ms: float


@dataclass(frozen=True, slots=True, eq=False)
class Lesson:
    """A ground with what was found out about it."""

    ground: Ground
    curves: list[JointCurves | None]  # of each second; requests, and so curves, are the same at any split
    costs: Floats  # (windows of WINDOW_S, SPLITS) latency added up over requests, ms
    steps: list[Step]

    @property
    def num_ticks(self) -> int:
        return min(len(self.curves), int(self.costs.shape[0] * WINDOW_S))


class _Regime(NamedTuple):
    """One state of traffic, relative to a lesson's own."""

    rate: float
    hot_share: float
    history: float
    exponent: float
    crowd: int


def draw_ground(number: int, cost: CostModel, duration_s: float) -> Ground:
    """Lesson `number`: the same number, the same lesson."""
    rng = np.random.default_rng(_TAUGHT_FROM + number)
    shape = "wide" if rng.random() < 0.75 else "dlrmv3"
    pool_bytes = int(rng.choice([16, 40, 80])) << 30
    history = float(rng.choice([4_000, 7_000, 10_000]))
    hot_users = max(20, int(pool_bytes * rng.uniform(0.6, 2.0) / (history * _KV_TOKEN_BYTES)))
    num_items = int(pool_bytes / 1_024 * rng.uniform(1.5, 5.0) / _TABLES[shape])
    config = NodeConfig(
        model=profile(shape, num_items),
        engine=EngineConfig(
            pool_bytes=pool_bytes,
            max_batch_requests=int(rng.choice([8, 8, 32])),
            move_bytes_per_step=int(rng.choice([16, 64])) << 20,
        ),
        row_sample=_ROW_SAMPLE,
    )
    pressure = float(rng.uniform(0.35, 0.9))
    plan = _Plan(rng, history, hot_users, num_items, float(rng.uniform(0.85, 1.3)), duration_s, pressure)
    lone = generate(_workload(plan, _calm(plan, 20.0)), _TAUGHT_FROM + number)
    rate = _rate_for(lone, config, cost, pressure)
    trace = generate(_workload(plan, _walk(plan, rate)), _TAUGHT_FROM + number)
    return Ground(f"lesson {number}: {shape}, {pool_bytes >> 30} GiB, {rate:.0f}/s", trace, config, cost)


class _Plan(NamedTuple):
    rng: np.random.Generator
    history: float
    hot_users: int
    num_items: int
    exponent: float
    duration_s: float
    pressure: float  # at home, at an even split


def _workload(plan: _Plan, phases: tuple[Phase, ...]) -> Workload:
    users = Users(min_history=int(plan.history * 0.3), max_history=int(plan.history * 2.1))
    return Workload(
        name="lesson", num_items=plan.num_items, item_shift=max(1.0, plan.num_items / 4e4), users=users, phases=phases
    )


def _calm(plan: _Plan, duration_s: float, rate: float = 60.0) -> tuple[Phase, ...]:
    phase = Phase(
        name="calm",
        duration_s=duration_s,
        rate=rate,
        hot_users=plan.hot_users,
        history=plan.history,
        item_exponent=plan.exponent,
    )
    return (phase,)


def _rate_for(trace: Trace, config: NodeConfig, cost: CostModel, pressure: float) -> float:
    """Arrivals at which a node at an even split is under this pressure (`control.outlook.Crowding`)."""
    node = config.model_copy(update={"engine": config.engine.model_copy(update={"alpha": 0.5})})
    result = simulate(trace, node, cost, Static(StaticSettings(alpha=0.5)))
    service = service_cost(cost, node, trace)
    last = [window.stats for window in result.windows[len(result.windows) // 2 :]]
    new = float(np.mean([one.new_tokens_per_request for one in last]))
    total = new + float(np.mean([one.resident_tokens_per_request for one in last]))
    missed = float(np.mean([one.missed_rows_per_request for one in last]))
    compute = service.floor_ms + new * (service.token_ms + service.pair_ms * total / 2)
    lead = service.host_floor_ms + service.host_token_ms * new + service.missed_row_ms * missed
    return float(1e3 * pressure / np.hypot(compute, lead))


def _walk(plan: _Plan, rate: float) -> tuple[Phase, ...]:
    """Home, and excursions from it of all lengths and kinds; a third of the changes are ramps, the others jumps.

    Some excursions come again: what a burst was like once tells of the next.
    """
    rng, phases, passed_s = plan.rng, list[Phase](), 0.0
    home = here = _Regime(1.0, float(rng.uniform(0.4, 0.85)), 1.0, 0.0, 0)
    usual = _excursion(plan, home)
    while passed_s < plan.duration_s:
        goes_home = here != home and rng.random() < 0.6
        away = usual if rng.random() < 0.4 else _excursion(plan, home)
        there = home if goes_home else away
        seconds = float(np.clip(np.exp(rng.normal(2.7, 0.8)), 3.0, 60.0))
        is_ramp = rng.random() < 0.35
        phases.append(_phase(plan, rate, (here if is_ramp else there, there), seconds))
        passed_s, here = passed_s + seconds, there
    return tuple(phases)


def _excursion(plan: _Plan, home: _Regime) -> _Regime:
    """Some of what makes traffic changes, not always all of it."""
    rng, most = plan.rng, _MAX_PRESSURE / plan.pressure
    changes = rng.random(4) < 0.55
    return _Regime(
        rate=float(np.exp(rng.uniform(np.log(0.5), np.log(most)))) if changes[0] else home.rate,
        hot_share=float(rng.uniform(0.15, 0.95)) if changes[1] else home.hot_share,
        history=float(rng.uniform(0.5, 1.3)) if changes[2] else home.history,
        exponent=float(rng.uniform(-0.3, 0.15)) if changes[3] else home.exponent,
        crowd=int(rng.integers(0, 3)) if changes[2] else home.crowd,
    )


def _phase(plan: _Plan, rate: float, ends: tuple[_Regime, _Regime], seconds: float) -> Phase:
    start, end = ends
    return Phase(
        name="walk",
        duration_s=seconds,
        rate=(start.rate * rate, end.rate * rate),
        hot_share=(start.hot_share, end.hot_share),
        hot_users=plan.hot_users,
        hot_first=end.crowd * plan.hot_users,
        history=(start.history * plan.history, end.history * plan.history),
        item_exponent=(plan.exponent + start.exponent, plan.exponent + end.exponent),
    )


def at_speed(ground: Ground, speed: float) -> Ground:
    """The same requests, so many times as fast."""
    trace = replace(ground.trace, time_s=ground.trace.time_s / speed)
    return replace(ground, name=f"{ground.name} at speed {speed:g}", trace=trace)


def learn_ground(ground: Ground) -> Lesson:
    """Record the miss curves and sweep the splits."""
    runs = [_run(ground, alpha) for alpha in SPLITS]
    columns = [cost_by_window(result) for result in runs]
    num_windows = min(column.size for column in columns)
    return Lesson(
        ground=ground,
        curves=record_curves(ground.trace, ground.born_at(0.5), ground.cost),
        costs=np.column_stack([column[:num_windows] for column in columns]),
        steps=[_step(window.stats) for result in runs for window in result.windows[20:]],
    )


def _run(ground: Ground, alpha: float) -> SimResult:
    policy = Static(StaticSettings(alpha=float(alpha)))
    return simulate(ground.trace, ground.born_at(float(alpha)), ground.cost, policy)


def cost_by_window(result: SimResult, window_s: float = WINDOW_S) -> Floats:
    """Latency added up over the requests of each window of arrivals; every refused one counts ten SLOs."""
    latency_ms = np.nan_to_num(result.outcomes.latency_ms, nan=_REFUSED_SLOS * result.slo_ms)
    place: NDArray[np.int64] = (result.arrived_s // window_s).astype(np.int64)
    return np.bincount(place, latency_ms).astype(np.float64)


def _step(stats: WindowStats) -> Step:
    return Step(
        stats.new_tokens_per_request,
        stats.resident_tokens_per_request,
        stats.missed_rows_per_request,
        stats.traffic.arrival_rate,
        stats.traffic.mean_ms,
    )
