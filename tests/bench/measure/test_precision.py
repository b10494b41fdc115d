"""The measurement of low precision: parts by calls of their own, in one file; and that it runs at all."""

import json
from pathlib import Path

import pytest

from helmrec.errors import ConfigError
from helmrec_bench.measure.cards import precision
from helmrec_bench.measure.cards.measured_parts import MeasuredParts, Row
from helmrec_bench.registry import REGISTERED

EQUAL: Row = {
    "precision": "fp8",
    "asked": 2_000,
    "tolerance": 0.05,
    "worst_alone_and_in_a_batch": 0.01,
    "beyond_tolerance": 0,
    **dict.fromkeys(("moves", "tokens_reused", "pages_reloaded", "pages_evicted"), 3),
}


def run(out: Path, *arguments: str) -> None:
    REGISTERED["precision"].run(["--device", "cpu", "--quick", "--out", str(out), *arguments])


@pytest.fixture
def commit(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HELMREC_COMMIT", "abc1234")
    return "abc1234"


def test_parts_of_several_calls_are_in_one_file(tmp_path: Path, commit: str) -> None:
    out = tmp_path / "found.json"
    run(out, "--only", "capacity")
    run(out, "--only", "equality", "--precisions", "fp8-all")
    run(out, "--only", "quality", "--precisions", "fp8-all", "int8")
    found = json.loads(out.read_text())
    assert {part: made["commit"] for part, made in found["made"].items()} == dict.fromkeys(
        ("capacity", "equality", "quality"), commit
    )
    assert [(row["dtype"], row["precision"]) for row in found["equality"]] == [
        ("float32", "fp8-all"),
        ("bfloat16", "fp8-all"),
    ]
    assert [row["precision"] for row in found["quality"]] == ["fp8-all", "int8"]


def test_a_call_goes_on_where_the_one_before_stopped(
    tmp_path: Path, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def compare(*arguments: object) -> Row:
        asked.append(str(arguments[1]))
        return {key: value for key, value in EQUAL.items() if key not in {"precision", "asked"}}

    monkeypatch.setattr(precision, "compare_scores", compare)
    out = tmp_path / "found.json"
    run(out, "--only", "equality", "--limit-s", "-1")
    assert not asked
    run(out, "--only", "equality", "--precisions", "model", "fp8")
    assert len(asked) == 4
    run(out, "--only", "equality")
    assert len(asked) == 2 * len(precision.PRECISIONS), "in each of two dtypes, once"


def test_rows_of_other_code_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "found.json"
    for commit, kept in (("one", 0), ("one", 1), ("two", 0), ("two-dirty", 0), ("two-dirty", 0)):
        monkeypatch.setenv("HELMREC_COMMIT", commit)
        parts = MeasuredParts(out, ["quality"])
        assert len(parts.rows_of_this_commit("quality")) == kept
        parts.put("quality", [{"precision": "fp8"}])


def test_a_part_names_every_command_that_made_it(tmp_path: Path, commit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "found.json"
    for number in ("1", "2", "2"):
        monkeypatch.setattr("sys.argv", ["helmrec", "bench", number])
        MeasuredParts(out, ["quality"]).put("quality", [])
    made = json.loads(out.read_text())["made"]["quality"]
    assert made["commands"] == ["helmrec bench 1", "helmrec bench 2"]
    assert made["commit"] == commit


def test_layers_without_a_card_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--device cuda"):
        run(tmp_path / "found.json", "--only", "layers")


@pytest.mark.parametrize(
    ("changed", "objection"),
    [
        ({"beyond_tolerance": 1}, "1 scores beyond the tolerance"),
        ({"worst_alone_and_in_a_batch": 0.2}, "scores alone and in a batch differ by 0.2"),
        ({"pages_reloaded": 0}, "no pages_reloaded"),
    ],
)
def test_a_comparison_that_shows_too_little_is_named(changed: Row, objection: str) -> None:
    assert not precision.objections_to(EQUAL)
    assert precision.objections_to({**EQUAL, **changed}) == [objection]


def test_calls_side_by_side_add_rows_to_one_part(tmp_path: Path, commit: str) -> None:
    one, other = (MeasuredParts(tmp_path / "found.json", ("equality",)) for _ in range(2))
    one.add_row("equality", {"precision": "int8"})
    other.add_row("equality", {"precision": "fp8"})
    one.add_row("equality", {"precision": "fp8-all"})
    found = json.loads((tmp_path / "found.json").read_text())["equality"]
    assert {row["precision"] for row in found} == {"int8", "fp8", "fp8-all"}
    assert len(found) == 3, commit


def test_rows_of_one_call_stay_together_without_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HELMREC_COMMIT", "unknown")
    parts = MeasuredParts(tmp_path / "found.json", ("equality",))
    for name in ("int8", "fp8"):
        parts.add_row("equality", {"precision": name})
    assert len(json.loads((tmp_path / "found.json").read_text())["equality"]) == 2
