"""What measurements may do to an engine and its users may not: prepare ahead, empty caches, exchange parts.

One thread at a time: nobody else may step the engine while a method runs that changes it.
"""

import statistics
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from helmrec.config import RelayConfig
from helmrec.costs.reload import ReloadCosts
from helmrec.costs.steps import StepCosts
from helmrec.engine.dense import Dense
from helmrec.engine.engine import Engine
from helmrec.engine.intake import Prepared
from helmrec.engine.relay.pre_inference import Relay
from helmrec.kernels.row_table import RowTally
from helmrec.memory.device_rows import DeviceRows
from helmrec.memory.pool import Pool
from helmrec.memory.prefix import PageLoad
from helmrec.memory.row_master import HostRows
from helmrec.types import PrefillRequest, RankRequest, RankResult


class EngineProbe:
    """An engine, opened for measurements."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.num_slots = self.pool.host_tier.num_slots  # of the host tier

    @property
    def pool(self) -> Pool:
        return self.engine._pool

    @property
    def host_rows(self) -> HostRows:
        return self.engine._master

    @property
    def dense(self) -> Dense:
        return self.engine._dense

    @property
    def num_ended(self) -> int:
        """Steps that have ended."""
        return self.engine._pipeline.num_ended

    def prepare(self, request: RankRequest) -> Prepared:
        """Check and hash a request; from any thread."""
        return self.engine._intake.prepare(request)

    def submit(self, request: Prepared) -> "Future[RankResult]":
        return self.engine._scheduler.submit(request, self.engine._now())

    def withdraw(self, futures: Iterable["Future[RankResult]"]) -> None:
        """Cancel requests that still wait."""
        self.engine._scheduler.withdraw([future for future in futures if not future.done()])

    def signal(self, request: PrefillRequest, history: Prepared) -> None:
        """`Engine.submit_prefill` of a history that is prepared."""
        self.engine._relay.submit(request, history)

    def score_without_caches(self, request: Prepared) -> NDArray[np.float32]:
        return self.engine._runner.score_without_caches(request)

    def set_limit(self, name: str, value: int) -> None:
        """Change a setting that the engine reads at each step."""
        object.__setattr__(self.engine.config, name, value)

    def set_overlap(self, *, is_on: bool) -> None:
        self.engine.check()
        self.engine._pipeline.overlaps = is_on

    def set_relay(self, config: RelayConfig) -> None:
        """Forget all signals and leases and go on with other settings."""
        engine = self.engine
        engine.check()
        engine._relay = Relay(config, engine._scheduler, self.pool.kv, self.pool.host_tier.costs.steps)

    def set_freshness(self, lag_s: float) -> None:
        """Let KV lag behind row updates by so many seconds from now on; 0 is exact. Not by table."""
        self.pool.kv.limits = replace(self.pool.kv.limits, lag_s=lag_s)

    def spread_checks(self, rng: np.random.Generator, lag_s: float) -> None:
        """Spread the times since prefixes were last compared with row updates evenly over the lag before now."""
        now = self.engine._now()
        for prefix in self.pool.kv._order.values():
            prefix.verified_s = now - lag_s * rng.random()

    def set_curves(self, *, is_on: bool) -> None:
        """Start new miss curves, or none."""
        self.engine._curves = self.engine._make_curves() if is_on else None

    @property
    def num_unobserved(self) -> int:
        """Requests that the miss curves were not shown, because their thread was behind."""
        feed = self.engine._curves
        return 0 if feed is None else feed.num_skipped

    def clear(self, alpha: float) -> None:
        """Empty both caches and the host tier, forget visits and learned costs, and set the boundary."""
        engine, pool = self.engine, self.pool
        engine.check()
        engine.move_alpha(0.0)
        engine.settle()
        pool.kv.clear()
        if isinstance(pool.rows, DeviceRows):
            torch.cuda.synchronize()
            pool.rows.table.tally[RowTally.GHOSTS] = 0
            pool.rows.table.seen.zero_()
            torch.cuda.synchronize()
        if self.num_slots:  # what reloads cost was learned under the load before
            pool.host_tier.costs = ReloadCosts(StepCosts(), engine._runner.host.time_a_page())
        pool.host_tier.clear(self.num_slots)
        engine.move_alpha(alpha)
        engine.settle()
        engine.check()

    def clear_prefixes(self, *, has_tier: bool = True) -> None:
        """Empty KV and the host tier, and turn the tier on or off; rows and learned costs stay."""
        self.engine.check()
        self.pool.kv.clear()
        self.pool.host_tier.clear(self.num_slots if has_tier else 0)

    def refill(self, budget_bytes: int) -> None:
        """Read evicted rows back ahead of demand, so many bytes."""
        self.engine._runner.refill(budget_bytes)

    def load_ms(self, num_pages: int, repeats: int) -> float:
        """Milliseconds of so many pages from the host, over pages that hold nothing; on a card."""
        self.engine.check()
        self.pool.kv.clear()
        host, last = self.engine._runner.host, self.pool.ledger.num_pages - 1
        assert host.loading_stream is not None
        times = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record(host.loading_stream)
            host.start_loading([PageLoad(i, last - i) for i in range(num_pages)])
            end.record(host.loading_stream)
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        return statistics.median(times)
