"""Merge the state of many engines into one: counts are added, alpha is averaged over all pages."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any, TypeVar

from helmrec.costs.learned import StageCosts
from helmrec.engine.engine import EngineStats
from helmrec.memory.stats import PoolStats
from helmrec.pauses import PauseStats
from helmrec.serve.port import EngineView

T = TypeVar("T")
_LARGEST = frozenset(
    {"audit_max_error", "recent_ms", "newest", "lag_deltas", "lag_s", "log_rows", "log_bytes"}
)  # and all fields whose names begin with "longest_"
_BY_PAGES = frozenset({"alpha", "alpha_target", "alpha_min", "alpha_max"})
_SMALLEST = frozenset({"position"})
_SAME = frozenset({"page_bytes", "recent_cause", "source", "stop"})
_MEAN = frozenset({"compute_share"})


def merge_stats(stats: Sequence[EngineStats]) -> EngineStats:
    """Merge the counters of at least one engine."""
    return _merged(stats)


def merge_looks(looks: Sequence[EngineView]) -> EngineView:
    """Merge views: pages are concatenated, and the controller shown is that of the first engine."""
    owners = b"".join(look.page_owners for look in looks)
    devices = " and ".join(dict.fromkeys(look.device for look in looks))
    return EngineView(merge_stats([look.stats for look in looks]), owners, looks[0].control, devices)


def _merged(parts: Sequence[T]) -> T:
    """Merge values of one class field by field."""
    kind: Any = type(parts[0])
    if kind is PauseStats:  # the cause shown is that of the longest pause
        parts = sorted(parts, key=lambda part: -part.recent_ms)  # type: ignore[attr-defined]
    values = {field.name: [getattr(part, field.name) for part in parts] for field in fields(kind)}
    weights = values["num_pages"] if kind is PoolStats else [1] * len(parts)
    return kind(**{name: _one(name, of_all, weights) for name, of_all in values.items()})


def _one(name: str, values: Sequence[Any], num_pages: Sequence[int]) -> Any:
    """Merge the values of one field, ignoring None."""
    known = [(value, num) for value, num in zip(values, num_pages, strict=True) if value is not None]
    return _of_some(name, *zip(*known, strict=True)) if known else None


def _of_some(name: str, values: Sequence[Any], num_pages: Sequence[int]) -> Any:
    first = values[0]
    if is_dataclass(first):
        return _merged(values)
    if isinstance(first, dict | tuple):
        return _collected(name, values)
    if name in _BY_PAGES:
        return sum(value * num for value, num in zip(values, num_pages, strict=True)) / max(1, sum(num_pages))
    if name in _MEAN:
        return sum(values) / len(values)
    if name in _LARGEST or name in _SMALLEST or name.startswith("longest_"):
        return min(values) if name in _SMALLEST else max(values)
    return first if name in _SAME else sum(values)


def _collected(name: str, values: Sequence[Any]) -> Any:
    """Merge dictionaries by key and tuples by index."""
    if isinstance(values[0], StageCosts):
        return StageCosts(*(sum(terms) / len(values) for terms in zip(*values, strict=True)))
    if isinstance(values[0], tuple):
        return tuple(map(sum, zip(*values, strict=True)))
    found = {key: [value[key] for value in values if key in value] for key in dict.fromkeys(chain(*values))}
    return {key: _one(name, parts, [1] * len(parts)) for key, parts in found.items()}
