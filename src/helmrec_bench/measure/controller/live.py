"""The controller live on a card: one course of steady, drifting and bursting traffic, against constant splits.

    helmrec bench run live                                        # on a card; writes docs/measurements/live-h200.json
    helmrec bench run live --rows 24 --policies static:0.1 static:0.2 static:0.3 --seconds 30 --screen-s 0
    helmrec bench run live --rows 24 --course steady --policies static:0.3 --seconds 360 --repeats 1 --screen-s 0
    helmrec bench run live --quick                                # a small model on the CPU: that it runs, no figures

The setup is that of the trade-off map (experiment `trade-off`): 24 rows a token, where the caches compete, or one,
where they do not (with a smaller table, to be ready sooner). One engine serves all runs of a setup; between runs both
caches are emptied and the same warm-up is served. Arrivals are open-loop at 70% of what the best constant bears in each
of three mixes, measured first. Constants are screened on a short course of the same kind; then the policies take turns
on one long course, which is scored as a whole and after its first minute. A call that begins no further run after
`--limit-s` is continued by the next call, at the same arrivals.
"""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from helmrec.engine.engine import Engine
from helmrec.engine.probe import EngineProbe
from helmrec.model.profiles import profile
from helmrec.policies import needs_curves
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.measure.cards.banked_traffic import banked_for
from helmrec_bench.measure.cards.trade_off import NUM_HOT, POOL_BYTES, TABLE_BYTES
from helmrec_bench.measure.cards.traffic import card_crowd, serving_config, serving_engine
from helmrec_bench.measure.controller.cost import ALPHA, cost_of_control, requests_per_s
from helmrec_bench.measure.controller.turns import (
    SLO_MS,
    LiveCourse,
    LiveRun,
    earlier,
    serve_all,
    serve_course,
    start_of,
    take_turns,
    turn_options,
)

PROBED = (0.2, 0.4, 0.6, 0.8)
TABLES = {24: TABLE_BYTES, 1: 8 << 30}
MIXES = (0.35, 0.6, 0.85)  # shares of requests by hot users; what a mix bears is not linear between the ends
LOAD = 0.7  # of what the best constant bears in each mix
WARM_UP, PROBE, SATURATING = 320, 384, 3_000  # requests
BANK = 1_500  # histories of users who come once; each new user has one of them, under an id of its own


class Stretch(NamedTuple):
    """A part of the course, over which the share of hot users goes from one value to another."""

    name: str
    share_of_run: float
    hot_share: tuple[float, float]
    rate_factor: float = 1.0


COURSES = {
    "all": (
        Stretch("steady", 0.3, (0.35, 0.35)),
        Stretch("trend", 0.3, (0.35, 0.85)),
        Stretch("burst", 0.2, (0.35, 0.35), 1.1),
        Stretch("after", 0.2, (0.85, 0.85)),
    ),
    "steady": (Stretch("steady", 1.0, (0.6, 0.6)),),
}


def plan_times(
    stretches: Sequence[Stretch], rates: dict[float, float], duration_s: float, seed: int
) -> Iterator[tuple[float, float, str]]:
    """(due, hot share, stretch) of each request: Poisson arrivals at the rate that goes with the mix."""
    rng, start_s, known = np.random.default_rng(seed), 0.0, sorted(rates)
    for stretch in stretches:
        length_s, at_s = stretch.share_of_run * duration_s, 0.0
        while True:
            passed = at_s / length_s
            share = stretch.hot_share[0] + (stretch.hot_share[1] - stretch.hot_share[0]) * passed
            rate = stretch.rate_factor * np.interp(share, known, [rates[mix] for mix in known])
            at_s += float(rng.exponential(1 / rate))
            if at_s >= length_s:
                break
            yield start_s + at_s, share, stretch.name
        start_s += length_s


class Stand:
    """One engine and how runs on it are begun."""

    def __init__(self, rows_per_token: int, stretches: Sequence[Stretch], is_quick: bool) -> None:
        self.is_quick, self.stretches = is_quick, stretches
        self.rates: dict[float, float] = {}  # arrivals a second by mix, once they are known
        crowd = card_crowd(4, 2_100, 64) if is_quick else card_crowd(NUM_HOT)
        self.warm_up, self.probe = (16, 16) if is_quick else (WARM_UP, PROBE)
        self._rows = rows_per_token
        self.engine = self._make()
        self.requests = banked_for(self.engine, crowd, 32 if is_quick else BANK)

    def _make(self) -> Engine:
        if not self.is_quick:
            return serving_engine(serving_config(self._rows, TABLES[self._rows]), pool_bytes=POOL_BYTES, alpha=0.5)
        config = profile("demo", 20_000).model_copy(update={"user_context": (), "request_context": ()})
        small = {"device": "cpu", "max_batch_requests": 4, "max_batch_tokens": 4_096}
        return serving_engine(config, pool_bytes="12MiB", alpha=0.5, **small)

    def begin(self, alpha: float, *, has_curves: bool) -> Engine:
        """Caches as on the first day, the boundary at `alpha`; curves only for who looks at them: they take time."""
        if self.is_quick:
            self.engine.close()
            self.engine = self._make()
            self.engine.move_alpha(alpha)
            self.engine.settle()
        else:
            EngineProbe(self.engine).clear(alpha)
        EngineProbe(self.engine).set_curves(is_on=has_curves)
        return self.engine

    def run(self, course: LiveCourse, policy: str) -> LiveRun:
        return serve_course(self.begin(start_of(policy), has_curves=needs_curves(policy)), course, policy)

    def saturate(self, *, has_controller: bool) -> float:
        num = 3 * self.probe if self.is_quick else SATURATING
        requests = self.requests.take([MIXES[1]] * (self.warm_up + num), seed=1)
        engine = self.begin(ALPHA, has_curves=has_controller)
        return requests_per_s(engine, requests[: self.warm_up], requests[self.warm_up :], has_controller=has_controller)

    def course(self, duration_s: float) -> LiveCourse:
        planned = list(plan_times(self.stretches, self.rates, duration_s, seed=2))
        shares = [self.stretches[0].hot_share[0]] * self.warm_up + [share for _, share, _ in planned]
        requests = self.requests.take(shares, seed=3)
        due_s = np.array([due for due, _, _ in planned])
        return LiveCourse(requests[: self.warm_up], requests[self.warm_up :], due_s, [name for _, _, name in planned])


def capacities(stand: Stand) -> dict[float, dict[float, float]]:
    """Requests/s by mix and constant, everything queued at once."""
    found: dict[float, dict[float, float]] = {}
    for share in MIXES:
        requests = stand.requests.take([share] * (stand.warm_up + stand.probe), seed=1)
        found[share] = {}
        for alpha in PROBED:
            engine = stand.begin(alpha, has_curves=False)
            serve_all(engine, requests[: stand.warm_up])
            found[share][alpha] = round(stand.probe / serve_all(engine, requests[stand.warm_up :]), 1)
        print(f"hot {share:.2f}: {found[share]}", flush=True)
    return found


def rates_for(found: dict[float, dict[float, float]]) -> dict[float, float]:
    """Arrivals a second by mix: a share of what the constant bears that loses least in the mix it suits worst."""
    best = max(PROBED, key=lambda alpha: min(by[alpha] / max(by.values()) for by in found.values()))
    return {share: LOAD * by[best] for share, by in found.items()}


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, nargs="*", choices=(24, 1), default=[24, 1])
    parser.add_argument("--course", choices=COURSES, default="all")
    turn_options(parser)
    parser.add_argument("--anew", action="store_true", help="leave out the runs that the file has")
    parser.add_argument("--quick", action="store_true", help="a small model on the CPU")


def main(flags: Namespace) -> None:
    setup = {"pool_bytes": POOL_BYTES, "table_bytes": TABLES, "hot_users": NUM_HOT, "load": LOAD, "slo_ms": SLO_MS}
    setups: dict[str, Any] = {} if flags.anew else earlier(flags).get("setups", {})
    for rows in flags.rows:
        stand = Stand(rows, COURSES[flags.course], flags.quick)
        print(f"{rows} rows a token: ready", flush=True)
        found = setups.setdefault(str(rows), {})
        stretches = json.loads(json.dumps([stretch._asdict() for stretch in stand.stretches]))
        if found.get("stretches") != stretches:
            capacity = capacities(stand)
            found.clear()
            found |= {
                "capacity": {
                    f"{share:g}": {f"{a:g}": rate for a, rate in by.items()} for share, by in capacity.items()
                },
                "arrivals_per_s": {f"{share:g}": round(rate, 1) for share, rate in rates_for(capacity).items()},
                "stretches": stretches,
            }
        if flags.cost_repeats:
            found["cost_of_control"] = cost_of_control(stand, flags.cost_repeats)
            print(f"cost of curves and controller: {found['cost_of_control']}", flush=True)
        stand.rates = {float(share): rate for share, rate in found["arrivals_per_s"].items()}
        is_done = take_turns(
            stand, flags, found, lambda: write_measurement(flags.out, {"setup": setup, "setups": setups})
        )
        print("all runs are done" if is_done else "not done: run the command again", flush=True)
        stand.engine.close()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
