"""Least squares of the relative error over steps: the moments of their work, and the terms that explain their time."""

import numba
import numpy as np

from helmrec.types import FloatArray


@numba.njit(cache=True, nogil=True)
def add_one(moments: FloatArray, target: FloatArray, work: FloatArray, took: float, scale: float) -> None:
    """Add one step to the moments of its work; its error is relative to `scale`."""
    weight = 1.0 / (scale * scale)
    for term in range(work.size):
        weighted = weight * work[term]
        target[term] += weighted * took
        for other in range(work.size):
            moments[term, other] += weighted * work[other]


@numba.njit(cache=True, nogil=True)
def fit(moments: FloatArray, target: FloatArray, ridge: float) -> FloatArray:
    """Least squares of the terms; those that come out negative are left out, and the others fitted again."""
    num, scale = target.size, np.sqrt(np.diag(moments))
    is_used = scale > 0
    while is_used.any():
        inverse = np.array([1 / scale[i] if is_used[i] else 0.0 for i in range(num)])
        rows = np.empty((num, num + 1))
        for i in range(num):
            for j in range(num):
                rows[i, j] = moments[i, j] * (inverse[i] * inverse[j]) if j != i else 1 + ridge
            rows[i, num] = target[i] * inverse[i]
        for i in range(num):  # elimination needs no pivots: positive definite
            for j in range(num):
                factor = rows[j, i] / rows[i, i] if j != i else 0.0
                for k in range(num + 1):
                    rows[j, k] -= factor * rows[i, k]
        terms = inverse * rows[:, num] / np.diag(rows)
        if (terms >= 0).all():
            return terms
        is_used &= terms >= 0
    return np.zeros(num)
