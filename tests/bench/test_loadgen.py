"""MLPerf LoadGen's verdict: what makes a run valid, and what does not."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from helmrec.cli.main import app
from helmrec.clock import MonotonicClock
from helmrec.engine.engine import Engine
from helmrec.errors import ConfigError, QueueFull
from helmrec.model.profiles import profile
from helmrec.model.weights import init_model
from helmrec.traffic.families import family, preset
from helmrec.traffic.generate import generate
from helmrec.traffic.trace_file import write_trace
from helmrec_bench.loadgen import LoadGenConfig, LoadGenVerdict, Offer, ServerScenario, largest_valid
from tests.helpers import random_request, tiny_engine


def live_engine() -> Engine:
    engine = tiny_engine(clock=MonotonicClock())
    engine.rank([random_request(np.random.default_rng(0), engine.model_config, 99)])  # compiles
    return engine


def offers(engine: Engine) -> Offer:
    rng = np.random.default_rng(0)
    made = itertools.cycle([random_request(rng, engine.model_config, user) for user in range(7)])
    return lambda: engine.submit(next(made))


def judged(engine: Engine, offer: Offer, **settings: Any) -> LoadGenVerdict:
    config = LoadGenConfig(**{"target_qps": 300, "seconds": 2.5, "latency_ms": 2_000} | settings)
    return ServerScenario(engine, offer, config).run()


def test_a_run_within_the_bound_is_valid() -> None:
    engine = live_engine()
    verdict = judged(engine, offers(engine))
    assert verdict.is_valid, verdict
    assert verdict.problems == ()
    assert verdict.num_queries > 660  # what LoadGen's confidence takes at the 99th percentile
    assert engine.stats().served == verdict.num_queries + 1
    assert 0 < verdict.percentiles_ms["50"] <= verdict.percentiles_ms["99"] <= verdict.max_ms
    assert 250 < verdict.completed_per_s < 350
    engine.check()


def test_a_bound_nobody_can_keep_makes_a_run_invalid() -> None:
    engine = live_engine()
    verdict = judged(engine, offers(engine), latency_ms=0.01, seconds=1)
    assert not verdict.is_valid
    assert "too many over the latency bound" in verdict.problems
    assert verdict.num_late > 0.9 * verdict.num_queries


def test_one_refused_query_makes_a_run_invalid_and_the_rest_go_on() -> None:
    engine = live_engine()
    offer, numbers = offers(engine), itertools.count()

    def refuse_one() -> Any:
        if next(numbers) == 100:
            raise QueueFull("the queue is full")
        return offer()

    verdict = judged(engine, refuse_one)
    assert not verdict.is_valid
    assert verdict.problems == ("1 refused or failed",)
    assert verdict.num_queries > 660


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("target_qps", 0, "target_qps must be more than 0.0, got 0"),
        ("percentile", 1, "percentile must be less than 1.0"),
    ],
)
def test_settings_out_of_bounds_are_told(field: str, value: float, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        LoadGenConfig(**{"target_qps": 1.0, field: value})


def capacity(limit: float) -> Any:
    def judge(qps: float) -> LoadGenVerdict:
        return LoadGenVerdict(qps <= limit, (), qps, qps, 1, 0, 0, 1.0, {}, 1.0)

    return judge


def test_the_search_closes_in_on_the_largest_valid_rate() -> None:
    seen = largest_valid(capacity(730), 100, 3_200, steps=8)
    best = max(verdict.target_qps for verdict in seen if verdict.is_valid)
    assert len(seen) == 8
    assert 0.98 * 730 < best <= 730


def test_the_search_looks_at_the_lowest_rate_when_nothing_else_was_valid() -> None:
    assert [verdict.is_valid for verdict in largest_valid(capacity(100), 100, 3_200, steps=2)] == [False, False, True]


def made(folder: Path, seconds: float) -> list[str]:
    shape = preset("amazon-video-games").stretched(40)
    trace = generate(
        family("steady", type(shape)(**shape.model_dump() | {"rate": 60.0, "duration_s": seconds})), seed=0
    )
    write_trace(trace, folder / "trace.parquet")
    init_model(folder / "model", profile("demo", trace.catalogue.num_items), 0)
    return ["loadgen", str(folder / "model"), "--trace", str(folder / "trace.parquet")]


def test_the_command_says_why_a_run_is_invalid_and_keeps_the_files_of_loadgen(tmp_path: Path) -> None:
    command = [*made(tmp_path, 3), "--logs", str(tmp_path / "logs"), "--out", str(tmp_path / "verdict.json")]
    done = CliRunner().invoke(app, [*command, "--qps", "40", "--seconds", "2", "--latency", "5000"])
    assert done.exit_code == 1, done.output
    assert "INVALID" in done.output
    assert "too few queries" in " ".join(done.output.split())
    assert json.loads((tmp_path / "verdict.json").read_text())["num_queries"] > 40
    assert "Scenario : Server" in (tmp_path / "logs" / "mlperf_log_summary.txt").read_text()
    short = CliRunner().invoke(app, [*command, "--qps", "400"])
    assert short.exit_code == 2
    assert "need 28800" in short.output


@pytest.mark.slow
def test_the_small_model_is_valid_on_a_cpu_within_80_ms(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [*made(tmp_path, 60), "--qps", "20", "--seconds", "40"])
    assert done.exit_code == 0, done.output
    assert "VALID" in done.output
