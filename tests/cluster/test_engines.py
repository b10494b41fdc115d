"""Several engines on one host, without Ray: the answers of one, whatever happens to an engine."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helmrec.cluster import engines
from helmrec.cluster.engines import EnginesPort, make_engines
from helmrec.costs.calibrated import default_cost
from helmrec.costs.routing import RouterCost
from helmrec.engine.engine import EngineStats
from helmrec.errors import ConfigError, EngineClosed, RequestError
from helmrec.model.weights import save_model
from helmrec.router.settings import StateSettings
from helmrec.router.sketch import PackedSketch, build_sketch
from helmrec.serve.app import make_app
from helmrec.serve.port import Health
from helmrec.serve.settings import ServeConfig
from helmrec.types import RankResult
from tests.helpers import tiny_engine, tiny_model
from tests.serve.asgi import Caller, wait_for
from tests.serve.cases import as_request, rank_body, rank_requests
from tests.serve.conftest import TOKEN
from tests.serve.fake_engine import FakeEngine, port_before
from tests.serve.test_process_port import engine_config
from tests.serve.test_resume import until

ADMIN = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engines") / "tiny"
    made = tiny_model()
    save_model(path, made.config, made.dense, made.tables)
    return path


def two_engines(folder: Path, **overrides: Any) -> EnginesPort:
    serve: dict[str, Any] = {"engines": 2, "ring_bytes": 1 << 20, "log_level": "error", "policy": "none"}
    return make_engines(folder, engine_config(**overrides), ServeConfig(**serve))


class Host:
    """A front with two engines behind it."""

    def __init__(self, port: EnginesPort, caller: Caller) -> None:
        self.port = port
        self.caller = caller

    def pid(self, engine: int) -> int:
        process = self.port._ports[engine]._process
        assert process is not None
        return process.pid

    def run(self, work: Callable[[], Awaitable[Any]]) -> Any:
        return self.caller.run(work())

    def wait_for_both(self) -> None:
        wait_for(lambda: all(port.health is Health.READY for port in self.port._ports))
        wait_for(lambda: all(seen.num_reports for seen in self.port._seen))

    def stats_by_engine(self) -> dict[str, EngineStats]:
        self.run(self.port.stats)
        return dict(self.port.replica_stats)


@pytest.fixture(scope="module")
def host(folder: Path) -> Iterator[Host]:
    port = two_engines(folder)
    with Caller(make_app(port, ServeConfig(admin_token=TOKEN))) as caller:
        caller.wait_until_ready()
        host = Host(port, caller)
        yield host
        host.wait_for_both()
        pids = [host.pid(0), host.pid(1)]
    assert port.health is Health.CLOSED
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()], "engines end with their front"


def test_routed_scores_are_those_of_one_engine(host: Host) -> None:
    requests = rank_requests(24)
    results = host.run(lambda: host.port.submit(requests))
    for result, expected in zip(results, tiny_engine().rank(requests), strict=True):
        np.testing.assert_allclose(result.scores, expected.scores, atol=1e-5)
    stats = host.stats_by_engine()
    assert list(stats) == ["engine 0", "engine 1"]
    assert all(one.served for one in stats.values()), "both have served"
    assert host.run(host.port.stats).served == sum(one.served for one in stats.values())


def test_a_user_who_returns_finds_the_engine_with_the_history(host: Host) -> None:
    body = rank_body(user_id=77)
    for _ in range(4):
        assert host.caller.post("/v1/rank", body).status == 200
    before = sum(stats.pool.reused_tokens for stats in host.stats_by_engine().values())
    assert host.caller.post("/v1/rank", body).status == 200
    after = sum(stats.pool.reused_tokens for stats in host.stats_by_engine().values())
    assert after > before


def test_requests_are_routed_by_costs_that_these_engines_have_learned(host: Host) -> None:
    def learned() -> bool:
        host.run(lambda: host.port.submit(rank_requests(8)))
        return len(host.port._costs) == 2

    wait_for(learned)
    for costs in host.port._costs.values():
        assert costs.token_ms + costs.compute_step_ms + costs.host_step_ms > 0
    learned_cost = RouterCost.learned(list(host.port._costs.values()), len(host.port.model.features))
    figures = host.port._policy._figures[-len(learned_cost) :]
    h200 = RouterCost.from_calibration(default_cost().terms(), len(host.port.model.features), 64)
    assert not np.allclose(figures, h200)
    assert figures[0] + figures[2] > 0
    assert host.run(host.port.stats).costs is not None


def test_every_engine_has_metrics_of_its_own(host: Host) -> None:
    text = host.caller.get("/metrics").body.decode()
    for name in ("engine 0", "engine 1"):
        assert f'helmrec_pool_alpha{{replica="{name}"}}' in text
        assert f'helmrec_served_total{{replica="{name}"}}' in text


def test_what_is_wrong_is_refused_as_by_one_engine(host: Host) -> None:
    assert host.caller.post("/v1/rank", rank_body(items=[1, 2, 999])).status == 400
    served = host.run(host.port.stats).served
    requests = [*rank_requests(3), as_request(rank_body(user_id=1_000, items=[1, 2, 999]))]
    with pytest.raises(RequestError, match="999"):
        host.run(lambda: host.port.submit(requests))
    assert host.run(host.port.stats).served == served, "all requests of a call or none"
    with pytest.raises(RequestError, match="table"):
        host.run(lambda: host.port.update_rows("nowhere", [1], [[0.0]]))


def test_a_killed_engine_costs_no_client_an_error(host: Host) -> None:
    requests = rank_requests(40)
    wanted = [result.scores for result in tiny_engine().rank(requests)]

    async def under_load() -> list[list[RankResult]]:
        answers: list[list[RankResult]] = []
        for turn in range(12):
            if turn == 3:
                asyncio.get_running_loop().call_later(0.002, os.kill, host.pid(0), signal.SIGKILL)
            answers += await asyncio.gather(*(host.port.submit([request]) for request in requests))
        return answers

    restarts = host.port.num_restarts
    for i, (result,) in enumerate(host.run(under_load)):
        np.testing.assert_allclose(result.scores, wanted[i % len(requests)], atol=1e-5)
    assert host.port.health is Health.READY
    wait_for(lambda: host.port.num_restarts == restarts + 1)
    host.wait_for_both()


def test_an_engine_that_was_down_has_the_rows_that_were_updated_meanwhile(host: Host) -> None:
    host.wait_for_both()
    model = tiny_model()
    table = model.config.features[0].name
    ids, values = [1, 2, 3], np.full((3, model.config.row_dim), 0.25, np.float32)
    os.kill(host.pid(1), signal.SIGKILL)
    wait_for(lambda: host.port._ports[1].health is not Health.READY)
    host.run(lambda: host.port.update_rows(table, ids, values.tolist()))
    with pytest.raises(EngineClosed, match=r"engine 1 .* nothing was changed"):
        host.run(lambda: host.port.forget(1))
    host.wait_for_both()
    expected = tiny_engine(model)
    expected.update_rows(table, ids, values)
    request = as_request(rank_body(items=[1, 2, 3]))
    (wanted,) = expected.rank([request])
    for port in host.port._ports:
        (result,) = host.caller.run(port.submit([request]))
        np.testing.assert_allclose(result.scores, wanted.scores, atol=1e-5)


def test_admin_calls_reach_every_engine(host: Host) -> None:
    host.wait_for_both()
    assert host.caller.post("/v1/admin/alpha", {"alpha": 0.3}, ADMIN).status == 200
    targets = [stats.pool.alpha_target for stats in host.stats_by_engine().values()]
    assert targets == pytest.approx([0.3, 0.3], abs=0.05)
    host.run(lambda: host.port.forget(77))
    assert host.caller.get("/metrics").status == 200


def test_without_a_ready_engine_the_reason_is_said(folder: Path) -> None:
    async def ask() -> None:
        await two_engines(folder).submit(rank_requests(1))

    with pytest.raises(EngineClosed, match="no engine is ready"):
        asyncio.run(ask())


def test_each_engine_has_a_card_of_its_own(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    ports = two_engines(folder, device="cuda")._ports
    assert [port._environment["CUDA_VISIBLE_DEVICES"] for port in ports] == ["4", "6"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    with pytest.raises(ConfigError, match=r"engines: .* 1 are visible, got 2"):
        two_engines(folder, device="cuda")


def test_snapshots_of_engines_are_kept_apart(folder: Path, tmp_path: Path) -> None:
    serve = ServeConfig(engines=2, snapshot_path=str(tmp_path / "state"), policy="none")
    port = make_engines(folder, engine_config(), serve)
    paths = [each._begin.serve["snapshot_path"] for each in port._ports]
    assert paths == [f"{tmp_path}/state.0", f"{tmp_path}/state.1"]


def test_an_engine_that_hangs_delays_the_state_of_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_ANSWER_S", 0.2)
    monkeypatch.setattr(engines, "_LOOK_EVERY_S", 0.01)

    def sketch(_: str, arguments: dict[str, Any]) -> PackedSketch:
        return build_sketch(np.arange(4), arguments["num_bits"]).packed()

    def hang(*_: Any) -> None:
        pass

    async def ask() -> None:
        fakes = [FakeEngine(sketch), FakeEngine(sketch)]
        port = EnginesPort({f"engine {i}": port_before(fake) for i, fake in enumerate(fakes)}, 100, StateSettings())
        port.start()
        await until(lambda: port.health is Health.READY)
        await port.stats()
        assert list(port.replica_stats) == ["engine 0", "engine 1"]
        monkeypatch.setattr(fakes[0], "_call", hang)
        num_reports = port._seen[1].num_reports
        async with asyncio.timeout(10):
            await port.stats()
        assert list(port.replica_stats) == ["engine 1"]
        await until(lambda: port._seen[1].num_reports > num_reports + 2)
        monkeypatch.setattr(fakes[1], "_call", hang)
        async with asyncio.timeout(10):
            with pytest.raises(EngineClosed, match="no engine answers"):
                await port.stats()
        await port.close()

    asyncio.run(ask())
