"""The port in front of three real engines, without Ray: what routing, losing and forgetting must not change."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from helmrec.cluster.port import ClusterPort
from helmrec.cluster.replica import ReplicaReply
from helmrec.engine.choose import device_name
from helmrec.errors import DeadlineExceeded, EngineClosed, Forgotten, RequestError
from helmrec.serve.app import make_app
from helmrec.serve.port import Health
from helmrec.serve.settings import ServeConfig
from tests.cluster.cases import LocalFleet, ahead_of, make_replica, spread, write_model
from tests.helpers import tiny_config, tiny_engine
from tests.serve.asgi import Caller
from tests.serve.cases import rank_body, rank_requests


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("cluster") / "tiny")


@pytest.fixture
def fleet(folder: Path) -> Iterator[LocalFleet]:
    fleet = LocalFleet(*(make_replica(folder, name) for name in ("a", "b", "c")))
    replicas = list(fleet.replicas.values())
    asyncio.run(fleet.report())
    yield fleet
    for replica in replicas:
        asyncio.run(replica.close())
    fleet.dispatch.state.check()


def with_port(fleet: LocalFleet, work: Callable[[ClusterPort], Awaitable[None]]) -> None:
    async def run() -> None:
        port = ClusterPort(fleet, tiny_config(), max_history=100, patience_s=5.0)
        port.start()
        for _ in range(100):
            if port.health is Health.READY:
                break
            await asyncio.sleep(0.01)
        assert port.health is Health.READY
        await work(port)
        await port.close()

    asyncio.run(run())


def test_users_by_string_are_ranked_and_come_back_to_their_replica(fleet: LocalFleet) -> None:
    requests = [replace(request, user_id=f"user-{request.user_id}") for request in rank_requests(30)]
    wanted = tiny_engine().rank(requests)

    async def work(port: ClusterPort) -> None:
        for _ in range(2):
            for result, alone in zip(await port.submit(requests), wanted, strict=True):
                np.testing.assert_allclose(result.scores, alone.scores, atol=1e-5)
        await port.forget("user-3")
        (again,) = await port.submit(requests[3:4])
        assert again.reused_tokens == 0

    with_port(fleet, work)
    assert len(spread(fleet.went_to)) == 3
    assert fleet.went_to[:30] == fleet.went_to[30:60], "users come back to where they were"


def test_scores_are_those_of_one_engine_in_the_order_of_the_requests(fleet: LocalFleet) -> None:
    requests = rank_requests(30)
    wanted = tiny_engine().rank(requests)

    async def work(port: ClusterPort) -> None:
        for _ in range(2):
            results = await port.submit(requests)
            for result, alone in zip(results, wanted, strict=True):
                np.testing.assert_allclose(result.scores, alone.scores, atol=1e-5)
        stats = await port.stats()
        assert stats.served >= 60
        assert stats.pool.num_pages == 90

    with_port(fleet, work)
    assert len(spread(fleet.went_to)) == 3
    assert fleet.went_to[:30] == fleet.went_to[30:], "users come back to where they were"


def test_one_wrong_request_keeps_the_others_of_its_call_from_running(fleet: LocalFleet) -> None:
    good, bad = rank_requests(2)
    bad = replace(bad, items=[10_000, *list(bad.items)[1:]])

    async def work(port: ClusterPort) -> None:
        with pytest.raises(RequestError, match=r"requests\[1\].items\[0\]"):
            await port.submit([good, bad])
        with pytest.raises(RequestError, match=r"^items\[0\]"):
            await port.submit([bad])
        with pytest.raises(RequestError, match=r"^user_id"):
            await port.submit([replace(good, user_id=2**70)])

    with_port(fleet, work)


def test_a_lost_replica_costs_a_second_try_and_no_error(fleet: LocalFleet) -> None:
    requests = rank_requests(20)

    async def work(port: ClusterPort) -> None:
        await port.submit(requests)
        fleet.lost = {fleet.went_to[0]}
        assert len(await port.submit(requests)) == 20
        assert 1 <= port.num_retries <= 20
        assert len(fleet.replicas) == 2

    with_port(fleet, work)


def test_an_engine_that_ended_is_avoided_on_the_second_try(fleet: LocalFleet) -> None:
    (request,) = rank_requests(1)

    async def work(port: ClusterPort) -> None:
        await port.submit([request])
        home = fleet.went_to[-1]
        await fleet.replicas[home].close()
        assert len(await port.submit([request])) == 1
        assert fleet.went_to[-2] == home != fleet.went_to[-1]
        with pytest.raises(EngineClosed):
            fleet.replicas[home].check_health()

    with_port(fleet, work)


def test_two_lost_replicas_are_an_error_that_says_so(fleet: LocalFleet) -> None:
    (request,) = rank_requests(1)
    fleet.lost = set(fleet.replicas)

    async def work(port: ClusterPort) -> None:
        with pytest.raises(EngineClosed, match="two replicas were lost"):
            await port.submit([request])

    with_port(fleet, work)


def test_what_was_spent_before_counts_towards_the_deadline(fleet: LocalFleet) -> None:
    (request,) = rank_requests(1)

    async def work(port: ClusterPort) -> None:
        await port.submit([replace(request, deadline_ms=5_000)], spent_ms=10.0)
        with pytest.raises(DeadlineExceeded):
            await port.submit([replace(request, deadline_ms=20)], spent_ms=1_000.0)

    with_port(fleet, work)


def test_a_request_that_came_before_its_user_was_forgotten_is_refused(fleet: LocalFleet) -> None:
    (request,) = rank_requests(1)

    async def work(port: ClusterPort) -> None:
        await port.submit([request])
        await port.forget(request.user_id)
        with pytest.raises(Forgotten):
            await port.submit([request], spent_ms=10_000.0)
        (result,) = await port.submit([request])
        assert result.reused_tokens == 0

    with_port(fleet, work)


def test_a_signal_that_came_before_its_user_was_forgotten_is_refused(fleet: LocalFleet) -> None:
    """Its history was read from a store meanwhile, and the user forgotten by way of another front."""
    (request,) = rank_requests(1)

    async def work(port: ClusterPort) -> None:
        await port.forget(request.user_id)
        with pytest.raises(Forgotten):
            await port.prefill(ahead_of(request), spent_ms=10_000.0)
        assert await port.prefill(ahead_of(request))

    with_port(fleet, work)


def test_clocks_of_replicas_need_not_agree_with_that_of_the_front(
    fleet: LocalFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    (request,) = rank_requests(1)
    for skew_s in (-3_600.0, 3_600.0):
        skewed = SimpleNamespace(
            time=partial(skewed_s, time.time, skew_s), monotonic=partial(skewed_s, time.monotonic, skew_s)
        )
        monkeypatch.setattr("helmrec.cluster.replica.time", skewed)

        async def work(port: ClusterPort) -> None:
            await port.submit([replace(request, deadline_ms=2_000)])
            await port.forget(request.user_id)
            with pytest.raises(Forgotten):
                await port.submit([request], spent_ms=10_000.0)
            await port.submit([request])

        with_port(fleet, work)


def skewed_s(clock: Callable[[], float], skew_s: float) -> float:
    return clock() + skew_s


def test_knobs_reach_every_engine(fleet: LocalFleet) -> None:
    model = tiny_config()

    async def work(port: ClusterPort) -> None:
        await port.move_alpha(0.2)
        looks = [replica._engine.stats().pool.alpha_target for replica in fleet.replicas.values()]
        assert looks == [pytest.approx(0.2)] * 3
        await port.update_rows("item", [1], [[0.5] * model.row_dim])
        requests = [replace(r, candidates=[1], candidate_features={"category": [1]}) for r in rank_requests(12)]
        twin = tiny_engine()
        twin.update_rows("item", [1], [[0.5] * model.row_dim])
        for result, alone in zip(await port.submit(requests), twin.rank(requests), strict=True):
            np.testing.assert_allclose(result.scores, alone.scores, atol=1e-5)
        with pytest.raises(RequestError, match="mode"):
            await port.set_mode("freeze")
        look = await port.look()
        assert len(look.page_owners) == look.stats.pool.num_pages == 90

    with_port(fleet, work)


def test_a_signal_goes_where_its_rank_will_go(fleet: LocalFleet) -> None:
    requests = rank_requests(12)

    async def work(port: ClusterPort) -> None:
        for request in requests:
            told = await port.prefill(ahead_of(request))
            assert told.verdict
        before = list(fleet.went_to)
        await port.submit(requests)
        assert fleet.went_to[len(before) :] == before

    with_port(fleet, work)


def test_metrics_name_the_replica_and_count_replicas_that_were_started_again(folder: Path, fleet: LocalFleet) -> None:
    port = ClusterPort(fleet, tiny_config(), max_history=100, patience_s=5.0)
    with Caller(make_app(port, ServeConfig())) as caller:
        caller.wait_until_ready()
        for user in range(6):
            assert caller.post("/v1/rank", rank_body(user_id=user)).status == 200
        before = samples(caller)
        assert {labels["replica"] for labels, _ in before["helmrec_pool_alpha"]} == {"a", "b", "c"}
        assert sum(value for _, value in before["helmrec_served_total"]) >= 6
        assert {(each["replica"], each["cause"]) for each, _ in before["helmrec_pool_bytes_total"]} >= {
            ("a", "row-miss")
        }
        assert before["helmrec_engine_restarts_total"] == [({}, 0.0)]
        assert before["helmrec_replicas"] == [({}, 3.0)]
        live = caller.get("/v1/live").json
        assert sorted(live["replicas"]) == ["a", "b", "c"]
        assert sum(each["served"] for each in live["replicas"].values()) == live["stats"]["served"]
        assert live["device"] == device_name("cpu"), "named once"
        asyncio.run(fleet.replicas.pop("b").close())
        assert samples(caller)["helmrec_replicas"] == [({}, 2.0)]
        assert sorted(caller.get("/v1/live").json["replicas"]) == ["a", "c"]
        fleet.replicas["d"] = make_replica(folder, "d")
        after = samples(caller)
        asyncio.run(fleet.replicas.pop("d").close())
    assert {labels["replica"] for labels, _ in after["helmrec_pool_alpha"]} == {"a", "c", "d"}
    assert after["helmrec_engine_restarts_total"] == [({}, 1.0)]


def samples(caller: Caller) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Labels and values of every metric."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(caller.get("/metrics").body.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_a_replica_that_does_not_answer_leaves_the_others_ready(
    fleet: LocalFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("helmrec.cluster.port._LOOK_TIMEOUT_S", 0.05)

    async def stuck(*_: object) -> list[ReplicaReply]:
        await asyncio.sleep(60)
        return []

    async def work(port: ClusterPort) -> None:
        monkeypatch.setattr(fleet, "call_all", stuck)
        await reason_is(port, "a replica did not answer within 0.05 s")
        assert port.health is Health.READY
        assert len(await port.submit(rank_requests(1))) == 1

    with_port(fleet, work)


def test_replicas_that_cannot_be_looked_at_make_the_port_unready_and_are_logged_once(
    fleet: LocalFleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("helmrec.cluster.port._LOOK_EVERY_S", 0.01)

    async def broken(*_: object) -> list[ReplicaReply]:
        raise RuntimeError("planted")

    async def work(port: ClusterPort) -> None:
        monkeypatch.setattr(fleet, "call_all", broken)
        await reason_is(port, "the replicas could not be asked for their state (RuntimeError)")
        await asyncio.sleep(0.1)
        assert port.health.value == "restarting"
        monkeypatch.undo()
        await reason_is(port, None)
        assert port.health.value == "ready"

    with_port(fleet, work)
    assert [record.message for record in caplog.records].count("the replicas could not be asked for their state") == 1


async def reason_is(port: ClusterPort, reason: str | None) -> None:
    for _ in range(300):
        if port.reason == reason:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{reason!r} is wanted, got {port.reason!r}")


def test_without_any_replica_the_port_is_not_ready_and_says_why(fleet: LocalFleet) -> None:
    fleet.replicas = {}

    async def run() -> None:
        port = ClusterPort(fleet, tiny_config(), max_history=100, patience_s=5.0)
        port.start()
        await asyncio.sleep(0.05)
        assert port.health is Health.STARTING
        assert port.reason == "no replica is running"
        await port.close()

    asyncio.run(run())


def test_a_port_closes_at_whatever_moment_it_is_asked_to() -> None:
    async def run() -> None:
        for num_turns in range(12):
            port = ClusterPort(LocalFleet(), tiny_config(), max_history=100, patience_s=5.0)
            port.start()
            for _ in range(num_turns):
                await asyncio.sleep(0)
            async with asyncio.timeout(1.0):
                await port.close()
            assert port.health is Health.CLOSED

    asyncio.run(run())
