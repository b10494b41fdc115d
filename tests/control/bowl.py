"""A made-up node whose latency is a bowl over alpha with a known bottom: what policies are tried on here."""

from dataclasses import dataclass, replace

import numpy as np

from helmrec.control.policy import Policy, Traffic, WindowStats
from helmrec.memory.miss_curves import JointCurves
from helmrec_bench.baselines.service_cost import ServiceCost, wait_ms

COST = ServiceCost(token_ms=0.001, floor_ms=0.5, missed_row_ms=0.0005, is_overlapping=False)
TOKENS, ROWS = 6_000.0, 24_000.0
GRID = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class Bowl:
    """Misses of both caches fall off with their share of the pool."""

    emb_scale: float = 0.3  # share of the pool over which row misses fall by e
    kv_scale: float = 0.3  # as much for computed tokens
    rate: float = 20.0  # requests per second
    noise: float = 0.0  # relative, of measured latency and misses
    filled: float = 0.01  # share of the pool that is in use: what a move costs

    def computed(self, alpha: float) -> float:
        return TOKENS * float(np.exp(-(1 - alpha) / self.kv_scale))

    def missed(self, alpha: float) -> float:
        return ROWS * float(np.exp(-alpha / self.emb_scale))

    def curves(self) -> JointCurves:
        alphas = np.array(GRID)
        alphas.flags.writeable = False  # as curves of an engine are
        computed = np.array([self.computed(alpha) for alpha in GRID])
        missed = np.array([self.missed(alpha) for alpha in GRID])
        return JointCurves(
            alphas=alphas,
            num_requests=1_000.0,
            kv_token_hit_rate=1 - computed / TOKENS,
            kv_user_hit_rate=1 - computed / TOKENS,
            emb_hit_rate=1 - missed / ROWS,
            rows_per_request=np.full(len(GRID), ROWS),
            missed_rows_per_request=missed,
            computed_tokens_per_request=computed,
        )

    def window(self, alpha: float, start_s: float = 0.0, rng: np.random.Generator | None = None) -> WindowStats:
        """One second at this split."""
        drawn = rng.standard_normal(3) if rng is not None else np.zeros(3)
        blur: list[float] = (1 + self.noise * drawn).tolist()  # plain numbers, as an engine gives them
        computed, missed = self.computed(alpha) * blur[0], self.missed(alpha) * blur[1]
        traffic = Traffic(
            start_s=start_s,
            end_s=start_s + 1,
            num_requests=round(self.rate),
            num_served=round(self.rate),
            hot_user_share=0.5,
            mean_ms=0.0,
            p50_ms=0.0,
            p99_ms=0.0,
            slo_ms=80.0,
            slo_satisfaction=1.0,
            num_queued=0,
            compute_busy=min(1.0, self.rate / 1e3 * (COST.floor_ms + COST.token_ms * computed)),
            bus_busy=min(1.0, self.rate / 1e3 * COST.missed_row_ms * missed),
            idle_share=0.5,
        )
        stats = WindowStats(
            traffic=traffic,
            alpha=alpha,
            alpha_target=alpha,
            alpha_min=0.0,
            alpha_max=1.0,
            pool_bytes=1 << 30,
            num_pages=1 << 16,
            page_tokens=16,
            resident_rows=round(self.filled * alpha * (1 << 20)),
            kv_pages=round(self.filled * (1 - alpha) * (1 << 16)),
            kv_token_hit_rate=1 - computed / TOKENS,
            emb_hit_rate=1 - missed / ROWS,
            new_tokens_per_request=computed,
            resident_tokens_per_request=TOKENS - computed,
            missed_rows_per_request=missed,
            curves=self.curves(),
        )
        mean_ms = self.latency_ms(alpha) * blur[2]
        measured = replace(traffic, mean_ms=mean_ms, p50_ms=mean_ms, p99_ms=2 * mean_ms)
        return replace(stats, traffic=measured)

    def latency_ms(self, alpha: float) -> float:
        """What a request takes at this split, the wait included, from the misses themselves."""
        service = COST.floor_ms + COST.token_ms * self.computed(alpha) + COST.missed_row_ms * self.missed(alpha)
        return service + float(wait_ms(np.array(service), round(self.rate)))

    def bottom(self) -> float:
        """The best split within the curves, on a fine grid."""
        grid = np.linspace(0.1, 0.9, 801)
        return float(grid[np.argmin([self.latency_ms(float(alpha)) for alpha in grid])])


def drive(
    policy: Policy, bowl: Bowl, start: float, num_windows: int, seed: int = 0, start_s: float = 0.0
) -> list[float]:
    """Alpha after each window, every move applied at once."""
    rng, alpha, path = np.random.default_rng(seed), start, []
    for window in range(num_windows):
        move = policy.decide(bowl.window(alpha, start_s + window, rng))
        alpha = alpha if move is None else min(max(move.alpha, 0.0), 1.0)
        path.append(alpha)
    return path
