"""`helmrec explain` shows what every layer proposed, what was predicted, and what came of the last move."""

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helmrec.cli.main import app
from helmrec.control.explain import Explanation
from helmrec.control.layers import Proposal
from helmrec.control.moves import MoveRecord

MOVES = Explanation(
    time_s=12.0,
    alpha=0.4,
    measured_ms=21.5,
    predicted_ms=20.25,
    arrivals_per_s=430.0,
    proposals=[
        Proposal("base", 0.45, "predicts 19.00 ms there, 20.00 ms here", 1.0),
        Proposal("residual", 0.5, "predicts 18.50 ms there, 20.00 ms here", 1.5),
    ],
    last_move=MoveRecord(2.0, 0.5, 0.4, "residual", 1.25, 0.75),
)
STAYS = replace(
    MOVES,
    time_s=13.0,
    predicted_ms=None,
    proposals=[Proposal("base", 0.4, "predicts 20.00 ms there, 20.00 ms here", 0.0)],
    last_move=None,
)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "decisions.jsonl"
    path.write_text(f"{MOVES.as_json()}\n{STAYS.as_json()}\n")
    return path


def explain(*words: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["explain", *words])
    return result.exit_code, result.output


def test_every_layer_is_shown_with_what_it_predicts(log: Path) -> None:
    code, output = explain(str(log), "--at", "12")
    assert code == 0
    for words in ("base", "0.450", "predicts 19.00 ms there", "residual", "0.500", "predicts 18.50 ms there"):
        assert words in output
    for words in ("alpha 0.400 -> 0.500", "decided by", "+1.500 ms a request predicted"):
        assert words in output


def test_measured_latency_stands_beside_predicted_and_the_last_move_beside_its_gain(log: Path) -> None:
    _, output = explain(str(log), "--at", "12")
    for words in ("21.50 ms", "20.25 ms predicted", "430 requests/s", "last move", "0.500 -> 0.400 by residual"):
        assert words in output
    for words in ("+1.250 ms of stage time per request predicted", "+0.750 ms realised"):
        assert words in output


def test_without_a_time_the_last_decision_is_shown_after_lines_of_those_before(log: Path) -> None:
    code, output = explain(str(log))
    assert code == 0
    assert "t=12.0 alpha 0.400 -> 0.500" in output
    for words in ("13.0 s: alpha 0.400 -> 0.400", "base", "stay", "predicts 20.00 ms there", "no prediction"):
        assert words in output


def test_a_time_before_all_decisions_is_an_error(log: Path) -> None:
    code, output = explain(str(log), "--at", "3")
    assert code == 2
    assert "no decision" in output


def test_a_file_without_decisions_is_an_error(tmp_path: Path) -> None:
    code, output = explain(str(tmp_path / "nothing.jsonl"))
    assert code == 2
    assert "cannot read" in output
