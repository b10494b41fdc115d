"""Statistics of a pool for controllers and dashboards: plain numbers without references into the pool."""

import warnings
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolStats:
    """The state and counters of a pool at one time. Counters never decrease; take differences for rates."""

    alpha: float
    alpha_target: float
    alpha_min: float
    alpha_max: float
    num_pages: int
    free_pages: int
    emb_pages: int
    kv_pages: int
    draining_pages: int
    page_bytes: int

    row_hits: int
    row_misses: int
    row_evictions: int
    row_refills: int
    resident_rows: int
    row_capacity: int

    reused_tokens: int
    total_tokens: int
    resident_users: int
    kv_evicted_pages: int
    kv_refused_prefixes: int
    stale_cuts: int
    unmatched_histories: int  # of resident users, that share no token with their cached prefixes

    host_pages: int
    host_saved_pages: int
    host_reloaded_pages: int
    host_evicted_pages: int

    bytes_by_cause: dict[str, int]

    leases: int = 0  # prefixes computed ahead and held for their ranks
    leased_pages: int = 0  # upper bound of their pages
    page_tokens: int = 0  # that a KV page holds
    stale_tokens: int = 0  # cached history tokens computed again because rows had changed; 0 in the simulator

    @property
    def row_hit_rate(self) -> float:
        return self.row_hits / max(1, self.row_hits + self.row_misses)

    @property
    def strangers(self) -> int:
        """Deprecated name of `unmatched_histories`."""
        warnings.warn("PoolStats.strangers is now unmatched_histories", DeprecationWarning, stacklevel=2)
        return self.unmatched_histories

    @property
    def token_reuse_rate(self) -> float:
        return self.reused_tokens / max(1, self.total_tokens)
