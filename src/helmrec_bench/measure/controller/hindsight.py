"""How much moving the boundary can gain over the best constant, in hindsight: drawn scenarios whose traffic drifts.

    helmrec bench run controller-hindsight                                    # validation range, one seed
    helmrec bench run controller-hindsight --range test --numbers 60 --seeds 3 --processes 12

Constants on a grid of 0.05 serve each scenario from the beginning to the end. Two answers follow from their latencies:

*assembled*: each window is taken from the constant that served it best, as if caches of every size were always warm
and moving took no time. The mean is the least one; the P99 is the least P99 of any such choice of constants.

*replayed*: paths planned on those windows, for several lengths of windows and prices of a move, are served with all
their moves. The best of them has been reached, but only with knowledge of the future. The best path by mean and the
best one by P99 may differ.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from helmrec.control.static import Static, StaticSettings
from helmrec.sim.simulate import simulate
from helmrec.types import FloatArray, IntArray
from helmrec_bench.baselines.oracle import cheapest_path
from helmrec_bench.drawn import KINDS, RANGES, Drawn
from helmrec_bench.judging.first_times import OPENING_S
from helmrec_bench.judging.judge import with_refused
from helmrec_bench.judging.quasi_static import quasi_static
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.lab.store import Store, finish
from helmrec_bench.map.shifts import Planned
from helmrec_bench.measure.controller.cases import BUILD, Case, scene
from helmrec_bench.measure.controller.trials import interval

ALPHAS = tuple(round(0.05 * step, 2) for step in range(1, 20))
WINDOWS_S = (10.0, 30.0, 90.0)  # of paths; the middle one is that of the assembled figures
PRICES = (0.0, 0.3, 3.0)  # of a move from one end to the other, in mean windows of the best constant
DRIFTS = ("growth", "sine", "turnover")
FIGURES = ("assembled mean", "assembled P99", "replayed mean", "replayed P99")


class LookBack(NamedTuple):
    """A scenario and a seed, looked at in hindsight."""

    case: Case

    @property
    def name(self) -> str:
        return f"hindsight, windows {WINDOWS_S}, prices {PRICES}: {self.case.name}"


class ServedByConstants(NamedTuple):
    """What constants made of a scenario. Refused requests count as ten seconds."""

    alphas: FloatArray
    latency_ms: FloatArray  # (alphas, requests that count)
    arrived_s: FloatArray  # (requests that count,)

    def windows(self, window_s: float) -> IntArray:
        """(requests that count,) the number of the window that each came in; the last one may be shorter."""
        return ((self.arrived_s - OPENING_S) // window_s).astype(np.int64)

    def costs(self, window_s: float) -> FloatArray:
        """(windows, alphas): latency summed over requests."""
        return per_window(self.windows(window_s), self.latency_ms)


def per_window(windows: IntArray, values: FloatArray) -> FloatArray:
    """(windows, alphas): values (alphas, requests) summed over the requests of each window."""
    return np.array([np.bincount(windows, each) for each in values]).T


def least_p99(windows: IntArray, latency_ms: FloatArray) -> float:
    """The least P99 that a choice of one constant per window can have.

    A bound is met if at most 1% of requests exceed it when each window takes the constant with the fewest beyond it.
    """
    allowed = windows.size // 100
    low, high = 0.0, float(latency_ms.max())
    while high - low > 1e-3 * high:
        bound = (low + high) / 2
        beyond = per_window(windows, (latency_ms > bound).astype(np.float64)).min(axis=1).sum()
        low, high = (low, bound) if beyond <= allowed else (bound, high)
    return high


def paths(served: ServedByConstants) -> Iterator[Planned]:
    for window_s in WINDOWS_S:
        costs = served.costs(window_s)
        mean = costs.sum(axis=0).min() / costs.shape[0]
        distance = np.abs(served.alphas[:, None] - served.alphas[None, :])
        for price in PRICES:
            plan = cheapest_path(costs, served.alphas, price * mean * distance)
            yield Planned(plan.alpha, window_s, OPENING_S)


def look_back(look: LookBack) -> dict[str, Any]:
    drawn, trace = scene(look.case)
    is_scored = trace.time_s >= OPENING_S
    alphas = np.array([alpha for alpha in ALPHAS if alpha <= drawn.config.alpha_max])
    constants = [_latency(look, drawn, alpha, Static(StaticSettings(alpha=alpha))) for alpha in alphas.tolist()]
    served = ServedByConstants(alphas, np.array(constants)[:, is_scored], trace.time_s[is_scored])
    exact = quasi_static(served.costs(WINDOWS_S[1]), alphas)
    best = int(served.latency_ms.mean(axis=1).argmin())
    replayed = [_latency(look, drawn, float(path.alphas[0]), path)[is_scored] for path in paths(served)]
    everyone = [served.latency_ms[best], *replayed]  # staying is a path too
    return {
        "kind": drawn.kind,
        "num": int(np.count_nonzero(is_scored)),
        "best_constant": float(alphas[best]),
        "mean_ms": float(served.latency_ms[best].mean()),
        "p99_ms": _p99(served.latency_ms[best]),
        "assembled_mean_ms": float(exact.cost.sum() / served.arrived_s.size),
        "assembled_p99_ms": least_p99(served.windows(WINDOWS_S[1]), served.latency_ms),
        "replayed_mean_ms": float(min(one.mean() for one in everyone)),
        "replayed_p99_ms": float(min(map(_p99, everyone))),
        "alphas": exact.alpha.tolist(),
    }


def _latency(look: LookBack, drawn: Drawn, alpha: float, policy: Static | Planned) -> FloatArray:
    """Of all requests of the scenario, on a node that starts at this split."""
    trace = scene(look.case)[1]
    return with_refused(simulate(trace, drawn.node_at(alpha), drawn.cost, policy).outcomes.latency_ms)


def _p99(latency_ms: FloatArray) -> float:
    return float(np.percentile(latency_ms, 99))


def gains(seeds: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of one scenario, averaged over its seeds, over the best constant of each seed: -0.1 is a tenth shorter."""
    names = [figure.lower().replace(" ", "_") + "_ms" for figure in FIGURES]
    return {
        figure: float(np.mean([one[name] / one[f"{name.split('_')[1]}_ms"] - 1 for one in seeds]))
        for figure, name in zip(FIGURES, names, strict=True)
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"scenarios": len(rows), **{figure: interval([row[figure] for row in rows]) for figure in FIGURES}}


def show(found: dict[str, Any]) -> None:
    table = Table("scenario", "best constant", *FIGURES, title="least latency in hindsight, over the best constant's")
    for name, row in found["scenarios"].items():
        table.add_row(name, f"{row['best_constant']:g}", *(f"{row[figure]:+.1%}" for figure in FIGURES))
    for kind, each in found["kinds"].items():
        cells = [f"{each[figure]['average']:+.1%}" for figure in FIGURES]
        table.add_row(f"{kind}: {each['scenarios']}", "", *cells, style="bold")
    Console(width=140).print(table)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--range", dest="which", choices=RANGES, default="validation")
    parser.add_argument("--numbers", type=int, default=36, help="scenarios, from the first on")
    parser.add_argument("--kinds", nargs="+", default=DRIFTS, help="only these kinds")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)


def main(flags: Namespace) -> None:
    numbers = [number for number in range(flags.numbers) if KINDS[number % len(KINDS)][0] in flags.kinds]
    pieces = {number: [LookBack(Case(flags.which, number, seed)) for seed in range(flags.seeds)] for number in numbers}
    store = Store(BUILD / "controller-trials.jsonl", "2")
    finish([piece for own in pieces.values() for piece in own], look_back, store, flags.processes, "hindsight")
    scenarios: dict[str, dict[str, Any]] = {}
    for number, own in pieces.items():
        seeds = [store.found[piece.name] for piece in own]
        scenarios[f"{flags.which}-{number}-{seeds[0]['kind']}"] = {
            **{name: seeds[0][name] for name in ("kind", "best_constant", "alphas")},
            **gains(seeds),
        }
    kinds = {
        kind: summary([row for row in scenarios.values() if row["kind"] == kind])
        for kind in sorted({row["kind"] for row in scenarios.values()})
    }
    kinds["all"] = summary(list(scenarios.values()))
    found = {"range": flags.which, "seeds": flags.seeds, "kinds": kinds, "scenarios": scenarios}
    show(found)
    if flags.out is not None:
        write_measurement(flags.out, found)
