"""Logs of one's own: what is kept, what is dropped and why."""

import gzip
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from helmrec.errors import ConfigError, TraceError
from helmrec.traffic.imported import ImportConfig, trace_of_log
from helmrec.traffic.own_log import LogColumns, OwnLog, read_csv_log, read_parquet_log

HEADER = "user,item,action,time\n"


def read(tmp_path: Path, text: str | bytes, **columns: Any) -> OwnLog:
    path = tmp_path / "log.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_csv_log(path, LogColumns(**columns))


def events(own: OwnLog) -> list[tuple[int, int, int, int]]:
    log = own.log
    columns = (log.user, log.item, log.action, log.timestamp_s)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_string_ids_are_numbered_by_first_use_and_events_sorted_by_time(tmp_path: Path) -> None:
    own = read(tmp_path, HEADER + "zoë,boots,view,20\nbob,hat,view,5\nzoë,hat,view,10\n")
    assert events(own) == [(1, 1, 0, 5), (0, 1, 0, 10), (0, 0, 0, 20)]
    assert (own.report.num_users, own.report.num_items, own.report.num_out_of_order) == (2, 2, 1)


def test_times_in_another_unit_keep_their_order_within_a_second(tmp_path: Path) -> None:
    own = read(tmp_path, HEADER + "a,x,view,7900\na,y,view,7100\n", time_unit="ms")
    assert events(own) == [(0, 1, 0, 7), (0, 0, 0, 7)]


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("2026-03-01T09:30:00Z", 1772357400),
        ("2026-03-01 09:30:00", 1772357400),
        ("2026-03-01T10:30:00+01:00", 1772357400),
    ],
)
def test_iso_times_are_read_and_are_utc_without_a_zone(tmp_path: Path, written: str, seconds: int) -> None:
    assert events(read(tmp_path, f"{HEADER}a,x,view,{written}\n", time_unit="iso"))[0][3] == seconds


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (",x,view,5", "user is missing"),
        ("a, ,view,5", "item is missing"),
        ("a,x,,5", "action is missing"),
        ("a,x,view,", "time is missing"),
        ("a,x,view,soon", "time cannot be read (--time-unit s)"),
        ("a,x,view,nan", "time cannot be read (--time-unit s)"),
        ("a,x,view,-4", "time is before 1970"),
        ("a,x,view,1700000000000", "time is after the year 3000 (--time-unit s)"),
        ("a,x,view", "not 4 fields, as the header has"),
        ("a,x,view,5,6", "not 4 fields, as the header has"),
        (b"\xff,x,view,5".decode(errors="surrogateescape"), "not UTF-8"),
    ],
)
def test_a_bad_line_is_dropped_and_named(tmp_path: Path, line: str, reason: str) -> None:
    text = f"{HEADER}a,x,view,1\n{line}\na,y,view,2\n{line}\n".encode(errors="surrogateescape")
    report = read(tmp_path, text).report
    assert (report.num_read, report.num_kept, report.dropped) == (4, 2, {reason: (2, 3)})


def test_other_names_a_delimiter_and_no_action_column(tmp_path: Path) -> None:
    text = "when;who;what\n5;a;x\n"
    own = read(tmp_path, text, user="who", item="what", time="when", action=None, delimiter=";")
    assert (events(own), own.log.num_actions, own.report.actions) == ([(0, 0, 0, 5)], 1, {})


def test_a_byte_order_mark_quotes_and_empty_lines_are_understood(tmp_path: Path) -> None:
    own = read(tmp_path, b'\xef\xbb\xbfuser,item,action,time\r\n"a,b",x,view,5\r\n\r\n')
    assert (len(events(own)), own.report.dropped) == (1, {})


@pytest.mark.parametrize(
    ("written", "given", "expected"),
    [
        (["view", "buy"], (), {"buy": 0, "view": 1}),
        (["3", "0"], (), {"0": 0, "3": 3}),
        (["3", "view"], (), {"3": 0, "view": 1}),
        (["view", "buy"], ("view", "cart", "buy"), {"view": 0, "cart": 1, "buy": 2}),
    ],
)
def test_actions_get_numbers(
    tmp_path: Path, written: list[str], given: tuple[str, ...], expected: dict[str, int]
) -> None:
    own = read(tmp_path, HEADER + "".join(f"a,x,{name},{t}\n" for t, name in enumerate(written)), actions=given)
    assert own.report.actions == expected
    assert own.log.action.tolist() == [expected[name] for name in written]
    assert own.log.num_actions == max(expected.values()) + 1


def test_actions_that_were_not_listed_are_dropped(tmp_path: Path) -> None:
    report = read(tmp_path, HEADER + "a,x,view,1\na,x,scroll,2\n", actions=("view", "buy")).report
    assert report.dropped == {"action is none of view, buy": (1, 3)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("user,item,time\na,b,1\n", "column 'action' is missing; its columns are user, item, time"),
        ("user,item,time,action,time\n", "column 'time' stands there more than once"),
        ("", r"column 'user' is missing; its columns are \(none\)"),
        (HEADER, "has no usable events; it has no lines"),
        (HEADER + "a,x,view,soon\n", "has no usable events; 1 lines: time cannot be read"),
        (HEADER + "".join(f"a,x,kind{n},5\n" for n in range(300)), "at most 256 different values, got 'kind256'"),
        (HEADER + "a," + "x" * 200_000 + ",view,5\n", "line 2: field larger than field limit"),
    ],
)
def test_a_file_without_a_log_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        read(tmp_path, text)
    assert "log.csv" in str(caught.value) or "column" in str(caught.value)


def test_a_delimiter_is_one_character() -> None:
    assert LogColumns(delimiter="\\t").delimiter == "\t"
    with pytest.raises(ConfigError, match="delimiter: must be one character"):
        LogColumns(delimiter="::")


def test_a_compressed_file_is_read_and_a_cut_one_refused(tmp_path: Path) -> None:
    packed = gzip.compress((HEADER + "a,x,view,5\n" * 1_000).encode())
    (tmp_path / "log.csv.gz").write_bytes(packed)
    assert read_csv_log(tmp_path / "log.csv.gz", LogColumns()).report.num_kept == 1_000
    (tmp_path / "cut.csv.gz").write_bytes(packed[:-20])
    with pytest.raises(TraceError, match="cut"):
        read_csv_log(tmp_path / "cut.csv.gz", LogColumns())


def written(tmp_path: Path, **columns: Any) -> Path:
    parquet.write_table(pa.table(columns), tmp_path / "log.parquet")
    return tmp_path / "log.parquet"


def test_parquet_and_csv_with_the_same_lines_are_the_same_log(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    lines = [(f"u{u}", int(i), "buy" if i % 3 else "view", int(t)) for u, i, t in rng.integers(0, 50, (400, 3))]
    own = read(tmp_path, HEADER + "".join(",".join(map(str, line)) + "\n" for line in lines))
    user, item, action, time = (list(column) for column in zip(*lines, strict=True))
    path = written(tmp_path, user=user, item=item, action=action, time=time)
    other = read_parquet_log(path, LogColumns())
    assert (events(other), other.report) == (events(own), own.report)


def test_timestamps_of_parquet_have_their_own_unit(tmp_path: Path) -> None:
    time = pa.array([datetime(2026, 3, 1, 9, 30, tzinfo=UTC), None], pa.timestamp("ns", "UTC"))
    own = read_parquet_log(written(tmp_path, user=["a", "b"], item=[1.0, 2.0], action=[0, 0], time=time), LogColumns())
    assert (events(own), own.report.dropped) == ([(0, 0, 0, 1772357400)], {"time is missing": (1, 2)})


def test_a_parquet_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log.parquet").write_text("user,item\n")
    with pytest.raises(TraceError, match="not a Parquet file"):
        read_parquet_log(tmp_path / "log.parquet", LogColumns())
    with pytest.raises(TraceError, match="no such file: nowhere"):
        read_parquet_log(Path("nowhere"), LogColumns())


def test_csv_needs_no_pyarrow_and_parquet_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert read(tmp_path, HEADER + "a,x,view,5\n").report.num_kept == 1
    with pytest.raises(ConfigError, match=r"pip install 'helmrec\[parquet\]'"):
        read_parquet_log(tmp_path / "log.csv", LogColumns())


def test_progress_ends_near_the_size_of_the_file(tmp_path: Path) -> None:
    path, seen = tmp_path / "log.csv", list[tuple[int, int]]()
    path.write_text(HEADER + "a,x,view,5\n" * 25_000)
    read_csv_log(path, LogColumns(), lambda done, total: seen.append((done, total)))
    assert [total for _, total in seen] == [path.stat().st_size] * 2
    assert 0 < seen[0][0] < seen[1][0] <= seen[0][1]


def test_an_own_log_becomes_a_valid_trace(tmp_path: Path) -> None:
    own = read(tmp_path, HEADER + "a,x,view,1\nb,x,view,2\na,y,buy,3\nb,z,view,9\na,x,view,10\n")
    trace = trace_of_log(own.log, ImportConfig(history_share=0.0))
    trace.check()
    assert (trace.num_requests, trace.num_users, trace.catalogue.num_items) == (5, 2, 3)
