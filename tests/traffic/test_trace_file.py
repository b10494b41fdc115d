import json
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from safetensors.numpy import save

from helmrec.errors import ConfigError, TraceError
from helmrec.traffic.families import FAMILIES, family, preset
from helmrec.traffic.generate import generate
from helmrec.traffic.trace import Trace
from helmrec.traffic.trace_file import read_trace, write_trace
from tests.traffic.cases import small_trace


def assert_same(a: Trace, b: Trace) -> None:
    for field in fields(Trace):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, np.ndarray):
            assert x.dtype == y.dtype, field.name
            assert np.array_equal(x, y), field.name
        else:
            assert x == y


def written(trace: Trace, path: Path) -> bytes:
    write_trace(trace, path)
    return path.read_bytes()


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    trace = small_trace()
    write_trace(trace, tmp_path / "t.parquet")
    assert_same(read_trace(tmp_path / "t.parquet"), trace)
    assert [path.name for path in tmp_path.iterdir()] == ["t.parquet"]


def test_safetensors_hold_the_same_trace_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    trace, path = small_trace(), tmp_path / "t.safetensors"
    assert written(trace, path) == written(trace, tmp_path / "again.safetensors")
    assert_same(read_trace(path), trace)
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_safetensors_that_are_no_trace_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    whole = written(small_trace(), path)
    for data, message in (
        (whole[:-8], "not a safetensors file"),
        (save({"user": np.zeros(2)}), "not a trace: it has no"),
        (whole.replace(b'"phase"', b'"phasf"'), "its arrays must be time_s"),
        (whole.replace(b'"dtype":"F64"', b'"dtype":"I64"'), "time_s must be float64, got int64"),
    ):
        path.write_bytes(data)
        with pytest.raises(TraceError, match=message):
            read_trace(path)


@pytest.mark.parametrize("name", FAMILIES)
def test_same_seed_same_bytes_and_another_seed_others(tmp_path: Path, name: str) -> None:
    shape = preset("amazon-video-games").model_copy(update={"duration_s": 40.0, "rate": 20.0, "axis": "all"})
    first, again, other = (
        written(generate(family(name, shape), seed), tmp_path / f"{i}.parquet") for i, seed in enumerate((3, 3, 4))
    )
    assert first == again
    assert first != other


def test_reading_and_writing_again_gives_the_same_bytes(tmp_path: Path) -> None:
    first = written(small_trace(), tmp_path / "a.parquet")
    assert written(read_trace(tmp_path / "a.parquet"), tmp_path / "b.parquet") == first


def test_a_trace_stores_appended_events_and_no_rows_of_backlogs_or_candidates(tmp_path: Path) -> None:
    trace = small_trace()
    write_trace(trace, tmp_path / "t.parquet")
    table = parquet.read_table(tmp_path / "t.parquet")
    names = "time_s user phase epoch num_candidates candidate_seed backlog item action timestamp_s"
    assert table.column_names == names.split()
    assert table.num_rows == trace.num_requests
    assert sum(len(items) for items in table["item"].to_pylist()) == trace.item.size
    assert trace.backlog.sum() > trace.item.size  # and those are not in the file


def test_an_empty_trace_is_a_trace(tmp_path: Path) -> None:
    trace = small_trace()
    empty = {f.name: getattr(trace, f.name)[:0] for f in fields(Trace) if f.name not in ("catalogue", "phase_names")}
    write_trace(Trace(trace.catalogue, trace.phase_names, **empty), tmp_path / "t.parquet")
    assert read_trace(tmp_path / "t.parquet").num_requests == 0


def without(name: str) -> Callable[[Any], Any]:
    return lambda table: table.drop_columns([name])


def put(name: str, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def edit(table: Any) -> Any:
        at = table.column_names.index(name)
        return table.set_column(at, name, change(table[name]))

    return edit


def with_metadata(change: Callable[[dict[str, Any]], object]) -> Callable[[Any], Any]:
    def edit(table: Any) -> Any:
        values = json.loads(table.schema.metadata[b"helmrec.trace"])
        change(values)
        return table.replace_schema_metadata({"helmrec.trace": json.dumps(values)})

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (without("epoch"), "column 'epoch' is missing"),
        (put("time_s", lambda c: c.cast("float32")), "time_s must be float64, got float32"),
        (put("item", lambda c: pa.array(range(len(c)))), "item must be lists"),
        (put("phase", lambda c: c.cast("string")), "phase must be a dictionary of calm, busy"),
        (put("user", lambda c: pa.array([10**6] * len(c))), "user must be numbered from 0 without gaps"),
        (put("action", lambda c: pa.array([[]] * len(c), pa.list_(pa.uint8()))), "action must have as many events"),
        (put("epoch", lambda c: pa.array([None] * len(c), pa.int32())), "epoch must have no nulls"),
        (put("epoch", lambda c: pa.array([99] * len(c), pa.int32())), "epoch must be from 0 to"),
        (lambda table: table.replace_schema_metadata({}), "not a trace"),
        (lambda table: table.replace_schema_metadata({"helmrec.trace": "{"}), "metadata cannot be read"),
        (with_metadata(lambda v: v.pop("phases")), "cannot be read: KeyError"),
        (with_metadata(lambda v: v.update(format=2)), "trace format must be 1, got 2"),
        (with_metadata(lambda v: v["catalogue"].update(shoes=1)), "shoes is not a known setting"),
        (with_metadata(lambda v: v["catalogue"].update(num_items=20)), "item must be from 0 to 19"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_by_name(tmp_path: Path, edit: Callable[[Any], Any], message: str) -> None:
    path = tmp_path / "t.parquet"
    write_trace(small_trace(), path)
    parquet.write_table(edit(parquet.read_table(path)), path)
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)


def test_missing_and_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such trace"):
        read_trace(tmp_path / "nowhere.parquet")
    path = tmp_path / "t.parquet"
    write_trace(small_trace(), path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(TraceError, match="not a Parquet file that can be read"):
        read_trace(path)
    with pytest.raises(TraceError, match="cannot write"):
        write_trace(small_trace(), tmp_path / "nowhere" / "t.parquet")


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"helmrec\[parquet\]"):
        read_trace(tmp_path / "t.parquet")


def test_arrays_read_are_of_the_same_kind_as_arrays_made(tmp_path: Path) -> None:
    """Otherwise every compiled loop over a trace would be compiled twice, once for each."""
    write_trace(small_trace(), tmp_path / "t.parquet")
    for trace in (small_trace(), read_trace(tmp_path / "t.parquet")):
        arrays = [value for field in fields(Trace) if isinstance(value := getattr(trace, field.name), np.ndarray)]
        assert all(array.flags.c_contiguous and array.flags.writeable for array in arrays)
