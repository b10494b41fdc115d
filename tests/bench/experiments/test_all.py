"""Every experiment at the smallest tier, and the report of all of them."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from helmrec.errors import ConfigError
from helmrec_bench.cli.bench import bench_app
from helmrec_bench.experiments import strategies
from helmrec_bench.experiments.registry import EXPERIMENTS
from helmrec_bench.experiments.report import report_html, write_report
from helmrec_bench.experiments.results import read_results, run_experiment, verdicts, without_times
from helmrec_bench.lab.lab import Lab
from helmrec_bench.lab.place import Place
from helmrec_bench.lab.tiers import TIERS
from tests.bench.conftest import ROOT, SCENARIOS, MakeLab


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Results of all experiments."""
    found = Place(SCENARIOS, ROOT / "docs" / "measurements", tmp_path_factory.mktemp("bench"))
    for one in EXPERIMENTS.values():
        run_experiment(one, Lab(TIERS["smoke"], found, is_quiet=True))
    return found


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_runs_and_says_where_its_figures_come_from(place: Place, name: str) -> None:
    result = read_results(place.build, "smoke")[name]
    assert result["seeds"] == [0]
    assert result["commit"]
    assert result["hardware"]["cores"] >= 1
    assert result["scenarios"]
    assert result["verdicts"]
    assert {verdict["finding"] for verdict in result["verdicts"]} == {"not judged"}, "smoke judges nothing"


def test_results_are_json_that_other_languages_can_read(place: Place) -> None:
    def refuse(text: str) -> Any:
        raise AssertionError(f"{text} is no JSON")

    for path in (place.build / "smoke").glob("*.json"):
        json.loads(path.read_text(), parse_constant=refuse)


def test_the_report_holds_every_experiment_and_claim_and_nothing_from_outside(place: Place) -> None:
    text = write_report(place, "smoke").read_text()
    for name, result in read_results(place.build, "smoke").items():
        assert f'id="{name}"' in text
        for verdict in result["verdicts"]:
            assert verdict["ours"] in text
    assert text.count("<svg") >= len(EXPERIMENTS) - 2
    assert not re.search(r"""(src|href)=["'](?!#|data:)|@import|url\((?!#)""", text), "an asset from outside"
    assert "measured on an H200" in text


def test_a_verdict_in_a_file_is_not_believed(place: Place) -> None:
    """What the report says follows from figures and rules, whatever a result claims of itself."""
    results = {"falsification": read_results(place.build, "smoke")["falsification"]}
    before = report_html(results, {}, "smoke")
    results["falsification"]["verdicts"][0]["finding"] = "reproduced"
    assert report_html(results, {}, "smoke") == before


def test_the_report_says_what_was_not_run(place: Place) -> None:
    results = read_results(place.build, "smoke")
    text = report_html({"falsification": results["falsification"]}, {}, "smoke")
    assert "Not run: What a user gains, part by part, Overall P99" in text
    assert 'id="ladder"' not in text


def test_frozen_at_its_start_the_controller_is_a_constant(place: Place) -> None:
    families = read_results(place.build, "smoke")["falsification"]["figures"]["families"]
    for one in families.values():
        frozen, moving = (one["gains"][policy]["mean"]["mean"] for policy in (strategies.FROZEN, strategies.OURS))
        assert frozen == 0
        assert moving != 0


@pytest.mark.parametrize(
    ("moving", "left", "finding"),
    [(0.3, 0.0, "reproduced"), (0.1, 0.0, "partly"), (0.0, 0.0, "not"), (0.3, 0.1, "reproduced")],
)
def test_the_falsification_fails_where_a_frozen_controller_gains(moving: float, left: float, finding: str) -> None:
    gains = {"helm": {"mean": {"mean": moving}, "p99": {"mean": moving}}}
    gains |= {strategies.FROZEN: {"mean": {"mean": left}, "p99": {"mean": left}}}
    frozen, gain = verdicts(EXPERIMENTS["falsification"], {"families": {"Burst": {"gains": gains}}}, "quick")
    assert gain.finding == finding
    assert frozen.finding == ("reproduced" if left == 0 else "not")


@pytest.mark.parametrize("name", ["control-strategies", "system-ablation", "ladder"])
def test_two_runs_from_nothing_give_the_same_but_for_times(place: Place, make_lab: MakeLab, name: str) -> None:
    again = run_experiment(EXPERIMENTS[name], make_lab())
    assert without_times(again) == without_times(read_results(place.build, "smoke")[name])


def test_one_changed_line_of_a_scenario_gives_another_report(place: Place, tmp_path: Path, make_lab: MakeLab) -> None:
    scenarios = tmp_path / "scenarios"
    shutil.copytree(SCENARIOS, scenarios)
    path = scenarios / "main-burst-60s.toml"
    path.write_text(path.read_text().replace("hot_share = 0.35", "hot_share = 0.05"))
    result = run_experiment(EXPERIMENTS["latency-vs-ratio"], make_lab(scenarios=scenarios))
    before = read_results(place.build, "smoke")["latency-vs-ratio"]
    assert result["scenarios"] != before["scenarios"]
    assert result["figures"]["phases"]["burst"] != before["figures"]["phases"]["burst"]
    reports = [report_html({"latency-vs-ratio": one}, {}, "smoke") for one in (result, before)]
    assert reports[0] != reports[1]


def test_a_scenario_that_is_wrong_is_told_plainly(tmp_path: Path, make_lab: MakeLab) -> None:
    scenarios = tmp_path / "scenarios"
    shutil.copytree(SCENARIOS, scenarios)
    path = scenarios / "main-burst-60s.toml"
    path.write_text(path.read_text().replace("hot_share = 0.35", "hot_share = 3.5"))
    with pytest.raises(ConfigError, match=r"main-burst-60s.*hot_share.*3\.5"):
        run_experiment(EXPERIMENTS["latency-vs-ratio"], make_lab(scenarios=scenarios))


def test_the_command_lists_runs_and_reports(tmp_path: Path) -> None:
    cli, flags = CliRunner(), ["--smoke", "--out", str(tmp_path)]
    listed = cli.invoke(bench_app, ["list"])
    assert all(name in listed.output for name in EXPERIMENTS)
    scenarios = ["--scenarios", str(SCENARIOS), "--processes", "1"]
    assert cli.invoke(bench_app, ["run", "hstu-settings", *flags, *scenarios]).exit_code == 0
    assert cli.invoke(bench_app, ["report", *flags, "--measurements", str(tmp_path)]).exit_code == 0
    assert "HSTU latency" in (tmp_path / "smoke" / "report.html").read_text()


def test_the_command_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    cli = CliRunner()
    assert cli.invoke(bench_app, ["run", "nothing", "--smoke", "--out", str(tmp_path)]).exit_code == 2
    assert cli.invoke(bench_app, ["run", "ladder", "--smoke", "--full"]).exit_code == 2
    assert cli.invoke(bench_app, ["report", "--full", "--out", str(tmp_path)]).exit_code == 2
