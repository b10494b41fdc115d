"""Named workloads: families of traffic, each combined with a preset that has the shape of a data set.

Item counts and history lengths of the presets are the published sizes of the data sets; exponents and spreads are our
choice. `stretched` gives a preset the history lengths of long-sequence serving, as published evaluations do.
"""

from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field

from helmrec.config import Frozen
from helmrec.errors import ConfigError
from helmrec.traffic.workload import Phase, Users, Workload

Axis = Literal["hot-share", "history", "skew", "rate", "all"]


class Shape(Frozen):
    """The parameters of a family."""

    num_items: int = Field(1_000_000, ge=1)
    item_exponent: float = Field(1.2, ge=0.3, le=4)
    item_shift: float = Field(4, gt=0)
    num_candidates: int = Field(2_048, ge=1)
    history: float = Field(6_700, gt=0, description="median events")
    history_sigma: float = Field(0.35, ge=0)
    min_history: int = Field(2_000, ge=0)
    max_history: int = Field(14_000, ge=1)
    new_events: float = Field(8, ge=1)
    hot_share: float = Field(0.7, ge=0, le=1)
    hot_users: int = Field(2_000, ge=1)
    rate: float = Field(100, gt=0, description="requests per second")
    duration_s: float = Field(600, gt=0)
    axis: Axis = Field("hot-share", description="what the families trend and burst change")
    burst_s: float = Field(20, gt=0, description="length of a burst; bursts take a quarter of the time")

    def stretched(self, history: float) -> "Shape":
        """The same items and users with another median history length, and the spread of dlrmv3."""
        lengths = {"history": history, "history_sigma": 0.35, "min_history": int(history * 0.3)}
        return Shape(**self.model_dump() | lengths | {"max_history": int(history * 2.1)})


PRESETS: dict[str, Shape] = {
    "dlrmv3": Shape(),  # item slope and top 1% of the published news clicks
    "meta-2021": Shape(  # fitted: 60,000 requests read rows as often as Meta's published embedding trace
        num_items=150_000_000,
        item_exponent=0.9,
        item_shift=40_000,
    ),
    "taobao": Shape(  # 4.16 M items, 988 k users with 101 events each
        num_items=4_162_024,
        item_exponent=0.85,
        item_shift=20,
        num_candidates=1_024,
        history=70,
        history_sigma=0.9,
        min_history=5,
        max_history=900,
    ),
    "amazon-video-games": Shape(  # 5-core: 10.7 k items, 24 k users with 9.5 events each
        num_items=10_672,
        item_exponent=0.8,
        item_shift=15,
        num_candidates=256,
        history=7,
        history_sigma=0.6,
        min_history=5,
        max_history=850,
        new_events=1.5,
    ),
    "amazon-books": Shape(  # 5-core: 368 k items, 604 k users with 14.7 events each
        num_items=367_982,
        item_exponent=0.75,
        item_shift=15,
        num_candidates=512,
        history=9,
        history_sigma=0.8,
        min_history=5,
        max_history=23_000,
        new_events=1.5,
    ),
}


def preset(name: str) -> Shape:
    """The named preset."""
    if name not in PRESETS:
        raise ConfigError(f"preset must be one of {', '.join(PRESETS)}, got {name!r}")
    return PRESETS[name]


def family(name: str, shape: Shape) -> Workload:
    """The named family as a workload."""
    if name not in FAMILIES:
        raise ConfigError(f"family must be one of {', '.join(FAMILIES)}, got {name!r}")
    return Workload(
        name=name,
        num_items=shape.num_items,
        item_shift=shape.item_shift,
        num_candidates=shape.num_candidates,
        users=Users(
            history_sigma=shape.history_sigma,
            min_history=shape.min_history,
            max_history=shape.max_history,
            new_events=shape.new_events,
        ),
        phases=FAMILIES[name](shape),
    )


def _phase(shape: Shape, name: str, duration_s: float, **settings: Any) -> Phase:
    base = {
        "rate": shape.rate,
        "hot_share": shape.hot_share,
        "hot_users": shape.hot_users,
        "history": shape.history,
        "item_exponent": shape.item_exponent,
    }
    return Phase(name=name, duration_s=duration_s, **base | settings)


def _other(shape: Shape) -> dict[str, Any]:
    """The settings at the end of a trend and during a burst, by axis. Together they favour embedding rows over KV."""
    by_axis: dict[str, dict[str, Any]] = {
        "hot-share": {"hot_share": shape.hot_share / 2},
        "history": {"history": shape.history / 2, "hot_first": shape.hot_users},
        "skew": {"item_exponent": shape.item_exponent - 0.3},
        "rate": {"rate": shape.rate * 1.5},
    }
    if shape.axis == "all":
        return {key: value for settings in by_axis.values() for key, value in settings.items()}
    return by_axis[shape.axis]


def _steady(shape: Shape) -> tuple[Phase, ...]:
    return (_phase(shape, "steady", shape.duration_s),)


def _trend(shape: Shape) -> tuple[Phase, ...]:
    """One fifth unchanged, three fifths of gradual change, one fifth after the change."""
    before, other = _phase(shape, "before", shape.duration_s * 0.2), _other(shape)
    ramps = {key: (getattr(before, key)[0], value) for key, value in other.items()}
    return (
        before,
        _phase(shape, "trend", shape.duration_s * 0.6, **ramps),
        _phase(shape, "after", shape.duration_s * 0.2, **other),
    )


def _burst(shape: Shape) -> tuple[Phase, ...]:
    """Alternating calm and burst; calm lasts three times as long."""
    calm = _phase(shape, "calm", 3 * shape.burst_s)
    burst = _phase(shape, "burst", shape.burst_s, **_other(shape))
    return (calm, burst) * max(1, round(shape.duration_s / (4 * shape.burst_s)))


def _mixed_day(shape: Shape) -> tuple[Phase, ...]:
    """A day compressed into the duration: night, morning ramp, flash at noon, new users, evening, a burst, night."""
    hour, rate, hot = shape.duration_s / 24, shape.rate, shape.hot_share
    return (
        _phase(shape, "night", 6 * hour, rate=rate * 0.4, hot_share=min(1.0, hot * 1.2)),
        _phase(shape, "morning", 4 * hour, rate=(rate * 0.4, rate)),
        _phase(shape, "flash", 2 * hour, flash_share=(0.3, 0.05), drift_items_per_hour=shape.num_items * 0.01),
        _phase(shape, "new users", 4 * hour, hot_share=(hot, hot / 2), history=shape.history * 0.7),
        _phase(shape, "evening", 5 * hour, rate=(rate, rate * 1.3), hot_share=(hot / 2, hot)),
        _phase(shape, "burst", hour / 2, rate=rate * 1.8, hot_share=hot / 3),
        _phase(shape, "night", 2.5 * hour, rate=(rate, rate * 0.4), hot_share=min(1.0, hot * 1.2)),
    )


def _request_bursts(shape: Shape) -> tuple[Phase, ...]:
    """About 100, 300, 1,000 and 2,000 extra requests within a second, by new and by hot users in turn."""
    phases: list[Phase] = []
    for size, hot_share in ((100, 0.1), (300, 1.0), (1_000, 0.1), (2_000, 1.0), (2_000, 0.1)):
        phases.append(_phase(shape, "calm", max(1.0, shape.duration_s / 5 - 1)))
        phases.append(_phase(shape, f"burst of {size}", 1.0, rate=shape.rate + size, hot_share=hot_share))
    return tuple(phases)


def _flash_items(shape: Shape) -> tuple[Phase, ...]:
    """Half of all draws go to a thousand new items, other items each time."""
    calm = _phase(shape, "calm", shape.duration_s / 8)
    return (calm, _phase(shape, "flash", shape.duration_s / 8, flash_share=(0.5, 0.2))) * 4


def _cold_flood(shape: Shape) -> tuple[Phase, ...]:
    """Requests of new users are added to the usual traffic: as many again, then twice as many."""
    phases: list[Phase] = []
    for times in (2, 3):
        flood = {"rate": shape.rate * times, "hot_share": shape.hot_share / times}
        phases += _phase(shape, "calm", shape.duration_s * 0.3), _phase(shape, "flood", shape.duration_s * 0.2, **flood)
    return tuple(phases)


def _diurnal(shape: Shape) -> tuple[Phase, ...]:
    """Two slow cycles of rate and hot share, in opposite directions."""
    high, low = shape.rate * 1.2, shape.rate * 0.6
    warm, cool = min(1.0, shape.hot_share * 1.2), shape.hot_share * 0.6
    quarter, drift = shape.duration_s / 4, shape.num_items * 0.002
    rise = _phase(shape, "rise", quarter, rate=(low, high), hot_share=(warm, cool), drift_items_per_hour=drift)
    fall = _phase(shape, "fall", quarter, rate=(high, low), hot_share=(cool, warm), drift_items_per_hour=drift)
    return (rise, fall) * 2


FAMILIES: dict[str, Callable[[Shape], tuple[Phase, ...]]] = {
    "steady": _steady,
    "trend": _trend,
    "burst": _burst,
    "mixed-day": _mixed_day,
    "request-bursts": _request_bursts,
    "flash-items": _flash_items,
    "cold-flood": _cold_flood,
    "diurnal": _diurnal,
}
