"""Rows that are not finite, or too large for the model: their requests fail, and nobody else notices."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helmrec.config import RelayConfig
from helmrec.engine.engine import Engine
from helmrec.errors import NonFiniteScores
from helmrec.types import PrefillRequest, RankRequest
from tests.helpers import tiny_engine, tiny_geometry, tiny_model

BAD = 77
HISTORY = [1, 2, 3, 4, 5, 6, 7, BAD, 9]


def request_of(items: list[int], user: int = 1, candidates: tuple[int, ...] = (5, 6)) -> RankRequest:
    return RankRequest(
        user_id=user,
        items=items,
        actions=[1] * len(items),
        timestamps=list(range(100, 100 + len(items))),
        candidates=list(candidates),
        features={"category": [item % 20 for item in items]},
        candidate_features={"category": [item % 20 for item in candidates]},
        context={"country": 1, "hour": 2},
    )


def signal_of(rank: RankRequest) -> PrefillRequest:
    names = ("items", "actions", "timestamps", "features")
    history = {name: getattr(rank, name) for name in names}
    return PrefillRequest(rank.user_id, context={"country": 1}, num_candidates=2, **history)


def spoiled_engine(value: float = np.nan, **settings: Any) -> Engine:
    """An engine whose row BAD is not finite: on a CPU, tables that are in memory already are used as they are."""
    model = tiny_model()
    model.tables["item"][BAD] = value
    return tiny_engine(model, **{"kv_admission": "always", "alpha": 0.1, **settings})


def repair(engine: Engine) -> None:
    engine.update_rows("item", [BAD], tiny_model().tables["item"][[BAD]].numpy())


def assert_fresh(engine: Engine, *requests: RankRequest) -> None:
    """It scores these as an engine does that never saw a bad row."""
    for result, expected in zip(engine.rank(requests), tiny_engine().rank(requests), strict=True):
        np.testing.assert_allclose(result.scores, expected.scores, atol=1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_a_repaired_row_heals_every_history_that_read_it(value: float) -> None:
    engine = spoiled_engine(value)
    with pytest.raises(NonFiniteScores, match=r"2 of 2 candidates of user 1, the first at candidates\[0\]"):
        engine.rank([request_of(HISTORY)])
    assert_fresh(engine, request_of(HISTORY[:7]), request_of([*HISTORY[:7], 8]))
    repair(engine)
    assert_fresh(engine, request_of(HISTORY))
    engine.check()


def test_scores_that_are_not_finite_leave_no_prefix() -> None:
    engine = spoiled_engine(host_kv_bytes=20 * tiny_geometry(tiny_model().config).page_bytes)
    free = engine.stats().pool.free_pages
    with pytest.raises(NonFiniteScores):
        engine.rank([request_of(HISTORY)])
    stats = engine.stats()
    assert (stats.pool.resident_users, stats.pool.host_pages, stats.pool.free_pages) == (0, 0, free)
    assert (stats.served, stats.non_finite) == (0, 1)


def test_what_was_kept_before_the_bad_event_stays() -> None:
    engine = spoiled_engine()
    engine.rank([request_of(HISTORY[:7])])
    with pytest.raises(NonFiniteScores):
        engine.rank([request_of(HISTORY)])
    (again,) = engine.rank([request_of(HISTORY[:7])])
    assert again.reused_tokens == 8


@pytest.mark.parametrize("overlap", [False, True])
def test_batch_mates_of_a_request_that_fails_get_their_exact_scores(overlap: bool) -> None:
    engine = spoiled_engine(overlap=overlap, max_batch_requests=4)
    bad = [request_of(HISTORY), request_of([3, 4], user=2, candidates=(5, BAD))]
    good = [
        request_of(HISTORY[:6]),
        request_of([8, 9, 10], user=3),
        request_of([*HISTORY[:7], 8]),
        request_of([3, 4], 2),
    ]
    requests = [good[0], bad[0], good[1], bad[1], good[2], bad[0], good[3]]
    futures = [engine.submit(request) for request in requests]
    while engine.step():
        pass
    expected = tiny_engine().rank(good)
    scores = [future.result().scores for future in futures if future.exception() is None]
    for one, other in zip(scores, expected, strict=True):
        np.testing.assert_allclose(one, other.scores, atol=1e-5)
    assert [isinstance(future.exception(), NonFiniteScores) for future in futures] == [each in bad for each in requests]
    engine.check()
    repair(engine)
    assert_fresh(engine, *requests)


def test_a_candidate_that_is_not_finite_leaves_a_history_that_is_known_to_be_sound() -> None:
    engine = spoiled_engine()
    engine.rank([request_of([1, 2, 3, 4])])
    with pytest.raises(NonFiniteScores, match=r"1 of 2 candidates of user 1, the first at candidates\[1\]"):
        engine.rank([request_of([1, 2, 3, 4], candidates=(5, BAD))])
    (again,) = engine.rank([request_of([1, 2, 3, 4])])
    assert again.reused_tokens == 5


def test_a_history_computed_ahead_with_a_bad_row_fails_its_rank_and_is_dropped() -> None:
    page_bytes = tiny_geometry(tiny_model().config).page_bytes
    relay = RelayConfig(risk=0, chunk_tokens=4, max_compute=1.0)
    engine = spoiled_engine(relay=relay, host_kv_bytes=20 * page_bytes, kv_reload="always")
    rank = request_of(HISTORY)
    engine.rank([request_of(HISTORY[:2]), request_of(HISTORY[:2])])  # it has earned its pages, so they are saved
    assert engine.prefill(signal_of(rank)).verdict == "admitted"
    while engine.step():
        pass
    assert engine.stats().relay.failed == 0
    assert engine.stats().pool.host_pages == 2
    with pytest.raises(NonFiniteScores):
        engine.rank([rank])
    assert engine.stats().pool.host_pages == 0, "the host keeps pages that scores were not finite with"
    (again,) = engine.rank([request_of(HISTORY[:3])])
    assert again.reused_tokens == 3
    repair(engine)
    assert_fresh(engine, rank)
    engine.check()


def test_freed_pages_full_of_nan_harm_nobody_who_gets_them_next() -> None:
    engine = spoiled_engine()
    for user in range(20):  # so that every page has held them
        with pytest.raises(NonFiniteScores):
            engine.rank([request_of([BAD, *range(user, user + 14)], user=user)])
    assert_fresh(engine, *(request_of(list(range(user, user + 13)), user=100 + user) for user in range(5)))


def test_a_half_precision_model_that_overflows_fails_the_request_and_heals() -> None:
    model, row = tiny_model(dtype="float16", row_dtype="float16"), np.where(np.arange(16) % 2, 1, -1)[None]
    engine, fresh = (tiny_engine(each, kv_admission="always") for each in (model, replace(model, tables=copied(model))))
    request = request_of([1, 2, 3])
    engine.update_rows("item", [2], row * np.float32(60_000))
    with pytest.raises(NonFiniteScores):
        engine.rank([request])
    for each in (engine, fresh):
        each.update_rows("item", [2], row * np.float32(1))
    np.testing.assert_allclose(engine.rank([request])[0].scores, fresh.rank([request])[0].scores, atol=1e-2)


def copied(model: Any) -> dict[str, Any]:
    return {name: table.clone() for name, table in model.tables.items()}


def test_requests_that_failed_are_not_audited() -> None:
    engine = spoiled_engine(audit_every=1)
    with pytest.raises(NonFiniteScores):
        engine.rank([request_of(HISTORY)])
    engine.rank([request_of([1, 2])])
    stats = engine.stats()
    assert (stats.audits, stats.audit_mismatches, stats.background_failures) == (1, 0, 0)
