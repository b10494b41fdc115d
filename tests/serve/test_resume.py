"""An engine that is started again serves only with every row that was set; whatever fails is logged and tried again."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from helmrec.engine.warm_up import made_up_request
from helmrec.errors import AlphaOutOfRange, EngineClosed, RequestError
from helmrec.serve import child_process, process_port
from helmrec.serve.app import make_app
from helmrec.serve.port import Health
from helmrec.serve.process_port import ProcessPort
from helmrec.serve.ring import Link
from helmrec.serve.settings import ServeConfig
from tests.helpers import tiny_config
from tests.serve.asgi import send
from tests.serve.fake_engine import GARBAGE, SILENCE, FakeEngine, port_before

ROWS: dict[str, Any] = {"table": "item", "ids": [1, 4], "values": [[0.5] * 16, [1.0] * 16]}


def takes_all(name: str, _: dict[str, Any]) -> Any:
    return 0 if name == "place_rows" else None


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


@asynccontextmanager
async def running(port: ProcessPort) -> AsyncIterator[ProcessPort]:
    port.start()
    try:
        await until(lambda: port.health is Health.READY)
        yield port
    finally:
        await port.close()
        await asyncio.sleep(0.01)  # its engine sees it


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "_FIRST_PAUSE_S", 0.002)
    monkeypatch.setattr(child_process, "_EXIT_CODE_TIMEOUT_S", 0.2)


def fails(num_times: int, name: str, failure: Any) -> Callable[[str, dict[str, Any]], Any]:
    """Answers that fail so many times for one call, and are right otherwise."""
    left = [num_times]

    def answer(called: str, arguments: dict[str, Any]) -> Any:
        if called == name and left[0]:
            left[0] -= 1
            if isinstance(failure, Exception):
                raise failure
            return failure
        return takes_all(called, arguments)

    return answer


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (RuntimeError("CUDA error"), "RuntimeError: CUDA error"),
        (RequestError("ids", 4, "there are fewer rows"), "ids: there are fewer rows, got 4"),
        (EngineClosed("it is about to end"), "it is about to end"),
        (SILENCE, "update_rows was not answered for 0.2 s"),
        (GARBAGE, "it sent data that cannot be read"),
    ],
    ids=["fails", "refuses", "closed", "hangs", "garbage"],
)
def test_an_engine_that_does_not_take_its_rows_is_ended_and_another_is_tried(
    failure: Any, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(fails(3, "update_rows", failure))
    port = port_before(engine)
    port.hang_s = 0.2
    reasons: set[str | None] = set()

    async def crash() -> None:
        async with running(port):
            await port.update_rows(**ROWS)
            engine.crash()
            await until(lambda: port.health is not Health.READY)
            while port.health is not Health.READY:
                reasons.add(port.reason)
                await asyncio.sleep(0.001)
            assert engine.calls == ["update_rows"]

    asyncio.run(crash())
    assert engine.num_starts == 5, "the first, three that failed, and the one that serves"
    assert port.num_restarts == 4
    assert any(told in str(reason) for reason in reasons), reasons
    ends = [record for record in caplog.records if record.message == "the engine ended"]
    assert sum(told in str(vars(record)["reason"]) for record in ends) == 3
    assert not any(vars(record)["gives_up"] for record in ends)


def test_the_pause_between_tries_grows_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def pause(self: ProcessPort, seconds: float) -> None:
        pauses.append(seconds)
        await asyncio.sleep(0)

    monkeypatch.setattr(ProcessPort, "_pause", pause)
    monkeypatch.setattr(child_process, "_FIRST_PAUSE_S", 0.2)
    engine = FakeEngine(fails(9, "update_rows", RuntimeError("no")))
    port = port_before(engine)

    async def crash() -> None:
        async with running(port):
            await port.update_rows(**ROWS)
            engine.crash()
            await until(lambda: engine.num_starts == 11 and port.health is Health.READY)

    asyncio.run(crash())
    assert pauses == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30, 30])


def test_health_says_what_is_wrong_while_the_front_tries_again() -> None:
    engine = FakeEngine(fails(10_000, "update_rows", RuntimeError("CUDA error")))
    port = port_before(engine)

    async def crash() -> None:
        app = make_app(port, ServeConfig())
        async with running(port):
            await port.update_rows(**ROWS)
            engine.crash()
            await until(lambda: "CUDA error" in str(port.reason))
            live, ready = await send(app, "GET", "/healthz"), await send(app, "GET", "/readyz")
            assert (live.status, ready.status) == (200, 503), "the front lives and goes on trying"
            assert live.json == ready.json
            assert live.json["status"] == "restarting"
            assert "RuntimeError: CUDA error" in live.json["reason"]

    asyncio.run(crash())


def test_a_table_whose_rows_were_all_beyond_the_bound_does_not_keep_the_engine_down(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = FakeEngine(takes_all)
    port = port_before(engine, replay_bytes=600)  # two rows of 64 bytes, with what keeping them costs

    async def crash() -> None:
        async with running(port):
            await port.update_rows(**ROWS)
            await port.update_rows("category", [1], [[0.5] * 16])
            engine.crash()
            await until(lambda: port.num_restarts == 1 and port.health is Health.READY)
            assert engine.calls == ["update_rows"]

    asyncio.run(crash())
    told = [record.message for record in caplog.records]
    assert "row updates exceed replay_bytes: a restarted engine will not have all of them" in told
    assert "row updates are lost: send them again" in told


@pytest.mark.parametrize("name", ["move_alpha", "set_mode"])
def test_a_setting_that_is_refused_costs_no_rows(name: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(takes_all)
    port = port_before(engine)

    async def crash() -> None:
        async with running(port):
            await port.move_alpha(0.9)
            await port.set_mode("freeze")
            await port.update_rows(**ROWS)
            engine._answer = fails(1, name, AlphaOutOfRange("alpha must be at most 0.8"))
            engine.crash()
            await until(lambda: port.num_restarts == 1 and port.health is Health.READY)

    asyncio.run(crash())
    assert engine.calls == ["update_rows", "move_alpha", "set_mode"], "rows come first, and each call is on its own"
    (record,) = [record for record in caplog.records if record.message == "a setting was not restored"]
    assert (vars(record)["call"], vars(record)["reason"]) == (name, "alpha must be at most 0.8")


def test_rows_set_on_a_model_while_its_swap_ends_are_kept_and_those_of_the_model_before_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine has switched to the new model and still answers what waits for the old one: the swap is not over."""
    engine = FakeEngine(takes_all)
    port = port_before(engine)
    monkeypatch.setattr(process_port, "check_fits", lambda new, old: None)
    monkeypatch.setattr(process_port, "read_manifest", lambda path: type("Manifest", (), {"model": port.model}))
    told: list[dict[str, Any]] = []

    def answer(name: str, arguments: dict[str, Any]) -> Any:
        if name == "swap":
            return SILENCE  # for now
        if name == "update_rows":
            told.append(arguments)
        return 1 if name == "place_rows" and arguments["ids"] == [2] else 0 if name == "place_rows" else None

    async def swap() -> None:
        async with running(port):
            await port.update_rows("item", [1], [[1.0] * 16])
            engine._answer = answer
            swapping = asyncio.create_task(port.swap("second"))
            await until(lambda: "swap" in engine.calls)
            await port.update_rows("item", [2], [[2.0] * 16])
            await port.update_rows("item", [3], [[3.0] * 16])  # the old model took this one, and answered late
            call = max(port._pending)
            port._pending[call].set_result(b"\xc0")
            await swapping
            engine.crash()
            await until(lambda: port.num_restarts == 1 and port.health is Health.READY)
            assert port._begin.model == "second"

    asyncio.run(swap())
    assert [each["ids"] for each in told] == [[2]]


def test_an_engine_that_ends_right_after_a_swap_gets_no_rows_of_the_model_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has swapped, and ends before the front knows how requests are prepared for the new model."""
    told: list[Any] = []

    def answer(name: str, arguments: dict[str, Any]) -> Any:
        if name == "update_rows":
            told.append(arguments["ids"])
        return 0 if name == "place_rows" else None

    class Ends(FakeEngine):
        def _call(self, link: Link, call: int, name: str, arguments: dict[str, Any]) -> None:
            if name == "intake_recipe" and "swap" in self.calls:
                self.crash()
            else:
                super()._call(link, call, name, arguments)

    engine = Ends(answer)
    port = port_before(engine)
    monkeypatch.setattr(process_port, "check_fits", lambda new, old: None)
    monkeypatch.setattr(process_port, "read_manifest", lambda path: type("Manifest", (), {"model": port.model}))

    async def swap() -> None:
        async with running(port):
            await port.update_rows("item", [1], [[1.0] * 16])
            await port.swap("second")
            await until(lambda: port.num_restarts == 1 and port.health is Health.READY)
            assert port._begin.model == "second"

    asyncio.run(swap())
    assert told == []


def test_rows_of_a_swap_that_a_crash_cut_short_are_not_set_on_the_old_model(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(takes_all)
    port = port_before(engine)

    async def crash() -> None:
        async with running(port):
            await port.update_rows("item", [1], [[1.0] * 16])
            engine._answer = lambda name, _: 1 if name == "place_rows" else None
            await port.update_rows("item", [2], [[2.0] * 16])
            engine.crash()
            await until(lambda: port.num_restarts == 1 and port.health is Health.READY)
            port._replay.check()
            assert [call.arguments["ids"] for call in port._replay.row_calls(1_000)] == [[1]]

    asyncio.run(crash())
    (record,) = [record for record in caplog.records if "whose swap did not complete" in record.message]
    assert vars(record)["rows"] == 1


def test_whatever_fails_in_starting_an_engine_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(takes_all)
    port = port_before(engine)
    failures = [MemoryError("no room"), OSError("too many open files"), RuntimeError("can't start new thread")]

    def spawn() -> Any:
        if engine.num_starts and failures:
            raise failures.pop()
        return engine.spawn()

    async def crash() -> None:
        port._spawn = spawn  # type: ignore[method-assign]
        async with running(port):
            engine.crash()
            await until(lambda: port.num_restarts == 4 and port.health is Health.READY)

    asyncio.run(crash())
    assert not failures
    assert len([record for record in caplog.records if record.message == "the engine could not be run"]) == 3


def test_a_watch_that_sees_an_unexpected_error_goes_on_watching(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(child_process, "_LOOK_EVERY_S", 0.005)
    engine = FakeEngine(takes_all)
    port = port_before(engine)
    port.hang_s = 0.1
    num_looks = [0]

    async def stats() -> Any:
        num_looks[0] += 1
        if num_looks[0] <= 3:
            raise RuntimeError("CUDA error")
        await asyncio.sleep(60)

    async def watch() -> None:
        async with running(port):
            port.stats = stats  # type: ignore[method-assign]
            await until(lambda: port.num_restarts >= 1)

    with caplog.at_level(logging.ERROR):
        asyncio.run(watch())
    assert "it did not answer for 0.1 s" in {vars(record).get("reason") for record in caplog.records}, (
        "it is still seen"
    )
    assert len([record for record in caplog.records if "watching the engine" in record.message]) == 1


def test_an_answer_that_cannot_be_read_fails_its_call_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    port = port_before(FakeEngine(takes_all))

    async def rank() -> None:
        async with running(port):
            for _ in range(2):
                with pytest.raises(msgspec.ValidationError):
                    await asyncio.wait_for(port.submit([made_up_request(tiny_config(), 3)]), 10)
            await port.stats()
            assert port.health is Health.READY
            assert port.num_restarts == 0

    with caplog.at_level(logging.ERROR):
        asyncio.run(rank())
    assert len([record for record in caplog.records if record.message == "an answer could not be read"]) == 2
