import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helmrec.calibrate.timed import read_measured
from helmrec.cli.main import app
from helmrec.costs.calibrated import load_cost

SMALL = ["--device", "cpu", "--quick", "--pool", "24MiB", "--tables", "16MiB"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrated")
    paths = ["--out", str(folder / "here.json"), "--steps", str(folder / "steps.json")]
    result = CliRunner().invoke(app, ["calibrate", "--profile", "demo", *paths, *SMALL])
    assert result.exit_code == 0, result.output
    assert "predicted / measured" in result.output
    return folder


def test_a_calibration_of_this_cpu_is_one_the_simulator_takes(folder: Path) -> None:
    cost = load_cost(folder / "here.json")
    assert cost.name == "here"
    assert cost.device.startswith("CPU")
    assert cost.shape == "demo"
    assert cost.compute_token_us > 0
    assert cost.reload_gb_per_s > 0
    assert cost.unexplained == []
    assert {"command", "commit", "date", "torch"} <= cost.made.keys()
    assert not list(folder.glob("*.part"))


def test_predictions_are_of_the_size_of_what_was_timed(folder: Path) -> None:
    """A wrong unit is a factor of 1,000. A machine that is busy with other things was off by 2.2."""
    ratios = sorted(load_cost(folder / "here.json").fit.values())
    assert 0.2 < ratios[len(ratios) // 2] < 5


def test_what_was_timed_did_what_its_case_says(folder: Path) -> None:
    (measured,) = read_measured(folder / "steps.json")
    by_case = {each.case: each for each in measured.timed}
    first, fresh = by_case["1 first visits, 0% fresh"].steps[0], by_case["1 first visits, 100% fresh"].steps[0]
    assert first.missed_rows < 0.1 * first.hit_rows
    assert fresh.missed_rows > 0.4 * fresh.hit_rows
    returns = by_case["1 returns, 0% fresh"].steps[0]
    assert returns.num_tokens < first.num_tokens - 100
    assert by_case["1 reload"].steps[0].loaded_bytes > 0
    burst = by_case["burst of returns, 0% fresh"]
    assert len(burst.steps) == 6
    assert {step.num_requests for step in burst.steps} == {8}
    assert not measured.overlaps


def test_kept_steps_are_fitted_again_to_the_same(folder: Path) -> None:
    again = folder / "again.json"
    result = CliRunner().invoke(
        app, ["calibrate", "--refit", str(folder / "steps.json"), "--out", str(again), "--name", "here"]
    )
    assert result.exit_code == 0, result.output
    assert load_cost(again) == load_cost(folder / "here.json")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--profile", "none"], "profile must be one of"),
        (["--device", "tpu"], "device must be cpu or cuda"),
        (["--pool", "much"], "pool_bytes must be a size like"),
        (["--refit", "missing.json"], "cannot read timed steps"),
    ],
)
def test_bad_flags_raise_clear_errors(tmp_path: Path, flags: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["calibrate", "--out", str(tmp_path / "c.json"), *flags])
    assert result.exit_code == 2
    assert words in result.output
    assert not list(tmp_path.iterdir())


def test_an_output_path_that_cannot_be_written_is_an_error_before_anything_is_measured(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["calibrate", "--out", str(tmp_path / "none" / "c.json")])
    assert result.exit_code == 2
    assert "there is no folder" in result.output


def test_steps_of_two_devices_are_not_fitted_together(folder: Path, tmp_path: Path) -> None:
    other = json.loads((folder / "steps.json").read_text())
    other["measured"][0]["device"] = "another"
    (tmp_path / "other.json").write_text(json.dumps(other))
    refits = ["--refit", str(folder / "steps.json"), "--refit", str(tmp_path / "other.json")]
    result = CliRunner().invoke(app, ["calibrate", "--out", str(tmp_path / "c.json"), *refits])
    assert result.exit_code == 2
    assert "steps of one device" in result.output
