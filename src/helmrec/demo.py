"""A stream of synthetic traffic against a small engine, with a live view.

The traffic changes character twice and the boundary is moved by hand to follow it, under load: returning
users want KV pages, a flood of strangers wants rows. One request in twenty is scored again without caches.
"""

import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from helmrec.config import EngineConfig
from helmrec.engine.engine import Engine, EngineStats
from helmrec.model.config import ModelConfig
from helmrec.model.profiles import profile
from helmrec.model.weights import init_model
from helmrec.types import RankRequest, RankResult

_BATCH = 8
_CANDIDATES = 64


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of traffic and the split that suits it."""

    name: str
    hot_share: float  # share of requests by returning users
    alpha: float


PHASES = (
    Phase("returning users", hot_share=0.95, alpha=0.15),
    Phase("flood of strangers", hot_share=0.25, alpha=0.60),
    Phase("returning users again", hot_share=0.95, alpha=0.15),
)


class Traffic:
    """Users with growing histories over Zipf-popular items. Same seed, same requests."""

    def __init__(self, config: ModelConfig, seed: int, num_hot: int = 48) -> None:
        self._config = config
        self._rng = np.random.default_rng(seed)
        self._num_items = config.features[0].num_rows
        self._hot = [self._history(int(self._rng.integers(100, 400))) for _ in range(num_hot)]
        self._next_stranger = num_hot

    def next_request(self, hot_share: float) -> RankRequest:
        rng = self._rng
        if rng.random() < hot_share:
            user_id = int(rng.integers(len(self._hot)))
            self._hot[user_id] = history = self._append(self._hot[user_id])
        else:
            user_id, history = self._next_stranger, self._history(int(rng.integers(50, 200)))
            self._next_stranger += 1
        items, actions, timestamps = history
        candidates = self._items(_CANDIDATES)
        return RankRequest(
            user_id=user_id,
            items=items,
            actions=actions,
            timestamps=timestamps,
            candidates=candidates,
            features={"category": items % 500},
            candidate_features={"category": candidates % 500},
            context={"country": user_id % 200, "hour": int(rng.integers(24))},
        )

    def row_update(self) -> tuple[np.ndarray, np.ndarray]:
        """New values for a few rarely used items, as an online trainer would send them."""
        ids = np.unique(self._rng.integers(self._num_items // 2, self._num_items, 16))
        return ids, self._rng.standard_normal((ids.size, self._config.row_dim))

    def _history(self, length: int) -> np.ndarray:  # (3, events): items, actions, timestamps
        return np.stack([self._items(length), self._rng.integers(0, 8, length), self._times(0, length)])

    def _append(self, history: np.ndarray) -> np.ndarray:
        num = int(self._rng.integers(1, 4))
        new = [self._items(num), self._rng.integers(0, 8, num), self._times(history[2, -1], num)]
        return np.concatenate([history, np.stack(new)], axis=1)

    def _times(self, start: int, num: int) -> np.ndarray:
        return start + np.cumsum(self._rng.integers(1, 3_600, num))

    def _items(self, num: int) -> np.ndarray:
        return (self._rng.zipf(1.2, num) - 1) % self._num_items


@dataclass(frozen=True, slots=True)
class PhaseSummary:
    """What one phase looked like, from its results and the counters' differences."""

    name: str
    alpha: float
    requests: int
    p50_ms: float
    p99_ms: float
    row_hit_rate: float
    token_reuse: float


def run_demo(console: Console, seconds: float, seed: int) -> list[PhaseSummary]:
    """Serve each phase for a third of the time, then print what happened."""
    with tempfile.TemporaryDirectory() as folder:
        init_model(Path(folder) / "demo", profile("demo"), seed)
        config = EngineConfig(pool_bytes="24MiB", alpha=PHASES[0].alpha, audit_every=20, move_bytes_per_step="512KiB")
        engine = Engine.from_model(Path(folder) / "demo", config)
        traffic = Traffic(engine.model_config, seed)
        engine.rank([traffic.next_request(0.5)])  # compiles the host loops, so that the first phase is not about that
        with Live(console=console, refresh_per_second=4, transient=True) as live:
            summaries = [_serve(engine, traffic, phase, seconds / len(PHASES), live) for phase in PHASES]
        _print_summary(console, summaries, engine.stats())
        engine.check()
        engine.close()
    return summaries


def _serve(engine: Engine, traffic: Traffic, phase: Phase, seconds: float, live: Live) -> PhaseSummary:
    engine.move_alpha(phase.alpha)
    before = engine.stats()
    done: list[RankResult] = []
    recent: deque[RankResult] = deque(maxlen=400)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if len(done) % 200 < _BATCH:
            engine.update_rows("item", *traffic.row_update())
        results = engine.rank([traffic.next_request(phase.hot_share) for _ in range(_BATCH)])
        done.extend(results)
        recent.extend(results)
        live.update(_view(phase, engine.stats(), recent))
    return _summarise(phase, before, engine.stats(), done)


def _summarise(phase: Phase, before: EngineStats, after: EngineStats, results: Sequence[RankResult]) -> PhaseSummary:
    latency = np.array([result.timing.total_ms for result in results])
    hits = after.pool.row_hits - before.pool.row_hits
    looked_up = hits + after.pool.row_misses - before.pool.row_misses
    tokens = after.pool.total_tokens - before.pool.total_tokens
    return PhaseSummary(
        name=phase.name,
        alpha=after.pool.alpha,
        requests=len(results),
        p50_ms=float(np.percentile(latency, 50)),
        p99_ms=float(np.percentile(latency, 99)),
        row_hit_rate=hits / looked_up,
        token_reuse=(after.pool.reused_tokens - before.pool.reused_tokens) / tokens,
    )


def _view(phase: Phase, stats: EngineStats, recent: Sequence[RankResult]) -> Group:
    pool = stats.pool
    latency = np.array([result.timing.total_ms for result in recent])
    rows = sum(r.row_hits for r in recent) / max(1, sum(r.row_hits + r.row_misses for r in recent))
    table = Table(title=f"HelmRec demo: {phase.name}", show_header=False)
    table.add_row("pool", _pool_bar(stats))
    table.add_row("alpha", f"{pool.alpha:.3f}  (target {pool.alpha_target:.3f})")
    table.add_row("row hit rate", f"{rows:6.1%}   {pool.resident_rows:,} rows resident")
    table.add_row("token reuse", f"{_reuse(recent):6.1%}   {pool.resident_users} users resident")
    table.add_row("latency", f"P50 {np.percentile(latency, 50):.1f} ms   P99 {np.percentile(latency, 99):.1f} ms")
    table.add_row("served", f"{stats.served:,} requests, {stats.audits} audited, {stats.audit_mismatches} wrong")
    return Group(table)


def _reuse(results: Sequence[RankResult]) -> float:
    reused = sum(result.reused_tokens for result in results)
    return reused / max(1, reused + sum(result.computed_tokens - _CANDIDATES - 1 for result in results))


def _pool_bar(stats: EngineStats, width: int = 60) -> Text:
    """Pages by owner; letters as well as colours, for those who see none."""
    pool, bar = stats.pool, Text()
    shares = (("E", "cyan", pool.emb_pages), ("K", "magenta", pool.kv_pages), ("d", "yellow", pool.draining_pages))
    for letter, style, pages in shares:
        bar.append(letter * round(width * pages / pool.num_pages), style=style)
    bar.append("." * (width - len(bar)), style="dim")
    return bar


def _print_summary(console: Console, summaries: Sequence[PhaseSummary], stats: EngineStats) -> None:
    table = Table(title="HelmRec demo: one pool, two caches")
    for column in ("traffic", "alpha", "requests", "P50 ms", "P99 ms", "rows hit", "tokens reused"):
        table.add_column(column, justify="left" if column == "traffic" else "right")
    for s in summaries:
        cells = (f"{s.alpha:.2f}", f"{s.requests:,}", f"{s.p50_ms:.1f}", f"{s.p99_ms:.1f}")
        table.add_row(s.name, *cells, f"{s.row_hit_rate:.1%}", f"{s.token_reuse:.1%}")
    console.print(table)
    pool = stats.pool
    console.print(
        f"{stats.served:,} requests served, none lost. {stats.audits} of them scored again without caches: "
        f"{stats.audit_mismatches} wrong, largest difference {stats.audit_max_error:.1e}.\n"
        f"{pool.num_pages} pages: {pool.emb_pages} rows, {pool.kv_pages} KV, {pool.free_pages} free, "
        f"{pool.draining_pages} draining. Boundary moved under load: "
        f"{pool.bytes_by_cause.get('boundary-grow', 0) / 2**20:.1f} MiB to rows, "
        f"{pool.bytes_by_cause.get('boundary-compact', 0) / 2**20:.1f} MiB of rows compacted.",
        highlight=False,
    )
