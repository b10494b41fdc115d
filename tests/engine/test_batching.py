"""Batch mates never influence each other's scores, and threads may share an engine."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from helmrec.types import RankRequest, RankResult
from tests.helpers import random_request, tiny_engine, tiny_model


def _requests(num: int) -> list[RankRequest]:
    rng = np.random.default_rng(1)
    config = tiny_model().config
    return [random_request(rng, config, user % 7, int(rng.integers(0, 30)), 1 + user % 8) for user in range(num)]


def test_a_request_scores_the_same_alone_and_in_any_batch() -> None:
    requests = _requests(24)
    alone = [tiny_engine().rank([request])[0].scores for request in requests]
    order = np.random.default_rng(2).permutation(len(requests))
    for max_batch in (1, 3, 24):
        engine = tiny_engine(pool_bytes="1MiB", max_batch_requests=max_batch)
        shuffled = engine.rank([requests[i] for i in order])
        for i, result in zip(order, shuffled, strict=True):
            assert np.abs(result.scores - alone[i]).max() <= 1e-5


def test_two_requests_of_one_user_in_a_batch_compute_the_new_tokens_once() -> None:
    engine = tiny_engine(pool_bytes="1MiB")
    [request] = _requests(1)
    first, second = engine.rank([request, request])
    assert first.reused_tokens == 0
    assert second.reused_tokens == len(request.items) + 1  # and the user's context token
    assert np.abs(first.scores - second.scores).max() <= 1e-5


def test_threads_that_share_an_engine_get_their_own_right_scores() -> None:
    requests = _requests(40)
    expected = [tiny_engine().rank([request])[0].scores for request in requests]
    engine = tiny_engine(pool_bytes="256KiB")

    def rank(i: int) -> RankResult:
        engine.move_alpha(0.1 + 0.6 * (i % 5) / 4)
        return engine.rank([requests[i]])[0]

    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(rank, range(40)))
    for result, scores in zip(results, expected, strict=True):
        assert np.abs(result.scores - scores).max() <= 1e-5
    engine.check()


def test_the_audit_scores_one_request_in_n_and_counts_what_differs() -> None:
    engine = tiny_engine(audit_every=4)
    for request in _requests(12):
        engine.rank([request])
    stats = engine.stats()
    assert (stats.audits, stats.audit_mismatches) == (3, 0)
    engine._arena.k_pages.fill_(3.0)  # every resident prefix is now wrong
    for request in _requests(12):
        engine.rank([request])
    assert engine.stats().audit_mismatches > 0
