"""Nodes and traffic drawn at random: what a controller is trained on, chosen on and tested on.

A number is always the same scenario. Three ranges of numbers never meet: training, validation, test. Arrivals are set
by what the node can bear: requests of each mix are sent to it all at once, at several splits, and its capacity is a
little less than the best throughput found there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from helmrec.config import EngineConfig
from helmrec.costs.calibrated import CostModel, default_cost
from helmrec.model.config import ModelConfig
from helmrec.model.profiles import dlrmv3_shape
from helmrec.sim.node.config import NodeConfig, prepare_requests
from helmrec.sim.node.node import Node
from helmrec.sim.node.state import make_outcomes
from helmrec.steps import Step
from helmrec.traffic.generate import generate
from helmrec.traffic.trace import Trace
from helmrec.traffic.workload import Phase, Users, Workload
from helmrec_bench.judging.first_times import OPENING_S

Range = Literal["train", "validation", "test"]
Kind = Literal["steady", "step", "ramp", "sine", "growth", "burst", "flood", "turnover"]
RANGES: tuple[Range, ...] = ("train", "validation", "test")
LONG_S, SHORT_S = 1_200.0, 300.0
# Half of them long: what adapting is for is slow.
KINDS: tuple[tuple[Kind, float], ...] = (
    ("steady", SHORT_S),
    ("growth", LONG_S),
    ("burst", SHORT_S),
    ("sine", LONG_S),
    ("step", SHORT_S),
    ("turnover", LONG_S),
    ("flood", SHORT_S),
    ("burst", LONG_S),
    ("ramp", SHORT_S),
    ("sine", LONG_S),
    ("steady", SHORT_S),
    ("growth", LONG_S),
)
_DRIFTS = ("growth", "sine", "turnover")
_LOST_BY_ANY, _MOST_DRAWN = 0.1, 10  # share of the throughput that every constant loses at one end; draws until then
_STEADY_LOADS = (0.5, 0.7, 0.9, 0.95)
_PILOT_ALPHAS = (0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.93)
_PILOT_S = 60.0
_WITHIN_SLO = 0.92  # share of the throughput that a node serves within the SLO, roughly
_SLO_MS, _SLO_CAPACITY = 80.0, 750.0  # of the frozen scenarios: an SLO, and what a node that has it can bear
_ROW_BYTES, _KV_ITEM_BYTES = 1_024, 2  # of the drawn model shapes
_SAMPLED_ROWS = 1 << 14  # that stand for all rows of the pool
_SEEDS_FROM = 1_000  # of pilots, apart from those of runs


class Mix(NamedTuple):
    """What requests are like at one time; fields as in `Phase`."""

    hot_share: float
    hot_first: int  # another value is another set of regular users
    history: float
    item_exponent: float


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """A scenario. Figures are counted from `scored_from_s` on; `bursts_s` are the bursts in it, from and until."""

    name: str
    kind: str
    load: float  # share of the capacity, at the busiest time
    workload: Workload
    config: NodeConfig
    cost: CostModel
    bursts_s: tuple[tuple[float, float], ...] = ()
    scored_from_s: float = OPENING_S

    def make_trace(self, seed: int) -> Trace:
        return generate(self.workload, seed)

    def node_at(self, alpha: float) -> NodeConfig:
        """The node, started at this split."""
        return _started_at(self.config, alpha)


def draw(which: Range, number: int, load: float | None = None) -> Drawn:
    """Scenario `number` of a range; `load` replaces the one that was drawn."""
    kind, _ = KINDS[number % len(KINDS)]
    parts = _draw_drift(which, number) if kind in _DRIFTS else _draw_parts(which, number, attempt=0)
    if load is not None:
        parts = parts._replace(load=load)
    scaled, calm = parts.plan, parts.calm
    phases, bursts_s = _PHASES[kind](parts)
    return Drawn(
        name=f"{which}-{number}-{kind}",
        kind=kind,
        load=parts.load,
        workload=_workload(scaled, (_phase("opening", OPENING_S, phases[0].rate[0], (calm, calm), scaled), *phases)),
        config=scaled.config,
        cost=scaled.cost,
        bursts_s=bursts_s,
    )


def _draw_drift(which: Range, number: int) -> "_Parts":
    """Draw until no constant suits both ends, or take what suits them least of some."""
    drawn, lost = list[_Parts](), list[float]()
    while not lost or (lost[-1] < _LOST_BY_ANY and len(lost) < _MOST_DRAWN):
        drawn.append(_draw_parts(which, number, attempt=len(drawn)))
        lost.append(_limits_of_best_constant(drawn[-1].plan, (drawn[-1].calm, drawn[-1].other)).lost)
    return drawn[int(np.argmax(lost))]


def _draw_parts(which: Range, number: int, attempt: int) -> "_Parts":
    kind, duration_s = KINDS[number % len(KINDS)]
    plan = _draw_plan(which, number, attempt)
    rng = plan.rng
    if kind == "growth":
        plan = _with_room_to_grow(plan)
    elif kind in _DRIFTS:
        plan = _with_room_for_users(plan)
    calm = plan.calm
    load = float(rng.uniform(0.7 if kind in _DRIFTS else 0.5, 0.95))
    if kind == "steady":
        load = _STEADY_LOADS[number // len(KINDS) % 4]
    other = _draw_other(plan)
    if kind == "growth":
        other = calm._replace(history=plan.longest)
    elif kind in _DRIFTS:
        calm, other = _draw_ends(rng, calm)
    plan = plan._replace(calm=calm)
    scaled = _scaled(_with_events(plan, plan.longest if kind == "growth" else 1.1 * calm.history, duration_s))
    least = min(_limits_of_best_constant(scaled, (calm, other)).capacities) if kind == "growth" else None
    return _Parts(scaled, calm, other, load, duration_s, least)


def _with_room_to_grow(plan: "_Plan") -> "_Plan":
    """Regular users whose prefixes fit with ease at first, and hardly or not at all at the end."""
    times, share, hot_share = plan.rng.uniform((2.5, 0.6, 0.6), (4.0, 1.2, 0.9)).tolist()
    longest = min(12_000.0, plan.calm.history * times)
    history = longest / times
    users = plan.users.model_copy(
        update={"min_history": int(history * 0.3), "max_history": int(min(13_500.0, longest * 2.1))}
    )
    pool_bytes, model = plan.config.engine.sized_pool_bytes, plan.config.model
    hot_users = max(20, int(pool_bytes * share / _kv_bytes(model, longest)))
    calm = plan.calm._replace(history=history, hot_share=hot_share)
    return plan._replace(calm=calm, longest=longest, users=users, hot_users=hot_users)


def _with_room_for_users(plan: "_Plan") -> "_Plan":
    """Regular users whose prefixes fit into most of the pool."""
    share = float(plan.rng.uniform(0.4, 0.9))
    pool_bytes, model = plan.config.engine.sized_pool_bytes, plan.config.model
    return plan._replace(hot_users=max(20, int(pool_bytes * share / _kv_bytes(model, plan.calm.history))))


def _draw_ends(rng: np.random.Generator, mix: Mix) -> tuple[Mix, Mix]:
    """Many visitors who look at all kinds of items, and mostly regular users of popular items; either may be first."""
    low, high = (0.15, 0.7), (0.45, 0.95)
    visitors = mix._replace(**dict(zip(("hot_share", "item_exponent"), rng.uniform(low, high).tolist(), strict=True)))
    low, high = (0.75, 1.0), (0.95, 1.3)
    regulars = mix._replace(**dict(zip(("hot_share", "item_exponent"), rng.uniform(low, high).tolist(), strict=True)))
    return (visitors, regulars) if rng.random() < 0.5 else (regulars, visitors)


def _kv_bytes(model: ModelConfig, num_tokens: float) -> float:
    return num_tokens * model.num_layers * model.num_heads * (model.qk_dim + model.v_dim) * _KV_ITEM_BYTES


def _with_events(plan: "_Plan", history: float, duration_s: float) -> "_Plan":
    """Hot users append as many events at each visit as take their histories to this length."""
    visits = plan.capacity * plan.calm.hot_share * duration_s / plan.hot_users
    new_events = max(1.0, (history - plan.calm.history) / visits)
    return plan._replace(users=plan.users.model_copy(update={"new_events": new_events}))


class _Plan(NamedTuple):
    """A node without its speed, and the traffic it is made for."""

    rng: np.random.Generator
    seed: int
    capacity: float  # requests per second in calm
    config: NodeConfig
    cost: CostModel
    num_items: int
    hot_users: int
    longest: float  # median history at the end of growth
    users: Users
    calm: Mix


def _draw_plan(which: Range, number: int, attempt: int) -> _Plan:
    rng = np.random.default_rng((RANGES.index(which), number, attempt)[: 3 if attempt else 2])
    capacity = float(np.exp(rng.uniform(np.log(100), np.log(400))))
    rows_per_token = int(rng.choice([2, 6, 12, 24, 24, 32]))
    pool_bytes = int(capacity * rng.uniform(0.05, 0.2) * (1 << 30))
    history = float(np.exp(rng.uniform(np.log(1_500), np.log(9_000))))
    longest = min(12_000.0, history * float(rng.uniform(1.6, 3.0)))
    num_items = max(20_000, int(pool_bytes * rng.uniform(1.0, 5.0) / _ROW_BYTES / (1 + (rows_per_token - 2) / 4)))
    model = dlrmv3_shape(f"drawn-{rows_per_token}", num_items, rows_per_token - 2)
    kv_bytes = _kv_bytes(model, history)
    calm = Mix(float(rng.uniform(0.35, 0.9)), 0, history, float(rng.uniform(0.75, 1.25)))
    slo_ms = float(np.clip(_SLO_MS * _SLO_CAPACITY / capacity, 80, 1_000))
    config = NodeConfig(
        model=model,
        engine=EngineConfig(
            pool_bytes=pool_bytes,
            max_batch_requests=int(rng.choice([8, 8, 16, 32])),
            move_bytes_per_step=int(rng.choice([16, 64])) << 20,
            overlap=None if rng.random() < 0.75 else False,
            queue_limit=4_096,
        ),
        row_sample=min(1.0, 2.0 ** np.floor(np.log2(_SAMPLED_ROWS * _ROW_BYTES / pool_bytes))),
        slo_ms=slo_ms,
    )
    return _Plan(
        rng=rng,
        seed=_SEEDS_FROM + number,
        capacity=capacity,
        config=config,
        cost=default_cost(),
        num_items=num_items,
        hot_users=max(20, int(pool_bytes * rng.uniform(0.4, 1.5) / kv_bytes)),
        longest=longest,
        users=Users(
            hot_exponent=float(rng.uniform(0.3, 0.9)),
            min_history=int(history * 0.3),
            max_history=int(min(13_500.0, longest * 2.1)),
            cold_return=float(rng.uniform(0.05, 0.4)),
        ),
        calm=calm,
    )


def _slower(cost: CostModel, compute: float, bus: float, host: float) -> CostModel:
    """The same device with its stages slower by these factors."""
    values = cost.terms()._asdict()
    changed = {name: value * compute for name, value in values.items() if name.startswith("compute_")}
    changed |= {
        name: value * host
        for name, value in values.items()
        if name.startswith("host_") or name in ("background_ms", "intake_ms")
    }
    changed |= {name: value / bus for name, value in values.items() if name.endswith("_gb_per_s")}
    changed["reload_floor_ms"] = values["reload_floor_ms"] * bus
    return cost.model_copy(update=changed | {"name": f"drawn from {cost.name}"})


def _draw_other(plan: _Plan) -> Mix:
    """Some of what makes the mix is changed, not always all of it."""
    rng, calm = plan.rng, plan.calm
    changes = rng.random(4) < 0.6
    return Mix(
        hot_share=float(np.clip(calm.hot_share * rng.uniform(0.3, 1.3), 0.05, 0.95)) if changes[0] else calm.hot_share,
        hot_first=plan.hot_users if changes[1] else 0,
        history=calm.history * float(rng.uniform(0.5, 1.5)) if changes[1] else calm.history,
        item_exponent=max(0.35, calm.item_exponent + float(rng.uniform(-0.35, 0.2)))
        if changes[2]
        else calm.item_exponent,
    )


def _phase(
    name: str, duration_s: float, rate: float | tuple[float, float], ends: tuple[Mix, Mix], plan: _Plan
) -> Phase:
    start, end = ends
    return Phase(
        name=name,
        duration_s=duration_s,
        rate=rate,
        hot_users=plan.hot_users,
        hot_share=(start.hot_share, end.hot_share),
        hot_first=(start.hot_first, end.hot_first),
        history=(start.history, end.history),
        item_exponent=(start.item_exponent, end.item_exponent),
    )


def _workload(plan: _Plan, phases: tuple[Phase, ...]) -> Workload:
    return Workload(
        name="drawn",
        num_items=plan.num_items,
        item_shift=max(1.0, plan.num_items / 4e4),
        users=plan.users,
        phases=phases,
    )


def _started_at(config: NodeConfig, alpha: float) -> NodeConfig:
    return config.model_copy(update={"engine": config.engine.model_copy(update={"alpha": alpha})})


# Capacity.


def _scaled(plan: _Plan) -> _Plan:
    """The plan with a device of its own: which stage is the longer one is drawn, and how much; then how fast it is.

    At an even split rows take 0.15 to 2 times as long as compute; in calm it bears `plan.capacity` requests a
    second.
    """
    ratio, host = np.exp(plan.rng.uniform(np.log([0.15, 0.5]), np.log([2.0, 2.0])))
    took_ms = _flooded(plan, _pilot(plan, plan.calm), 0.5).take_steps().sum(axis=0)
    slower = took_ms[Step.ROWS_MS] / took_ms[Step.COMPUTE_MS] / ratio
    balanced = plan._replace(cost=_slower(plan.cost, float(slower), 1.0, float(host)))
    factor = _capacity(balanced, plan.calm) / plan.capacity
    return balanced._replace(cost=_slower(balanced.cost, factor, factor, factor))


def _pilot(plan: _Plan, mix: Mix) -> Trace:
    phase = _phase("pilot", _PILOT_S, plan.capacity, (mix, mix), plan)
    return generate(_workload(plan, (phase,)), plan.seed)


def _capacity(plan: _Plan, mix: Mix) -> float:
    """Requests per second of this mix at the best of several splits, once the caches are warm."""
    trace = _pilot(plan, mix)
    return _WITHIN_SLO * max(_throughput(plan, trace, alpha) for alpha in _PILOT_ALPHAS)


class _Limits(NamedTuple):
    """What one constant bears of each of several mixes, and how much less that is than what others would, at worst."""

    capacities: list[float]
    lost: float


def _limits_of_best_constant(plan: _Plan, mixes: Sequence[Mix]) -> _Limits:
    """Of the constant that loses least where it suits least."""
    traces = [_pilot(plan, mix) for mix in mixes]
    found = np.array([[_throughput(plan, trace, alpha) for alpha in _PILOT_ALPHAS] for trace in traces])
    kept = (found / found.max(axis=1, keepdims=True)).min(axis=0)
    best = int(kept.argmax())
    return _Limits((_WITHIN_SLO * found[:, best]).tolist(), float(1 - kept[best]))


def _throughput(plan: _Plan, trace: Trace, alpha: float) -> float:
    """Requests per second when all are sent at once; the second half of the answers counts."""
    if alpha > plan.config.alpha_max:
        return 0.0
    answered_s = np.sort(_flooded(plan, trace, alpha).outcomes.latency_ms) / 1e3
    half = trace.num_requests // 2
    return float((trace.num_requests - half) / (answered_s[-1] - answered_s[half - 1]))


def _flooded(plan: _Plan, trace: Trace, alpha: float) -> Node:
    """A node that was sent all requests at once, and has answered them."""
    config = _started_at(plan.config, alpha)
    engine = config.engine.model_copy(update={"queue_limit": trace.num_requests})
    config = config.model_copy(update={"engine": engine})
    node = Node(config, plan.cost, prepare_requests(trace, config), make_outcomes(trace.num_requests))
    node.send(np.arange(trace.num_requests), np.zeros(trace.num_requests))
    while node.num_unanswered:
        node.run_until(node.now_s + 10.0)
    return node


# Phases of each kind.


class _Parts(NamedTuple):
    plan: _Plan
    calm: Mix
    other: Mix
    load: float
    duration_s: float
    least: float | None  # capacity that holds from the beginning to the end, where one was found

    def rate_of(self, mix: Mix) -> float:
        """Arrivals of this mix that are this load."""
        capacity = self.plan.capacity if mix == self.calm else _capacity(self.plan, mix)
        return self.load * (self.least or capacity)

    def phase(self, name: str, share: float, rate: float | tuple[float, float], ends: tuple[Mix, Mix]) -> Phase:
        return _phase(name, share * self.duration_s, rate, ends, self.plan)


_Phases = tuple[tuple[Phase, ...], tuple[tuple[float, float], ...]]


def _steady(parts: _Parts) -> _Phases:
    return (parts.phase("steady", 1.0, parts.rate_of(parts.calm), (parts.calm, parts.calm)),), ()


def _growth(parts: _Parts) -> _Phases:
    """Histories grow, of regular users and of new ones."""
    rate = parts.rate_of(parts.calm)
    return (parts.phase("growth", 1.0, rate, (parts.calm, parts.other)),), ()


def _step(parts: _Parts) -> _Phases:
    calm, other = parts.calm, parts.other
    phase = parts.phase("calm", 1 / 3, parts.rate_of(calm), (calm, calm))
    return (phase, parts.phase("step", 1 / 3, parts.rate_of(other), (other, other)), phase), ()


def _ramp(parts: _Parts) -> _Phases:
    calm, other = parts.calm, parts.other
    first, last = parts.rate_of(calm), parts.rate_of(other)
    return (
        parts.phase("before", 0.2, first, (calm, calm)),
        parts.phase("ramp", 0.6, (first, last), (calm, other)),
        parts.phase("after", 0.2, last, (other, other)),
    ), ()


def _sine(parts: _Parts) -> _Phases:
    """From one mix to another and back, two to five times."""
    cycles = int(parts.plan.rng.integers(2, 6))
    share = 0.25 / cycles
    there = _drift(parts, ("leaves", "arrives"), share, (parts.calm, parts.other))
    back = _drift(parts, ("turns", "returns"), share, (parts.other, parts.calm))
    return (*there, *back) * cycles, ()


def _drift(parts: _Parts, names: tuple[str, str], share: float, ends: tuple[Mix, Mix]) -> tuple[Phase, Phase]:
    """From one mix to another in two phases; arrivals are so much of what the best constant bears along the way."""
    start, end = ends
    middle = start._replace(
        hot_share=(start.hot_share + end.hot_share) / 2,
        item_exponent=(start.item_exponent + end.item_exponent) / 2,
        hot_first=(start.hot_first + end.hot_first) // 2,
    )
    mixes = [mix._replace(hot_first=0) for mix in (start, middle, end)]
    first, halfway, last = (parts.load * rate for rate in _limits_of_best_constant(parts.plan, mixes).capacities)
    return (
        parts.phase(names[0], share, (first, halfway), (start, middle)),
        parts.phase(names[1], share, (halfway, last), (middle, end)),
    )


def _turnover(parts: _Parts) -> _Phases:
    """The set of regular users and the popular items change all the time, and so does the mix."""
    rng, plan = parts.plan.rng, parts.plan
    end = parts.other._replace(hot_first=plan.hot_users * 2 * int(rng.integers(1, 3)))
    phases = _drift(parts, ("turnover", "further"), 0.5, (parts.calm, end))
    drift = plan.num_items * float(rng.uniform(0.005, 0.1))
    return tuple(phase.model_copy(update={"drift_items_per_hour": drift}) for phase in phases), ()


def _bursts(parts: _Parts) -> _Phases:
    """Calm and bursts in turn: 0.7 to 3 times the arrivals for 2 to 120 s, never more than the node can bear."""
    calm, other, rng = parts.calm, parts.other, parts.plan.rng
    times, length_s = float(rng.uniform(0.7, 3.0)), float(np.exp(rng.uniform(np.log(2), np.log(120))))
    length_s = min(length_s, parts.duration_s / 10)
    calm_s = length_s * float(rng.uniform(2.0, 4.0)) + 10.0
    rate = parts.rate_of(calm)
    rate = min(rate, parts.rate_of(other) / times)
    return _alternating(parts, (calm_s, rate, calm), (length_s, rate * times, other))


def _floods(parts: _Parts) -> _Phases:
    """Requests of users never seen before, on top of the usual traffic: 0.5 to 2 times as many."""
    calm, rng = parts.calm, parts.plan.rng
    times = float(rng.uniform(1.5, 3.0))
    flood = calm._replace(hot_share=calm.hot_share / times)
    rate = min(parts.rate_of(calm), parts.rate_of(flood) / times)
    length_s = float(rng.uniform(15.0, 40.0))
    return _alternating(parts, (length_s * 1.5 + 20.0, rate, calm), (length_s, rate * times, flood))


def _alternating(parts: _Parts, calm: tuple[float, float, Mix], burst: tuple[float, float, Mix]) -> _Phases:
    phases, bursts, now_s = list[Phase](), list[tuple[float, float]](), OPENING_S
    while now_s < OPENING_S + parts.duration_s - 1:
        for seconds, rate, mix in (calm, burst):
            phases.append(_phase("burst" if mix is burst[2] else "calm", seconds, rate, (mix, mix), parts.plan))
            if mix is burst[2]:
                bursts.append((now_s, now_s + seconds))
            now_s += seconds
    return tuple(phases), tuple(bursts)


_PHASES = {
    "steady": _steady,
    "growth": _growth,
    "step": _step,
    "ramp": _ramp,
    "sine": _sine,
    "turnover": _turnover,
    "burst": _bursts,
    "flood": _floods,
}
