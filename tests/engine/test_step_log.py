"""What the engine says of its steps: one record each, whose work is that of their results."""

from typing import Any

import numpy as np
import pytest

from helmrec.clock import ManualClock, MonotonicClock
from helmrec.config import RelayConfig
from helmrec.engine.engine import Engine
from helmrec.engine.runner import Runner, Running, StepOutput
from helmrec.engine.warm_up import warm_up
from helmrec.memory.host_pages import HostPages
from helmrec.model.hstu import HstuModel
from helmrec.steps import Step, Steps
from helmrec.types import RankResult
from tests.engine.relay.test_pre_inference import finish, rank_of, signal_of
from tests.helpers import random_request, tiny_engine, tiny_model

HOST_TIER: dict[str, Any] = {"host_kv_bytes": "64KiB", "kv_reload": "always", "kv_admission": "always"}


def rank_many(engine: Engine, num_rounds: int = 12) -> list[RankResult]:
    """Users that come back with longer histories, several to a step, after their pages were evicted."""
    rng = np.random.default_rng(0)
    whole = {user: random_request(rng, engine.model_config, user, 15) for user in range(4)}
    results = []
    for i in range(num_rounds):
        length = 4 + i % 12
        requests = [
            random_request(
                rng,
                engine.model_config,
                user,
                num_candidates=1 + (i + user) % 4,
                items=each.items[:length],
                actions=each.actions[:length],
                timestamps=each.timestamps[:length],
                features={"category": each.features["category"][:length]},
                context=each.context,
            )
            for user, each in whole.items()
        ]
        results += engine.rank(requests)
        if i % 3 == 2:
            engine._pool.kv.evict(1_000)
    return results


def num_pairs(result: RankResult, num_candidates: int, total: int) -> float:
    """As the simulator counts them: every new token looks back, candidates and request context at the history."""
    others = num_candidates + 1
    new, resident = result.computed_tokens - others, result.reused_tokens
    return new * (resident + new / 2) + others * total


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("row_index", ["host", "device"])
def test_columns_add_up_to_what_results_and_pool_say(row_index: str, overlap: bool) -> None:
    settings = {"row_index": row_index, "overlap": overlap, "max_batch_requests": 3, **HOST_TIER}
    with tiny_engine(clock=MonotonicClock(), **settings) as engine:
        results = rank_many(engine)
        stats, steps = engine.stats(), engine.take_steps()
    assert len(steps) == stats.steps
    sums = steps.sum(axis=0)
    assert sums[Step.REQUESTS] == len(results) == stats.served
    assert sums[Step.TOKENS] == sum(result.computed_tokens for result in results)
    assert sums[Step.ROWS_MISSED] == sum(result.row_misses for result in results) == stats.pool.row_misses
    assert sums[Step.ROWS_READ] == stats.pool.row_misses + stats.pool.row_hits
    assert sums[Step.PAGES_RELOADED] == stats.pool.host_reloaded_pages > 0
    assert np.isfinite(steps).all()


def test_pairs_are_counted_as_the_simulator_counts_them() -> None:
    with tiny_engine(kv_admission="always") as engine:
        rng = np.random.default_rng(0)
        request = random_request(rng, engine.model_config, num_events=9, num_candidates=5)
        for expected_new in (10, 0):
            (result,) = engine.rank([request])
            (step,) = engine.take_steps()
            assert step[Step.TOKENS] == expected_new + 6
            assert step[Step.PAIRS] == num_pairs(result, num_candidates=5, total=10)
        assert step[Step.PAIRS] == 6 * 10, "candidates and the request's own context look at a history that is there"


def test_pairs_of_a_step_are_those_of_its_requests() -> None:
    with tiny_engine(max_batch_requests=8) as engine:
        rng = np.random.default_rng(0)
        sizes = [(5, 3), (12, 1), (0, 8)]
        requests = [
            random_request(rng, engine.model_config, user, num_events, num_candidates)
            for user, (num_events, num_candidates) in enumerate(sizes)
        ]
        results = engine.rank(requests)
        (step,) = engine.take_steps()
    assert step[Step.REQUESTS] == 3
    assert step[Step.PAIRS] == sum(
        num_pairs(result, num_candidates, 1 + num_events)
        for result, (num_events, num_candidates) in zip(results, sizes, strict=True)
    )


@pytest.mark.parametrize("row_index", ["host", "device"])
def test_stages_that_follow_each_other_fit_before_the_next_step(row_index: str) -> None:
    """The host's includes what it does once results are out."""
    with tiny_engine(clock=MonotonicClock(), row_index=row_index, overlap=False, **HOST_TIER) as engine:
        rank_many(engine)
        steps = engine.take_steps()
    stages = steps[:, [Step.HOST_MS, Step.ROWS_MS, Step.COMPUTE_MS]]
    assert (stages > 0).all()
    on_device = stages[:, 1:].sum(axis=1)
    assert (on_device <= (steps[:, Step.END_S] - steps[:, Step.BEGIN_S]) * 1e3 + 1e-6).all()
    assert (stages[:-1].sum(axis=1) <= np.diff(steps[:, Step.BEGIN_S]) * 1e3 + 1e-6).all()
    assert (np.diff(steps[:, Step.END_S]) > 0).all()
    assert (steps[1:, Step.BEGIN_S] >= steps[:-1, Step.END_S]).all()


def test_each_stage_is_charged_with_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host takes 1 ms, pages 2, rows 4, the layers 8; the clock stands still otherwise."""
    clock = ManualClock()

    def slow(owner: type, name: str, ms: float) -> None:
        method = getattr(owner, name)

        def run(*args: Any) -> Any:
            clock.advance(ms / 1e3)
            return method(*args)

        monkeypatch.setattr(owner, name, run)

    with tiny_engine(clock=clock, **HOST_TIER) as engine:
        slow(HostPages, "finish_saves_of", 1)
        slow(HostPages, "start_loading", 2)
        slow(type(engine._dense.rows), "read", 4)
        slow(HstuModel, "layers", 8)
        request = random_request(np.random.default_rng(0), engine.model_config, num_events=11)
        engine.rank([request])
        engine._pool.kv.evict(1_000)
        engine.rank([request])
        first, second = engine.take_steps()
    assert (first[Step.PAGES_RELOADED], second[Step.PAGES_RELOADED]) == (0, 3)
    assert first[Step.HOST_MS :] == pytest.approx([1, 4, 8])
    assert second[Step.HOST_MS :] == pytest.approx([1, 6, 8])
    assert second[Step.END_S] - second[Step.BEGIN_S] == pytest.approx(15e-3)


def test_steps_of_more_tokens_compute_longer() -> None:
    model = tiny_model(window=1_024, normaliser=1_024)
    with tiny_engine(model, MonotonicClock(), pool_bytes="4MiB", page_tokens=64) as engine:
        rng = np.random.default_rng(0)
        for user in range(12):
            engine.rank([random_request(rng, model.config, user, num_events=1_000 if user % 2 else 10)])
        steps = engine.take_steps()[2:]
    assert steps[1, Step.TOKENS] > 50 * steps[0, Step.TOKENS]
    short, long = steps[::2], steps[1::2]
    assert np.median(long[:, Step.COMPUTE_MS]) > 2 * np.median(short[:, Step.COMPUTE_MS])


def test_each_step_is_taken_once() -> None:
    with tiny_engine() as engine:
        rng = np.random.default_rng(0)
        taken: list[Steps] = []
        for user in range(5):
            engine.rank([random_request(rng, engine.model_config, user)])
            taken.append(engine.take_steps())
        assert [len(steps) for steps in taken] == [1] * 5
        assert len(engine.take_steps()) == 0


def test_a_step_ahead_of_requests_is_recorded_and_answers_none() -> None:
    with tiny_engine(alpha=0.1, relay=RelayConfig(risk=0, chunk_tokens=4, max_compute=1.0)) as engine:
        rank = rank_of(user=1, num_events=13)
        engine.prefill(signal_of(rank))
        num_ahead = finish(engine)
        steps = engine.take_steps()
        assert len(steps) == num_ahead == 4
        assert (steps[:, Step.REQUESTS] == 0).all()
        assert steps[:, Step.TOKENS].sum() == 14 + num_ahead, "each chunk computes the request's own context anew"
        engine.rank([rank])
        assert engine.take_steps()[:, Step.REQUESTS].tolist() == [1]


def test_a_step_that_fails_leaves_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny_engine(overlap=True, max_batch_requests=1) as engine:
        rng = np.random.default_rng(0)
        futures = [engine.submit(random_request(rng, engine.model_config, user)) for user in range(5)]
        launch, finish, calls = Runner.launch, Runner.finish, {"launched": 0, "finished": 0}

        def fail_second(self: Runner, batch: Any) -> Running:
            calls["launched"] += 1
            if calls["launched"] == 2:
                raise RuntimeError("not launched")
            return launch(self, batch)

        def fail_third(self: Runner, running: Running) -> StepOutput:
            calls["finished"] += 1
            if calls["finished"] == 3:
                raise RuntimeError("not finished")
            return finish(self, running)

        monkeypatch.setattr(Runner, "launch", fail_second)
        monkeypatch.setattr(Runner, "finish", fail_third)
        while engine.step():
            pass
        failed = [future.exception() is not None for future in futures]
        assert failed == [False, True, False, True, True], "a step on top of one that fails, fails with it"
        assert len(engine.take_steps()) == failed.count(False)


def test_the_log_begins_after_the_warm_up() -> None:
    with tiny_engine(clock=MonotonicClock()) as engine:
        warm_up(engine)
        assert len(engine.take_steps()) == 0
        engine.rank([random_request(np.random.default_rng(0), engine.model_config)])
        assert len(engine.take_steps()) == 1
