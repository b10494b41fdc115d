"""Made-up nodes whose best split moves: episodes to learn from and stretches to be judged on."""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from helmrec.control.policy import Policy
from helmrec_bench.baselines.features import Episode
from tests.control.bowl import COST, Bowl

NUM_WINDOWS = 120

__all__ = ["COST", "NUM_WINDOWS", "bottoms", "bowls", "episode", "follow"]


def bowls(seed: int) -> list[Bowl]:
    """Scales swing slowly against each other, from a phase and at a pace of their own."""
    rng = np.random.default_rng(seed)
    phase, period = rng.uniform(0, 2 * np.pi), rng.uniform(60, 120)
    swing = np.sin(phase + 2 * np.pi * np.arange(NUM_WINDOWS) / period)
    return [Bowl(emb_scale=0.3 * 2**s, kv_scale=0.25 * 2**-s, rate=30, noise=0.03) for s in swing]


@cache
def _bottom(emb_scale: float, kv_scale: float) -> float:
    return Bowl(emb_scale, kv_scale, rate=30).bottom()


def bottoms(nodes: list[Bowl]) -> NDArray[np.float64]:
    """The best split of each window, to a hundredth of the scales."""
    return np.array([_bottom(round(bowl.emb_scale, 2), round(bowl.kv_scale, 2)) for bowl in nodes])


def episode(seed: int) -> Episode:
    """Seen by someone who wanders over the splits."""
    rng, nodes = np.random.default_rng(seed + 1_000), bowls(seed)
    wander = np.clip(0.5 + 0.1 * np.cumsum(rng.standard_normal(len(nodes))), 0.1, 0.9)
    stats = [bowl.window(float(wander[window]), float(window), rng) for window, bowl in enumerate(nodes)]
    return Episode("drift", tuple(stats), bottoms(nodes))


def follow(policy: Policy, nodes: list[Bowl], start: float = 0.5, seed: int = 0) -> NDArray[np.float64]:
    """The split in force in each window."""
    rng, alpha, path = np.random.default_rng(seed), start, []
    for window, bowl in enumerate(nodes):
        path.append(alpha)
        move = policy.decide(bowl.window(alpha, float(window), rng))
        alpha = alpha if move is None else min(max(move.alpha, 0.0), 1.0)
    return np.array(path)
