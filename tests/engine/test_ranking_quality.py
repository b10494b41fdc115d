"""Measures of rankings against definitions written out."""

import itertools

import numpy as np
import pytest

from helmrec.engine.ranking_quality import auc, kendall_tau, ndcg, top_overlap


def test_equal_rankings_agree_wholly_and_reversed_ones_not_at_all() -> None:
    scores = np.arange(30.0)
    assert top_overlap(scores, 2 * scores + 1) == 1
    assert top_overlap(scores, -scores) == 0
    assert kendall_tau(scores, 3 * scores) == pytest.approx(1)
    assert kendall_tau(scores, -scores) == pytest.approx(-1)
    assert kendall_tau(scores, np.ones(30)) is None


def test_tau_and_auc_count_pairs(rng: np.random.Generator) -> None:
    one, other = rng.integers(0, 6, (2, 40)).astype(float)
    labels = rng.integers(0, 2, 40).astype(float)
    pairs = list(itertools.combinations(range(40), 2))
    signs = [(np.sign(one[i] - one[j]), np.sign(other[i] - other[j])) for i, j in pairs]
    untied = [sum(pair[side] != 0 for pair in signs) for side in (0, 1)]
    assert kendall_tau(one, other) == pytest.approx(sum(a * b for a, b in signs) / np.sqrt(untied[0] * untied[1]))
    wins = [(one[i] > one[j]) + 0.5 * (one[i] == one[j]) for i in range(40) for j in range(40) if labels[i] > labels[j]]
    assert auc(one, labels) == pytest.approx(np.mean(wins))
    assert auc(one, np.ones(40)) is None


def test_ndcg_looks_at_the_first_ten() -> None:
    scores, labels = -np.arange(20.0), np.zeros(20)
    assert ndcg(scores, labels) is None
    labels[2] = 1
    assert ndcg(scores, labels) == pytest.approx(0.5)
    labels[2], labels[12] = 0, 1
    assert ndcg(scores, labels) == 0
    assert top_overlap(scores[:3], scores[:3]) == 1, "fewer than ten candidates"
