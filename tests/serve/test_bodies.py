"""How a body that does not fit its type is explained, and how much of bodies is held in memory."""

import asyncio
from typing import Any

import msgspec
import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Message

from helmrec.errors import RequestError
from helmrec.serve.bodies import Bodies, decode
from helmrec.serve.schema import AlphaBody, BulkBody, RankBody
from tests.serve.asgi import Caller

RANK = msgspec.json.Decoder(RankBody)
ALPHA = msgspec.json.Decoder(AlphaBody)
BULK = msgspec.json.Decoder(BulkBody)


@pytest.mark.parametrize(
    ("decoder", "body", "message"),
    [
        (ALPHA, b'{"alpha": "x"}', "alpha: float is needed, not str, got 'x'"),
        (ALPHA, b'{"alpha": 1.5}', "alpha: float <= 1.0 is needed, got 1.5"),
        (ALPHA, b'{"beta": 1}', "beta: not a known field, got 1"),
        (ALPHA, b"[]", "body: object is needed, not array, got '[]'"),
        (ALPHA, b'{"alpha": {"deep": [1, 2]}}', "alpha: float is needed, not object, got '{\"deep\": [1, 2]}'"),
        (RANK, b'{"user_id": -1}', "user_id: int >= 0 is needed, got -1"),
        (RANK, b'{"user_id": ' + b"9" * 5000 + b"}", f"user_id: Integer value out of range, got '{'9' * 100}…'"),
        (RANK, b'{"user_id": 1, "features": {"a": [1, null]}}', "features.a[1]: int is needed, not null, got None"),
        (
            RANK,
            b'{"user_id": 1, "context": {"hour": 1, "country": "de"}}',
            "context.country: int is needed, not str, got 'de'",
        ),
        (RANK, b'{"user_id": 1, "features": {"a": [1], "b": "x"}}', "features.b: array is needed, not str, got 'x'"),
        (
            BULK,
            b'{"appends": [{"user_id": 1, "items": []}]}',
            "appends[0].actions: is required, got None",
        ),
        (BULK, b'{"appends": [{"user_id": 1, "foo": [2]}]}', "appends[0].foo: not a known field, got '[2]'"),
    ],
)
def test_field_and_value_are_named(decoder: msgspec.json.Decoder[object], body: bytes, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        decode(decoder, body)
    assert str(caught.value) == message


@pytest.mark.parametrize("value", [b'"' + b"x" * 100_000 + b'"', b"[" * 100_000, b'"' + b'\\"' * 100_000 + b'"'])
def test_what_is_shown_of_a_long_value_is_short(value: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        decode(ALPHA, b'{"alpha": ' + value + b"}")
    assert 100 < len(str(caught.value)) < 350
    assert "…" in str(caught.value)


def test_a_wrong_body_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To show the value of one field, only that value may be decoded, however long the rest is."""
    decode_again, lengths = msgspec.json.decode, []

    def counting(text: bytes) -> Any:
        lengths.append(len(text))
        return decode_again(text)

    monkeypatch.setattr(msgspec.json, "decode", counting)
    for body in (
        b'{"user_id": 1.5, "candidates": [' + b"[]," * 50_000 + b"[]]}",
        b'{"user_id": 1, "candidates": [' + b"1," * 50_000 + b'"x"]}',
        b'{"context": {"a": 1}, "user_id": [' + b"{}," * 50_000 + b"{}]}",
    ):
        with pytest.raises(RequestError, match="is needed"):
            decode(RANK, body)
    assert lengths == [3, 3]


def test_a_body_of_very_many_fields_is_refused_before_it_is_decoded() -> None:
    features = b",".join(b'"%d":[]' % number for number in range(20_000))
    with pytest.raises(RequestError, match="body: at most 10000 fields are allowed in a body, got 20003"):
        decode(RANK, b'{"user_id":1,"candidates":[1],"features":{' + features + b"}}")


class Slow:
    """A client that sends the beginning of a body, and the rest when it is told to."""

    def __init__(self, beginning: bytes) -> None:
        self._beginning = beginning
        self._go_on = asyncio.Event()
        self.scope: dict[str, Any] = {"type": "http", "method": "POST", "headers": []}
        self._num_received = 0

    async def receive(self) -> Message:
        self._num_received += 1
        if self._num_received == 1:
            return {"type": "http.request", "body": self._beginning, "more_body": True}
        await self._go_on.wait()
        return {"type": "http.request", "body": b"end", "more_body": False}

    def finish(self) -> None:
        self._go_on.set()

    def read_by(self, bodies: Bodies) -> "asyncio.Task[bytes]":
        return asyncio.create_task(bodies.read(Request(self.scope, self.receive)))


def test_bodies_in_memory_are_bounded_and_small_ones_get_through_beside_slow_large_ones() -> None:
    async def crowd() -> None:
        bodies = Bodies(max_body_bytes=1 << 20, max_bodies_bytes=4 << 20, timeout_s=60)
        large = [Slow(b" " * 1_000_000) for _ in range(20)]
        reads = [each.read_by(bodies) for each in large]
        await asyncio.sleep(0.01)
        assert bodies.held_bytes == 3_000_000, "an eighth is for small ones"
        waiting = [read for read in reads if not read.done()]
        refused = [read.exception() for read in reads if read.done()]
        assert len(refused) == 17
        for error in refused:
            assert isinstance(error, HTTPException)
            assert (error.status_code, (error.headers or {})["retry-after"]) == (503, "1")
            assert "max_bodies_bytes" in error.detail
        small = Slow(b" " * 50_000)
        small.finish()
        assert len(await small.read_by(bodies)) == 50_003
        for each in large:
            each.finish()
        assert [len(await read) for read in waiting] == [1_000_003] * 3
        assert bodies.held_bytes == 3 * 1_000_003 + 50_003, "they count until they are answered"
        for each in (*large, small, small):
            bodies.release(each.scope)
        assert bodies.held_bytes == 0

    asyncio.run(crowd())


def test_a_body_that_does_not_come_in_time_is_408() -> None:
    async def wait() -> None:
        bodies = Bodies(1 << 20, 4 << 20, timeout_s=0.02)
        with pytest.raises(HTTPException) as caught:
            await asyncio.wait_for(Slow(b"beginning").read_by(bodies), 5)
        assert (caught.value.status_code, caught.value.headers) == (408, {"connection": "close"})
        assert "within 0.02 s (body_timeout_s)" in caught.value.detail

    asyncio.run(wait())


def test_a_server_that_stops_does_not_wait_for_slow_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helmrec.serve.bodies._STOP_TIMEOUT_S", 0.02)

    async def stop() -> None:
        bodies = Bodies(1 << 20, 4 << 20, timeout_s=600)
        before = Slow(b"beginning").read_by(bodies)
        await asyncio.sleep(0)
        bodies.stop()
        for read in (before, Slow(b"after").read_by(bodies)):
            with pytest.raises(HTTPException) as caught:
                await asyncio.wait_for(read, 5)
            assert caught.value.status_code == 503
            assert "about to stop" in caught.value.detail

    asyncio.run(stop())


@pytest.mark.parametrize(
    ("body", "status"),
    [(b'{"user_id": "x"}', 400), (b"x" * 100_001, 413), ([b"x" * 99_999, b"xx"], 413), (b"{}", 400)],
)
def test_what_is_refused_is_not_counted_any_more(caller: Caller, body: Any, status: int) -> None:
    assert caller.post("/v1/rank", body).status == status
    assert caller.app.state.front.bodies.held_bytes == 0
    assert "helmrec_http_body_bytes 0.0" in caller.get("/metrics").body.decode()
