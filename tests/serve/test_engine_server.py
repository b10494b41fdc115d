"""Calls are answered once, when all their requests have ended or one has failed."""

import asyncio
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from helmrec.errors import Forgotten
from helmrec.serve.engine_server import EndedCalls
from helmrec.serve.port import Queued
from helmrec.types import RankResult


def queued(num: int) -> Queued:
    futures: list[Future[RankResult]] = [Future() for _ in range(num)]
    return Queued(list(range(num)), futures, 0.0)


async def settled() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_a_call_is_answered_when_its_last_request_has_ended() -> None:
    async def run() -> None:
        calls, answers, waiting = EndedCalls(), list[str](), queued(3)
        calls.watch(waiting, lambda: answers.append("call"))
        for future in waiting.futures:
            await settled()
            assert answers == []
            future.set_result(None)  # type: ignore[arg-type]
        await settled()
        assert answers == ["call"]

    asyncio.run(run())


@pytest.mark.parametrize("ends", ["fail", "succeed", "are cancelled"])
def test_the_first_failure_answers_a_call_whatever_its_other_requests_do(ends: str) -> None:
    async def run() -> None:
        calls, answers, waiting = EndedCalls(), list[str](), queued(3)
        calls.watch(waiting, lambda: answers.append("call"))
        waiting.futures[1].set_exception(Forgotten("user 1"))
        await settled()
        assert answers == ["call"]
        for future in (waiting.futures[0], waiting.futures[2]):
            end: dict[str, Any] = {
                "fail": lambda future=future: future.set_exception(Forgotten("too")),
                "succeed": lambda future=future: future.set_result(None),
                "are cancelled": future.cancel,
            }
            end[ends]()
        await settled()
        assert answers == ["call"]

    asyncio.run(run())


def test_requests_that_several_threads_end_at_once_are_all_noticed() -> None:
    async def run() -> None:
        calls, answers = EndedCalls(), list[int]()
        waiting = [queued(4) for _ in range(300)]
        for number, each in enumerate(waiting):
            calls.watch(each, lambda number=number: answers.append(number))  # type: ignore[misc]

        def end(place: int) -> None:
            for each in waiting:
                each.futures[place].set_result(None)  # type: ignore[arg-type]

        threads = [threading.Thread(target=end, args=(place,)) for place in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            await asyncio.sleep(0)
        await settled()
        assert sorted(answers) == list(range(300))

    asyncio.run(run())
