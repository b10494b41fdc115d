"""The `helmrec` command, as a user types it."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from helmrec.cli.main import app
from helmrec.model.config import ModelConfig

runner = CliRunner()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "model"
    result = runner.invoke(app, ["model", "init", "--profile", "demo", "--rows", "500", "--out", str(path)])
    assert result.exit_code == 0, result.output
    return path


def request_line(**overrides: Any) -> str:
    request = {
        "user_id": 7,
        "items": [1, 2, 3],
        "actions": [0, 1, 2],
        "timestamps": [10, 20, 30],
        "features": {"category": [1, 1, 2]},
        "candidates": [4, 5],
        "candidate_features": {"category": [1, 2]},
        "context": {"country": 3, "hour": 12},
    }
    return json.dumps(request | overrides)


def rank(folder: Path, tmp_path: Path, *lines: str) -> tuple[int, list[dict[str, Any]]]:
    (tmp_path / "requests.jsonl").write_text("\n".join(lines) + "\n")
    out = tmp_path / "results.jsonl"
    arguments = ["rank", str(folder), "--requests", str(tmp_path / "requests.jsonl"), "--out", str(out)]
    result = runner.invoke(app, [*arguments, "--pool", "16MiB"])
    return result.exit_code, [json.loads(line) for line in out.read_text().splitlines()]


def test_info_shows_the_shape_of_a_model(folder: Path) -> None:
    result = runner.invoke(app, ["model", "info", str(folder), "--verify"])
    assert result.exit_code == 0
    assert "demo" in result.output
    assert "item (500)" in result.output


def test_init_never_writes_over_a_model(folder: Path) -> None:
    result = runner.invoke(app, ["model", "init", "--out", str(folder)])
    assert result.exit_code == 2
    assert "not empty" in result.output


def test_init_names_the_profiles_it_knows(tmp_path: Path) -> None:
    result = runner.invoke(app, ["model", "init", "--profile", "huge", "--out", str(tmp_path / "m")])
    assert result.exit_code == 2
    assert "dlrmv3" in result.output
    assert "'huge'" in result.output


def test_rank_answers_every_line_in_order(folder: Path, tmp_path: Path) -> None:
    code, answers = rank(
        folder, tmp_path, request_line(), request_line(items=[], actions=[], timestamps=[], features={"category": []})
    )
    assert code == 0
    assert [answer["line"] for answer in answers] == [1, 2]
    assert len(answers[0]["scores"]) == 2
    assert len(answers[0]["scores"][0]) == 2


def test_rank_says_what_the_pool_holds_if_asked(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text(request_line() + "\n")
    result = runner.invoke(app, ["rank", str(folder), "--requests", str(tmp_path / "r.jsonl"), "--verbose"])
    assert result.exit_code == 0
    assert "tokens or" in result.stderr
    assert json.loads(result.stdout)["line"] == 1


def test_a_bad_line_gets_its_error_and_the_rest_go_on(folder: Path, tmp_path: Path) -> None:
    lines = ["{", request_line(items=[1, 2, 999]), request_line(shoes=1), "[]", request_line()]
    code, answers = rank(folder, tmp_path, *lines)
    assert code == 2
    assert "items[2]" in answers[1]["error"]
    assert "999" in answers[1]["error"]
    assert "shoes" in answers[2]["error"]
    assert ["error" in answer for answer in answers] == [True, True, True, True, False]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"\xff\xfe", "not JSON"),
        (b'{"user_id": 7', "not JSON"),
        (b'{"user_id": 7, "items": []}', "actions, candidates, timestamps missing"),
        (b"3", "a JSON object is needed, got 3"),
    ],
)
def test_the_first_bad_line_is_named_in_one_line(folder: Path, tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(request_line().encode() + b"\n" + line + b"\n")
    result = runner.invoke(app, ["rank", str(folder), "--requests", str(path), "--pool", "16MiB"])
    assert result.exit_code == 2
    (shown,) = result.stderr.splitlines()
    assert f"{path}, line 2: " in shown
    assert message in shown
    assert len(result.stdout.splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pool", "1KiB"], "pool_bytes must be at least"),
        (["--alpha", "1.5"], "alpha must be at most 1"),
        (["--device", "tpu"], "device"),
    ],
)
def test_a_bad_setting_is_one_clear_line(folder: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "r.jsonl").write_text(request_line() + "\n")
    result = runner.invoke(app, ["rank", str(folder), "--requests", str(tmp_path / "r.jsonl"), *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_a_missing_model_is_one_clear_line(tmp_path: Path) -> None:
    result = runner.invoke(app, ["model", "info", str(tmp_path / "nowhere")])
    assert result.exit_code == 2
    assert "not a model folder" in " ".join(result.output.split())


def test_compile_takes_the_form_of_a_model_and_says_what_it_did(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[ModelConfig] = []

    def compiled(model: ModelConfig) -> int:
        asked.append(model)
        return 16

    monkeypatch.setattr("helmrec.engine.warm_up.compile_ahead", compiled)
    for arguments in ([], [str(folder)]):
        result = runner.invoke(app, ["compile", *arguments])
        assert result.exit_code == 0, result.output
        assert "loops of 16 kinds of engines" in result.output
    assert [model.features[0].num_rows for model in asked] == [50_000, 500]
    assert runner.invoke(app, ["compile", str(tmp_path / "none")]).exit_code == 2
