"""Windows as numbers, and windows with the answer beside them: what predictors learn from."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from helmrec.control.policy import WindowStats
from helmrec.errors import ConfigError

Floats = NDArray[np.float64]

CURVE_ALPHAS = (0.1, 0.3, 0.5, 0.7, 0.9)
NUM_FEATURES = 13 + 2 * len(CURVE_ALPHAS)


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """One run: what was seen in each window, and the split an oracle would have had in it."""

    family: str  # of traffic; hold out whole families when judging
    stats: tuple[WindowStats, ...]
    alpha_star: Floats  # (windows,)

    def __post_init__(self) -> None:
        if len(self.stats) != self.alpha_star.size:
            raise ConfigError(
                f"alpha_star must have one value per window ({len(self.stats)}), not {self.alpha_star.size}"
            )


def features(stats: WindowStats) -> Floats:
    """(NUM_FEATURES,) of one window, each of order one. Unknown miss curves read as no hits at any split."""
    traffic, curves = stats.traffic, stats.curves
    window = (
        stats.alpha_target,
        traffic.hot_user_share,
        stats.kv_token_hit_rate,
        stats.emb_hit_rate,
        traffic.compute_busy,
        traffic.bus_busy,
        min(traffic.mean_ms / traffic.slo_ms, 4.0),
        min(traffic.p99_ms / traffic.slo_ms, 4.0),
        np.log1p(traffic.num_queued) / 4,
        np.log1p(traffic.arrival_rate) / 8,
        np.log1p(stats.new_tokens_per_request) / 8,
        np.log1p(stats.resident_tokens_per_request) / 8,
        np.log1p(stats.missed_rows_per_request) / 8,
    )
    if curves is None:
        return np.array((*window, *np.zeros(2 * len(CURVE_ALPHAS))))
    hits = [np.interp(CURVE_ALPHAS, curves.alphas, rate) for rate in (curves.kv_token_hit_rate, curves.emb_hit_rate)]
    return np.concatenate((window, *hits))


@dataclass(frozen=True, slots=True, eq=False)
class Examples:
    """Stretches of windows and the split wanted right after each."""

    inputs: Floats  # (examples, windows, NUM_FEATURES), oldest window first
    alphas: Floats  # (examples,)


def examples(episodes: Sequence[Episode], num_windows: int) -> Examples:
    """Every stretch of `num_windows` windows of every episode, with the oracle's split in the window after it."""
    inputs, alphas = [], []
    for episode in episodes:
        seen = np.array([features(stats) for stats in episode.stats])
        for end in range(num_windows, len(seen)):
            inputs.append(seen[end - num_windows : end])
            alphas.append(episode.alpha_star[end])
    if not inputs:
        longest = max((len(episode.stats) for episode in episodes), default=0)
        raise ConfigError(f"training needs an episode of more than {num_windows} windows, the longest has {longest}")
    return Examples(np.array(inputs), np.array(alphas))
