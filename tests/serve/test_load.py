"""Open-loop load over HTTP: everything is answered and counted once, whatever becomes of it."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from helmrec.cli.main import app
from helmrec.clock import MonotonicClock
from helmrec.config import EngineConfig
from helmrec.engine.engine import Engine
from helmrec.engine.runner import Runner, Running
from helmrec.engine.scheduler import Batch
from helmrec.errors import ConfigError, ServerError
from helmrec.load import LoadSnapshot, arrival_times
from helmrec.model.profiles import profile
from helmrec.model.weights import init_model
from helmrec.serve.app import make_app
from helmrec.serve.client import Client
from helmrec.serve.load import HttpLoad
from helmrec.serve.port import InProcessPort
from helmrec.serve.settings import ServeConfig
from helmrec.traffic.families import family, preset
from helmrec.traffic.generate import generate
from helmrec.traffic.trace_file import write_trace
from tests.helpers import tiny_engine
from tests.serve.asgi import on_loopback, wait_for
from tests.serve.cases import rank_requests


def ready(port: int) -> str:
    url = f"http://127.0.0.1:{port}"
    with Client(url) as client:
        wait_for(client.is_ready)
    return url


def slow_steps(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    launch = Runner.launch

    def late(self: Runner, batch: Batch) -> Running:
        time.sleep(seconds)
        return launch(self, batch)

    monkeypatch.setattr(Runner, "launch", late)


async def broken(*_: Any) -> None:
    raise RuntimeError("broken")


def test_every_request_is_answered_and_counted_once() -> None:
    engine, seen = tiny_engine(clock=MonotonicClock(), audit_every=1), list[LoadSnapshot]()
    with on_loopback(make_app(InProcessPort(engine), ServeConfig())) as port:
        load = HttpLoad(ready(port))
        model = load.model()
        assert model == engine.model_config
        times_s = arrival_times(np.zeros(60), rate=300, seed=0)
        end = load.run(iter(rank_requests(60)), model, times_s, seen.append, watch_every_s=0.05)
        assert engine.stats().audit_mismatches == 0
        assert engine.stats().served == 63, "with three to warm up"
    assert (end.offered, end.answered, end.failed, end.refused) == (60, 60, 0, {})
    assert 0 < end.p50_ms <= end.p99_ms
    assert end.pool.total_tokens > 0
    assert seen
    assert sorted(status for _, status, _ in load.outcomes) == [200] * 60


def test_refusals_are_counted_by_cause_and_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(clock=MonotonicClock(), max_batch_requests=1, queue_limit=2)
    with on_loopback(make_app(InProcessPort(engine), ServeConfig())) as port:
        load = HttpLoad(ready(port))
        model = load.model()
        slow_steps(monkeypatch, 0.05)
        end = load.run(iter(rank_requests(30)), model, np.zeros(30))
    assert end.refused["queue full"] > 10
    assert end.answered + sum(end.refused.values()) == 30
    assert end.refused_p99_ms < end.p99_ms


def test_a_deadline_is_sent_along(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_loopback(make_app(InProcessPort(tiny_engine(clock=MonotonicClock())), ServeConfig())) as port:
        load = HttpLoad(ready(port), deadline_ms=1e-3)
        end = load.run(iter(rank_requests(5)), load.model(), np.arange(5) / 50)
    assert end.refused == {"deadline, or not ready": 5}


def test_a_server_that_does_not_run_is_an_error() -> None:
    with pytest.raises(ConfigError, match="url must look like"):
        HttpLoad("ftp://host")
    with pytest.raises(ServerError, match="no answer"):
        HttpLoad("http://127.0.0.1:9").model()


def test_the_command_offers_a_trace_to_a_server_and_says_why_requests_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = preset("amazon-video-games").stretched(40)
    trace = generate(family("steady", type(shape)(**shape.model_dump() | {"rate": 50.0, "duration_s": 1.0})), seed=0)
    write_trace(trace, tmp_path / "trace.parquet")
    init_model(tmp_path / "model", profile("demo", trace.catalogue.num_items), 0)
    settings: dict[str, Any] = {"pool_bytes": "64MiB"}
    engine = Engine.from_model(tmp_path / "model", EngineConfig(**settings), MonotonicClock())
    with on_loopback(make_app(InProcessPort(engine), ServeConfig())) as port:
        command = ["load", ready(port), "--trace", str(tmp_path / "trace.parquet"), "--rate", "60", "--requests", "20"]
        done = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "result.json")])
        monkeypatch.setattr(InProcessPort, "submit", broken)
        failed = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert failed.exit_code == 1
    assert "20 of 20 requests failed; 20 of them with: status 500: " in failed.stderr
    assert done.exit_code == 0, done.output
    assert "20 / 20" in done.output
    assert "20 requests over 0." in done.stderr
    assert json.loads((tmp_path / "result.json").read_text())["answered"] == 20
