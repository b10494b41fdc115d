"""Pictures of a simulated run: where the boundary was, what the caches hit, how long answers took."""

from pathlib import Path
from typing import Any

import numpy as np

from helmrec.errors import ConfigError
from helmrec.sim.simulate import SimResult

_BLUE, _ORANGE, _GREY = "#2563a8", "#d9702b", "#8a8f98"


def plot_run(result: SimResult, title: str, path: Path) -> None:
    """Alpha, hit rates, latencies and bytes over time; the format follows the name."""
    figure = _figure()
    figure.suptitle(title)
    (alpha, hits), (latency, moved) = figure.subplots(2, 2, sharex=True)
    end_s = [window.stats.traffic.end_s for window in result.windows]
    _lines(alpha, end_s, {"target": [w.stats.alpha_target for w in result.windows]}, color=_GREY, linestyle="--")
    _lines(alpha, end_s, {"alpha": [w.stats.alpha for w in result.windows]}, color=_BLUE)
    alpha.set(title="boundary", ylabel="EMB share of the pool", ylim=(0, 1))
    _lines(hits, end_s, {"rows": [w.stats.emb_hit_rate for w in result.windows]}, color=_BLUE)
    _lines(hits, end_s, {"KV tokens": [w.stats.kv_token_hit_rate for w in result.windows]}, color=_ORANGE)
    hits.set(title="hit rates", ylim=(0, 1))
    _lines(latency, end_s, {"p50": [w.stats.traffic.p50_ms for w in result.windows]}, color=_BLUE)
    _lines(latency, end_s, {"p99": [w.stats.traffic.p99_ms for w in result.windows]}, color=_ORANGE)
    latency.axhline(result.slo_ms, color=_GREY, linestyle="--", linewidth=1, label="SLO")
    latency.set(title="latency", ylabel="ms", xlabel="time (s)", yscale="log")
    causes = [cause for cause, num in result.pool.bytes_by_cause.items() if num]
    for cause in causes:
        _lines(moved, end_s, {cause: np.array([w.bytes_by_cause[cause] for w in result.windows]) / 1e9})
    moved.set(title="bytes moved, by cause", ylabel="GB per window", xlabel="time (s)")
    for axes in (alpha, hits, latency, *((moved,) if causes else ())):
        axes.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {path}: {error}") from None


def _lines(axes: Any, x: list[float], named: dict[str, Any], **style: Any) -> None:
    for name, y in named.items():
        axes.plot(x, y, label=name, linewidth=1.2, **style)


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - only pictures need it
    except ImportError:
        raise ConfigError("pictures need matplotlib: pip install 'helmrec[bench]'") from None
    return Figure(figsize=(12, 7), layout="constrained")
