"""How runs are held against each other: intervals over paired seeds, and the largest load that meets a target."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from helmrec.errors import ConfigError
from helmrec.types import FloatArray

# Two-sided 95% points of Student's t for 1, 2, ... degrees of freedom.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_T95_BEYOND = 2.12  # of 16, and of more a little too wide

Name = TypeVar("Name")


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds and where it lies with 95% confidence, if seeds are independent and near normal."""

    mean: float
    low: float
    high: float


def with_refused(latency_ms: FloatArray) -> FloatArray:
    """Latencies in which each refused request, NaN before, counts as ten seconds."""
    return np.nan_to_num(latency_ms, nan=10_000.0)


def interval(values: Sequence[float]) -> Interval:
    """Of one value per seed; from a single seed the interval is unbounded."""
    seen = np.asarray(values, np.float64)
    if not seen.size:
        raise ConfigError("an interval needs at least one value, got none")
    mean = float(seen.mean())
    if seen.size == 1:
        return Interval(mean, -np.inf, np.inf)
    point = _T95[seen.size - 2] if seen.size - 2 < len(_T95) else _T95_BEYOND
    half = point * float(seen.std(ddof=1)) / np.sqrt(seen.size)
    return Interval(mean, mean - half, mean + half)


def paired_change(values: Sequence[float], references: Sequence[float]) -> Interval:
    """Relative change against a reference on the same seeds: -0.1 is a tenth less."""
    if len(values) != len(references):
        raise ConfigError(f"pairs need as many references ({len(references)}) as values ({len(values)})")
    return interval([value / reference - 1 for value, reference in zip(values, references, strict=True)])


def largest_of(loads: Sequence[float], is_met: Callable[[float], bool]) -> float | None:
    """The largest of these rising loads that is met, by bisection; None if none is.

    Supposes that a load is met if a larger one is; noise near the edge moves the answer by as much as it blurs that.
    """
    return largest_of_each(("",), loads, lambda asked: {name: is_met(load) for name, load in asked.items()})[""] or None


def largest_of_each(
    names: Iterable[Name], loads: Sequence[float], are_met: Callable[[Mapping[Name, float]], Mapping[Name, bool]]
) -> dict[Name, float]:
    """For every name, the largest of these rising loads that is met, by bisection; 0 if none is.

    All searches take their next step together: `are_met` gets the load that each open one asks for.
    """
    bounds = dict.fromkeys(names, (-1, len(loads)))
    while middles := {name: (low + high) // 2 for name, (low, high) in bounds.items() if high - low > 1}:
        met = are_met({name: loads[middle] for name, middle in middles.items()})
        for name, middle in middles.items():
            low, high = bounds[name]
            bounds[name] = (middle, high) if met[name] else (low, middle)
    return {name: loads[low] if low >= 0 else 0.0 for name, (low, _) in bounds.items()}
