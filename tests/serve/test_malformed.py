"""Thousands of wrong bodies: each is refused, none is our failure, and the engine never hears of them."""

import logging
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from helmrec.engine.engine import Engine
from tests.serve.asgi import Caller, Reply, send
from tests.serve.cases import rank_body
from tests.serve.malformed import Sent, damaged, wrong_events, wrong_infer_binary, wrong_infer_json, wrong_rank

KINDS = [(wrong_rank, 4_000), (wrong_infer_json, 3_000), (wrong_infer_binary, 3_000)]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "helmrec.serve")  # one line per refusal would be most of the work


def send_all(caller: Caller, make: Callable[[np.random.Generator], Sent], num: int, seed: int) -> list[Reply]:
    rng = np.random.default_rng(seed)

    async def one_by_one() -> list[Reply]:
        replies = []
        for i in range(num):
            sent = make(rng)
            reply = await send(caller.app, "POST", sent.path, sent.body, sent.headers)
            assert reply.status < 500, f"number {i} of seed {seed}: {sent}"
            replies.append(reply)
        return replies

    replies: list[Reply] = caller.run(one_by_one())
    return replies


def refuse_all(caller: Caller, make: Callable[[np.random.Generator], Sent], num: int, seed: int) -> None:
    before = caller.get("/v1/pool").json
    replies = send_all(caller, make, num, seed)
    assert Counter(reply.status for reply in replies) == {400: num}
    assert all(reply.json["field"] and len(reply.body) < 2_000 for reply in replies)
    assert len({reply.json["field"] for reply in replies}) > 10, "they are wrong in many ways"
    assert caller.get("/v1/pool").json == before


def serve_what_survives(caller: Caller, num: int, seed: int) -> None:
    good = caller.post("/v1/rank", rank_body()).json["scores"]
    before = caller.get("/v1/pool").json["served"]
    statuses = Counter(reply.status for reply in send_all(caller, damaged, num, seed))
    assert statuses.keys() == {200, 400}
    assert caller.get("/v1/pool").json["served"] == before + statuses[200]
    assert caller.post("/v1/rank", rank_body()).json["scores"] == pytest.approx(np.array(good), abs=1e-5)


@pytest.mark.parametrize(("make", "num"), KINDS)
def test_wrong_bodies_are_refused_and_leave_no_trace(
    caller: Caller, make: Callable[[np.random.Generator], Sent], num: int
) -> None:
    refuse_all(caller, make, num, seed=0)


def test_wrong_events_are_refused_and_not_kept(keeper: Caller) -> None:
    refuse_all(keeper, wrong_events, 2_000, seed=0)
    assert keeper.get("/v1/users/7").status == 404
    assert "helmrec_history_users 0.0" in keeper.get("/metrics").body.decode()


def test_damaged_bodies_are_refused_or_served(caller: Caller, served: Engine) -> None:
    serve_what_survives(caller, 2_000, seed=0)
    assert served.stats().audit_mismatches == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
def test_many_more_wrong_bodies(caller: Caller, seed: int) -> None:
    for make, num in KINDS:
        refuse_all(caller, make, 2 * num, seed)
    serve_what_survives(caller, 10_000, seed)
