"""Plots of a trace on one page."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from helmrec.errors import TraceError
from helmrec.traffic.trace import Trace, index_histories
from helmrec_bench.report.files import picture
from helmrec_bench.traces.describe import item_counts, return_times

_NUM_BINS = 240
_BLUE, _ORANGE, _GREY = "#2563a8", "#d9702b", "#8a8f98"


def plot_trace(trace: Trace, path: Path) -> None:
    """Plot arrivals, users, history lengths, item popularity and return times; the suffix sets the format."""
    if not trace.num_requests:
        raise TraceError("a trace without requests cannot be plotted")
    with picture(path, (12, 7.5)) as figure:
        figure.suptitle(f"{trace.catalogue.source}: {trace.num_requests:,} requests, {trace.num_users:,} users")
        (arrivals, users), (items, returns) = figure.subplots(2, 2)
        _plot_arrivals(arrivals, trace)
        _plot_users(users, trace)
        _plot_items(items, trace)
        _plot_returns(returns, trace)


def _plot_arrivals(axes: Any, trace: Trace) -> None:
    edges = _edges(trace)
    counts, _ = np.histogram(trace.time_s, edges)
    axes.step(edges[:-1], counts / np.diff(edges), where="post", color=_BLUE, linewidth=1.2)
    axes.set(xlabel="time (s)", ylabel="requests per second", title="arrivals, shaded by phase", ylim=(0, None))
    changes = np.flatnonzero(np.diff(trace.phase)) + 1
    starts = np.concatenate(([0], changes, [trace.num_requests - 1]))
    named: set[int] = set()
    for begin, end in pairwise(starts):
        code = int(trace.phase[begin])
        label = trace.phase_names[code] if code not in named else None
        named.add(code)
        axes.axvspan(trace.time_s[begin], trace.time_s[end], color=f"C{code}", alpha=0.12, linewidth=0, label=label)
    if len(named) > 1:
        axes.legend(fontsize="small", loc="upper left", ncols=2)


def _plot_users(axes: Any, trace: Trace) -> None:
    histories, edges = index_histories(trace), _edges(trace)
    axes.step(edges[:-1], _binned(trace, edges, histories.visit > 0), where="post", color=_BLUE, linewidth=1.2)
    axes.set(xlabel="time (s)", title="users and their history lengths", ylim=(0, 1))
    axes.set_ylabel("share by users seen before", color=_BLUE)
    lengths = axes.twinx()
    lengths.step(edges[:-1], _binned(trace, edges, histories.length), where="post", color=_ORANGE, linewidth=1.2)
    lengths.set_ylabel("mean history (events)", color=_ORANGE)
    lengths.set_ylim(0, None)


def _plot_items(axes: Any, trace: Trace) -> None:
    counts = item_counts(trace)
    axes.set(xlabel="rank", ylabel="times", title="items of appended events, and a line of slope -1.2")
    if not counts.size:
        return
    ranks = np.arange(1, counts.size + 1)
    axes.loglog(ranks, counts, color=_BLUE, linewidth=1.4)
    anchor = counts.size**0.5
    axes.loglog(ranks, counts[int(anchor) - 1] * (ranks / anchor) ** -1.2, color=_GREY, linewidth=1, linestyle="--")
    axes.set_ylim(0.7, counts[0] * 2.0)


def _plot_returns(axes: Any, trace: Trace) -> None:
    gaps = np.sort(return_times(trace))
    axes.set(xlabel="seconds since the user's last request", ylabel="share of returns", title="return times")
    if gaps.size:
        axes.set_xscale("log")
        axes.plot(gaps, np.arange(1, gaps.size + 1) / gaps.size, color=_BLUE, linewidth=1.4)
    axes.plot([93, 3.4 * 3_600], [0.5, 0.75], "o", color=_GREY, label="news clicks, published")
    axes.legend(fontsize="small", loc="upper left")
    axes.set_ylim(0, 1)
    if gaps.size:  # last, so that the right limit includes everything drawn
        axes.set_xlim(left=max(1e-3, float(np.quantile(gaps, 0.01))))


def _edges(trace: Trace) -> NDArray[np.float64]:
    return np.linspace(0, max(trace.duration_s, 1e-9), _NUM_BINS + 1)


def _binned(trace: Trace, edges: NDArray[np.float64], values: NDArray[Any]) -> NDArray[np.float64]:
    """Mean per bin; NaN, which is not drawn, for bins without requests."""
    counts, _ = np.histogram(trace.time_s, edges)
    sums, _ = np.histogram(trace.time_s, edges, weights=values.astype(np.float64))
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
