"""The check of low precision: its figures, its verdict in the model folder, and engines that obey it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from helmrec.cli.main import app
from helmrec.config import EngineConfig, RoundedKV
from helmrec.engine.engine import Engine
from helmrec.engine.precision_check import check_precision, random_requests
from helmrec.errors import ConfigError, ModelError
from helmrec.memory.geometry import PageGeometry
from helmrec.model.precision import (
    LOW_PRECISIONS,
    Precision,
    PrecisionFigures,
    PrecisionVerdicts,
    Thresholds,
    read_verdicts,
    write_verdicts,
)
from helmrec.model.weights import LoadedModel, load_model, save_model
from helmrec.sim.node.config import NodeConfig
from helmrec.types import LabelledRequest
from tests.helpers import QUERY_FRAMES, random_request, tiny_model

GOOD: dict[str, Any] = {
    "requests": 200,
    "source": "made up",
    "largest_difference": 0.1,
    "mean_difference": 0.01,
    "spread": 1.0,
    "top_overlap": 0.995,
    "kendall_tau": 0.995,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tiny_model()
    save_model(tmp_path / "model", model.config, model.dense, model.tables)
    return tmp_path / "model"


def verdicts_of(model: LoadedModel, **differences: float) -> PrecisionVerdicts:
    found = PrecisionVerdicts(version=f"{model.version:016x}")
    for name, difference in differences.items():
        kv_dtype: RoundedKV = "int8" if name == "int8" else "fp8_e4m3"
        found = found.with_verdict(Precision(kv_dtype), PrecisionFigures(**GOOD | {"mean_difference": difference}))
    return found


def test_int8_is_closer_than_fp8_and_both_are_close() -> None:
    model = tiny_model()
    fp8, int8 = (
        check_precision(model, LOW_PRECISIONS[name], random_requests(model.config, 20, 0), "random")
        for name in ("fp8", "int8")
    )
    assert 0 < int8.mean_difference < fp8.mean_difference < 0.02 * fp8.spread
    assert int8.kendall_tau >= fp8.kendall_tau > 0.9
    assert int8.requests == 20
    assert int8.largest_difference >= int8.mean_difference
    assert int8.auc is None


def test_every_precision_is_close_and_has_a_verdict_of_its_own() -> None:
    model, verdicts = tiny_model(), PrecisionVerdicts(version="0")
    for name, precision in LOW_PRECISIONS.items():
        figures = check_precision(model, precision, random_requests(model.config, 5, 0), name)
        assert 0 < figures.mean_difference < 0.05 * figures.spread
        verdicts = verdicts.with_verdict(precision, figures)
    for name, precision in LOW_PRECISIONS.items():
        verdict = verdicts.about(precision)
        assert verdict is not None
        assert verdict.figures.source == name
    assert verdicts.about(Precision("int8", row_dtype="fp8_e4m3")) is None


def test_labels_give_quality_in_both_precisions(rng: np.random.Generator) -> None:
    model = tiny_model()
    asked = [LabelledRequest(random_request(rng, model.config, user, 12, 8), np.eye(8)[user % 8]) for user in range(10)]
    found = check_precision(model, Precision("fp8_e4m3"), asked, "made up")
    assert found.labelled == 10
    assert found.full_auc is not None
    assert found.auc == pytest.approx(found.full_auc, abs=0.1)
    assert found.ndcg == pytest.approx(found.full_ndcg, abs=0.1)


def test_models_with_a_query_frame_are_checked_too() -> None:
    model = tiny_model(**QUERY_FRAMES["neither"])
    assert (
        check_precision(model, Precision("int8"), random_requests(model.config, 3, 0), "random").largest_difference
        < 0.1
    )


@pytest.mark.parametrize(
    ("changed", "objection"),
    [
        ({}, None),
        ({"top_overlap": 0.98}, "top_overlap 0.9800 is below 0.99"),
        ({"kendall_tau": 0.9}, "kendall_tau 0.9000 is below 0.99"),
        ({"requests": 99}, "99 requests are fewer than 100"),
        ({"labelled": 200, "auc": 0.8, "full_auc": 0.8, "kendall_tau": 0.1}, None),
        ({"labelled": 200, "auc": 0.7991, "full_auc": 0.8}, "AUC 0.79910 is below 99.9% of 0.80000"),
        ({"labelled": 200, "ndcg": 0.1, "full_ndcg": 0.2}, "NDCG@10 0.10000 is below 99.9% of 0.20000"),
        ({"labelled": 20, "auc": 0.8, "full_auc": 0.8}, "20 requests are fewer than 100"),
    ],
)
def test_thresholds_decide(changed: dict[str, Any], objection: str | None) -> None:
    found = PrecisionFigures(**GOOD | changed).objections(Thresholds())
    assert found == ([] if objection is None else [objection])


def test_auto_takes_the_closest_of_those_allowed_and_says_why() -> None:
    model = tiny_model()
    cases = [
        (None, "model", "chosen since the model folder has no check"),
        (verdicts_of(model, fp8_e4m3=0.1, int8=0.01), "int8", "the model's check allows it"),
        (verdicts_of(model, fp8_e4m3=0.1), "fp8_e4m3", "the model's check allows it"),
        (
            PrecisionVerdicts(version="0").with_verdict(
                Precision("int8"), PrecisionFigures(**GOOD | {"kendall_tau": 0.5})
            ),
            "model",
            "int8: kendall_tau 0.5000 is below 0.99",
        ),
    ]
    for verdicts, expected, reason in cases:
        with Engine(replace(model, precision=verdicts), EngineConfig(kv_dtype="auto", device="cpu")) as engine:
            assert engine.config.kv_dtype == expected
            assert reason in str(engine.report())


def test_a_verdict_is_bound_to_its_weights(folder: Path) -> None:
    model = load_model(folder)
    assert model.precision is None
    write_verdicts(folder, verdicts_of(model, int8=0.01))
    assert load_model(folder).precision == verdicts_of(model, int8=0.01)
    assert load_model(folder).version == model.version, "a verdict is no part of the model"
    assert read_verdicts(folder, model.version + 1) is None


@pytest.mark.parametrize("content", ["", "[]", '{"format": 1}', '{"version": "1", "verdicts": {"fp4": {}}}'])
def test_a_damaged_verdict_is_an_error_that_names_the_file(folder: Path, content: str) -> None:
    (folder / "precision.json").write_text(content)
    with pytest.raises(ModelError, match=r"precision\.json"):
        load_model(folder)


def test_a_simulation_needs_a_fixed_kv_dtype() -> None:
    node = NodeConfig(model=tiny_model().config, engine=EngineConfig(kv_dtype="auto", pool_bytes="1GiB"))
    with pytest.raises(ConfigError, match="kv_dtype must be 'model', 'fp8_e4m3' or 'int8' here, got 'auto'"):
        assert isinstance(node.geometry, PageGeometry)


def test_the_command_writes_the_verdict_and_its_status_says_it(folder: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke
    result = run(app, ["model", "check", str(folder), "--precision", "fp8", "--seed", "3"])
    found = json.loads((folder / "precision.json").read_text())
    verdict = found["verdicts"][str(LOW_PRECISIONS["fp8"])]
    assert verdict["figures"]["source"] == "random, seed 3"
    assert result.exit_code == (1 if verdict["objections"] else 0)
    asked = tmp_path / "asked.jsonl"
    rng, config = np.random.default_rng(0), load_model(folder).config
    lines = []
    for user in range(3):
        request = random_request(rng, config, user, 5, 3)
        whole = {name: getattr(request, name) for name in ("items", "actions", "timestamps", "candidates")}
        features = {
            name: {k: v.tolist() for k, v in getattr(request, name).items()}
            for name in ("features", "candidate_features")
        }
        fields = {name: each.tolist() for name, each in whole.items()}
        lines.append({"user_id": user, **fields, **features, "context": request.context, "labels": [1, 0, 0]})
    asked.write_text("\n".join(json.dumps(line) for line in lines))
    result = run(app, ["model", "check", str(folder), "--precision", "int8", "--requests", str(asked)])
    assert result.exit_code == 1, "three requests are too few"
    assert "3 requests are fewer than 100" in " ".join(result.output.split())
    kept = json.loads((folder / "precision.json").read_text())["verdicts"]
    assert set(kept) == {str(LOW_PRECISIONS[name]) for name in ("fp8", "int8")}
    assert kept[str(LOW_PRECISIONS["int8"])]["figures"]["labelled"] == 3
    asked.write_text(json.dumps({**lines[0], "labels": [1]}))
    result = run(app, ["model", "check", str(folder), "--precision", "int8", "--requests", str(asked)])
    assert result.exit_code != 0
    assert "line 1" in result.output
    result = run(app, ["model", "check", str(folder), "--precision", "fp4"])
    known = "fp8, int8, fp8-products, fp8-rows, int8-rows, fp8-layers, int8-caches or fp8-all"
    assert f"--precision must be {known}, got 'fp4'" in " ".join(result.output.split())
