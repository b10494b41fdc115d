"""What happens around a step: who waits for whom, who hears of a failure, what a callback may do."""

import threading
import time
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from helmrec.clock import ManualClock, MonotonicClock
from helmrec.engine.engine import Engine
from helmrec.engine.runner import Runner, Running, StepOutput
from helmrec.engine.scheduler import Batch
from helmrec.errors import ConfigError, DeadlineExceeded
from helmrec.types import RankResult
from tests.helpers import random_request, tiny_engine, tiny_model


def test_a_callback_may_update_rows_and_no_old_value_is_admitted_after_it() -> None:
    model = tiny_model()
    engine = tiny_engine(model, row_admission="always")
    request = random_request(np.random.default_rng(0), model.config, num_events=6)
    item = int(request.items[0])

    def update(_: "Future[RankResult]") -> None:
        engine.update_rows("item", [item], np.full((1, model.config.row_dim), 2.0))

    future = engine.submit(request)
    future.add_done_callback(update)
    engine.step()
    [again] = engine.rank([request])
    plain = engine._runner.score_without_caches(engine._intake.prepare(request))
    assert np.abs(again.scores - plain).max() <= 1e-5
    assert np.abs(again.scores - future.result().scores).max() > 1e-3


def test_a_callback_of_an_expired_request_may_submit_again() -> None:
    clock = ManualClock()
    engine = tiny_engine(clock=clock)
    request = random_request(np.random.default_rng(0), engine.model_config)
    retries: list[Future[RankResult]] = []
    future = engine.submit(random_request(np.random.default_rng(0), engine.model_config, deadline_ms=10))
    future.add_done_callback(lambda _: retries.append(engine.submit(request)))
    clock.advance(1)
    while engine.step():
        pass
    assert isinstance(future.exception(), DeadlineExceeded)
    engine.step()
    assert retries[0].result(timeout=0).scores.shape == (3, 2)


def test_one_time_users_in_one_batch_displace_no_returning_user() -> None:
    model = tiny_model()
    engine = tiny_engine(model, kv_admission="second-visit", max_batch_tokens=40, pool_bytes="80KiB", alpha=0.1)
    rng = np.random.default_rng(0)
    regulars = [random_request(rng, model.config, user, 8) for user in range(6)]
    for _ in range(2):
        for request in regulars:
            engine.rank([request])
    evicted = engine.stats().pool.kv_evicted_pages
    for first in range(100, 140, 4):
        engine.rank([random_request(rng, model.config, user, 8) for user in range(first, first + 4)])
    assert [result.reused_tokens for result in engine.rank(regulars)] == [9] * 6
    assert engine.stats().pool.kv_evicted_pages == evicted


def test_submitting_does_not_wait_for_a_running_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    engine = tiny_engine(model, MonotonicClock())
    requests = [random_request(np.random.default_rng(user), model.config, user) for user in range(2)]
    engine.rank(requests)
    run, started = Runner.launch, threading.Event()

    def slow(self: Runner, batch: Batch) -> Running:
        started.set()
        time.sleep(0.5)
        return run(self, batch)

    monkeypatch.setattr(Runner, "launch", slow)
    engine.submit(requests[0])
    stepping = threading.Thread(target=engine.step)
    stepping.start()
    started.wait()
    began = time.monotonic()
    waiting = engine.submit(requests[1])
    assert time.monotonic() - began < 0.25
    stepping.join()
    engine.step()
    assert waiting.result().timing.queue_ms > 100


def test_a_failure_of_background_work_fails_nobodys_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(Runner, "admit", fail)
    request = random_request(np.random.default_rng(0), engine.model_config, user_id=77)
    assert engine.rank([request])[0].scores.shape == (3, 2)
    assert engine.stats().background_failures == 1
    assert "background work failed" in caplog.text


def test_background_work_that_fails_keeps_no_other_from_its_turn_and_does_not_flood_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = tiny_engine(audit_every=1, miss_curves=True)

    def fail(*_: object) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(Runner, "admit", fail)
    rng = np.random.default_rng(0)
    for user_id in range(40):
        engine.rank([random_request(rng, engine.model_config, user_id)])
    stats = engine.stats()
    assert stats.audits == stats.background_failures == 40
    assert engine.settled_curves() is not None, "the curves were fed"
    assert len([record for record in caplog.records if "background work failed" in record.message]) == 1
    engine.close()


def test_one_clients_failing_step_does_not_reach_another(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    run, failures = Runner.launch, [RuntimeError("first batch")]

    def fail_first(self: Runner, batch: Batch) -> Running:
        if failures:
            raise failures.pop()
        return run(self, batch)

    rng = np.random.default_rng(0)
    others = [engine.submit(random_request(rng, engine.model_config, user)) for user in range(32)]  # a whole batch
    monkeypatch.setattr(Runner, "launch", fail_first)
    [mine] = engine.rank([random_request(rng, engine.model_config, 99)])
    assert mine.scores.shape == (3, 2)
    assert str(others[0].exception()) == "first batch"


def test_every_request_is_audited_if_asked_for() -> None:
    engine = tiny_engine(audit_every=1)
    rng = np.random.default_rng(0)
    engine.rank([random_request(rng, engine.model_config, user) for user in range(5)])
    assert engine.stats().audits == 5


def test_triton_without_a_card_is_a_named_error() -> None:
    with pytest.raises(ConfigError, match="triton needs device 'cuda'"):
        tiny_engine(kernels="triton")


def test_a_pool_that_cannot_be_had_is_a_named_error() -> None:
    with pytest.raises(ConfigError, match="pool_bytes"):
        tiny_engine(pool_bytes="500TiB")


def test_a_host_page_made_from_an_old_row_is_not_used_once_that_row_was_computed_anew() -> None:
    """The short request recomputes the changed event; the long one must not go on with pages made before it changed."""
    model = tiny_model()
    engine = tiny_engine(model, host_kv_bytes="64KiB", kv_reload="always", kv_admission="always")
    whole = random_request(np.random.default_rng(0), model.config, num_events=15)
    short = replace(
        whole,
        items=whole.items[:5],
        actions=whole.actions[:5],
        timestamps=whole.timestamps[:5],
        features={"category": whole.features["category"][:5]},
    )
    engine.rank([whole])
    engine._pool.kv.evict(100)
    engine.update_rows("item", [int(whole.items[2])], np.full((1, model.config.row_dim), 2.0))
    for request, result in zip((short, whole), engine.rank([short, whole]), strict=True):
        plain = engine._runner.score_without_caches(engine._intake.prepare(request))
        assert np.abs(result.scores - plain).max() <= 1e-5


def test_a_step_that_fails_takes_those_launched_on_top_of_it_along(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(overlap=True, max_batch_requests=1)
    rng = np.random.default_rng(0)
    futures = [engine.submit(random_request(rng, engine.model_config, 1)) for _ in range(3)]
    finish, failures = Runner.finish, [RuntimeError("lost")]

    def fail_first(self: Runner, running: Running) -> StepOutput:
        if failures:
            raise failures.pop()
        return finish(self, running)

    monkeypatch.setattr(Runner, "finish", fail_first)
    while engine.step():
        pass
    assert [str(future.exception()) for future in futures] == ["lost", "lost", "None"]
    assert engine.stats().steps == engine._pipeline.num_launched == 3
    assert engine.stats().served == 1
    engine.check()


def test_overlapping_steps_are_not_counted_twice_when_a_deadline_is_judged() -> None:
    clock = ManualClock()
    engine = tiny_engine(clock=clock, overlap=True, max_batch_requests=1)
    rng = np.random.default_rng(0)
    for user in range(40):
        engine.submit(random_request(rng, engine.model_config, user))
    while engine.step():
        clock.advance(0.01)
    assert engine._scheduler._times.request_ms == pytest.approx(10, rel=0.15)


def test_nothing_runs_after_close(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(overlap=True)
    future = engine.submit(random_request(np.random.default_rng(0), engine.model_config, 1))
    engine.step()
    engine.close()
    assert future.result(timeout=0).scores.shape == (3, 2)
    monkeypatch.setattr(Runner, "refill", lambda *_: pytest.fail("a refill after close"))
    engine.close()
    engine.check()


def test_what_a_step_takes_is_counted_from_the_end_of_the_one_before() -> None:
    clock = ManualClock()
    engine = tiny_engine(clock=clock, overlap=True, max_batch_requests=1)
    rng = np.random.default_rng(0)
    for user in range(3):
        engine.submit(random_request(rng, engine.model_config, user))
    took = []
    for _ in range(4):
        batch = engine._scheduler.next_batch(clock.now())
        clock.advance(0.01)
        took += [step.took_s for step in engine._pipeline.push(batch)]
    assert took == pytest.approx([0.02, 0.01, 0.01])
