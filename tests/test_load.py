"""Open-loop load: what is offered, and what latency means."""

import json
import re
import time
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from helmrec.cli.main import app
from helmrec.clock import MonotonicClock
from helmrec.control.policy import Move, WindowStats
from helmrec.control.rebalancer import Rebalancer
from helmrec.engine.engine import Engine
from helmrec.engine.runner import Runner, Running
from helmrec.engine.scheduler import Batch
from helmrec.errors import ConfigError
from helmrec.load import EngineLoad, LoadSnapshot, LoadTally, arrival_times
from helmrec.model.profiles import profile
from helmrec.model.weights import init_model
from helmrec.traffic.families import family, preset
from helmrec.traffic.generate import generate
from helmrec.traffic.trace_file import write_trace
from tests.helpers import random_request, tiny_engine, tiny_model


def live_engine(**settings: Any) -> Engine:
    engine = tiny_engine(clock=MonotonicClock(), **settings)
    engine.rank([random_request(np.random.default_rng(0), engine.model_config, 99)])  # compiles
    return engine


def requests(engine: Engine, num: int) -> Any:
    rng = np.random.default_rng(0)
    return iter([random_request(rng, engine.model_config, user % 7) for user in range(num)])


def slow_steps(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    launch = Runner.launch

    def late(self: Runner, batch: Batch) -> Running:
        time.sleep(seconds)
        return launch(self, batch)

    monkeypatch.setattr(Runner, "launch", late)


def test_every_request_is_answered_and_counted_once() -> None:
    engine, seen = live_engine(), list[LoadSnapshot]()
    times = arrival_times(np.zeros(60), rate=400, seed=0)
    result = EngineLoad(engine).run(requests(engine, 60), times, seen.append, watch_every_s=0.02)
    assert (result.offered, result.answered, result.failed, result.refused) == (60, 60, 0, {})
    assert result.elapsed_s >= times[-1]
    assert 0 < result.p50_ms <= result.p99_ms
    assert seen
    assert seen[-1].answered <= 60
    engine.check()


def test_a_stall_is_felt_by_all_who_would_have_come_during_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = live_engine(max_batch_requests=1)
    slow_steps(monkeypatch, 0.05)
    result = EngineLoad(engine).run(requests(engine, 10), np.zeros(10))
    assert result.p50_ms > 200, "half of them waited for five steps of 50 ms"
    assert result.p99_ms > 450


def test_refusals_are_counted_by_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = live_engine(max_batch_requests=1, queue_limit=2)
    slow_steps(monkeypatch, 0.02)
    result = EngineLoad(engine).run(requests(engine, 30), np.zeros(30))
    assert result.refused["queue full"] > 10
    assert result.answered + sum(result.refused.values()) == 30


def test_a_failing_engine_fails_requests_and_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = live_engine()

    def fail(self: Runner, batch: Batch) -> Running:
        raise RuntimeError("broken")

    monkeypatch.setattr(Runner, "launch", fail)
    result = EngineLoad(engine).run(requests(engine, 5), np.zeros(5))
    assert (result.answered, result.failed) == (0, 5)
    assert result.failures == {"RuntimeError: broken": 5}


def test_poisson_arrivals_have_the_rate_asked_for_and_repeat() -> None:
    times = arrival_times(np.zeros(20_000), rate=250, seed=3)
    assert times[-1] == pytest.approx(80, rel=0.03)
    assert np.array_equal(times, arrival_times(np.zeros(20_000), rate=250, seed=3))
    assert np.array_equal(arrival_times(np.array([5.0, 6.5]), None, 0), [0.0, 1.5])


@pytest.mark.parametrize("rate", [0, -3.0])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="rate must be more than 0"):
        arrival_times(np.zeros(3), rate, 0)


@pytest.fixture(scope="module")
def load_command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """`helmrec load` of a small model with a small trace."""
    folder = tmp_path_factory.mktemp("load")
    shape = preset("amazon-video-games").stretched(40)
    trace = generate(family("steady", type(shape)(**shape.model_dump() | {"rate": 50.0, "duration_s": 1.0})), seed=0)
    write_trace(trace, folder / "trace.parquet")
    init_model(folder / "model", profile("demo", trace.catalogue.num_items), 0)
    return ["load", str(folder / "model"), "--trace", str(folder / "trace.parquet"), "--rate", "100"]


def test_the_command_offers_a_trace_and_writes_what_it_saw(load_command: list[str], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [*load_command, "--requests", "20", "--out", str(tmp_path / "result.json")])
    assert done.exit_code == 0, done.output
    assert "20 / 20" in done.output
    assert json.loads((tmp_path / "result.json").read_text())["answered"] == 20
    refused = CliRunner().invoke(app, [*load_command, "--rate", "-1"])
    assert refused.exit_code == 2
    assert "rate must be more than 0, got -1" in refused.output


def test_the_command_says_what_it_waits_for_without_a_terminal(load_command: list[str]) -> None:
    done = CliRunner().invoke(app, [*load_command, "--requests", "20"])
    loading, start = done.stderr.splitlines()[:2]
    assert loading == "loading the model; the first run compiles, for about a minute"
    assert re.fullmatch(r"20 requests over 0\.\d s", start)


def test_figures_of_no_requests_are_a_dash_and_null(load_command: list[str], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [*load_command, "--requests", "5", "--out", str(tmp_path / "result.json")])
    assert re.search(r"refused after p99\W+-\W", done.stdout)
    assert "nan" not in done.output
    assert "NaN" not in (text := (tmp_path / "result.json").read_text())
    assert json.loads(text)["refused_p99_ms"] is None


@pytest.mark.parametrize(
    "option", ["--policy helm", "--decisions d.jsonl", "--pool 1GiB", "--alpha 0.4", "--device cpu", "--slo 80"]
)
def test_an_option_that_a_server_decides_itself_is_refused_by_name(option: str) -> None:
    command = ["load", "http://127.0.0.1:9", "--trace", "nowhere", *option.split()]
    refused = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert refused.exit_code == 2
    assert re.search(rf"error: {option.split(maxsplit=1)[0]}[a-z-]* needs a model folder", refused.stderr)


@pytest.mark.parametrize("policy", ["static:0.3", None])
def test_decisions_that_cannot_be_explained_are_refused(policy: str | None, tmp_path: Path) -> None:
    flags = [] if policy is None else ["--policy", policy]
    path = tmp_path / "decisions.jsonl"
    refused = CliRunner().invoke(app, ["load", "model", "--trace", "nowhere", "--decisions", str(path), *flags])
    assert refused.exit_code == 2
    assert f"policy {policy or 'none'} makes no decisions" in " ".join(refused.stderr.split())
    assert not path.exists()


class Wants:
    """A policy that asks for one split and counts its windows."""

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self.windows: list[WindowStats] = []

    def decide(self, stats: WindowStats) -> Move | None:
        self.windows.append(stats)
        return Move(self.alpha, "asked for")

    def reset(self) -> None: ...


def test_a_policy_moves_the_boundary_under_load_and_sees_every_request() -> None:
    engine, policy = live_engine(alpha=0.2), Wants(0.6)
    load = EngineLoad(engine, Rebalancer(engine, policy, slo_ms=80, tick_s=0.05))
    result = load.run(requests(engine, 60), arrival_times(np.zeros(60), rate=300, seed=0))
    assert result.answered == 60
    assert engine.stats().pool.alpha == pytest.approx(0.6, abs=0.02)
    assert 0 < sum(window.traffic.num_requests for window in policy.windows) <= 60
    assert max(window.traffic.compute_busy for window in policy.windows) > 0
    engine.check()


def test_answers_may_come_while_figures_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    tally = LoadTally()
    tally.answer(0.0, 1.0)

    def percentile(values: Any, shares: Any) -> Any:
        held = memoryview(values) if isinstance(values, array) else None  # as NumPy holds it while it computes
        tally.answer(1.0, 2.0)
        del held
        return [0.0 for _ in shares]

    monkeypatch.setattr("helmrec.load.np.percentile", percentile)
    engine = tiny_engine(tiny_model())
    with engine:
        tally.snapshot(1.0, engine.stats().pool)
    assert len(tally.latencies_ms) > 1
