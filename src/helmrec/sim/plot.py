"""Plots of a simulated run: boundary, hit rates, latency and bytes moved over time."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from helmrec.errors import ConfigError
from helmrec.sim.quasi_static import QuasiStatic
from helmrec.sim.simulate import SimResult
from helmrec.traffic.plot import BLUE, GREY, ORANGE, make_figure


class Star(NamedTuple):
    """The best split of each window in hindsight, and the band of splits within 1% of its cost."""

    window_s: float
    found: QuasiStatic


def plot_run(result: SimResult, title: str, path: Path, star: Star | None = None) -> None:
    """Plot alpha and alpha*, hit rates, latencies, share within the SLO, and bytes; the suffix sets the format."""
    figure = make_figure(12, 10)
    figure.suptitle(title)
    (alpha, hits), (latency, within), (moved, rest) = figure.subplots(3, 2, sharex=True)
    rest.remove()
    end_s, windows = [window.stats.traffic.end_s for window in result.windows], result.windows
    if star is not None:
        _draw_star(alpha, star)
    _lines(alpha, end_s, {"target": [w.stats.alpha_target for w in windows]}, color=GREY, linestyle="--")
    _lines(alpha, end_s, {"alpha": [w.stats.alpha for w in windows]}, color=BLUE)
    alpha.set(title="boundary", ylabel="EMB share of the pool", ylim=(0, 1))
    _lines(hits, end_s, {"rows": [w.stats.emb_hit_rate for w in windows]}, color=BLUE)
    _lines(hits, end_s, {"KV tokens": [w.stats.kv_token_hit_rate for w in windows]}, color=ORANGE)
    hits.set(title="hit rates", ylim=(0, 1))
    _lines(latency, end_s, {"p50": [w.stats.traffic.p50_ms for w in windows]}, color=BLUE)
    _lines(latency, end_s, {"p99": [w.stats.traffic.p99_ms for w in windows]}, color=ORANGE)
    latency.axhline(result.slo_ms, color=GREY, linestyle="--", linewidth=1, label="SLO")
    latency.set(title="latency", ylabel="ms", yscale="log")
    _lines(within, end_s, {"in SLO": [w.stats.traffic.slo_satisfaction for w in windows]}, color=BLUE)
    within.set(title="answered within the SLO", ylim=(0, 1.02), xlabel="time (s)")
    causes = [cause for cause, num in result.pool.bytes_by_cause.items() if num]
    spans_s = np.array([w.stats.traffic.end_s - w.stats.traffic.start_s for w in windows])
    for cause in causes:
        _lines(moved, end_s, {cause: np.array([w.bytes_by_cause[cause] for w in windows]) / 1e9 / spans_s})
    moved.set(title="bytes moved, by cause", ylabel="GB/s", xlabel="time (s)")
    for axes in (alpha, hits, latency, *((moved,) if causes else ())):
        axes.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {path}: {error}") from None


def _draw_star(axes: Any, star: Star) -> None:
    edges = star.window_s * np.arange(star.found.alpha.size + 1)
    axes.stairs(star.found.alpha, edges, label="alpha*", color=ORANGE, linewidth=1.2)
    axes.stairs(star.found.high, edges, baseline=star.found.low, fill=True, color=ORANGE, alpha=0.15)


def _lines(axes: Any, x: list[float], named: dict[str, Any], **style: Any) -> None:
    for name, y in named.items():
        axes.plot(x, y, label=name, linewidth=1.2, **style)
