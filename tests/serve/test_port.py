"""An engine behind its port: all of a call or nothing, and an end that leaves nobody waiting."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helmrec.clock import MonotonicClock
from helmrec.engine.engine import Engine
from helmrec.errors import DeadlineExceeded, EngineClosed, ModelError, QueueFull, RequestError
from helmrec.serve.app import make_app
from helmrec.serve.port import Health, InProcessPort
from helmrec.serve.settings import ServeConfig
from tests.helpers import tiny_engine
from tests.serve.asgi import send
from tests.serve.cases import rank_requests


@asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[InProcessPort]:
    port = InProcessPort(engine)
    port.start()
    while port.health is Health.STARTING:
        await asyncio.sleep(0.005)
    try:
        yield port
    finally:
        await port.close()


def live_engine(**settings: Any) -> Engine:
    return tiny_engine(clock=MonotonicClock(), **settings)


def test_results_come_in_the_order_of_the_requests() -> None:
    requests = rank_requests(20)
    expected = tiny_engine().rank(requests)

    async def ask() -> None:
        async with running(live_engine()) as port:
            results = await port.submit(requests)
        for got, want in zip(results, expected, strict=True):
            np.testing.assert_allclose(got.scores, want.scores, atol=1e-5)

    asyncio.run(ask())


def test_one_wrong_request_keeps_the_others_of_its_call_from_running() -> None:
    engine = live_engine()
    good, *_ = rank_requests(1)
    wrong = replace(good, user_id=-1)

    async def ask() -> None:
        async with running(engine) as port:
            before = await port.stats()
            with pytest.raises(RequestError, match=r"requests\[1\]\.user_id"):
                await port.submit([good, wrong])
            assert (await port.stats()) == before

    asyncio.run(ask())


def test_what_was_spent_before_counts_towards_the_deadline() -> None:
    request = replace(rank_requests(1)[0], deadline_ms=5_000.0)

    async def ask() -> None:
        async with running(live_engine()) as port:
            assert len(await port.submit([request], spent_ms=1.0)) == 1
            with pytest.raises(DeadlineExceeded, match=r"passed 5000\.1 ms after the request came in"):
                await port.submit([request], spent_ms=5_000.1)

    asyncio.run(ask())


def test_a_call_too_long_for_the_queue_leaves_nothing_in_it() -> None:
    engine = live_engine(queue_limit=2, max_batch_requests=1)

    async def ask() -> None:
        async with running(engine) as port:
            with pytest.raises(QueueFull):
                await port.submit(rank_requests(64))
            while (await port.stats()).queue_length:
                await asyncio.sleep(0.005)
            assert len(await port.submit(rank_requests(1))) == 1
            engine.check()

    asyncio.run(ask())


def test_a_closed_port_refuses_and_a_port_never_started_closes() -> None:
    async def ask() -> None:
        async with running(live_engine()) as port:
            pass
        assert port.health is Health.CLOSED
        with pytest.raises(EngineClosed):
            await port.submit(rank_requests(1))
        await InProcessPort(live_engine()).close()

    asyncio.run(ask())


def test_an_engine_whose_model_is_corrupt_is_not_ready_and_says_why() -> None:
    async def ask() -> None:
        async with running(live_engine()) as port:
            app = make_app(port, ServeConfig(policy="none"))
            assert (await send(app, "GET", "/readyz")).status == 200
            port.engine._stop_serving(ModelError("item.safetensors is corrupt"))
            async with asyncio.timeout(10):
                while port.health is Health.READY:
                    await asyncio.sleep(0.005)
            for path in ("/readyz", "/healthz"):
                reply = await send(app, "GET", path)
                assert (reply.status, reply.json) == (
                    503,
                    {"status": "failed", "reason": "item.safetensors is corrupt"},
                )

    asyncio.run(ask())
