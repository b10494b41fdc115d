"""Frames that cannot be read, in the process of an engine: whoever waits for an answer gets one."""

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from helmrec.errors import EngineClosed, ModelError
from helmrec.model.weights import save_model
from helmrec.serve.engine_process import EngineProcess
from helmrec.serve.port import Health
from helmrec.serve.ring import Link, open_ring, shared_file
from helmrec.serve.settings import ServeConfig, for_engine, revealed
from helmrec.serve.wire import Begin, FrameKind, unpack_error
from tests.helpers import tiny_model
from tests.serve.fake_engine import FakeEngine, port_before
from tests.serve.test_process_port import engine_config
from tests.serve.test_resume import running, takes_all, until

Sent = list[tuple[int, int, str]]  # kind, call, and what the error says


def links() -> tuple[Link, Link]:
    ours, theirs = socket.socketpair()
    there, back = shared_file(1 << 20), shared_file(1 << 20)
    pair = Link(ours, open_ring(there), open_ring(back)), Link(theirs, open_ring(back), open_ring(there))
    os.close(there)
    os.close(back)
    return pair


async def talk(speak: Callable[[Link], None], num_answers: int, process: type[EngineProcess] = EngineProcess) -> Sent:
    """Run an engine's process in this loop, speak to it, and return its first answers."""
    front, engine = links()
    answers: Sent = []

    def receive() -> None:
        try:
            for frame in front.receive():
                answers.append((frame.kind, frame.call, str(unpack_error(frame.payload))))
                front.done(frame)
        except EngineClosed:
            front.detach()

    front.attach(asyncio.get_running_loop(), receive)
    running = asyncio.create_task(process(engine).run())
    await asyncio.sleep(0)
    speak(front)
    async with asyncio.timeout(120):  # an engine may compile
        while len(answers) < num_answers:
            await asyncio.sleep(0.001)
        if not running.done():
            front.send(FrameKind.END, 0)
        await running
    front.close()
    engine.close()
    return answers


def test_a_frame_that_cannot_be_read_is_answered_and_does_not_take_along_those_behind_it() -> None:
    def speak(front: Link) -> None:
        front.send(FrameKind.CALL, 7, [b"\xc1 garbage"])
        front.send(FrameKind.RANK, 8, [b"\xc1 garbage"])
        front.send(FrameKind.CALL, 9, [msgspec.msgpack.encode(["stats", {}])])

    answers = asyncio.run(talk(speak, 3))
    assert [(kind, call) for kind, call, _ in answers] == [
        (FrameKind.ERROR, 7),
        (FrameKind.ERROR, 8),
        (FrameKind.ERROR, 9),
    ]
    assert "when the engine is ready" in answers[2][2], "it was read, and came too early"


@pytest.mark.parametrize("payload", [b"\xc1 garbage", msgspec.msgpack.encode(Begin("model", {}, {}))])
def test_a_beginning_that_makes_no_sense_ends_the_process_with_a_reason(payload: bytes) -> None:
    ((kind, _, reason),) = asyncio.run(talk(lambda front: front.send(FrameKind.BEGIN, 0, [payload]), 1))
    assert kind == FrameKind.FAILED
    assert reason


def test_positions_that_make_no_sense_end_the_process() -> None:
    def speak(front: Link) -> None:
        front.socket.send(b"\xff" * 56)

    ((kind, _, _),) = asyncio.run(talk(speak, 1))
    assert kind == FrameKind.FAILED


def test_an_answer_that_is_lost_to_a_mistake_ends_the_process() -> None:
    class Forgetful(EngineProcess):
        def _fail(self, call: int, error: Exception) -> None:
            raise RuntimeError("a mistake in answering")

    stats = msgspec.msgpack.encode(["stats", {}])
    ((kind, _, reason),) = asyncio.run(talk(lambda front: front.send(FrameKind.CALL, 9, [stats]), 1, Forgetful))
    assert (kind, reason) == (FrameKind.FAILED, "a mistake in answering")


def test_a_process_that_finds_its_model_corrupt_ends_with_that_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Corrupt(EngineProcess):
        def _answer(self, kind: FrameKind, call: int, parts: Sequence[bytes | memoryview]) -> None:
            super()._answer(kind, call, parts)
            if kind == FrameKind.READY:
                self._ready_port().current.engine._stop_serving(ModelError("item.safetensors is corrupt"))

    model = tiny_model()
    save_model(tmp_path / "tiny", model.config, model.dense, model.tables)
    monkeypatch.setattr("helmrec.serve.engine_process.log_to_stderr", lambda level, secrets: None)
    serve = ServeConfig(policy="none", log_level="error")
    begin = msgspec.msgpack.encode(Begin(str(tmp_path / "tiny"), revealed(engine_config()), for_engine(serve)))
    answers = asyncio.run(talk(lambda front: front.send(FrameKind.BEGIN, 0, [begin]), 2, Corrupt))
    assert [kind for kind, _, _ in answers] == [FrameKind.READY, FrameKind.FAILED]
    assert answers[1][2] == "item.safetensors is corrupt"


def test_an_engine_whose_model_is_corrupt_is_not_started_again() -> None:
    engine = FakeEngine(takes_all)
    port = port_before(engine)

    async def give_up() -> None:
        async with running(port):
            engine.give_up(ModelError("item.safetensors is corrupt"))
            await until(lambda: port.health is Health.FAILED)
            assert port.reason == "item.safetensors is corrupt"
            assert (engine.num_starts, port.num_restarts) == (1, 0)

    asyncio.run(give_up())


def test_an_engine_that_fails_otherwise_is_started_again() -> None:
    engine = FakeEngine(takes_all)
    port = port_before(engine)

    async def give_up() -> None:
        async with running(port):
            engine.give_up(RuntimeError("CUDA error"))
            await until(lambda: engine.num_starts == 2 and port.health is Health.READY)

    asyncio.run(give_up())
