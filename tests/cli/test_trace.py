"""`helmrec trace`, as a user types it."""

from pathlib import Path

import pytest
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
    ],
)
def test_a_bad_setting_is_one_clear_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    code, output = trace(*arguments, "--out", tmp_path / "t")
    assert code == 2
    assert message in output
    assert "Traceback" not in output
    assert not (tmp_path / "t").exists()
