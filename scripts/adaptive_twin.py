"""The live course of `scripts.gpu_adaptive` on a simulated card: the same traffic, node, controller and rebalancer.

    python -m scripts.adaptive_twin           # ten minutes; writes docs/measurements/adaptive-twin.json

Says what constants bear, what the controller makes of courses of several lengths, and what the best split of every
stretch would, moves free. Held against the card first, at the rates and the length that were served there. Not the same
as there: items are drawn anew by the same law, a hot user who has come 200 times is followed by another of its length
instead of losing its newest events, and nothing pauses.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from helmrec.config import EngineConfig
from helmrec.control.rebalancer import LOOK_EVERY, Rebalancer
from helmrec.sim.cost import default_cost
from helmrec.sim.node import Node
from helmrec.sim.node_config import NodeConfig, prepare_requests
from helmrec.sim.node_state import make_outcomes
from helmrec.sim.steered import SteeredNode
from helmrec.sim.trace import Catalogue, Epoch, Trace, ZipfLaw, lanes_for
from helmrec.types import IntArray
from scripts import gpu_adaptive
from scripts.gpu_adaptive import (
    ALPHAS,
    DRAIN_S,
    LOAD,
    MIXES,
    PROBE,
    PROBED,
    SLO_MS,
    TABLES,
    TICK_S,
    VISITS,
    WARM_UP,
    best_constant,
    plan_times,
    rates_for,
    steer,
)
from scripts.gpu_tradeoff import NUM_HOT, POOL_BYTES
from scripts.gpu_traffic import NEW_EVENTS, NUM_CANDIDATES, Mix, serving_config
from scripts.provenance import write_measurement

OUT, CARD = Path("docs/measurements/adaptive-twin.json"), gpu_adaptive.OUT
LENGTHS_S = {24: (15.0, 30.0, 60.0, 120.0), 1: (20.0,)}
SEEDS = (2, 3, 4)
MOST_EVENTS = 2 * Mix(0.0, NUM_HOT).mean_events - 2_000
LOOK_S = TICK_S * LOOK_EVERY  # how often the rebalancer is asked whether it wants to look

Floats = NDArray[np.float64]


class Asked(NamedTuple):
    """One request as planned."""

    due_s: float
    hot_share: float
    stretch: str


class _Visits(NamedTuple):
    user: IntArray
    num_new: NDArray[np.int32]
    backlog: NDArray[np.int32]


def _who_asks(asked: Sequence[Asked], rng: np.random.Generator) -> _Visits:
    """Hot users, in the midst of their visits, return with 16 more events, strangers come once; lengths are uniform."""
    lengths = rng.integers(2_000, MOST_EVENTS, NUM_HOT)
    visits, numbers = rng.integers(VISITS, size=NUM_HOT), np.full(NUM_HOT, -1)
    user, num_new, backlog = np.empty(len(asked), np.int64), np.empty(len(asked), np.int32), list[int]()
    for i, one in enumerate(asked):
        hot = int(rng.integers(NUM_HOT)) if rng.random() < one.hot_share else None
        if hot is not None and numbers[hot] >= 0 and visits[hot] % VISITS:
            user[i], num_new[i] = numbers[hot], NEW_EVENTS
        else:
            grown = 0 if hot is None else lengths[hot] + (visits[hot] % VISITS + 1) * NEW_EVENTS
            user[i], num_new[i] = len(backlog), grown or rng.integers(2_000, MOST_EVENTS)
            backlog.append(int(num_new[i]))
        if hot is not None:
            numbers[hot] = user[i]
            visits[hot] += 1
    return _Visits(user, num_new, np.array(backlog, np.int32))


def make_trace(asked: Sequence[Asked], num_items: int, seed: int) -> Trace:
    """As `gpu_traffic.Traffic` would ask."""
    rng = np.random.default_rng(seed)
    user, num_new, backlog = _who_asks(asked, rng)
    time_s = np.array([one.due_s for one in asked])
    is_return = np.flatnonzero(num_new == NEW_EVENTS)
    by_user = is_return[np.argsort(user[is_return], kind="stable")]  # events lie by user, then time
    stamps = np.repeat(time_s[by_user].astype(np.int64), NEW_EVENTS)
    items = np.exp(rng.random(stamps.size) * np.log(num_items)).astype(np.int64) - 1
    names = tuple(dict.fromkeys(one.stretch for one in asked))
    catalogue = Catalogue(
        source="the course of scripts.gpu_adaptive",
        num_items=num_items,
        num_lanes=lanes_for(num_items),
        seed=seed,
        laws=(ZipfLaw(exponent=1.0),),
        epochs=(Epoch(),),
    )
    trace = Trace(
        catalogue=catalogue,
        phase_names=names,
        time_s=time_s,
        user=user,
        num_new=num_new,
        num_candidates=np.full(user.size, NUM_CANDIDATES, np.int32),
        candidate_seed=rng.integers(0, 2**64, user.size, np.uint64),
        phase=np.array([names.index(one.stretch) for one in asked], np.int16),
        epoch=np.zeros(user.size, np.int32),
        backlog=backlog,
        item=items,
        action=(items % catalogue.num_actions).astype(np.uint8),
        timestamp_s=catalogue.start_time_s + stamps,
    )
    trace.check()
    return trace


class Card:
    """A simulated node and what steers it; its answers are handed on."""

    def __init__(self, config: NodeConfig, trace: Trace, *, has_curves: bool) -> None:
        self.outcomes, self._trace = make_outcomes(trace.num_requests), trace
        self.node = Node(config, default_cost(), prepare_requests(trace, config), self.outcomes)
        self.steered = SteeredNode(self.node, has_curves=has_curves)
        self._num_seen = 0

    def run_until(self, until_s: float, rebalancer: Rebalancer | None = None) -> None:
        self.node.run_until(until_s)
        answered = self.node.answered[self._num_seen :]
        self._num_seen += answered.size
        if rebalancer is not None:
            rebalancer.record_all(self._trace.user[answered], self.outcomes.latency_ms[answered])

    def serve_all(self, requests: IntArray) -> float:
        """Everything queued at once; requests a second."""
        self.node.send(requests, np.full(requests.size, self.node.now_s))
        while self.node.num_unanswered:
            self.run_until(self.node.now_s + 0.01)
        return float(requests.size / self.outcomes.latency_ms[requests].max() * 1e3)


@dataclass(frozen=True)
class Run:
    latency_ms: Floats  # of the course; infinite: not served
    alphas: list[tuple[float, float]]  # time, alpha


class Twin:
    """One set-up of the card."""

    def __init__(self, rows_per_token: int) -> None:
        engine = EngineConfig(
            pool_bytes=POOL_BYTES,
            page_tokens=128,
            overlap=True,
            max_batch_requests=8,
            max_batch_tokens=70_016,
            queue_limit=1 << 20,
        )
        model = serving_config(rows_per_token, TABLES[rows_per_token])
        self._config = NodeConfig(model=model, engine=engine, row_sample=2 / 256, slo_ms=SLO_MS)

    def at(self, alpha: float) -> NodeConfig:
        return self._config.model_copy(update={"engine": self._config.engine.model_copy(update={"alpha": alpha})})

    def trace(self, asked: Sequence[Asked], seed: int) -> Trace:
        return make_trace(asked, self._config.model.features[0].num_rows, seed)

    def capacity(self, hot_share: float, alpha: float) -> float:
        """Requests a second, a mean over seeds."""
        found = list[float]()
        for seed in SEEDS:
            trace = self.trace([Asked(0.0, hot_share, "probe")] * (WARM_UP + PROBE), seed)
            card = Card(self.at(alpha), trace, has_curves=False)
            card.serve_all(np.arange(WARM_UP))
            found.append(card.serve_all(np.arange(WARM_UP, WARM_UP + PROBE)))
        return round(float(np.mean(found)), 1)

    def course(self, rates: dict[float, float], seconds: float, seed: int) -> Trace:
        planned = [Asked(*one) for one in plan_times(rates, seconds, seed)]
        return self.trace([Asked(0.0, MIXES[0], "warm-up")] * WARM_UP + planned, seed)

    def serve(self, trace: Trace, alpha: float | None) -> Run:
        """`alpha`: a constant; None is the controller, from the untuned split."""
        card = Card(self.at(0.5 if alpha is None else alpha), trace, has_curves=alpha is None)
        card.serve_all(np.arange(WARM_UP))
        node, start_s, course = card.node, card.node.now_s, np.arange(WARM_UP, trace.num_requests)
        rebalancer = None
        if alpha is None:
            rebalancer = steer(card.steered, self._config, Mix(0.0, NUM_HOT).mean_events, lambda decision: None)
            rebalancer.tick(start_s)
        node.send(course, start_s + trace.time_s[course])
        alphas = list[tuple[float, float]]()
        for look in itertools.count(1):
            now_s = look * LOOK_S
            card.run_until(start_s + now_s, rebalancer)
            if rebalancer is not None:
                rebalancer.tick(start_s + now_s)
            if look * LOOK_S >= len(alphas):
                alphas.append((round(now_s, 2), round(node.stats().alpha, 3)))
            if not node.num_unanswered or now_s >= trace.duration_s + DRAIN_S:
                break
        latency_ms = np.full(trace.num_requests, np.inf)
        latency_ms[node.answered] = card.outcomes.latency_ms[node.answered]
        return Run(latency_ms[course], alphas)


def figures(latency_ms: Floats) -> dict[str, float | None]:
    """Those of who was served; who was not is later than anyone."""
    p99_ms = float(np.percentile(latency_ms, 99, method="higher"))
    return {
        "mean_ms": round(float(latency_ms[np.isfinite(latency_ms)].mean()), 2),
        "p99_ms": round(p99_ms, 2) if np.isfinite(p99_ms) else None,
        "slo_satisfaction": round(float((latency_ms <= SLO_MS).mean()), 4),
    }


def by_stretch(trace: Trace, latency_ms: Floats) -> list[Floats]:
    phase = trace.phase[WARM_UP:]
    return [latency_ms[phase == number] for number in range(1, len(trace.phase_names))]


def free_moves(trace: Trace, runs: Sequence[Run]) -> Floats:
    """Each stretch as the constant served it that was best there by mean latency."""
    stretches = zip(*(by_stretch(trace, run.latency_ms) for run in runs), strict=True)
    return np.concatenate([min(ways, key=np.mean) for ways in stretches])


def serve_course(twin: Twin, trace: Trace) -> dict[str, Any]:
    """All policies on one course."""
    constants = {alpha: twin.serve(trace, alpha) for alpha in ALPHAS}
    adaptive = twin.serve(trace, None)
    found: dict[str, Any] = {f"static {alpha:g}": figures(run.latency_ms) for alpha, run in constants.items()}
    found["best split of each stretch"] = figures(free_moves(trace, list(constants.values())))
    p99_ms = [round(float(np.percentile(part, 99)), 2) for part in by_stretch(trace, adaptive.latency_ms)]
    named = dict(zip(trace.phase_names[1:], p99_ms, strict=True))
    found["adaptive"] = figures(adaptive.latency_ms) | {"p99_ms_by_stretch": named, "alpha_over_time": adaptive.alphas}
    return found


def over_seeds(courses: Sequence[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Means; none where one seed has none."""

    def mean(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return round(float(np.mean(known)), 4) if len(known) == len(values) else None

    keys = ("mean_ms", "p99_ms", "slo_satisfaction")
    return {name: {key: mean([one[name][key] for one in courses]) for key in keys} for name in courses[0]}


def measure(rows_per_token: int) -> dict[str, Any]:
    twin = Twin(rows_per_token)
    found = {share: {alpha: twin.capacity(share, alpha) for alpha in PROBED} for share in MIXES}
    best = best_constant(found)
    rates = rates_for(found)
    told: dict[str, Any] = {
        "capacity": found,
        "best_constant_by_capacity": best,
        "arrivals_per_s": rates,
        "courses": {},
    }
    for seconds in LENGTHS_S[rows_per_token]:
        courses = [serve_course(twin, twin.course(rates, seconds, seed)) for seed in SEEDS]
        means = over_seeds(courses)
        told["courses"][f"{seconds:g} s"] = {"means": means, "seeds": dict(zip(SEEDS, courses, strict=True))}
        for name, one in means.items():
            print(f"{rows_per_token} rows, {seconds:g} s, {name}: {one}", flush=True)
    return told


def against_the_card(rows_per_token: int) -> dict[str, Any]:
    """Capacities by mix and constant there and here; and the course that was served there, here."""
    cell, twin = json.loads(CARD.read_text())["set_ups"][str(rows_per_token)], Twin(rows_per_token)
    rates = {float(share): rate for share, rate in cell["arrivals_per_s"].items()}
    courses = [serve_course(twin, twin.course(rates, cell["duration_s"], seed)) for seed in SEEDS]
    here, there = over_seeds(courses), cell["policies"]
    return {
        "requests_per_s": [
            {"hot_share": share, "alpha": alpha, "card": rate, "twin": twin.capacity(float(share), float(alpha))}
            for share, by in cell["capacity"].items()
            for alpha, rate in by.items()
        ],
        "seconds": cell["duration_s"],
        "mean_ms": {
            name: {"card": there[name]["mean_ms"], "twin": one["mean_ms"]}
            for name, one in here.items()
            if name in there
        },
        "twin": here,
    }


def main() -> None:
    found: dict[str, Any] = {
        "load": LOAD,
        "seeds": SEEDS,
        "calibration": default_cost().name,
        "against the card": {f"{rows} rows": against_the_card(rows) for rows in LENGTHS_S},
    }
    for rows in LENGTHS_S:
        found[f"{rows} rows"] = measure(rows)
        write_measurement(OUT, found)


if __name__ == "__main__":
    main()
