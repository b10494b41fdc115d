"""Miss curves from a live engine, held against what the engine itself did."""

import threading
from typing import Any

import numpy as np
import pytest

from helmrec.engine.engine import Engine
from helmrec.memory.miss_curves import CurveRequest, JointMissCurves
from tests.helpers import random_request, tiny_engine


def serve(engine: Engine, num: int, seed: int = 0) -> None:
    """Users come again and again, some more often, their histories growing."""
    rng = np.random.default_rng(seed)
    users = [random_request(rng, engine.model_config, user, 16) for user in range(12)]
    lengths = dict.fromkeys(range(12), 3)
    for _ in range(num):
        user = min(int(rng.zipf(1.3)) - 1, 11)
        lengths[user] = min(16, lengths[user] + int(rng.integers(0, 3)))
        whole, length = users[user], lengths[user]
        request = random_request(
            rng,
            engine.model_config,
            user,
            items=whole.items[:length],
            actions=whole.actions[:length],
            timestamps=whole.timestamps[:length],
            features={"category": whole.features["category"][:length]},
            context={**whole.context, "hour": int(rng.integers(24))},
            candidates=np.minimum(rng.zipf(1.3, 4) - 1, 299),
            candidate_features={"category": rng.integers(0, 20, 4)},
        )
        engine.rank([request])


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.4])
@pytest.mark.parametrize("kv_admission", ["always", "second-visit"])
def test_they_tell_what_the_engine_did_at_its_own_split(alpha: float, kv_admission: str) -> None:
    settings: dict[str, Any] = {"alpha": alpha, "kv_admission": kv_admission, "row_admission": "always"}
    engine = tiny_engine(
        miss_curves=True, max_batch_requests=1, max_batch_tokens=4, refill_bytes_per_step=0, **settings
    )
    assert engine.settled_curves() is None
    serve(engine, 400)
    curves, pool = engine.settled_curves(), engine.stats().pool
    assert curves is not None
    at = int(np.argmin(np.abs(curves.alphas - alpha)))
    assert pool.row_evictions > 50
    assert 0.05 < pool.token_reuse_rate < 1
    assert curves.kv_token_hit_rate[at] == pytest.approx(pool.token_reuse_rate, abs=0.02)
    assert curves.emb_hit_rate[at] == pytest.approx(pool.row_hit_rate, abs=0.02)


def test_more_pages_never_look_worse_for_the_cache_that_gets_them() -> None:
    engine = tiny_engine(miss_curves=True, kv_admission="always", row_admission="always")
    serve(engine, 300)
    curves = engine.settled_curves()
    assert curves is not None
    assert (np.diff(curves.kv_token_hit_rate) <= 1e-9).all()
    assert curves.kv_token_hit_rate[0] > curves.kv_token_hit_rate[-1] + 0.1
    assert curves.missed_rows_per_request[0] > 0


def test_an_engine_without_them_has_none() -> None:
    engine = tiny_engine()
    serve(engine, 40)
    assert engine.settled_curves() is None


def test_looking_at_a_request_does_not_hold_the_engine_up(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(miss_curves=True)
    go_on, looked = threading.Event(), list[int]()

    def slow(curves: JointMissCurves, request: CurveRequest) -> None:
        assert go_on.wait(10)
        looked.append(int(request.user_id))

    monkeypatch.setattr(JointMissCurves, "observe", slow)
    serve(engine, 5)
    assert looked == [], "all five were answered"
    assert engine.curves() is None, "nor does who asks for curves wait"
    go_on.set()
    engine.settled_curves()
    assert len(looked) == 5, "curves tell of all that was served before"
    engine.close()


def test_what_goes_wrong_there_fails_no_request_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(miss_curves=True)

    def broken(curves: JointMissCurves, request: CurveRequest) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(JointMissCurves, "observe", broken)
    serve(engine, 20)
    with pytest.raises(ValueError, match="broken"):
        engine.settled_curves()
    assert engine.stats().background_failures > 0


def test_after_one_failure_the_curves_start_anew_and_it_is_raised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, observe, failures = tiny_engine(miss_curves=True), JointMissCurves.observe, [ValueError("once")]

    def fails_once(curves: JointMissCurves, request: CurveRequest) -> None:
        if failures:
            raise failures.pop()
        observe(curves, request)

    monkeypatch.setattr(JointMissCurves, "observe", fails_once)
    serve(engine, 1)
    with pytest.raises(ValueError, match="once"):
        engine.settled_curves()
    serve(engine, 80)
    curves = engine.settled_curves()
    assert curves is not None
    assert curves.num_requests >= 32
    assert engine.stats().background_failures == 0, "it was raised to who asked"
    engine.close()


def test_who_comes_while_too_many_wait_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helmrec.engine.curves._MOST_WAITING", 3)
    engine = tiny_engine(miss_curves=True)
    go_on = threading.Event()
    monkeypatch.setattr(JointMissCurves, "observe", lambda curves, request: go_on.wait(10))
    serve(engine, 10)
    feed = engine._curves
    assert feed is not None
    assert feed.num_skipped >= 5
    go_on.set()
    engine.close()


def test_curves_of_a_thread_that_is_behind_are_those_of_most_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, observe = tiny_engine(miss_curves=True), JointMissCurves.observe
    serve(engine, 200)
    before = engine.settled_curves()
    go_on, reached = threading.Event(), threading.Event()
    num_left = [70]

    def stops(curves: JointMissCurves, request: CurveRequest) -> None:
        num_left[0] -= 1
        if num_left[0] == 0:
            reached.set()
            assert go_on.wait(10)
        observe(curves, request)

    monkeypatch.setattr(JointMissCurves, "observe", stops)
    serve(engine, 100, seed=1)
    assert reached.wait(10)
    newest = engine.curves()
    assert before is not None and newest is not None
    assert newest.num_requests > before.num_requests, "published since"
    go_on.set()
    settled = engine.settled_curves()
    assert settled is not None
    assert settled.num_requests > newest.num_requests
    assert engine.curves().num_requests == settled.num_requests  # type: ignore[union-attr]
    engine.close()
