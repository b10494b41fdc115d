from collections.abc import Sequence
from itertools import islice

import numpy as np
import pytest

from helmrec.engine.intake import Intake
from helmrec.errors import TraceError
from helmrec.traffic.requests import rank_requests
from helmrec.traffic.trace import Trace, index_histories
from helmrec.types import RankRequest, UserId
from tests.helpers import tiny_engine, tiny_model
from tests.traffic.cases import model_of_many_tables, small_trace

MODEL = model_of_many_tables()


@pytest.fixture(scope="module")
def trace() -> Trace:
    return small_trace()


def fields(request: RankRequest) -> tuple[object, ...]:
    """Everything an engine sees, copied: a request's arrays are views that live until the user's next one."""
    lists = [request.items, request.actions, request.timestamps, request.candidates]
    lists += [*request.features.values(), *request.candidate_features.values()]
    return (request.user_id, request.first_event, request.request_time, dict(request.context), [list(x) for x in lists])


def test_every_request_is_one_the_engine_takes(trace: Trace) -> None:
    intake = Intake(MODEL, version=1, max_history=1_000)
    prepared = [intake.prepare(request) for request in rank_requests(trace, MODEL)]
    assert len(prepared) == trace.num_requests
    assert max(p.num_events for p in prepared) > 50


def test_histories_only_grow_at_the_end(trace: Trace) -> None:
    whole = MODEL.model_copy(update={"window": 10_000})
    histories = index_histories(trace)
    seen: dict[UserId, Sequence[int]] = {}
    for r, request in enumerate(rank_requests(trace, whole)):
        items = list(request.items)
        before = seen.get(request.user_id, [])
        assert items[: len(before)] == before
        assert len(items) == histories.length[r] == len(before) + trace.num_new[r]
        seen[request.user_id] = items
    assert max(histories.visit) > 3


def test_own_events_are_those_of_the_trace(trace: Trace) -> None:
    whole = MODEL.model_copy(update={"window": 10_000})
    histories = index_histories(trace)
    for r, request in enumerate(rank_requests(trace, whole)):
        user = int(request.user_id)
        backlog, own = int(trace.backlog[user]), int(histories.own_start[user])
        stored = slice(own, own + int(histories.length[r]) - backlog)
        assert np.array_equal(request.items[backlog:], trace.item[stored])
        assert np.array_equal(request.timestamps[backlog:], trace.timestamp_s[stored])


def test_long_histories_are_sent_as_tails(trace: Trace) -> None:
    narrow = MODEL.model_copy(update={"window": 8})
    histories = index_histories(trace)
    for r, request in enumerate(rank_requests(trace, narrow)):
        assert len(request.items) == min(8, histories.length[r])
        assert request.first_event == histories.length[r] - len(request.items)


def test_an_engine_reuses_prefixes_of_returning_users(trace: Trace) -> None:
    model = tiny_model(features=MODEL.features, user_context=MODEL.user_context, window=64, max_candidates=64)
    engine = tiny_engine(model, kv_admission="always", pool_bytes=1 << 22)
    results = [engine.rank([request])[0] for request in islice(rank_requests(trace, model.config), 60)]
    visits = index_histories(trace).visit[:60]
    reused = np.array([result.reused_tokens for result in results])
    assert (reused[visits == 0] == 0).all()
    assert (reused[visits > 0] > 0).mean() > 0.8  # windows that have moved on start anew


def test_arrays_of_a_request_cannot_be_written(trace: Trace) -> None:
    request = next(rank_requests(trace, MODEL))
    assert isinstance(request.items, np.ndarray)
    with pytest.raises(ValueError, match="read-only"):
        request.items[...] = 0


def test_a_model_that_takes_fewer_candidates_is_refused_at_once(trace: Trace) -> None:
    with pytest.raises(TraceError, match=r"40 candidates .* takes 8"):
        rank_requests(trace, MODEL.model_copy(update={"max_candidates": 8}))
