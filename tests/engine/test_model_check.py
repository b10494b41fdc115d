"""The check of a model folder: equal scores pass, a planted difference does not."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from helmrec.cli.main import app
from helmrec.engine.model_check import check_model
from helmrec.model import HstuRanker, save_model
from helmrec.model import ranker as ranker_module
from helmrec.model.weights import LoadedModel
from tests.helpers import OPTIONS, QUERY_FRAMES, tiny_model


@pytest.mark.parametrize("form", ["concat", "gated"])
def test_an_engine_with_cached_prefixes_scores_as_the_module_does(form: str) -> None:
    found = check_model(tiny_model(form=form))
    assert found.is_equal
    assert 0 < found.largest_difference <= 1e-5
    assert found.reused_tokens > 0
    assert found.num_requests == 18


@pytest.mark.parametrize("option", OPTIONS)
def test_models_with_every_option_are_checked(option: str) -> None:
    found = check_model(tiny_model(**OPTIONS[option]))
    assert found.is_equal
    assert found.largest_difference <= 1e-5
    assert found.reused_tokens > 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_of_narrow_dtypes_is_within_the_tolerance(dtype: str) -> None:
    found = check_model(tiny_model(dtype=dtype, row_dtype=dtype))
    assert found.is_equal
    assert found.largest_difference > 1e-5


def test_the_same_seed_checks_the_same_requests() -> None:
    assert check_model(tiny_model(), 3) == check_model(tiny_model(), 3) != check_model(tiny_model(), 4)


@pytest.mark.parametrize("frame", QUERY_FRAMES)
def test_models_with_a_query_frame_are_checked(frame: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(**QUERY_FRAMES[frame])
    found = check_model(model)
    assert found.is_equal
    assert found.largest_difference <= 1e-5
    assert found.reused_tokens == 0
    plant(monkeypatch)
    assert not check_model(model).is_equal


def plant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the module attend a hundredth stronger than the engine."""
    attend = ranker_module._attend
    monkeypatch.setattr(ranker_module, "_attend", lambda *args: attend(*args) * 1.01)


def test_a_planted_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    found = check_model(tiny_model())
    assert not found.is_equal
    assert found.largest_difference > found.tolerance


def test_a_module_whose_scores_are_not_numbers_is_not_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = ranker_module._attend
    monkeypatch.setattr(ranker_module, "_attend", lambda *args: attend(*args) * torch.nan)
    assert not check_model(tiny_model()).is_equal


def run(model: LoadedModel, folder: Path) -> tuple[int, str]:
    save_model(folder, model.config, model.dense, model.tables)
    result = CliRunner().invoke(app, ["model", "check", str(folder)])
    return result.exit_code, result.output


def test_the_command_prints_the_difference_and_the_tolerance(tmp_path: Path) -> None:
    code, output = run(tiny_model(), tmp_path / "model")
    assert code == 0
    assert "against HstuRanker" in output
    assert "requests: 18, reused tokens: " in output
    assert "largest difference of scores: " in output
    assert "tolerance: 0.000" in output


def test_the_command_fails_on_a_planted_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    code, output = run(tiny_model(), tmp_path / "model")
    assert code == 1
    assert "differ" in output


def test_a_saved_module_with_a_query_frame_passes(tmp_path: Path) -> None:
    save_model(tmp_path / "model", HstuRanker(tiny_model(**QUERY_FRAMES["clock and context"]).config))
    result = CliRunner().invoke(app, ["model", "check", str(tmp_path / "model")])
    assert result.exit_code == 0, result.output
    assert "requests: 18, reused tokens: 0" in result.output


def test_a_missing_folder_is_one_clear_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["model", "check", str(tmp_path / "nowhere")])
    assert result.exit_code == 2
    assert "not a model folder" in " ".join(result.output.split())


def test_a_trained_module_passes(tmp_path: Path) -> None:
    module = HstuRanker(tiny_model().config)
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(1.5)
    save_model(tmp_path / "model", module)
    assert CliRunner().invoke(app, ["model", "check", str(tmp_path / "model"), "--seed", "1"]).exit_code == 0
