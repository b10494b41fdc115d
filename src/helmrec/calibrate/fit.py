"""Fit the simulator's cost terms to timed steps, by least squares of the relative error.

Single steps separate compute from row reads. Bursts show the effect of overlapping steps, and how much slower a
continuously busy device computes, perhaps because of a lower clock. The terms returned are those of a busy device.
Terms that only bursts or reloads determine keep a neutral value if none were timed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from helmrec.calibrate.replay import replay
from helmrec.calibrate.timed import Measured
from helmrec.costs.calibrated import CostTerms
from helmrec.types import FloatArray, IntArray

_OUTLIER = 0.15  # relative error above which the loss is linear (Huber)
_BESIDE_SHARE = 0.75  # of the speed alone, from docs/measurements/gpu-rows-h200.json: bursts hardly determine it
_COMPUTE = ("compute_floor_ms", "compute_token_us", "compute_pair_ns", "compute_row_ns")
_TINY = 1e-6
_ITERATIONS = 60


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """The fitted terms, and how well they predict."""

    terms: CostTerms  # of a busy device
    ratios: dict[str, float]  # case -> predicted over measured time, the median of its repeats
    num_steps: int


class _Runs(NamedTuple):
    """All timed runs as arrays. A run is a single step or a burst."""

    works: FloatArray  # (steps, columns of `replay`)
    starts: IntArray  # (runs + 1,)
    host_ms: FloatArray  # (runs,) as measured; 0 in a burst, where it is predicted
    span_ms: FloatArray  # (runs,)
    is_burst: NDArray[np.bool_]
    overlaps: bool

    @classmethod
    def of(cls, measured: Sequence[Measured]) -> "_Runs":
        timed = [each for one in measured for each in one.timed]
        return cls(
            works=np.concatenate([one.works() for one in measured]),
            starts=np.cumsum([0, *(len(each.steps) for each in timed)]),
            host_ms=np.array([each.host_ms or 0.0 for each in timed]),
            span_ms=np.array([each.span_ms for each in timed]),
            is_burst=np.array([each.is_burst for each in timed]),
            overlaps=measured[0].overlaps,
        )

    @property
    def first(self) -> FloatArray:  # (runs, columns)
        return self.works[self.starts[:-1]]

    def spans(self, point: "_FitPoint") -> FloatArray:
        """Predict the time of each run: a burst from first to last results, a single step from plan to results."""
        single = replay(point.terms, self.works, self.starts, self.overlaps)[self.starts[1:] - 1]
        ends = replay(point.busy_terms, self.works, self.starts, self.overlaps)
        return np.where(self.is_burst, ends[self.starts[1:] - 1] - ends[self.starts[:-1]], single)


class _FitPoint(NamedTuple):
    """Terms of a device that idles between steps, and the factor by which a busy device computes longer."""

    terms: CostTerms
    busy: float

    @property
    def busy_terms(self) -> CostTerms:
        return self.terms._replace(**{name: self.busy * getattr(self.terms, name) for name in _COMPUTE})


def fit(measured: Sequence[Measured]) -> Fitted:
    """Fit all profiles together. If all have the same rows per token, the cost of a row is part of the token's term."""
    runs = _Runs.of(measured)
    start = _first_guess(measured, runs)
    free = _free_terms(measured, runs)
    best = _descend(start, free, runs)
    timed = [each for one in measured for each in one.timed]
    names = _names(measured)
    ratios = runs.spans(best) / runs.span_ms
    by_case: dict[str, list[float]] = {}
    for name, ratio in zip(names, ratios.tolist(), strict=True):
        by_case.setdefault(name, []).append(ratio)
    return Fitted(
        terms=best.busy_terms,
        ratios={name: round(float(np.median(of_case)), 3) for name, of_case in by_case.items()},
        num_steps=sum(len(each.steps) for each in timed),
    )


def _names(measured: Sequence[Measured]) -> list[str]:
    prefix = {one.profile: f"{one.profile}, " if len(measured) > 1 else "" for one in measured}
    return [f"{prefix[one.profile]}{each.case}" for one in measured for each in one.timed]


def _free_terms(measured: Sequence[Measured], runs: _Runs) -> list[str]:
    """Return the names of the terms that the runs determine."""
    missed = runs.works[:, 6]
    from_rows = measured[0].sorted_from_rows
    free = ["compute_floor_ms", "compute_token_us", "compute_pair_ns"]
    free += ["compute_row_ns"] if len({one.rows_per_token for one in measured}) > 1 else []
    free += ["alone_gb_per_s"] if (missed[missed < from_rows] > 0).any() else []
    free += ["sorted_alone_gb_per_s"] if (missed >= max(1, from_rows)).any() else []
    if runs.overlaps and runs.is_burst.any():
        free += ["busy", "beside_slowdown"]
    if (runs.works[:, 7] > 0).any():
        free += ["reload_gb_per_s", "reload_exposed"]
    return free


def _first_guess(measured: Sequence[Measured], runs: _Runs) -> dict[str, float]:
    """Return the final host terms, and a linear estimate of the device terms, from single steps."""
    alone = ~runs.is_burst & (runs.first[:, 7] == 0)
    requests, tokens, pairs, rows, hit_bytes, miss_bytes, missed, _ = runs.first[alone].T
    host_ms, span_ms = runs.host_ms[alone], runs.span_ms[alone]
    is_one_shape = len({one.rows_per_token for one in measured}) == 1
    row_column = np.zeros_like(rows) if is_one_shape else rows / 1e6
    host = _relative_fit(np.stack([np.ones_like(tokens), requests, tokens / 1e3, row_column], 1), host_ms)
    hit_gb_per_s = float(np.median([one.hit_gb_per_s for one in measured]))
    is_sorted = missed >= measured[0].sorted_from_rows
    device_ms = np.maximum(span_ms - host_ms - hit_bytes / hit_gb_per_s / 1e6, _TINY)
    columns = [np.ones_like(tokens), tokens / 1e3, pairs / 1e6, row_column]
    columns += [np.where(is_sorted, 0.0, miss_bytes) / 1e6, np.where(is_sorted, miss_bytes, 0.0) / 1e6]
    device = _relative_fit(np.stack(columns, 1), device_ms)
    speeds = [1 / each if each > 0 else 10.0 for each in device[4:]]
    background = [each.background_ms for one in measured for each in one.timed if each.background_ms is not None]
    return {
        "compute_floor_ms": device[0],
        "compute_token_us": device[1],
        "compute_pair_ns": device[2],
        "compute_row_ns": device[3],
        "host_floor_ms": host[0],
        "host_request_ms": host[1],
        "host_token_us": host[2],
        "host_row_ns": host[3],
        "background_ms": float(np.median(background)),
        "intake_ms": float(np.median([one.intake_ms for one in measured])),
        "hit_gb_per_s": hit_gb_per_s,
        "alone_gb_per_s": speeds[0],
        "sorted_alone_gb_per_s": speeds[1],
        "beside_share": _BESIDE_SHARE if runs.overlaps else 1.0,
        "beside_slowdown": 0.1 if runs.overlaps else 0.0,
        "busy": 1.0,
        "sorted_from_rows": float(measured[0].sorted_from_rows),
        "reload_gb_per_s": max(speeds),
        "reload_floor_ms": 0.0,
        "reload_exposed": 0.8,
    }


def _relative_fit(columns: FloatArray, times_ms: FloatArray) -> list[float]:
    """Return the non-negative coefficients with the least squares of relative errors, by trying all sets of columns."""
    scaled, best, best_error = columns / times_ms[:, None], np.zeros(columns.shape[1]), np.inf
    for choice in product((False, True), repeat=columns.shape[1]):
        chosen = np.flatnonzero(choice)
        found = np.linalg.lstsq(scaled[:, chosen], np.ones(len(times_ms)), rcond=None)[0] if chosen.size else chosen
        error = float(np.square(scaled[:, chosen] @ found - 1).sum())
        if (found >= 0).all() and error < best_error - 1e-12:
            best, best_error = np.zeros(columns.shape[1]), error
            best[chosen] = found
    return [float(value) for value in best]


_SHARES = ("reload_exposed",)  # in [0, 1]; all other free terms are positive


def _descend(start: dict[str, float], free: Sequence[str], runs: _Runs) -> _FitPoint:
    """Minimise the error by the Levenberg-Marquardt method over logarithms, which keep terms positive."""
    place = np.array([_to_line(name, start[name]) for name in free])
    errors = _errors(start, free, place, runs)
    damping = 1e-2
    for _ in range(_ITERATIONS):
        slopes = np.stack(
            [(_errors(start, free, place + step, runs) - errors) / 1e-4 for step in np.eye(len(free)) * 1e-4]
        )
        pull = _pull(errors)
        moments = (slopes * pull) @ slopes.T
        move = np.linalg.solve(
            moments + damping * np.diag(np.diag(moments) + 1e-9) + 1e-9 * np.eye(len(free)), -(slopes * pull) @ errors
        )
        moved = place + np.clip(move, -1.0, 1.0)
        after = _errors(start, free, moved, runs)
        if _cost(after) < _cost(errors):
            gain = _cost(errors) - _cost(after)
            place, errors, damping = moved, after, max(damping / 4, 1e-8)
            if gain < 1e-9:
                break
        elif damping > 1e8:
            break
        else:
            damping *= 5
    return _point(start, free, place)


def _errors(start: dict[str, float], free: Sequence[str], place: FloatArray, runs: _Runs) -> FloatArray:
    """Return the relative error of each run, weighted by its steps. Single steps use the measured host time."""
    point = _point(start, free, place)
    terms = point.terms
    requests, tokens, _, rows = runs.first[:, :4].T
    host = terms.host_floor_ms + terms.host_request_ms * requests
    host = host + terms.host_token_us * tokens / 1e3 + terms.host_row_ns * rows / 1e6
    predicted = runs.spans(point) + np.where(runs.is_burst, 0.0, runs.host_ms - host)
    return (predicted / runs.span_ms - 1) * np.sqrt(np.diff(runs.starts))


def _pull(errors: FloatArray) -> FloatArray:
    return np.minimum(1.0, _OUTLIER / np.maximum(np.abs(errors), _TINY))


def _cost(errors: FloatArray) -> float:
    size = np.abs(errors)
    return float(np.where(size < _OUTLIER, size**2, _OUTLIER * (2 * size - _OUTLIER)).sum())


def _to_line(name: str, value: float) -> float:
    value = max(value, _TINY)
    return float(np.log(value / max(1 - value, _TINY)) if name in _SHARES else np.log(value))


def _point(start: dict[str, float], free: Sequence[str], place: FloatArray) -> _FitPoint:
    values = dict(start)
    for name, at in zip(free, place.tolist(), strict=True):
        values[name] = 1 / (1 + np.exp(-at)) if name in _SHARES else float(np.exp(at))
    if "alone_gb_per_s" not in free:
        values["alone_gb_per_s"] = values["sorted_alone_gb_per_s"]
    for name in ("alone_gb_per_s", "sorted_alone_gb_per_s", "reload_gb_per_s"):  # the bus is not faster than the pool
        values[name] = min(values[name], values["hit_gb_per_s"])
    share, busy = values.pop("beside_share"), values.pop("busy")
    values["beside_gb_per_s"] = share * values["alone_gb_per_s"]
    values["sorted_beside_gb_per_s"] = share * values["sorted_alone_gb_per_s"]
    return _FitPoint(CostTerms(**values), busy)
