"""From sweeps of a cell's two regimes to the figures of the map. Pure: takes load curves, runs nothing."""

from dataclasses import dataclass

import numpy as np

from helmrec_bench.judging.quasi_static import quasi_static
from helmrec_bench.map.load_curve import Floats, RegimeSweep

LOADS = (0.5, 0.75, 0.9)  # shares of the capacity at the best split


@dataclass(frozen=True, slots=True)
class Penalty:
    """What a wrong split costs, as a share of what the right one gives; at LOADS[1:] of the regime's capacity."""

    alpha: float
    mean: tuple[float, ...]
    p99: tuple[float, ...]
    capacity: float


@dataclass(frozen=True, slots=True)
class RegimeFigures:
    """One regime of a cell. Splits at which a cache had not been short yet are left out."""

    capacity: float  # requests per second within the SLO at the best split
    alpha_by_capacity: float
    alpha_by_mean: tuple[float, ...]  # at LOADS
    alpha_by_p99: tuple[float, ...]
    band: tuple[float, float]  # splits within 1% of the least mean at LOADS[1]
    penalties: dict[str, Penalty]


@dataclass(frozen=True, slots=True)
class Limit:
    """The largest load within the SLO in both regimes, for the best constant, and for one split each."""

    static_alpha: float
    static: float
    adaptive: float

    @property
    def gain(self) -> float:
        return self.adaptive / self.static - 1


def latencies(sweep: RegimeSweep, rate: float) -> tuple[Floats, Floats]:
    """Mean and P99 at every split."""
    mean = np.array([curve.mean_at(rate) for curve in sweep.curves])
    p99 = np.array([curve.p99_at(rate) for curve in sweep.curves])
    return np.where(sweep.is_full, mean, np.inf), np.where(sweep.is_full, p99, np.inf)


def best_alpha(sweep: RegimeSweep) -> float:
    """Where load may be largest; of splits within 1% the middle, since capacities are that noisy."""
    capacity = np.where(sweep.is_full, sweep.capacity, 0)
    near = np.flatnonzero(capacity >= 0.99 * capacity.max())
    return float(sweep.alphas[near[(near.size - 1) // 2]])


def regime_figures(sweep: RegimeSweep, other_alpha: float) -> RegimeFigures:
    capacity = float(np.where(sweep.is_full, sweep.capacity, 0).max())
    swept = [latencies(sweep, load * capacity) for load in LOADS]
    band = quasi_static(swept[1][0][sweep.is_full][None, :], sweep.alphas[sweep.is_full])
    wrong = {"of the other regime": other_alpha, "untuned 0.5": 0.5, "0.1": 0.1, "0.9": 0.9}
    return RegimeFigures(
        capacity=capacity,
        alpha_by_capacity=best_alpha(sweep),
        alpha_by_mean=tuple(float(sweep.alphas[mean.argmin()]) for mean, _ in swept),
        alpha_by_p99=tuple(float(sweep.alphas[p99.argmin()]) for _, p99 in swept),
        band=(float(band.low[0]), float(band.high[0])),
        penalties={name: _penalty(sweep, alpha, capacity) for name, alpha in wrong.items()},
    )


def _penalty(sweep: RegimeSweep, alpha: float, capacity: float) -> Penalty:
    at = int(np.abs(sweep.alphas - alpha).argmin())
    swept = [latencies(sweep, load * capacity) for load in LOADS[1:]]
    return Penalty(
        alpha=float(sweep.alphas[at]),
        mean=tuple(float(sweep.curves[at].mean_at(load * capacity) / mean.min() - 1) for load, (mean, _) in _at(swept)),
        p99=tuple(float(sweep.curves[at].p99_at(load * capacity) / p99.min() - 1) for load, (_, p99) in _at(swept)),
        capacity=float(1 - sweep.capacity[at] / capacity),
    )


def _at(swept: list[tuple[Floats, Floats]]) -> list[tuple[float, tuple[Floats, Floats]]]:
    return list(zip(LOADS[1:], swept, strict=True))


def constant_rate_limit(sweeps: tuple[RegimeSweep, RegimeSweep]) -> Limit:
    """Both regimes at one rate, in requests per second."""
    capacities = np.array([np.where(sweep.is_full, sweep.capacity, 0) for sweep in sweeps])
    return _limit(capacities, sweeps[0].alphas)


def following_rate_limit(sweeps: tuple[RegimeSweep, RegimeSweep]) -> Limit:
    """Each regime at the same share of its own capacity; in such shares, so `adaptive` is 1."""
    capacities = np.array([np.where(sweep.is_full, sweep.capacity, 0) for sweep in sweeps])
    return _limit(capacities / capacities.max(axis=1, keepdims=True), sweeps[0].alphas)


def _limit(capacities: Floats, alphas: Floats) -> Limit:
    worse = capacities.min(axis=0)
    at = int(worse.argmax())
    return Limit(float(alphas[at]), float(worse[at]), float(capacities.max(axis=1).min()))
