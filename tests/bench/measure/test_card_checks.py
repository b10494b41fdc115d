"""Times of a card are shown although a check of its kernels failed, and the failure is not lost."""

import json
from pathlib import Path

import pytest

from helmrec_bench.measure.cards import precision
from helmrec_bench.measure.cards.kernels import failed_checks
from helmrec_bench.registry import REGISTERED

TESTS = """
def test_that_holds():
    pass

def test_that_fails():
    assert 1 == 2
"""
LAYERS = {"gemm_tflops": 1, "fp8_gemm_tflops": 2, "attention": [], "rows": []}


def checks_in(folder: Path, text: str) -> None:
    (folder / "tests" / "gpu").mkdir(parents=True)
    (folder / "tests" / "gpu" / "test_some_on_gpu.py").write_text(text)


def test_failed_checks_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks_in(tmp_path, TESTS)
    monkeypatch.chdir(tmp_path)
    (line,) = failed_checks("some")
    assert line.startswith("FAILED tests/gpu/test_some_on_gpu.py::test_that_fails")


def test_checks_that_hold_name_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks_in(tmp_path, TESTS.replace("1 == 2", "1 == 1"))
    monkeypatch.chdir(tmp_path)
    assert not failed_checks("some")


def test_no_checks_at_all_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks_in(tmp_path, "")
    monkeypatch.chdir(tmp_path)
    assert failed_checks("some") == ["the checks ended with status 5"]


def test_times_are_shown_before_the_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(precision, "failed_checks", lambda *_, limit_s: ["FAILED one"])
    monkeypatch.setattr(precision, "layer_times", lambda keep, meta: keep(LAYERS))
    out = tmp_path / "found.json"
    flags = REGISTERED["precision"].parse(["--only", "checks", "layers", "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        precision.main(flags)
    assert ended.value.code == 1
    shown = capsys.readouterr().out
    assert shown.index("layers, ms") < shown.index("FAILED one")
    assert json.loads(out.read_text())["checks"] == {"failed": ["FAILED one"]}
