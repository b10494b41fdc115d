"""A node that is thrown back and forth between two regimes: what constants, trackers and oracles make of it.

Every path is replayed through the simulator with its moves, so what an oracle is credited with has been had. Only
`quasi_static` has not: it is each stretch of time as served by a node that had always been at the best split for it.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from helmrec.control.policy import Move, WindowStats
from helmrec.costs.calibrated import CostModel, tokens_ms
from helmrec.sim.node.config import NodeConfig
from helmrec.sim.simulate import SimResult, simulate
from helmrec.traffic.generate import generate
from helmrec.traffic.trace import Trace
from helmrec_bench.baselines.oracle import SwitchPrices, cheapest_path, switching_costs
from helmrec_bench.judging.judge import largest_of, with_refused
from helmrec_bench.map.cells import REGIMES, SLO_MS, Cell
from helmrec_bench.map.load_curve import run_static

Floats = NDArray[np.float64]

PRICES = (1.0, 8.0, 64.0)  # on work: how many requests wait for it is not known beforehand, so plans are made for each
_SCORED_S = 120.0
_TOKENS = 6_700  # of the prefix whose recomputation prices a byte


@dataclass(frozen=True, slots=True)
class Shift:
    """Each regime for `length_s` at its rate, in turn."""

    length_s: float
    rates: tuple[float, float]  # requests per second, as REGIMES
    load: float  # share of the best constant's limit that they are
    seed: int = 0

    @property
    def num_rounds(self) -> int:
        return max(2, round(_SCORED_S / (2 * self.length_s)))

    @property
    def window_s(self) -> float:
        """Windows that plans are made over; a regime has a whole number of them."""
        return self.length_s / max(1, round(self.length_s / 5))

    def scaled(self, share: float) -> "Shift":
        return replace(self, rates=(self.rates[0] * share, self.rates[1] * share))

    def trace(self, cell: Cell) -> Trace:
        calm, other = (
            cell.phase(regime, self.length_s, rate) for regime, rate in zip(REGIMES, self.rates, strict=True)
        )
        warm_up = cell.phase(REGIMES[0], cell.warm_up_s - 1, self.rates[0])
        return generate(cell.workload(warm_up, (calm, other) * self.num_rounds), self.seed)


SHARES = tuple(round(0.5 + 0.04 * step, 2) for step in range(14))  # of what both regimes alone would bear


def within_slo(cell: Cell, measured: CostModel, shift: Shift, alpha: float) -> Shift:
    """The shift at `load` of the largest arrivals, as shares of these, that a constant serves within the SLO.

    Each regime alone may bear its rate and the change still be too much: a crowd that has just come has no prefixes.
    """

    def is_met(share: float) -> bool:
        trace = shift.scaled(share).trace(cell)
        return _latency(_scored_ms(run_static(cell, measured, trace, alpha), cell)).p99_ms <= SLO_MS

    return shift.scaled(shift.load * (largest_of(SHARES, is_met) or SHARES[0]))


class Planned:
    """Goes where a plan made in hindsight says, in time for each window."""

    def __init__(self, alphas: Floats, window_s: float, start_s: float) -> None:
        self.alphas = alphas
        self._window_s, self._start_s = window_s, start_s

    def decide(self, stats: WindowStats) -> Move | None:
        place = int((stats.traffic.end_s - self._start_s) / self._window_s + 1e-9)
        alpha = float(self.alphas[min(max(place, 0), self.alphas.size - 1)])
        return None if alpha == stats.alpha_target else Move(alpha, "planned")

    def reset(self) -> None:
        """There is nothing to forget."""


@dataclass(frozen=True, slots=True)
class Latency:
    mean_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class ShiftResult:
    """What everyone made of a shift. Oracles by mean and by P99 may be different paths, as the best constants may."""

    statics: dict[float, Latency]  # by split
    tracker_alphas: tuple[float, float]  # where each regime is served best
    tracker: Latency  # jumps there the moment a regime begins
    oracle: Latency  # least of all that was replayed: plans at several prices of moving, the tracker, the constants
    oracle_travel: float  # change of alpha per change of regime, of the path with the least mean
    quasi_static: Latency  # as if moves were free: each regime as the constant that suits it best served it


def switch_prices(config: NodeConfig, cost: CostModel, load: float) -> SwitchPrices:
    """Prefixes are computed again, rows read again."""
    prefix_ms = float(tokens_ms(cost.terms(), 0, _TOKENS, len(config.model.features)))
    return SwitchPrices(
        pool_bytes=config.engine.sized_pool_bytes,
        rewarm_ms_per_byte=prefix_ms / (_TOKENS * config.geometry.token_bytes),
        refill_ms_per_byte=1 / (cost.sorted_beside_gb_per_s * 1e6),
        load=load,
    )


def run_shift(cell: Cell, measured: CostModel, shift: Shift, alphas: Floats) -> ShiftResult:
    trace = shift.trace(cell)
    runs = [run_static(cell, measured, trace, float(alpha)) for alpha in alphas]
    # Rounds are alike: their mean says which split is best, one alone is noisy.
    cycle = np.stack([_sums(run, cell, shift) for run in runs], axis=-1).mean(axis=0)  # (windows, alphas)
    half = cycle.shape[0] // 2
    favourites = np.array([part.sum(axis=0).argmin() for part in (cycle[:half], cycle[half:])])
    tracking = tuple(np.repeat(favourites, half).tolist())
    prices = switching_costs(alphas, switch_prices(cell.node(0.5), cell.cost(measured), shift.load))
    replayed = {
        path: _replay(cell, measured, shift, trace, alphas[list(path)])
        for path in dict.fromkeys((tracking, *_plans(cycle, alphas, prices)))
    }
    statics = {float(alpha): _latency(_scored_ms(run, cell)) for alpha, run in zip(alphas, runs, strict=True)}
    best = min(replayed, key=lambda path: replayed[path].mean_ms)
    has_moved = replayed[best].mean_ms < min(one.mean_ms for one in statics.values())
    return ShiftResult(
        statics=statics,
        tracker_alphas=(float(alphas[favourites[0]]), float(alphas[favourites[1]])),
        tracker=replayed[tracking],
        oracle=_least([*replayed.values(), *statics.values()]),
        oracle_travel=_travel(alphas[list(best)]) if has_moved else 0.0,
        quasi_static=_quasi_static(runs, cell, shift, favourites),
    )


def _plans(cycle: Floats, alphas: Floats, prices: Floats) -> list[tuple[int, ...]]:
    """A round's path for each price. Three rounds are planned: the middle one knows neither beginning nor end."""
    num = cycle.shape[0]
    plans = (cheapest_path(np.tile(cycle, (3, 1)), alphas, prices * price) for price in PRICES)
    return [tuple(plan.index[num : 2 * num].tolist()) for plan in plans]


def _replay(cell: Cell, measured: CostModel, shift: Shift, trace: Trace, path: Floats) -> Latency:
    policy = Planned(np.tile(path, shift.num_rounds), shift.window_s, cell.warm_up_s)
    result = simulate(trace, cell.node(float(path[0])), cell.cost(measured), policy)
    return _latency(_scored_ms(result, cell))


def _travel(path: Floats) -> float:
    return float(np.abs(np.diff(path, append=path[0])).sum() / 2)


def _least(seen: list[Latency]) -> Latency:
    return Latency(min(one.mean_ms for one in seen), min(one.p99_ms for one in seen))


def _sums(result: SimResult, cell: Cell, shift: Shift) -> Floats:
    """(rounds, windows of a round): latency summed over the requests that arrived in each."""
    num = shift.num_rounds * (per_round := round(2 * shift.length_s / shift.window_s))
    place = ((result.arrived_s - cell.warm_up_s) // shift.window_s).astype(np.int64)
    is_scored = (place >= 0) & (place < num)
    counted_ms = with_refused(result.outcomes.latency_ms)[is_scored]
    summed: Floats = np.bincount(place[is_scored], counted_ms, num).astype(np.float64)
    return summed.reshape(shift.num_rounds, per_round)


def _scored_ms(result: SimResult, cell: Cell) -> Floats:
    return with_refused(result.outcomes.latency_ms[result.arrived_s >= cell.warm_up_s])


def _latency(latency_ms: Floats) -> Latency:
    return Latency(float(latency_ms.mean()), float(np.percentile(latency_ms, 99)))


def _quasi_static(runs: list[SimResult], cell: Cell, shift: Shift, favourites: NDArray[np.int64]) -> Latency:
    """Each regime's requests as the constant that suits it best served them."""
    arrived_s = runs[0].arrived_s
    regime = ((arrived_s[arrived_s >= cell.warm_up_s] - cell.warm_up_s) // shift.length_s).astype(np.int64) % 2
    parts = [_scored_ms(runs[int(at)], cell)[regime == number] for number, at in enumerate(favourites)]
    return _latency(np.concatenate(parts))
