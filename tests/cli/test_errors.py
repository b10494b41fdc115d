"""What a user sees if a command cannot do its work: one line that names the thing, and the status."""

import os
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from helmrec.cli.main import app
from helmrec.cli.plan import table_of
from helmrec.sim.plan import Plan
from tests.cli.test_simulate import FAMILY, SCENARIO

runner = CliRunner()


def invoke(*arguments: str) -> Result:
    return runner.invoke(app, list(arguments), env={"COLUMNS": "200"})


def one_error(result: Result) -> str:
    """The only line on standard error, of a command that ended with status 2."""
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    path = tmp_path / "try.toml"
    path.write_text(SCENARIO + FAMILY)
    return str(path)


@pytest.mark.parametrize(
    "command",
    [
        ["simulate", "main-steady", "--policy", "helm", "--out"],
        ["demo", "--quick", "--out"],
        ["rank", "nowhere", "--requests", __file__, "--out"],
        ["load", "nowhere", "--trace", "nowhere", "--out"],
        ["load", "nowhere", "--trace", "nowhere", "--decisions"],
        ["calibrate", "--out"],
        ["calibrate", "--out", "made.json", "--steps"],
        ["loadgen", "nowhere", "--trace", "nowhere", "--qps", "1", "--out"],
        ["trace", "make", "--out"],
        ["trace", "import", "nowhere", "--kind", "taobao", "--out"],
        ["bench", "report", "--json"],
    ],
)
def test_a_file_that_cannot_be_written_is_named_before_the_work_begins(command: list[str], tmp_path: Path) -> None:
    missing = str(tmp_path / "none" / "made")
    assert f"{command[-1]}: there is no folder '{tmp_path / 'none'}'" in one_error(invoke(*command, missing))
    assert f"{command[-1]} must be a file, got the folder '{tmp_path}'" in one_error(invoke(*command, str(tmp_path)))


def test_a_file_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    line = one_error(invoke("simulate", "main-steady", "--policy", "helm", "--out", str(tmp_path / "made")))
    assert f"--out: no permission to write '{tmp_path / 'made'}'" in line


def test_a_model_folder_below_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert f"{tmp_path / 'file' / 'model'}" in one_error(invoke("model", "init", "--out", str(tmp_path / "file/model")))


def test_a_missing_model_folder_is_named(tmp_path: Path) -> None:
    assert "nowhere" in one_error(invoke("rank", str(tmp_path / "nowhere"), "--requests", __file__))
    assert "nowhere" in one_error(invoke("compile", str(tmp_path / "nowhere")))


def test_a_folder_that_cannot_be_made_is_named_before_the_work_begins(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    pytest.importorskip("stable_baselines3", reason="helmrec[train] is not installed")
    line = one_error(invoke("train", "--out", str(tmp_path / "file" / "networks")))
    assert "--out: the folder cannot be made (Not a directory)" in line
    assert str(tmp_path / "file" / "networks") in line


def test_an_unknown_scenario_or_policy_is_named_beside_all_that_are_known(scenario: str) -> None:
    line = one_error(invoke("simulate", "main-trnd", "--policy", "helm"))
    assert "main-trend" in line
    assert line.endswith("got 'main-trnd'")
    line = one_error(invoke("simulate", scenario, "--policy", "hlm"))
    assert "static:ALPHA, helm, ppo" in line
    assert "hill" in line
    assert "alpha from 0 to 1" in one_error(invoke("simulate", scenario, "--policy", "static:7"))


def test_a_missing_file_of_histories_is_named_without_an_empty_report(tmp_path: Path) -> None:
    result = invoke("histories", "load", str(tmp_path / "nowhere.jsonl"))
    assert "nowhere.jsonl" in one_error(result)
    assert result.stdout == ""


def test_explaining_a_decision_beyond_the_end_is_refused(scenario: str) -> None:
    assert "--at is beyond the end of" in (line := one_error(invoke("explain", scenario, "--at", "900")))
    assert line.endswith("got 900")


def plan_of(unloaded_p99_ms: float) -> str:
    plan = Plan(80 * 10**9, None, 0.4, 900.0, 0.1, 0.5, 0.5, unloaded_p99_ms)
    return " ".join(str(cell) for cell in table_of([plan], 100, 80, "h200").columns[1].cells)


def test_a_plan_says_whether_more_nodes_would_help() -> None:
    assert plan_of(95.0) == "unreachable at any size: 95.0 ms without load"
    assert plan_of(60.0) == "more than 256"


def test_files_are_written_with_the_umask(tmp_path: Path, scenario: str) -> None:
    made = tmp_path / "made.json"
    before = os.umask(0o027)
    try:
        assert invoke("simulate", scenario, "--policy", "static:0.4", "--out", str(made)).exit_code == 0
        assert invoke("trace", "make", "--duration", "1", "--out", str(tmp_path / "made.parquet")).exit_code == 0
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("made*")} == {0o640}
