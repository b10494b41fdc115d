"""`helmrec explain` tells what every layer said."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from helmrec.cli import app
from helmrec.control.explain import Explanation

TOLD = Explanation(
    time_s=12.0,
    alpha=0.4,
    base_step=0.05,
    base_alpha=0.45,
    residual=0.01,
    verdict=3.0,
    burst_alpha=0.7,
    burst_left_s=14.0,
    is_aside=0.0,
    static_alpha=0.52,
    wanted=0.5,
    expected_ms=20.0,
    expected_gain_ms=1.5,
    expected_cost_ms=80.0,
    measured_ms=21.5,
    fresh_best=0.7,
    lasting_best=0.55,
    rate=430.0,
)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "decisions.jsonl"
    later = TOLD._replace(time_s=13.0, is_aside=1.0)
    path.write_text(f"{TOLD.as_json()}\n{later.as_json()}\n")
    return path


def explain(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["explain", *words])
    return result.exit_code, result.output


def test_every_layer_is_shown_with_gain_and_cost(log: Path) -> None:
    code, output = explain(str(log), "--at", "12")
    assert code == 0
    for words in ("base", "step +0.05", "residual", "+0.0100", "burst", "chase at 0.700", "guardrail", "0.520"):
        assert words in output
    for words in ("expected gain", "+1.500 ms", "expected cost", "80.0 ms", "burst: chase"):
        assert words in output


def test_without_a_time_the_last_decision_is_shown_after_lines_of_those_before(log: Path) -> None:
    code, output = explain(str(log))
    assert code == 0
    assert "t=12.0 alpha 0.400 -> 0.500" in output
    assert "adapting is put aside" in output


def test_a_time_before_all_decisions_is_told(log: Path) -> None:
    code, output = explain(str(log), "--at", "3")
    assert code == 2
    assert "no decision" in output


def test_a_file_that_holds_none_is_told(tmp_path: Path) -> None:
    code, output = explain(str(tmp_path / "nothing.jsonl"))
    assert code == 2
    assert "cannot read" in output
