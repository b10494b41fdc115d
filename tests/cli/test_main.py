"""Commands, policies and scenarios of installed packages, and the product without them."""

import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helmrec.cli import main
from helmrec.cli.main import app
from helmrec.sim.scenario import find_scenario, load_scenario
from tests.cli.test_simulate import FAMILY, SCENARIO

runner = CliRunner()
NOT_OF_THE_CORE = (
    *("helmrec_bench", "matplotlib", "mlperf_loadgen", "pyarrow", "scipy", "tritonclient", "xgboost"),
    *("ray", "redis", "gymnasium", "stable_baselines3"),
)
WITHOUT = f"""
import sys
sys.modules |= dict.fromkeys({NOT_OF_THE_CORE!r})  # importing one of these fails
from helmrec.cli.main import app
path = sys.argv[1]
app(["simulate", path, "--policy", "helm", "--policy", "static:0.4"], standalone_mode=False)
app(["explain", path, "--at", "3"], standalone_mode=False)
app(["plan", "--help"], standalone_mode=False)
app(["serve", "--help"], standalone_mode=False)
app(["demo", "--help"], standalone_mode=False)
"""


def add_command(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    entry = EntryPoint(name, value, "helmrec.commands")
    monkeypatch.setattr(main, "extensions", lambda group: {name: entry})


def test_help_lists_commands_of_the_evaluation_after_those_of_the_product() -> None:
    shown = runner.invoke(app, ["--help"], env={"COLUMNS": "120"}).output
    places = [shown.index(f"│ {name} ") for name in ("serve", "demo", "trace", "bench", "loadgen", "train")]
    assert places == sorted(places)


def test_an_added_function_is_a_command_with_its_own_flags() -> None:
    shown = runner.invoke(app, ["loadgen", "--help"], env={"COLUMNS": "120"})
    assert shown.exit_code == 0
    assert "--qps" in shown.output
    assert "--install-completion" not in shown.output


def test_an_added_app_is_a_group_of_commands() -> None:
    shown = runner.invoke(app, ["bench", "list"], env={"COLUMNS": "140"})
    assert shown.exit_code == 0
    assert "latency-vs-ratio" in shown.output


def test_nobody_takes_a_command_of_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    add_command(monkeypatch, "plan", "nowhere:nothing")
    assert runner.invoke(app, ["plan", "--help"]).exit_code == 0
    assert runner.invoke(app, ["--help"]).output.count("│ plan ") == 1


def test_a_command_that_nobody_adds_is_refused() -> None:
    refused = runner.invoke(app, ["nothing"])
    assert refused.exit_code == 2
    assert "No such command 'nothing'" in refused.output


def test_commands_of_the_product_run_without_evaluation_and_extras(tmp_path: Path) -> None:
    path = tmp_path / "try.toml"
    path.write_text(SCENARIO + FAMILY)
    command, wide = [sys.executable, "-c", WITHOUT, str(path)], os.environ | {"COLUMNS": "140"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=wide)
    assert done.returncode == 0, done.stderr
    assert "static:0.4" in done.stdout


def test_a_scenario_is_found_by_name_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_scenario(find_scenario(Path("main-steady"))).name == "main-steady"
    assert load_scenario(find_scenario(Path("evaluation/taobao"))).name


def test_a_file_wins_over_an_installed_scenario_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("main-steady").write_text(SCENARIO + FAMILY)
    assert load_scenario(find_scenario(Path("main-steady"))).name == "try"


@pytest.mark.parametrize("command", [["simulate", "nowhere", "--policy", "helm"], ["explain", "nowhere"]])
def test_an_unknown_scenario_raises_a_clear_error(command: list[str]) -> None:
    refused = runner.invoke(app, command)
    assert refused.exit_code == 2
    assert "main-steady" in refused.output
    assert "nowhere" in refused.output


def test_a_group_of_an_installed_package_adds_to_the_group_of_the_product() -> None:
    shown = runner.invoke(app, ["trace", "--help"], env={"COLUMNS": "120"}).output
    assert [name in shown for name in ("│ make ", "│ import ", "│ describe ")] == [True] * 3
