"""`helmrec trace`, as a user types it."""

import sys
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from helmrec.cli.main import app
from helmrec.traffic.trace_file import read_trace

runner = CliRunner()
FIXTURES = Path(__file__).parents[1] / "traffic" / "fixtures"
SMALL = ["--preset", "amazon-video-games", "--rate", "10", "--duration", "20"]


def trace(*arguments: str | Path) -> tuple[int, str]:
    result = runner.invoke(app, ["trace", *map(str, arguments)])
    return result.exit_code, " ".join(result.output.split())


def test_a_family_is_made_and_described(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    code, output = trace("make", "--family", "trend", *SMALL, "--out", path)
    assert (code, "requests of" in output) == (0, True)
    code, output = trace("describe", path)
    assert code == 0
    for expected in ("synthetic: trend, seed 0", "before", "published", "6.9", "47.0%", "12,240"):
        assert expected in output


def test_same_flags_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert trace("make", *SMALL, "--seed", seed, "--out", tmp_path / name)[0] == 0
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_a_trace_that_cannot_fit_in_memory_is_refused_with_its_number_of_requests(tmp_path: Path) -> None:
    code, output = trace("make", "--rate", "1e9", "--duration", "1e9", "--out", tmp_path / "t")
    assert code == 2
    assert "error: a trace of 1,000,000,000,000,000,000 requests" in output


def test_histories_can_be_stretched(tmp_path: Path) -> None:
    assert trace("make", *SMALL, "--history", "8000", "--out", tmp_path / "t")[0] == 0
    backlog = read_trace(tmp_path / "t").backlog
    assert 6_000 < backlog.mean() < 10_500
    assert backlog.max() <= 16_800


def test_a_trace_that_is_not_there_is_one_clear_line() -> None:
    code, output = trace("describe", "nowhere.parquet")
    assert (code, "no such trace: nowhere.parquet" in output) == (2, True)


def test_a_workload_file_is_made(tmp_path: Path) -> None:
    (tmp_path / "w.toml").write_text('name = "w"\n[[phases]]\nname = "only"\nduration_s = 5\nhistory = 20\n')
    assert trace("make", "--config", tmp_path / "w.toml", "--out", tmp_path / "t")[0] == 0
    assert read_trace(tmp_path / "t").phase_names == ("only",)


def test_a_published_log_is_imported(tmp_path: Path) -> None:
    log = FIXTURES / "movietweetings.dat"
    code, output = trace("import", log, "--kind", "movietweetings", "--history-share", "0", "--out", tmp_path / "t")
    assert (code, "5 requests of 3 users" in output) == (0, True)
    assert read_trace(tmp_path / "t").catalogue.source == "movietweetings: movietweetings.dat"


OWN = "who,what,how,when\nann,boots,view,5\nbob,hat,buy,6\nann,,view,7\nbob,boots,view,soon\nann,hat,buy,9\n"
COLUMNS = ["--user-column", "who", "--item-column", "what", "--action-column", "how", "--time-column", "when"]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_an_own_log_is_imported_with_a_report(tmp_path: Path, kind: str) -> None:
    log, path = tmp_path / f"log.{kind}", tmp_path / "t.safetensors"
    if kind == "csv":
        log.write_text(OWN)
    else:
        header, *lines = (line.split(",") for line in OWN.split())
        columns = {name: [line[i] or None for line in lines] for i, name in enumerate(header)}
        parquet.write_table(pa.table(columns), log)
    code, output = trace("import", kind, log, *COLUMNS, "--history-share", "0", "--out", path)
    assert code == 0
    for expected in ("read │ 5", "kept │ 3", "dropped: what is missing", "dropped: when cannot", "buy │ becomes 0"):
        assert expected in output
    assert "3 requests of 2 users" in output
    assert read_trace(path).catalogue.source == f"{kind}: log.{kind}"
    assert trace("describe", path)[0] == 0


def test_without_pyarrow_a_csv_becomes_safetensors_and_parquet_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "log.csv").write_text(OWN)
    arguments: tuple[str | Path, ...] = ("import", "csv", tmp_path / "log.csv", *COLUMNS, "--out")
    assert trace(*arguments, tmp_path / "t.safetensors")[0] == 0
    code, output = trace(*arguments, tmp_path / "t.parquet")
    assert (code, "pip install 'helmrec[parquet]', or name the file *.safetensors" in output) == (2, True)


def test_the_form_with_the_log_first_still_imports_published_logs(tmp_path: Path) -> None:
    log, path = FIXTURES / "movietweetings.dat", tmp_path / "t"
    assert trace("import", "--kind", "movietweetings", log, "--out", path)[0] == 0
    assert trace("import", "published", log, "--kind", "movietweetings", "--out", tmp_path / "u")[0] == 0
    assert path.read_bytes() == (tmp_path / "u").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["make", "--family", "quiet"], "family must be one of steady"),
        (["make", "--preset", "ebay"], "preset must be one of dlrmv3"),
        (["make", "--axis", "moon"], "axis"),
        (["make", "--rate", "0"], "rate must be more than 0.0, got 0.0"),
        (["make", "--history", "-3"], "history must be more than 0, got -3"),
        (["make", "--config", "nowhere.toml"], "cannot read workload nowhere.toml"),
        (["import", "nowhere.csv", "--kind", "taobao"], "no such file: nowhere.csv"),
        (["import", "nowhere.csv", "--kind", "ebay"], "kind must be one of taobao"),
        (["import", "csv", "nowhere.csv"], "no such file: nowhere.csv"),
        (["import", "csv", "nowhere.csv", "--time-unit", "h"], "time_unit"),
        (["import", "csv", "nowhere.csv", "--delimiter", "::"], "delimiter: must be one character"),
    ],
)
def test_a_bad_setting_is_one_clear_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    code, output = trace(*arguments, "--out", tmp_path / "t")
    assert code == 2
    assert message in output
    assert "Traceback" not in output
    assert not (tmp_path / "t").exists()
