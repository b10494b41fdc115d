"""The client raises what an engine would, and survives connections that were closed on it."""

import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helmrec.clock import MonotonicClock
from helmrec.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineClosed,
    Forgotten,
    NonFiniteScores,
    QueueFull,
    RequestError,
    ServerError,
    StaleVersion,
)
from helmrec.history.config import HistoryConfig
from helmrec.serve.app import make_app
from helmrec.serve.client import Client
from helmrec.serve.histories import StoredHistories
from helmrec.serve.port import InProcessPort
from helmrec.serve.settings import ServeConfig
from tests.helpers import tiny_config, tiny_engine
from tests.serve.asgi import on_loopback, wait_for
from tests.serve.cases import as_request, rank_body, rank_requests


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    histories = StoredHistories.open(tmp_path_factory.mktemp("client"), tiny_config(), HistoryConfig())
    with (
        on_loopback(make_app(InProcessPort(tiny_engine(clock=MonotonicClock())), ServeConfig(), histories)) as port,
        Client(f"http://127.0.0.1:{port}") as client,
    ):
        wait_for(client.is_ready)
        yield client


def test_a_client_ranks_as_an_engine_does(client: Client) -> None:
    requests = rank_requests(5)
    for request, expected in zip(requests, tiny_engine().rank(requests), strict=True):
        result = client.rank(request)
        np.testing.assert_allclose(result.scores, expected.scores, atol=1e-5)
        assert result.scores.dtype == np.float32
        assert result.window_start == expected.window_start


def test_a_client_appends_ranks_with_what_is_kept_and_has_it_forgotten(client: Client) -> None:
    request = rank_requests(40)[-1]
    user_id, half = request.user_id, len(request.items) // 2
    assert client.user(user_id) is None
    for base, part in ((0, slice(half)), (half, slice(half, None))):
        features = {name: values[part] for name, values in request.features.items()}
        events = (request.items[part], request.actions[part], request.timestamps[part], features)
        done = client.append(user_id, base, *events)
        assert (done.first_event, done.is_repeat) == (base, False)
        assert client.append(user_id, base, *events).is_repeat
    state = client.user(user_id)
    assert state is not None
    assert (state.version, state.last_timestamp) == (len(request.items), request.timestamps[-1])
    kept = client.rank_stored(user_id, request.candidates, request.candidate_features, request.context)
    np.testing.assert_allclose(kept.scores, client.rank(request).scores, atol=1e-5)
    with pytest.raises(StaleVersion) as stale:
        client.append(user_id, 1, *events)
    assert (stale.value.user_id, stale.value.base, stale.value.current) == (user_id, 1, state.version)
    assert client.forget(user_id)
    assert client.user(user_id) is None
    assert not client.forget(user_id)


def test_wrong_events_and_users_are_the_errors_a_store_raises(client: Client) -> None:
    with pytest.raises(RequestError, match=r"items\[0\]: values run from 0 to 299, got 300"):
        client.append(1, 0, [300], [0], [0], {"category": [0]})
    with pytest.raises(RequestError, match="user_id"):
        client.user(-1)


def test_what_no_request_can_hold_is_refused_before_it_is_sent(client: Client) -> None:
    with pytest.raises(RequestError, match="numbers, sequences and arrays are needed, got <object"):
        client.rank(replace(rank_requests(1)[0], context={"hour": object()}))  # type: ignore[dict-item]


def test_a_wrong_field_is_the_same_error_as_in_process(client: Client) -> None:
    wrong = as_request(rank_body(items=[1, 2, 999]))
    with pytest.raises(RequestError) as there:
        client.rank(wrong)
    with pytest.raises(RequestError) as here:
        tiny_engine().rank([wrong])
    assert str(there.value) == str(here.value)
    assert (there.value.field, there.value.value) == (here.value.field, here.value.value)


@pytest.mark.parametrize("kind", [QueueFull, DeadlineExceeded, EngineClosed, Forgotten, NonFiniteScores])
def test_a_refusal_keeps_its_class(client: Client, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    async def refuse(self: InProcessPort, requests: Any, spent_ms: float) -> Any:
        raise kind("not now")

    monkeypatch.setattr(InProcessPort, "submit", refuse)
    with pytest.raises(kind, match=r"not now \(request .+\)"):
        client.rank(as_request(rank_body()))


def test_a_failure_of_the_server_is_raised_with_its_request_id(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: InProcessPort, requests: Any, spent_ms: float) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(InProcessPort, "submit", fail)
    with pytest.raises(ServerError, match=r"the server failed.*\(request .+\)"):
        client.rank(as_request(rank_body()))


def test_a_connection_closed_while_idle_is_opened_again(client: Client) -> None:
    assert client.is_ready()
    client._connection.sock.shutdown(socket.SHUT_RDWR)
    assert client.rank(as_request(rank_body())).scores.shape == (2, 2)


def test_no_server_and_no_url_are_different_errors() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        url = f"http://127.0.0.1:{gone.getsockname()[1]}"
    client = Client(url)
    assert not client.is_ready()
    with pytest.raises(ServerError, match=f"no answer .* from {url}"):
        client.rank(as_request(rank_body()))
    for wrong in ("127.0.0.1:8000", "ftp://host", "http://"):
        with pytest.raises(ConfigError, match="url must look like"):
            Client(wrong)


def test_an_answer_that_is_not_ours_is_a_server_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(b"HTTP/1.1 418 Teapot\r\ncontent-length: 5\r\n\r\nhello")

        thread = threading.Thread(target=answer)
        thread.start()
        with (
            Client(f"http://127.0.0.1:{other.getsockname()[1]}") as client,
            pytest.raises(ServerError, match="status 418 without a reason, got b'hello'"),
        ):
            client.rank(as_request(rank_body()))
        thread.join()
