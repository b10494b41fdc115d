"""Prefixes computed ahead: while no request waits, held until their rank, and never a wrong score."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helmrec.clock import ManualClock
from helmrec.config import EngineConfig, RelayConfig
from helmrec.engine.engine import Engine
from helmrec.engine.relay import pre_inference, trigger
from helmrec.engine.relay.trigger import Verdict
from helmrec.engine.scheduler import Batch
from helmrec.errors import ConfigError, EngineClosed, RequestError
from helmrec.model.weights import LoadedModel
from helmrec.types import PrefillRequest, RankRequest
from tests.helpers import tiny_engine, tiny_geometry, tiny_model

EAGER = RelayConfig(risk=0, chunk_tokens=4, max_compute=1.0, hold_ms=1_000)


def rank_of(user: int, num_events: int, num_candidates: int = 3) -> RankRequest:
    rng = np.random.default_rng(user)
    items = rng.integers(0, 300, num_events)
    candidates = rng.integers(0, 300, num_candidates)
    return RankRequest(
        user_id=user,
        items=items,
        actions=items % 4,
        timestamps=np.arange(num_events),
        candidates=candidates,
        features={"category": items % 20},
        candidate_features={"category": candidates % 20},
        context={"country": 1, "hour": 3},
    )


def signal_of(rank: RankRequest, **settings: Any) -> PrefillRequest:
    return PrefillRequest(
        user_id=rank.user_id,
        items=rank.items,
        actions=rank.actions,
        timestamps=rank.timestamps,
        features=rank.features,
        context={"country": rank.context["country"]},
        num_candidates=len(rank.candidates),
        **settings,
    )


def make_engine(model: LoadedModel | None = None, **settings: Any) -> tuple[Engine, ManualClock]:
    clock = ManualClock()
    return tiny_engine(model, clock, **{"relay": EAGER, "alpha": 0.1, **settings}), clock


def finish(engine: Engine) -> int:
    num_steps = 0
    while engine.step():
        num_steps += 1
    return num_steps


def test_a_rank_finds_all_its_history_computed_and_scores_as_it_would_without() -> None:
    (engine, _), (other, _) = make_engine(), make_engine()
    rank = rank_of(user=1, num_events=13)
    result = engine.prefill(signal_of(rank))
    assert result.verdict == "admitted"
    assert result.lease is not None
    assert result.lease.user_id == 1
    assert result.lease.expires_s == pytest.approx(1.0)
    assert finish(engine) == 4, "fourteen tokens in chunks of four"
    assert engine.stats().served == 0, "no request was served yet"
    (ranked,), (expected,) = engine.rank([rank]), other.rank([rank])
    assert ranked.reused_tokens == 14
    np.testing.assert_allclose(ranked.scores, expected.scores, atol=1e-6)
    stats = engine.stats().relay
    assert (stats.leases, stats.held_pages, stats.used, stats.expired) == (0, 0, 1, 0)
    engine.check()


def test_ranks_go_first() -> None:
    engine, _ = make_engine()
    engine.prefill(signal_of(rank_of(1, 13)))
    future = engine.submit(rank_of(2, 5))
    engine.step()
    assert future.done()
    assert engine._pool.kv.num_users <= 1
    finish(engine)
    assert engine.rank([rank_of(1, 13)])[0].reused_tokens == 14


def test_one_chunk_at_most_is_ahead_of_a_rank_where_steps_overlap() -> None:
    engine, _ = make_engine(overlap=True)
    engine.prefill(signal_of(rank_of(1, 13)))
    engine.step()
    assert engine._pipeline.is_ahead
    engine.step()
    assert engine._pipeline.is_empty, "the next chunk waits for this one's end, when ranks are asked for first"
    engine.step()
    future = engine.submit(rank_of(2, 5))
    engine.step()  # ends the chunk and launches the rank
    engine.step()
    assert future.done()


def test_short_prefixes_share_a_step() -> None:
    engine, _ = make_engine(relay=RelayConfig(risk=0, chunk_tokens=20, max_held=1.0, max_compute=1.0))
    for user in (1, 2, 3):
        engine.prefill(signal_of(rank_of(user, 7)))
    assert finish(engine) == 2, "seven tokens of each and one of the request"
    ranks = [rank_of(user, 7) for user in (1, 2, 3)]
    assert [result.reused_tokens for result in engine.rank(ranks)] == [7, 7, 7], "the last of eight ends a page"
    stats = engine.stats()
    assert stats.relay.steps == 2
    assert stats.served == 3
    engine.check()


def test_a_signal_may_come_while_a_step_runs_and_the_next_one_decides() -> None:
    engine, _ = make_engine()
    with engine._lock:  # as a running step holds it
        future = engine.submit_prefill(signal_of(rank_of(1, 13)))
        assert not future.done()
    engine.step()
    assert future.result(timeout=0).verdict == "admitted"
    pool = engine.stats().pool
    assert (pool.leases, pool.leased_pages) == (1, 4)
    waiting = engine.submit_prefill(signal_of(rank_of(2, 13)))
    engine.close()
    with pytest.raises(EngineClosed):
        waiting.result(timeout=0)
    with pytest.raises(EngineClosed):
        engine.submit_prefill(signal_of(rank_of(3, 13)))


def test_a_signal_that_cannot_be_decided_fails_alone_and_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    (engine, _), decide, failures = make_engine(), trigger.decide, [RuntimeError("undecided")]

    def fails_once(*args: Any) -> Verdict:
        if failures:
            raise failures.pop()
        return decide(*args)

    monkeypatch.setattr(pre_inference, "decide", fails_once)
    first, second = (engine.submit_prefill(signal_of(rank_of(user, 13))) for user in (1, 2))
    rank = engine.submit(rank_of(3, 5))
    engine.step()
    with pytest.raises(RuntimeError, match="undecided"):
        first.result(timeout=0)
    assert second.result(timeout=0).verdict is not None
    assert rank.result(timeout=0).scores.size
    assert engine.stats().background_failures == 1
    engine.check()


def test_signals_whose_leases_cannot_be_ended_are_refused_and_no_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no end")

    engine, _ = make_engine()
    monkeypatch.setattr(pre_inference.Relay, "expire", fail)
    signal, rank = engine.submit_prefill(signal_of(rank_of(1, 13))), engine.submit(rank_of(3, 5))
    engine.step()
    with pytest.raises(RuntimeError, match="no end"):
        signal.result(timeout=0)
    assert rank.result(timeout=0).scores.size
    assert engine.stats().background_failures == 1


def test_signals_that_come_faster_than_steps_are_not_looked_at() -> None:
    engine, _ = make_engine(relay=EAGER.model_copy(update={"max_leases": 2, "max_held": 0.5}))
    futures = [engine.submit_prefill(signal_of(rank_of(user, 13))) for user in range(1, 5)]
    assert [future.done() for future in futures] == [False, False, True, True]
    engine.step()
    assert [future.result(timeout=0).verdict for future in futures] == ["admitted", "admitted", "too busy", "too busy"]
    assert engine.stats().relay.verdicts["too busy"] == 2


def test_a_history_that_the_host_holds_whole_is_brought_back_ahead_of_its_rank() -> None:
    model = tiny_model(user_context=(), request_context=())
    page_bytes = tiny_geometry(model.config).page_bytes
    engine, _ = make_engine(model=model, host_kv_bytes=40 * page_bytes, kv_reload="always", kv_admission="always")
    rank = replace(rank_of(1, 12), context={})
    (first,) = engine.rank([rank])
    engine._pool.kv.evict(1_000)
    engine.prefill(replace(signal_of(rank_of(1, 12)), context={}))
    finish(engine)
    stats = engine.stats()
    assert stats.relay.failed == 0
    assert stats.pool.host_reloaded_pages == 2, "the page it ends with is left to the rank"
    (again,) = engine.rank([rank])
    assert again.reused_tokens == 12
    assert engine.stats().pool.host_reloaded_pages == 3
    np.testing.assert_allclose(again.scores, first.scores, atol=1e-6)


def test_what_nobody_has_asked_for_twice_is_not_saved() -> None:
    model = tiny_model()
    page_bytes = tiny_geometry(model.config).page_bytes
    engine, _ = make_engine(model=model, host_kv_bytes=40 * page_bytes, kv_admission="second-visit")
    for user in range(2, 8):  # so that there is no room for who has not earned it
        engine.rank([rank_of(user, 15), rank_of(user, 15)])
    for visit, num_saved in ((1, 0), (2, 4)):
        before = engine.stats().pool.host_saved_pages
        engine.prefill(signal_of(rank_of(1, 15)))
        finish(engine)
        assert engine.stats().pool.host_saved_pages == before, "no rank request has arrived yet"
        engine.rank([rank_of(1, 15)])
        finish(engine)
        assert engine.stats().pool.host_saved_pages == before + num_saved, f"visit {visit}"
    engine.check()


def test_a_history_of_no_events_has_nothing_to_compute() -> None:
    engine, _ = make_engine()
    assert engine.prefill(signal_of(rank_of(1, 0))).verdict == "resident"
    assert finish(engine) == 0


def test_what_is_held_outlives_what_is_not_until_its_lease_ends() -> None:
    engine, clock = make_engine(kv_admission="always")
    engine.prefill(signal_of(rank_of(1, 15)))
    finish(engine)
    for user in range(2, 14):
        engine.rank([rank_of(user, 15)])
    assert engine.stats().pool.kv_evicted_pages > 0
    assert engine._pool.kv.resident_tokens(engine._intake.prepare(rank_of(1, 15)).history) == 15
    clock.advance(2.0)
    engine.step()
    assert engine.stats().relay.expired == 1
    engine.rank([rank_of(20, 15)])
    assert engine._pool.kv.resident_tokens(engine._intake.prepare(rank_of(1, 15)).history) < 15, "it went first"
    engine.check()


def test_a_user_who_comes_once_does_not_stay_because_of_a_signal() -> None:
    engine, _ = make_engine(kv_admission="second-visit")
    for user in range(2, 8):
        engine.rank([rank_of(user, 15)])
        engine.rank([rank_of(user, 15)])
    engine.prefill(signal_of(rank_of(1, 15)))
    finish(engine)
    engine.rank([rank_of(1, 15)])
    assert next(iter(engine._pool.kv._order.values())).user_id == 1, "its pages are the next to go"


def test_a_signal_is_refused_with_its_reason() -> None:
    engine, _ = make_engine(relay=RelayConfig(risk=0, chunk_tokens=4, max_held=0.2, max_compute=1.0))
    first = engine.prefill(signal_of(rank_of(1, 13)))
    assert first.verdict == "admitted"
    assert engine.prefill(signal_of(rank_of(1, 13))).verdict == "held already"
    assert engine.prefill(signal_of(rank_of(2, 15))).verdict == "no room"
    calm, _ = make_engine(relay=RelayConfig())
    assert calm.prefill(signal_of(rank_of(1, 13))) == replace(first, verdict="not at risk", lease=None)
    assert calm.stats().relay.verdicts["not at risk"] == 1
    assert finish(calm) == 0


def test_a_forgotten_user_has_no_lease() -> None:
    engine, _ = make_engine()
    engine.prefill(signal_of(rank_of(1, 13)))
    engine.step()
    engine.forget(1)
    assert finish(engine) == 0
    assert engine.stats().relay.leases == 0
    assert engine.rank([rank_of(1, 13)])[0].reused_tokens == 0


def test_a_user_who_is_forgotten_while_a_signal_waits_stays_forgotten() -> None:
    engine, _ = make_engine()
    of_one, of_other = (engine.submit_prefill(signal_of(rank_of(user, 13))) for user in (1, 2))
    engine.forget(1)
    finish(engine)
    assert of_one.result(timeout=0).verdict == "forgotten"
    assert of_one.result().lease is None
    assert of_other.result(timeout=0).verdict == "admitted"
    assert list(engine._pool.kv._users) == [2]
    assert engine.stats().relay.verdicts["forgotten"] == 1


def test_a_signal_submitted_while_the_engine_closes_fails() -> None:
    engine, _ = make_engine()
    history = engine._intake.prepare_ahead(signal_of(rank_of(1, 13)))
    engine.close()
    late = engine._relay.submit(signal_of(rank_of(1, 13)), history)  # its caller had looked before
    with pytest.raises(EngineClosed):
        late.result(timeout=0)


@pytest.mark.parametrize(
    ("asked_ms", "granted_ms"), [(1e15, 4_000), (float("inf"), 4_000), (3_999, 3_999), (None, 1_000)]
)
def test_no_prefix_is_held_longer_than_the_bound_and_the_lease_says_so(
    asked_ms: float | None, granted_ms: float
) -> None:
    engine, clock = make_engine(relay=EAGER.model_copy(update={"max_hold_ms": 4_000}))
    lease = engine.prefill(signal_of(rank_of(1, 13), hold_ms=asked_ms)).lease
    assert lease is not None
    assert (lease.hold_ms, lease.is_shortened) == (granted_ms, asked_ms is not None and asked_ms > granted_ms)
    finish(engine)
    clock.advance(granted_ms / 1e3 - 0.01)
    engine.step()
    assert engine.stats().relay.leases == 1
    clock.advance(0.02)
    engine.step()
    assert engine.stats().relay.leases == 0


def test_a_lease_is_dropped_once_what_was_computed_for_it_does_not_stay() -> None:
    engine, _ = make_engine(relay=EAGER.model_copy(update={"max_held": 1.0}))
    for user in (1, 2):
        assert engine.prefill(signal_of(rank_of(user, 16))).verdict == "admitted"
    engine.step()
    engine.move_alpha(engine._pool.alpha_max)  # leaves the pages of one request, one of which is the next step's
    engine.settle()
    assert sum(engine.step() for _ in range(50)) < 12
    stats = engine.stats().relay
    assert (stats.lost, stats.leases, stats.held_pages) == (2, 0, 0)
    assert stats.failed == 0
    assert engine.rank([rank_of(1, 16)])[0].reused_tokens <= 16
    engine.check()


def test_rows_that_change_while_a_prefix_is_computed_cost_no_lease() -> None:
    engine, _ = make_engine(kv_admission="always")
    rank = rank_of(1, 13)
    engine.prefill(signal_of(rank))
    for _ in range(3):
        engine.step()
        engine.update_rows("item", [int(rank.items[0])], np.ones((1, 16)))
    finish(engine)
    assert (engine.stats().relay.lost, engine.stats().relay.leases) == (0, 1)
    assert engine.rank([rank])[0].reused_tokens == 14


def test_what_a_lease_of_before_wanted_is_not_computed_for_the_next() -> None:
    engine, clock = make_engine()
    old, new = rank_of(1, 13), replace(rank_of(2, 6), user_id=1)
    engine.prefill(signal_of(old))
    clock.advance(2.0)
    assert engine.prefill(signal_of(new)).verdict == "admitted", "the first has expired"
    finish(engine)
    assert engine._pool.kv.resident_tokens(engine._intake.prepare(old).history) == 1, "the user's own token at most"
    assert engine.rank([new])[0].reused_tokens == 7


def test_a_history_whose_only_event_ends_a_page_is_left_to_its_rank() -> None:
    engine, _ = make_engine(page_tokens=2)
    assert engine.prefill(signal_of(rank_of(1, 1))).verdict == "resident", "nothing is to be computed"
    assert finish(engine) == 0
    assert engine.rank([rank_of(1, 1)])[0].computed_tokens == 2 + 1 + 3


def test_a_chunk_of_pages_of_one_token_that_the_host_holds_computes_an_event_all_the_same() -> None:
    model = tiny_model(user_context=(), request_context=())
    page_bytes = tiny_geometry(model.config, 1).page_bytes
    settings = {"page_tokens": 1, "pool_bytes": 60 * page_bytes, "host_kv_bytes": 40 * page_bytes}
    engine, _ = make_engine(model, kv_reload="always", kv_admission="always", **settings)
    rank = replace(rank_of(1, 6), context={})
    (first,) = engine.rank([rank])
    engine._pool.kv.evict(1_000)
    engine.prefill(replace(signal_of(rank_of(1, 6)), context={}))
    finish(engine)
    assert (engine.stats().relay.failed, engine.stats().relay.leases) == (0, 1)
    (again,) = engine.rank([rank])
    assert again.reused_tokens >= 5
    np.testing.assert_allclose(again.scores, first.scores, atol=1e-6)


def test_chunks_of_several_users_stay_within_a_step_even_if_what_is_resident_is_not_fresh() -> None:
    relay = RelayConfig(risk=0, chunk_tokens=18, max_held=1.0, max_compute=1.0)
    engine, _ = make_engine(relay=relay, max_batch_tokens=20, kv_admission="always")
    steps, launch = [], engine._runner.launch

    def note(batch: Batch) -> Any:
        steps.append([member.num_tokens for member in batch.members])
        return launch(batch)

    engine.rank([rank_of(2, 12)])
    engine.update_rows("item", [int(rank_of(2, 12).items[0])], np.ones((1, 16)))
    engine._runner.launch = note  # type: ignore[method-assign]
    for user, num_events in ((1, 12), (2, 14)):
        engine.prefill(signal_of(rank_of(user, num_events)))
    finish(engine)
    assert steps == [[14], [15]], "three tokens seemed to be missing of the second prefix, and fourteen were"


def test_chunks_larger_than_a_step_are_refused_when_configured() -> None:
    with pytest.raises(ConfigError, match=r"^relay.chunk_tokens must be at most max_batch_tokens \(40\), got 41$"):
        tiny_engine(max_batch_tokens=40, relay=RelayConfig(chunk_tokens=41))
    assert EngineConfig(pool_bytes="1MiB", max_batch_tokens=40).chunk_tokens == 40
    assert EngineConfig(pool_bytes="1MiB").chunk_tokens == 8_192


def test_what_was_forgotten_is_not_computed_for_a_later_signal_of_the_same_user() -> None:
    engine, _ = make_engine()
    old, new = rank_of(1, 13), replace(rank_of(2, 6), user_id=1)
    engine.prefill(signal_of(old))
    engine.forget(1)
    assert engine.prefill(signal_of(new)).verdict == "admitted"
    finish(engine)
    assert engine._pool.kv.resident_tokens(engine._intake.prepare(old).history) == 1, "the user's own token at most"
    assert engine.rank([new])[0].reused_tokens == 7


@pytest.mark.parametrize(
    ("changed", "field"),
    [({"num_candidates": 9}, "num_candidates"), ({"budget_ms": -1}, "budget_ms"), ({"hold_ms": 0}, "hold_ms")],
)
def test_errors_of_bad_signals_name_the_field(changed: dict[str, Any], field: str) -> None:
    engine, _ = make_engine()
    with pytest.raises(RequestError, match=field):
        engine.prefill(replace(signal_of(rank_of(1, 5)), **changed))
    with pytest.raises(RequestError, match="hour"):
        engine.prefill(replace(signal_of(rank_of(1, 5)), context={"country": 1, "hour": 2}))


def test_a_busy_engine_sees_more_ranks_at_risk() -> None:
    engine, clock = make_engine(relay=RelayConfig(risk=0.5, budget_ms=10, max_compute=1.0))
    for _ in range(3):
        engine._relay._costs.observe(20, 0.0, 3e-3)  # a step of 3 ms, whatever it holds
    assert engine.prefill(signal_of(rank_of(1, 13))).verdict == "not at risk"
    engine._relay.note_step(Batch([], 0.0), took_s=0.6, now=clock.now())
    assert engine.prefill(signal_of(rank_of(1, 13))).verdict == "admitted", "3 ms, where 0.6 of the time is taken"
