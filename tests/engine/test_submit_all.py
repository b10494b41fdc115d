"""Calls of several requests: all are queued or none, and each history is hashed once."""

from dataclasses import replace

import numpy as np
import pytest

from helmrec.clock import ManualClock
from helmrec.engine.intake import Intake, Prepared
from helmrec.errors import DeadlineExceeded, QueueFull, RequestError
from helmrec.types import RankRequest
from tests.helpers import random_request, tiny_config, tiny_engine


def requests_of(num: int) -> list[RankRequest]:
    rng = np.random.default_rng(0)
    return [random_request(rng, tiny_config(), user) for user in range(num)]


def test_each_history_of_a_call_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, users = Intake.prepare, []

    def counting(self: Intake, request: RankRequest) -> Prepared:
        users.append(request.user_id)
        return prepare(self, request)

    engine, requests = tiny_engine(), requests_of(3)
    monkeypatch.setattr(Intake, "prepare", counting)
    futures = engine.submit_all(requests, 0.0)
    while engine.step():
        pass
    assert users == [0, 1, 2]
    for future, expected in zip(futures, tiny_engine().rank(requests), strict=True):
        np.testing.assert_allclose(future.result(timeout=0).scores, expected.scores, atol=1e-5)


def test_one_wrong_request_of_several_is_named_and_nothing_is_queued() -> None:
    engine, requests = tiny_engine(), requests_of(3)
    requests[1] = replace(requests[1], user_id=-1)
    with pytest.raises(RequestError, match=r"^requests\[1\]\.user_id: "):
        engine.submit_all(requests, 0.0)
    with pytest.raises(RequestError, match=r"^user_id: "):
        engine.submit_all(requests[1:2], 0.0)
    assert engine.stats().queue_length == 0


def test_a_queue_without_room_for_all_of_a_call_takes_none() -> None:
    engine = tiny_engine(queue_limit=2)
    with pytest.raises(QueueFull):
        engine.submit_all(requests_of(3), 0.0)
    assert engine.stats().queue_length == 0
    assert len(engine.submit_all(requests_of(2), 0.0)) == 2


def test_time_spent_before_a_call_counts_against_its_deadlines() -> None:
    clock = ManualClock()
    engine = tiny_engine(clock=clock)
    early, late = (replace(request, deadline_ms=50.0) for request in requests_of(2))
    with pytest.raises(DeadlineExceeded, match=r"50\.0 ms after the request came in"):
        engine.submit_all([early, late], 50.0)
    assert engine.stats().queue_length == 0
    [future] = engine.submit_all([early], 40.0)
    clock.advance(0.02)
    engine.step()
    assert isinstance(future.exception(timeout=0), DeadlineExceeded)
