"""The pool: the page ledger, both caches and the boundary between them.

The pool decides; a `RowMover` moves data in memory. No torch here, so that tests can compare the simulator's compiled
twin with it.
"""

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from helmrec.config import EngineConfig
from helmrec.errors import AlphaOutOfRange, ConfigError, PoolTooSmall
from helmrec.memory.boundary import moves_between_steps
from helmrec.memory.embedding_cache import EmbeddingCache
from helmrec.memory.geometry import PageGeometry
from helmrec.memory.kv_admission import ADMISSIONS, reserved_pages
from helmrec.memory.kv_cache import KVCache, KVLimits
from helmrec.memory.kv_host_tier import KVHostTier, PageSave
from helmrec.memory.ledger import Owner, PageLedger
from helmrec.memory.prefix_hash import RowEpochs
from helmrec.memory.row_admission import make_row_admission
from helmrec.memory.row_cache import RowCache, RowMover
from helmrec.memory.row_order import make_order
from helmrec.memory.stats import PoolStats


@dataclass(frozen=True, slots=True)
class Demand:
    """The largest work that the pool must be able to serve at any time."""

    num_rows: int  # rows in the id space of all tables
    request_tokens: int  # cacheable tokens of the longest request
    batch_tokens: int  # tokens of the largest step


class Pool:
    """Pages shared by embedding rows and KV prefixes, with a movable boundary."""

    def __init__(
        self,
        config: EngineConfig,
        geometry: PageGeometry,
        demand: Demand,
        mover: RowMover,
        rows: RowCache | None = None,
    ) -> None:
        """`rows` is an embedding cache without pages; by default one on the host."""
        num_pages = config.sized_pool_bytes // geometry.page_bytes
        self._request_pages = geometry.pages_for(demand.request_tokens)
        if num_pages < self._request_pages + 1:
            needed = _least_pages(self._request_pages, config.alpha) * geometry.page_bytes
            raise PoolTooSmall(
                f"pool_bytes must be at least {needed} for one request of {demand.request_tokens} tokens "
                f"({self._request_pages} pages of {geometry.page_bytes} bytes) beside rows at alpha {config.alpha:g}, "
                f"got {config.sized_pool_bytes}"
            )
        if num_pages * geometry.rows_per_page >= 1 << 31:
            raise ConfigError(f"pool_bytes must hold fewer than 2^31 rows, got {num_pages * geometry.rows_per_page}")
        self.geometry = geometry
        self.ledger = PageLedger(num_pages)
        self.row_epochs = RowEpochs(demand.num_rows)
        self.bytes_by_cause: Counter[str] = Counter()
        self._mover = mover
        self._batch_pages = geometry.pages_for(demand.batch_tokens)
        self.rows = rows or make_host_rows(config, geometry, demand.num_rows)
        self.host_tier = KVHostTier(config.host_kv_bytes // geometry.page_bytes, config.kv_reload)
        self.kv = self._make_kv(config)
        self.aim(config.alpha)
        self.rows.add_pages(self.ledger.allocate(Owner.EMB, self._target_pages))

    def _make_kv(self, config: EngineConfig) -> KVCache:
        limits = KVLimits(
            page_tokens=self.geometry.page_tokens,
            max_forks=config.max_forks,
            lag_s=config.kv_freshness if isinstance(config.kv_freshness, float) else 0.0,
        )
        return KVCache(limits, self.ledger, self.row_epochs, ADMISSIONS[config.kv_admission], self.host_tier)

    @property
    def alpha(self) -> float:
        """The current embedding share of the pool's pages."""
        return self.ledger.count(Owner.EMB) / self.ledger.num_pages

    @property
    def alpha_target(self) -> float:
        return self._target_pages / self.ledger.num_pages

    @property
    def alpha_max(self) -> float:
        """The largest share that leaves KV room for one request."""
        return 1 - self._request_pages / self.ledger.num_pages

    def aim(self, alpha: float) -> None:
        """Set the target of the boundary; `advance` moves it there in bounded steps."""
        self._target_pages = self._pages_at(alpha)
        self.kv.reserve_pages = reserved_pages(self.ledger.num_pages - self._target_pages, self._batch_pages)

    def _pages_at(self, alpha: float) -> int:
        if not (isinstance(alpha, int | float) and 0 <= alpha <= 1):
            raise AlphaOutOfRange(f"alpha must be between 0 and 1, got {alpha!r}")
        pages = int(np.floor(alpha * self.ledger.num_pages + 0.5))
        left = self.ledger.num_pages - pages
        if left < self._request_pages:
            raise AlphaOutOfRange(
                f"alpha must be at most {self.alpha_max:.4f}, got {alpha!r}: it leaves {left} pages for KV "
                f"and one request needs {self._request_pages}"
            )
        return pages

    def next_saves(self, budget_bytes: int) -> list[PageSave]:
        """Return the full KV pages to copy to the host now, at most `budget_bytes` (at least a page)."""
        saves = self.kv.next_saves(max(1, budget_bytes // self.geometry.page_bytes))
        self.bytes_by_cause["kv-save"] += len(saves) * self.geometry.page_bytes
        return saves

    @property
    def is_settled(self) -> bool:
        """Whether the boundary is at its target and no page is draining."""
        return self._target_pages == self.ledger.count(Owner.EMB) and not self.ledger.count(Owner.DRAINING)

    def advance(self, move_bytes: int, epoch: int, since_s: float = 0.0) -> None:
        """Move the boundary towards its target after a step, `since_s` after the last time, in bounded moves.

        A move is of at most `move_bytes` (at least a page). `epoch` is the newest step that may still read rows; pages
        leaving EMB wait for it.
        """
        pages = max(1, move_bytes // self.geometry.page_bytes)
        for _ in range(moves_between_steps(self.ledger.num_pages, pages, since_s)):
            gap = self._target_pages - self.ledger.count(Owner.EMB)
            if gap > 0:
                self._grow(min(gap, pages))
            elif gap < 0:
                self._shrink(min(-gap, pages), epoch)
            else:
                return

    def _grow(self, num: int) -> None:
        # Draining pages have no owner: until they are free, KV keeps the pages that one request needs.
        num = min(num, self.ledger.num_free + self.ledger.count(Owner.KV) - self._request_pages)
        if num <= 0:
            return
        if num > self.ledger.num_free:
            self.kv.evict(num - self.ledger.num_free)
        pages = self.ledger.allocate(Owner.EMB, min(num, self.ledger.num_free))
        self.rows.add_pages(pages)
        self.bytes_by_cause["boundary-grow"] += len(pages) * self.geometry.page_bytes

    def _shrink(self, num: int, epoch: int) -> None:
        self.ledger.drain(self.rows.give_up_pages(num, self._mover), epoch)

    def bytes_moved(self) -> dict[str, int]:
        """Return the bytes moved over the bus or inside the pool, by cause."""
        rows, stride, host_stride = self.rows, self.geometry.row_stride, self.geometry.host_row_stride
        from_host = {"row-miss": rows.misses * host_stride, "row-refill": rows.refills * host_stride}
        return {**from_host, "boundary-compact": rows.moves * stride, **self.bytes_by_cause}

    def stats(self) -> PoolStats:
        count = self.ledger.count
        return PoolStats(
            alpha=self.alpha,
            alpha_target=self.alpha_target,
            alpha_min=0.0,
            alpha_max=self.alpha_max,
            num_pages=self.ledger.num_pages,
            free_pages=count(Owner.FREE),
            emb_pages=count(Owner.EMB),
            kv_pages=count(Owner.KV),
            draining_pages=count(Owner.DRAINING),
            page_bytes=self.geometry.page_bytes,
            page_tokens=self.geometry.page_tokens,
            row_hits=self.rows.hits,
            row_misses=self.rows.misses,
            row_evictions=self.rows.evictions,
            row_refills=self.rows.refills,
            resident_rows=self.rows.num_resident,
            row_capacity=self.rows.capacity,
            reused_tokens=self.kv.reused_tokens,
            total_tokens=self.kv.total_tokens,
            resident_users=self.kv.num_users,
            kv_evicted_pages=self.kv.evicted_pages,
            kv_refused_prefixes=self.kv.refused_prefixes,
            stale_cuts=self.kv.stale_cuts,
            stale_tokens=self.kv.stale_tokens,
            unmatched_histories=self.kv.unmatched,
            host_pages=self.host_tier.num_pages,
            host_saved_pages=self.host_tier.saved_pages,
            host_reloaded_pages=self.host_tier.reloaded_pages,
            host_evicted_pages=self.host_tier.evicted_pages,
            bytes_by_cause=self.bytes_moved(),
        )

    def check(self) -> None:
        self.ledger.check()
        self.rows.check()
        self.kv.check()
        self.host_tier.check()
        owned = self.ledger.count(Owner.EMB) * self.geometry.rows_per_page
        assert self.rows.capacity == owned, "the embedding cache owns other pages than the ledger says"


def make_host_rows(config: EngineConfig, geometry: PageGeometry, num_rows: int) -> EmbeddingCache:
    """Make an embedding cache with its index on the host, sized for the whole pool and without pages."""
    num_pages = config.sized_pool_bytes // geometry.page_bytes
    num_slots = num_pages * geometry.rows_per_page
    order = make_order(config.row_order, num_slots)
    admission = make_row_admission(config.row_admission, num_slots)
    return EmbeddingCache(num_rows, num_pages, geometry.rows_per_page, order, admission)


def _least_pages(request_pages: int, alpha: float) -> int:
    """Return the pages of the smallest pool in which this split leaves room for a request."""
    if alpha == 1:
        return request_pages + 1  # no pool has room at this split; the least that any split needs
    num = max(request_pages + 1, math.floor((request_pages - 1 / 2) / (1 - alpha)))
    while num - math.floor(alpha * num + 1 / 2) < request_pages:
        num += 1
    return num
