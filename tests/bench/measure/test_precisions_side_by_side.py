"""Serving rates of several precisions in one file: what is measured, what is left out, and the table at the end."""

import json
from pathlib import Path
from typing import Any

import pytest

from helmrec_bench.measure.cards import loadgen, trade_off
from helmrec_bench.measure.cards.measured_parts import MeasuredParts
from helmrec_bench.measure.cards.trade_off import Cells, MapPlan
from helmrec_bench.registry import REGISTERED

MAP = ("--quick", "--precisions", "model", "fp8-all", "--rows", "24", "6", "--hot", "0.6", "--tier", "off", "--alphas")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The engines whose cells were measured; the best alpha is 0.3 in the model's dtype, else 0.7."""
    engines: list[str] = []

    def measure(wanted: Cells, plan: MapPlan, deadline_s: float) -> list[dict[str, Any]]:
        engines.append(f"{wanted.precision} {wanted.rows_per_token}")
        best = 0.3 if wanted.precision == "model" else 0.7
        return [
            {"hot_share": share, "host_tier": tier, "alpha": alpha, "requests_per_s": 100.0 + 50 * (alpha == best)}
            for share in wanted.shares
            for tier in wanted.tiers
            for alpha in wanted.alphas
        ]

    monkeypatch.setattr(trade_off, "measure", measure)
    monkeypatch.setenv("HELMREC_COMMIT", "abc1234")
    return engines


def run_map(out: Path, *alphas: str) -> None:
    REGISTERED["trade-off"].run(["--out", str(out), *MAP, *alphas])


def test_the_map_shows_the_best_split_of_each_precision(
    tmp_path: Path, measured: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run_map(tmp_path / "found.json", "0.3", "0.7")
    assert measured == ["model 24", "fp8-all 24", "model 6", "fp8-all 6"]
    lines = [line for line in capsys.readouterr().out.splitlines() if "60% hot" in line]
    assert lines[0] == "| model, 6 rows | 60% hot | without | **150** | 100 |"
    assert lines[-1] == "| fp8-all, 24 rows | 60% hot | without | 100 | **150** |"


def test_the_map_goes_on_where_the_call_before_stopped(tmp_path: Path, measured: list[str]) -> None:
    out = tmp_path / "found.json"
    run_map(out, "0.3", "0.7")
    run_map(out, "0.3", "0.7")
    assert len(measured) == 4
    run_map(out, "0.3", "0.9")
    assert len(measured) == 8, "another alpha is wanted"


def test_loadgen_finds_the_rates_of_each_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Made:
        def report(self) -> str:
            return "kv_dtype: as set"

        def close(self) -> None:
            closed.append(self)

    closed: list[Made] = []

    def search(*_: object, lowest: float) -> dict[str, Any]:
        return {"largest_valid_qps": 1_600.0 + 200 * len(closed), "saturated_per_s": 1_900.0}

    monkeypatch.setattr(loadgen, "make_engine", lambda *_: Made())
    monkeypatch.setattr(loadgen, "search", search)
    for name in ("EngineProbe", "PreparedTraffic", "Offers"):
        monkeypatch.setattr(loadgen, name, lambda *_, **__: None)
    out = tmp_path / "found.json"
    REGISTERED["loadgen-card"].run(
        ["--quick", "--precisions", "model", "fp8-all", "--limit-s", "1e9", "--out", str(out)]
    )
    assert len(closed) == 2, "the memory of one is free before the next is made"
    assert "| fp8-all | 1800.0 (1900.0) | 1800.0 (1900.0) |" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert found["fp8-all"]["row_dtype"] == "fp8_e4m3"
    assert found["model"]["with_reuse"]["largest_valid_qps"] == 1_600


def test_a_search_that_is_in_the_file_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HELMREC_COMMIT", "abc1234")
    out, rates = tmp_path / "found.json", {"largest_valid_qps": 1_600.0, "saturated_per_s": 1_900.0}
    MeasuredParts(out, ("set_up", "model")).put("model", {"with_reuse": rates, "without_reuse": rates})
    monkeypatch.setattr(loadgen, "make_engine", lambda *_: pytest.fail("an engine for nothing"))
    REGISTERED["loadgen-card"].run(["--quick", "--precisions", "model", "--out", str(out)])
