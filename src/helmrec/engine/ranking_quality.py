"""How alike two rankings are, and how good one is where labels are known. Pure NumPy; it knows no models."""

import numpy as np
from numba import njit
from numpy.typing import NDArray

Values = NDArray[np.float64]


def top_overlap(one: Values, other: Values, num: int = 10) -> float:
    """Return the share of the first `num` candidates of one ranking that are also among those of the other."""
    num = min(num, one.size)
    first, second = (np.argsort(-scores, kind="stable")[:num] for scores in (one, other))
    return np.intersect1d(first, second).size / num


def kendall_tau(one: Values, other: Values) -> float | None:
    """Return Kendall's tau-b of two rankings; None if one of them has no two different scores."""
    agree, disagree, tied_one, tied_other = _count_pairs(one, other)
    total = one.size * (one.size - 1) // 2
    ordered = (total - tied_one) * (total - tied_other)
    return float((agree - disagree) / np.sqrt(float(ordered))) if ordered else None


@njit(cache=True)
def _count_pairs(one: Values, other: Values) -> tuple[int, int, int, int]:
    """Count pairs in the same and in opposite order, and those tied in each."""
    agree = disagree = tied_one = tied_other = 0
    for i in range(one.size):
        for j in range(i + 1, one.size):
            a, b = one[i] - one[j], other[i] - other[j]
            tied_one += a == 0
            tied_other += b == 0
            agree += (a > 0 and b > 0) or (a < 0 and b < 0)
            disagree += (a > 0 and b < 0) or (a < 0 and b > 0)
    return agree, disagree, tied_one, tied_other


def auc(scores: Values, labels: Values) -> float | None:
    """Return the probability that a candidate with a positive label scores higher than another; ties count half."""
    positive, negative = scores[labels > 0], np.sort(scores[labels <= 0])
    if not positive.size or not negative.size:
        return None
    below = np.searchsorted(negative, positive, "left") + np.searchsorted(negative, positive, "right")
    return float(below.mean() / 2 / negative.size)


def ndcg(scores: Values, labels: Values, num: int = 10) -> float | None:
    """Return the normalised discounted cumulative gain of the first `num` candidates; None without a positive label."""
    weights = 1 / np.log2(np.arange(min(num, scores.size)) + 2)
    best = float(np.sort(labels)[::-1][: weights.size] @ weights)
    if best <= 0:
        return None
    return float(labels[np.argsort(-scores, kind="stable")[: weights.size]] @ weights) / best
