from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helmrec import DeadlineExceeded, Engine, EngineClosed, QueueFull, RankRequest, RequestError
from helmrec.clock import ManualClock
from helmrec.engine.runner import Runner, Running
from helmrec.engine.scheduler import Batch
from helmrec.memory.prefix_hash import chain
from helmrec.model.hstu import HstuModel
from helmrec.model.weights import LoadedModel
from tests.helpers import random_request, tiny_engine, tiny_model


def request(engine: Engine, user_id: int = 0, **overrides: object) -> RankRequest:
    return random_request(np.random.default_rng(user_id), engine.model_config, user_id=user_id, **overrides)  # type: ignore[arg-type]


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Users of every batch that runs, in order."""
    seen: list[list[int]] = []
    run = Runner.launch

    def record(self: Runner, batch: Batch) -> Running:
        seen.append([int(member.request.history.user_id) for member in batch.members])
        return run(self, batch)

    monkeypatch.setattr(Runner, "launch", record)
    return seen


def slow_steps(monkeypatch: pytest.MonkeyPatch, clock: ManualClock, seconds: float) -> None:
    """Every step takes this long by the clock."""
    run = Runner.launch

    def late(self: Runner, batch: Batch) -> Running:
        clock.advance(seconds)
        return run(self, batch)

    monkeypatch.setattr(Runner, "launch", late)


def test_requests_wait_until_a_step_runs(engine: Engine) -> None:
    future = engine.submit(request(engine))
    assert engine.stats().queue_length == 1
    assert not future.done()
    assert engine.step()
    assert future.result().scores.shape == (3, 2)
    assert not engine.step()


def test_a_full_queue_refuses_and_says_how_full(model: LoadedModel) -> None:
    engine = tiny_engine(model, queue_limit=2)
    waiting = [engine.submit(request(engine, user)) for user in range(2)]
    with pytest.raises(QueueFull, match="2 requests wait, the limit is 2"):
        engine.submit(request(engine, 2))
    assert engine.stats().refused == 1
    engine.step()
    assert all(future.done() for future in waiting)
    engine.submit(request(engine, 2))


def test_a_call_that_does_not_fit_the_queue_leaves_nothing_in_it(model: LoadedModel) -> None:
    engine = tiny_engine(model, queue_limit=2)
    with pytest.raises(QueueFull):
        engine.rank([request(engine, user) for user in range(3)])
    assert engine.stats().queue_length == 0


def test_the_requests_of_a_call_are_hashed_once_each(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counted(key: Any, seed: tuple[int, ...], *args: Any) -> Any:
        hashed.append(seed[0])
        return chain(key, seed, *args)

    monkeypatch.setattr("helmrec.engine.intake.chain", counted)
    futures = engine.submit_all([request(engine, user) for user in range(3)])
    engine.step()
    assert hashed == [0, 1, 2]
    assert all(future.done() for future in futures)


def test_a_call_with_a_wrong_request_queues_nothing_and_names_it(engine: Engine) -> None:
    with pytest.raises(RequestError) as caught:
        engine.submit_all([request(engine), replace(request(engine), user_id=-1)])
    assert (caught.value.field, engine.queue_length) == ("requests[1].user_id", 0)


def test_time_spent_before_the_engine_counts_against_the_deadline(engine: Engine, clock: ManualClock) -> None:
    timed = request(engine, deadline_ms=50.0)
    with pytest.raises(DeadlineExceeded, match=r"50\.0 ms after the request came in"):
        engine.submit_all([timed], spent_ms=50.0)
    [future] = engine.submit_all([timed], spent_ms=30.0)
    clock.advance(0.021)
    engine.step()
    with pytest.raises(DeadlineExceeded, match=r"the deadline passed after 21\.0 ms"):
        future.result(timeout=0)


def test_first_come_is_first_served(model: LoadedModel, sizes: list[list[int]]) -> None:
    engine = tiny_engine(model, max_batch_requests=2)
    engine.rank([request(engine, user) for user in (4, 3, 2, 1, 0)])
    assert sizes == [[4, 3], [2, 1], [0]]


def test_a_batch_stays_under_its_token_budget(model: LoadedModel, sizes: list[list[int]]) -> None:
    engine = tiny_engine(model, max_batch_tokens=22)  # 1 context + 5 events + 1 context + 3 candidates each
    engine.rank([request(engine, user) for user in range(5)])
    assert sizes == [[0, 1], [2, 3], [4]]


def test_a_request_larger_than_the_budget_runs_alone(model: LoadedModel, sizes: list[list[int]]) -> None:
    engine = tiny_engine(model, max_batch_tokens=5)
    engine.rank([request(engine, user) for user in range(2)])
    assert sizes == [[0], [1]]


def test_resident_tokens_do_not_count_against_the_budget(model: LoadedModel, sizes: list[list[int]]) -> None:
    engine = tiny_engine(model, max_batch_tokens=10)
    again = [request(engine, user) for user in range(2)]
    engine.rank(again)
    sizes.clear()
    engine.rank(again)
    assert sizes == [[0, 1]]


def test_requests_that_find_no_pages_wait_for_the_next_step(model: LoadedModel, sizes: list[list[int]]) -> None:
    engine = tiny_engine(model, alpha=0.6)  # 12 pages for KV, 5 per request
    results = engine.rank([request(engine, user, num_events=16) for user in range(5)])
    assert sizes == [[0, 1], [2, 3], [4]]
    assert [result.computed_tokens for result in results] == [1 + 16 + 1 + 3] * 5
    engine.check()


def test_a_request_whose_deadline_passed_in_the_queue_is_refused(engine: Engine, clock: ManualClock) -> None:
    late, patient = engine.submit(request(engine, 1, deadline_ms=50)), engine.submit(request(engine, 2))
    clock.advance(0.0501)
    engine.step()
    with pytest.raises(DeadlineExceeded, match=r"the deadline passed after 50\.1 ms in the queue"):
        late.result()
    assert patient.result().timing.queue_ms == pytest.approx(50.1)
    assert (engine.stats().refused, engine.stats().served) == (1, 1)


def test_a_request_just_in_time_is_served(engine: Engine, clock: ManualClock) -> None:
    future = engine.submit(request(engine, deadline_ms=500))
    clock.advance(0.5)
    engine.step()
    assert future.result().timing.queue_ms == 500


def test_the_engines_deadline_holds_for_requests_that_name_none(model: LoadedModel, clock: ManualClock) -> None:
    engine = tiny_engine(model, clock, deadline_ms=10.0)
    usual, own = engine.submit(request(engine, 1)), engine.submit(request(engine, 2, deadline_ms=1_000))
    clock.advance(0.1)
    engine.step()
    assert isinstance(usual.exception(), DeadlineExceeded)
    assert own.exception() is None


def test_rank_raises_what_its_request_was_refused_for(
    engine: Engine, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_steps(monkeypatch, clock, 1.0)
    blockers = [engine.submit(request(engine, user)) for user in range(40)]  # more than one batch
    with pytest.raises(DeadlineExceeded, match="deadline passed"):
        engine.rank([request(engine, 50, deadline_ms=100)])
    assert blockers[0].done()


def test_a_deadline_that_cannot_be_met_is_refused_at_once(
    engine: Engine, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_steps(monkeypatch, clock, 1.0)
    for _ in range(50):
        engine.rank([request(engine)])  # from the first, which came as a surprise, some caution is left
    engine.submit(request(engine, 1))
    with pytest.raises(DeadlineExceeded, match=r"900 ms is unlikely to be met: 1 requests wait, about 21\d\d"):
        engine.submit(request(engine, 2, deadline_ms=900))
    engine.submit(request(engine, 3, deadline_ms=5_000))
    assert (engine.stats().refused, engine.stats().queue_length) == (1, 2)


def test_a_request_whose_deadline_would_pass_in_the_step_makes_room_for_those_that_can_meet_theirs(
    engine: Engine, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_steps(monkeypatch, clock, 1.0)
    for _ in range(60):
        engine.rank([request(engine)])
    tight, easy = engine.submit(request(engine, 1, deadline_ms=1_500)), engine.submit(request(engine, 2))
    clock.advance(0.6)
    engine.step()
    with pytest.raises(DeadlineExceeded, match=r"would pass in a step of about 103\d\.\d ms, 600\.0 ms in the queue"):
        tight.result()
    assert easy.done()
    alone = engine.submit(request(engine, 3, deadline_ms=1_500))
    clock.advance(0.6)
    engine.step()
    assert alone.exception() is None, "an idle engine always tries"


def test_the_step_that_runs_counts_when_a_deadline_is_judged(
    engine: Engine, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_steps(monkeypatch, clock, 1.0)
    for _ in range(90):
        engine.rank([request(engine)])
    launch, told = Runner.launch, list[str]()

    def launch_while_others_come(self: Runner, batch: Batch) -> Running:
        clock.advance(0.1)
        for deadline_ms in (1_500, 2_500):
            try:
                engine.submit(request(engine, deadline_ms, deadline_ms=deadline_ms))
            except DeadlineExceeded as error:
                told.append(str(error))
        return launch(self, batch)

    engine.submit(request(engine, 1))
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "launch", launch_while_others_come)
        engine.step()
    assert len(told) == 1
    assert "a deadline of 1500 ms is unlikely to be met: 0 requests wait, about 19" in told[0]
    engine.step()
    assert engine.stats().refused == 1
    engine.submit(request(engine, 2, deadline_ms=1_500))
    assert engine.stats().queue_length == 1, "nothing runs: there is time"


def test_a_step_whose_time_varies_is_not_promised_by_its_mean(
    engine: Engine, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds in [0.5, 1.5] * 40:
        with monkeypatch.context() as patch:
            slow_steps(patch, clock, seconds)
            engine.rank([request(engine)])
    engine.submit(request(engine, 1))
    with pytest.raises(DeadlineExceeded, match=r"1 requests wait, about 4\d\d\d"):
        engine.submit(request(engine, 2, deadline_ms=2_500))


def test_a_failed_step_is_not_waited_for(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_once(monkeypatch)
    failed = engine.submit(request(engine, 1))
    engine.step()
    assert failed.exception() is not None
    assert engine._scheduler._in_flight == []


def test_an_engine_that_was_slow_once_does_not_refuse_for_ever(
    engine: Engine, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        slow_steps(patch, clock, 2.0)  # a first step that compiles
        engine.rank([request(engine)])
    refused = 0
    for _ in range(100):
        clock.advance(1.0)
        try:
            engine.rank([request(engine, deadline_ms=100)])
        except DeadlineExceeded:
            refused += 1
    assert refused < 100


def fail_once(monkeypatch: pytest.MonkeyPatch) -> None:
    head, failures = HstuModel.head, [RuntimeError("the model failed")]

    def head_or_fail(self: HstuModel, *args: Any) -> object:
        if failures:
            raise failures.pop()
        return head(self, *args)

    monkeypatch.setattr(HstuModel, "head", head_or_fail)


def test_a_failed_step_fails_its_requests_and_the_next_serves_right(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, twin = tiny_engine(model), tiny_engine(model)
    short, long = request(engine, 1, num_events=5), request(engine, 1, num_events=9)
    engine.rank([short])
    twin.rank([short])
    free = engine.stats().pool.free_pages
    futures = [engine.submit(r) for r in (long, request(engine, 2), long)]
    with monkeypatch.context() as patch:
        fail_once(patch)
        assert engine.step()
    assert [str(future.exception()) for future in futures] == ["the model failed"] * 3
    engine.check()
    assert (engine.stats().pool.free_pages, engine.stats().served) == (free, 1)
    for r in (long, request(engine, 2), short):
        [result], [expected] = engine.rank([r]), twin.rank([r])
        assert result.reused_tokens == expected.reused_tokens
        np.testing.assert_allclose(result.scores, expected.scores, atol=1e-5)
    engine.check()


def test_rank_raises_the_error_of_its_step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_once(monkeypatch)
    with pytest.raises(RuntimeError, match="the model failed"):
        engine.rank([request(engine)])
    engine.check()
    assert engine.rank([request(engine)])[0].reused_tokens == 0


def test_a_cancelled_request_does_not_take_its_batch_mates_with_it(engine: Engine) -> None:
    cancelled, mate = engine.submit(request(engine, 1)), engine.submit(request(engine, 2))
    cancelled.cancel()
    engine.step()
    assert mate.result(timeout=0).scores.shape == (3, 2)


def test_closing_refuses_everything_that_waits(model: LoadedModel) -> None:
    engine = tiny_engine(model)
    futures = [engine.submit(request(engine, user)) for user in range(3)]
    engine.close()
    assert all(isinstance(future.exception(), EngineClosed) for future in futures)
    assert engine.stats().queue_length == 0


def test_ranking_nothing_is_nothing(engine: Engine) -> None:
    assert engine.rank([]) == []
    assert engine.stats().steps == 0


def test_every_result_goes_to_its_own_request(model: LoadedModel) -> None:
    together, alone = tiny_engine(model), tiny_engine(model)
    requests = [request(together, user, num_events=user, num_candidates=1 + user) for user in range(6)]
    for result, one in zip(together.rank(requests), requests, strict=True):
        np.testing.assert_allclose(result.scores, alone.rank([one])[0].scores, atol=1e-5)


def test_an_audit_scores_one_request_in_n_again_and_agrees() -> None:
    engine = tiny_engine(tiny_model(), audit_every=3)
    for user in range(10):
        engine.rank([request(engine, user % 4, num_events=user)])
    stats = engine.stats()
    assert (stats.audits, stats.audit_mismatches) == (3, 0)
    assert stats.audit_max_error < 1e-5


def test_an_audit_tells_of_wrong_scores(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(Runner, "score_without_caches", lambda *_: np.full((3, 2), 100.0, np.float32))
    engine = tiny_engine(tiny_model(), audit_every=1)
    engine.rank([request(engine, 5)])
    assert engine.stats().audit_mismatches == 1
    assert "scores of user 5 differ" in caplog.text


def test_unmatched_histories_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = tiny_engine(tiny_model(user_context=()))
    rng = np.random.default_rng(0)
    for _ in range(80):
        engine.rank([random_request(rng, engine.model_config, user_id=1)])
    assert caplog.text.count("must set first_event") == 1
