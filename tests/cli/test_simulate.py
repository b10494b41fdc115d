"""`helmrec simulate`, as a user types it."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from helmrec.cli.main import app
from helmrec.errors import ConfigError
from helmrec.sim.scenario import load_scenario
from helmrec.traffic.families import Shape, family
from helmrec.traffic.generate import generate
from helmrec.traffic.trace_file import write_trace
from helmrec_bench.baselines.service_cost import service_cost

runner = CliRunner()

SCENARIO = """
name = "try"
warm_up_s = 2
row_sample = 0.02
[engine]
pool_bytes = "4GB"
max_batch_requests = 8
"""
FAMILY = """
[family]
name = "steady"
shape = { rate = 60, duration_s = 6 }
"""
FAULTS = """
[[faults.slow_bus]]
from_s = 2
until_s = 3
speed = 0.5
[[faults.stalls]]
from_s = 4
until_s = 4.5
[[faults.storms]]
from_s = 1
until_s = 5
every_s = 0.5
"""


def simulate(*arguments: str | Path) -> tuple[int, str]:
    result = runner.invoke(app, ["simulate", *map(str, arguments)])
    return result.exit_code, " ".join(result.output.split())


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "s.toml"
    path.write_text(SCENARIO + FAMILY + FAULTS)
    return path


def test_policies_are_compared_and_reported(scenario: Path, tmp_path: Path) -> None:
    report = tmp_path / "r.json"
    flags: list[str | Path] = ["--policy", "static:0.2", "--policy", "hill", "--seeds", "2", "--out", report]
    code, output = simulate(scenario, *flags)
    assert code == 0, output
    assert "costs of h200" in output
    assert "static:0.2: a cache was still filling up at the end of the warm-up" in output
    found = json.loads(report.read_text())
    assert found["scenario"]["faults"]["slow_bus"][0]["speed"] == 0.5
    static = found["policies"]["static:0.2"]
    assert static["calibration"] == "h200"
    assert len(static["by_seed"]["p99_ms"]) == 2
    assert static["by_seed"]["num_refused"] == [0, 0]
    for alphas, ends_s in zip(static["alpha_by_window"], static["window_end_s"], strict=True):
        assert set(np.round(alphas, 2)) == {0.2}
        assert len(ends_s) == len(alphas)
        assert ends_s == sorted(ends_s)


def test_a_recorded_trace_may_be_the_traffic(tmp_path: Path) -> None:
    write_trace(generate(family("steady", Shape(duration_s=3, rate=40)), 7), tmp_path / "t.parquet")
    (tmp_path / "s.toml").write_text(SCENARIO.replace("[engine]", 'trace = "t.parquet"\n[engine]'))
    code, output = simulate(tmp_path / "s.toml", "--policy", "static:0.3")
    assert code == 0, output


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace("[family]", "[familly]"), "familly is not a known setting"),
        (lambda text: text.replace(FAMILY, ""), "one of family, workload and trace is needed, not 0"),
        (lambda text: text.replace('"4GB"', '"4MB"'), "pool_bytes must be at least"),
        (lambda text: text.replace("max_batch_requests = 8", "max_batch_requests = 0"), "max_batch_requests must be"),
        (lambda text: text.replace("speed = 0.5", "speed = 2"), "speed must be at most 1"),
        (lambda text: text.replace('name = "try"', "name = "), "cannot read scenario"),
        (lambda text: text.replace("warm_up_s", 'calibration = "none.json"\nwarm_up_s'), "cannot read calibration"),
    ],
)
def test_errors_take_one_line(scenario: Path, change: object, words: str) -> None:
    assert callable(change)
    scenario.write_text(change(scenario.read_text()))
    code, output = simulate(scenario, "--policy", "static:0.2")
    assert code == 2
    assert words in output


@pytest.mark.parametrize("policy", ["static", "static:x", "oracle", "pid:3"])
def test_an_unknown_policy_raises_a_clear_error(scenario: Path, policy: str) -> None:
    code, output = simulate(scenario, "--policy", policy)
    assert code == 2
    assert "static" in output


def test_baselines_predict_with_the_calibration(scenario: Path) -> None:
    loaded = load_scenario(scenario)
    trace = loaded.make_trace(0)
    predicted = service_cost(loaded.cost(), loaded.node_config(trace), trace)
    assert predicted.token_ms == pytest.approx(
        (loaded.cost().compute_token_us + 6e-3 * loaded.cost().compute_row_ns) / 1e3
    )
    assert predicted.missed_row_ms == pytest.approx(1_024 / loaded.cost().sorted_beside_gb_per_s / 1e6)
    assert loaded.faults.compiled().update_s.tolist() == np.arange(1.0, 5.0, 0.5).tolist()
    with pytest.raises(ConfigError):
        load_scenario(scenario.parent / "nowhere.toml")


def test_policies_are_told_apart_on_a_narrow_terminal(scenario: Path) -> None:
    arguments = ["simulate", str(scenario), "--policy", "static:0.25", "--policy", "static:0.75"]
    shown = runner.invoke(app, arguments, env={"COLUMNS": "80"}).output
    assert "static:0.25" in shown
    assert "static:0.75" in shown
