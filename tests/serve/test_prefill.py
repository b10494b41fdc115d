"""`/v1/prefill`: early signals over HTTP, with sent and stored histories, with engines in this and other processes."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helmrec.clock import MonotonicClock
from helmrec.config import EngineConfig, RelayConfig
from helmrec.engine.engine import Engine
from helmrec.errors import RequestError
from helmrec.model.weights import save_model
from helmrec.serve.app import make_app
from helmrec.serve.client import Client
from helmrec.serve.histories import StoredHistories
from helmrec.serve.node import make_port
from helmrec.serve.port import InProcessPort
from helmrec.serve.settings import ServeConfig
from helmrec.serve.wire import NotForTheWire, pack_prefill, unpack_prefill
from helmrec.types import PrefillRequest
from tests.helpers import TINY_PAGES, tiny_engine, tiny_geometry, tiny_model
from tests.serve.asgi import Caller, on_loopback, wait_for
from tests.serve.cases import events_body, rank_body

EAGER = RelayConfig(risk=0, chunk_tokens=4, max_compute=1.0, hold_ms=60_000)


def signal_body(**overrides: Any) -> dict[str, Any]:
    """The history of `rank_body`, ahead of it."""
    history = {name: rank_body()[name] for name in ("user_id", "items", "actions", "timestamps", "features")}
    return {**history, "context": {"country": 3}, "num_candidates": 2} | overrides


@pytest.fixture
def served() -> Engine:
    return tiny_engine(clock=MonotonicClock(), relay=EAGER)


def metric(caller: Caller, line: str) -> float:
    """The value of a line of /metrics."""
    (found,) = [each for each in caller.get("/metrics").body.decode().splitlines() if each.startswith(line + " ")]
    return float(found.rsplit(" ", 1)[1])


def test_a_rank_finds_what_was_computed_ahead_of_it(caller: Caller, served: Engine) -> None:
    alone = caller.post("/v1/rank", rank_body(user_id=8)).json
    answer = caller.post("/v1/prefill", signal_body()).json
    assert answer["is_admitted"]
    assert answer["reason"] == "admitted"
    assert answer["lease"]["node"] == "local"
    assert answer["lease"]["hold_ms"] == 60_000
    assert answer["history_version"] is None
    assert metric(caller, "helmrec_relay_leases") == 1
    wait_for(lambda: served.stats().relay.steps)
    assert metric(caller, "helmrec_relay_leased_bytes") == served.stats().pool.page_bytes
    again = caller.post("/v1/prefill", signal_body()).json
    assert again == {"is_admitted": False, "reason": "held already", "lease": None, "history_version": None}
    ranked = caller.post("/v1/rank", rank_body()).json
    assert ranked["reused_tokens"] == 3, "the fourth ends a page"
    assert alone["reused_tokens"] == 0
    np.testing.assert_allclose(ranked["scores"], alone["scores"], atol=1e-6)
    wait_for(lambda: served.stats().relay.used == 1)
    assert metric(caller, "helmrec_relay_leases") == 0
    assert metric(caller, "helmrec_relay_leases_used_total") == 1
    assert metric(caller, 'helmrec_relay_signals_total{reason="admitted"}') == 1
    assert metric(caller, 'helmrec_relay_signals_total{reason="held already"}') == 1


def test_the_stored_history_is_computed_ahead_where_none_is_sent(keeper: Caller, served: Engine) -> None:
    keeper.post("/v1/events", events_body(0))
    answer = keeper.post("/v1/prefill", {"user_id": 7, "context": {"country": 3}}).json
    assert answer["is_admitted"]
    assert answer["history_version"] == 3
    wait_for(lambda: served.stats().relay.steps)
    assert keeper.post("/v1/rank", rank_body()).json["reused_tokens"] == 3


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"candidates": [1]}, "candidates"),
        ({"items": [1, 2, 999]}, "items[2]"),
        ({"budget_ms": 0}, "budget_ms"),
        ({"num_candidates": 9}, "num_candidates"),
        ({"context": {"country": 3, "hour": 1}}, "context"),
    ],
)
def test_errors_of_a_signal_name_the_field(caller: Caller, wrong: dict[str, Any], field: str) -> None:
    reply = caller.post("/v1/prefill", signal_body(**wrong))
    assert reply.status == 400
    assert reply.json["field"] == field


def test_a_history_is_needed_where_none_is_kept(caller: Caller) -> None:
    reply = caller.post("/v1/prefill", {"user_id": 7, "context": {"country": 3}})
    assert (reply.status, reply.json["field"]) == (400, "items")


@pytest.fixture
def client(served: Engine, histories: StoredHistories) -> Iterator[Client]:
    app = make_app(InProcessPort(served), ServeConfig(node_name="node-3"), histories)
    with on_loopback(app) as port, Client(f"http://127.0.0.1:{port}") as client:
        wait_for(client.is_ready)
        yield client


def test_the_client_signals_with_a_history_or_the_stored_one(client: Client) -> None:
    answer = client.prefill(PrefillRequest(**signal_body(hold_ms=100)))
    assert answer.lease is not None
    assert answer.lease.node == "node-3"
    client.append(**events_body(0, user_id=9))
    assert client.prefill_stored(9, {"country": 3}, num_candidates=2).history_version == 3
    with pytest.raises(RequestError, match="hour"):
        client.prefill(PrefillRequest(**signal_body(context={"country": 1, "hour": 2})))


def test_a_signal_crosses_to_another_process_as_it_was() -> None:
    request = PrefillRequest(**signal_body(items=np.array([1, 2, 3], np.int32), hold_ms=7.0, first_event=2))
    seen = unpack_prefill(memoryview(b"".join(pack_prefill(request))))
    assert lists(seen) == lists(request)
    with pytest.raises(NotForTheWire):
        pack_prefill(PrefillRequest(**signal_body(items=[[1], [2, 3]])))


def lists(request: PrefillRequest) -> dict[str, Any]:
    """A signal's fields, arrays as lists."""
    arrays = {name: np.asarray(getattr(request, name)).tolist() for name in ("items", "actions", "timestamps")}
    features = {name: np.asarray(each).tolist() for name, each in request.features.items()}
    return asdict(replace(request, features=features, **arrays))


def test_an_engine_in_a_process_of_its_own_takes_signals(tmp_path: Path) -> None:
    made = tiny_model()
    save_model(tmp_path / "tiny", made.config, made.dense, made.tables)
    pool_bytes = TINY_PAGES * tiny_geometry(made.config).page_bytes
    config = EngineConfig(pool_bytes=pool_bytes, page_tokens=4, relay=EAGER)
    serve = ServeConfig(engine_process=True, ring_bytes=1 << 20, log_level="error")
    with Caller(make_app(make_port(tmp_path / "tiny", config, serve), serve)) as caller:
        caller.wait_until_ready()
        assert caller.post("/v1/prefill", signal_body()).json["reason"] == "admitted"
        wait_for(lambda: metric(caller, "helmrec_relay_busy_seconds_total") > 0)
        assert caller.post("/v1/rank", rank_body()).json["reused_tokens"] == 3
        assert metric(caller, 'helmrec_relay_signals_total{reason="admitted"}') == 1
        wrong = caller.post("/v1/prefill", signal_body(items=[1, 2, 999]))
        assert (wrong.status, wrong.json["field"]) == (400, "items[2]")
        huge = caller.post("/v1/prefill", signal_body(num_candidates=1 << 80))
        assert (huge.status, huge.json["field"]) == (400, "num_candidates")
