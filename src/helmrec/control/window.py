"""A window of traffic as compiled code takes it: plain numbers, no objects."""

from typing import NamedTuple

from helmrec.control.policy import WindowStats


class Seen(NamedTuple):
    """A window as compiled code takes it."""

    start_s: float
    end_s: float
    num_requests: float
    num_served: float
    hot_user_share: float
    mean_ms: float
    p99_ms: float
    slo_ms: float
    num_queued: float
    compute_busy: float
    bus_busy: float
    alpha: float
    alpha_target: float
    alpha_min: float
    alpha_max: float
    pool_bytes: float
    new_tokens: float
    resident_tokens: float
    missed_rows: float
    weight: float  # behind the miss curves


def seen(stats: WindowStats) -> tuple[float, ...]:
    """The fields of `Seen`, as a plain tuple: a named one takes three times as long to hand over."""
    traffic, curves = stats.traffic, stats.curves
    return (
        traffic.start_s,
        traffic.end_s,
        float(traffic.num_requests),
        float(traffic.num_served),
        traffic.hot_user_share,
        traffic.mean_ms,
        traffic.p99_ms,
        traffic.slo_ms,
        float(traffic.num_queued),
        traffic.compute_busy,
        traffic.bus_busy,
        stats.alpha,
        stats.alpha_target,
        stats.alpha_min,
        stats.alpha_max,
        float(stats.pool_bytes),
        stats.new_tokens_per_request,
        stats.resident_tokens_per_request,
        stats.missed_rows_per_request,
        0.0 if curves is None else curves.num_requests,
    )
