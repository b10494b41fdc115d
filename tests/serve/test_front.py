"""The look that a front takes every second goes on whatever comes of it."""

import asyncio
from typing import Any

import pytest

from helmrec.errors import QueueFull
from helmrec.serve import front as fronts
from helmrec.serve.app import make_app
from helmrec.serve.front import Front
from helmrec.serve.port import Health, InProcessPort
from helmrec.serve.settings import ServeConfig
from tests.helpers import tiny_engine
from tests.serve.asgi import Caller, wait_for
from tests.serve.cases import rank_body


class Looked:
    """A port whose looks fail."""

    health = Health.READY

    def __init__(self, failure: Exception) -> None:
        self._failure = failure
        self.num_looks = 0

    async def look(self) -> Any:
        self.num_looks += 1
        raise self._failure


@pytest.mark.parametrize(
    ("failure", "num_logged"), [(RuntimeError("CUDA error"), 1), (QueueFull("busy"), 0)], ids=["ours", "refused"]
)
def test_a_look_that_fails_is_not_the_last_one(
    failure: Exception, num_logged: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fronts, "_SAMPLE_EVERY_S", 0.001)
    port: Any = Looked(failure)

    async def watch() -> None:
        front = Front(port, ServeConfig())
        watching = asyncio.create_task(front.watch())
        while port.num_looks < 10 and not watching.done():
            await asyncio.sleep(0.001)
        for _ in range(50_000):
            front.count_request("/v1/rank", 200, 0.01)
        assert not watching.done()
        assert len(front.samples._now.latencies_ms) < 20_000, "memory is bounded while no look succeeds"
        watching.cancel()

    asyncio.run(watch())
    assert len([record for record in caplog.records if "look at the engine" in record.message]) == num_logged


def test_metrics_are_shown_and_count_it_when_the_engine_cannot_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_: InProcessPort) -> Any:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(fronts, "_SAMPLE_EVERY_S", 0.005)
    with Caller(make_app(InProcessPort(tiny_engine()), ServeConfig())) as caller:
        caller.wait_until_ready()
        monkeypatch.setattr(InProcessPort, "stats", fail)
        monkeypatch.setattr(InProcessPort, "look", fail)
        assert caller.post("/v1/rank", rank_body()).status == 200
        reply = caller.get("/metrics")
        assert reply.status == 200
        assert 'helmrec_http_requests_total{route="/v1/rank",status="200"} 1.0' in reply.body.decode()
        wait_for(lambda: num_look_failures(caller) > 3)
        monkeypatch.undo()
        wait_for(lambda: caller.get("/v1/live").json["samples"])


def num_look_failures(caller: Caller) -> float:
    lines = caller.get("/metrics").body.decode().splitlines()
    (line,) = [line for line in lines if line.startswith("helmrec_look_failures_total")]
    return float(line.split()[1])
