"""The file formats of traces: Parquet with one row per request, or safetensors where the name ends in `.safetensors`.

Safetensors needs no library besides the core dependencies, and has the arrays of `Trace` as they are. Parquet:

| column | type | meaning |
|---|---|---|
| time_s | double | since the start of the trace |
| user | int64 | numbered from 0 |
| phase | dictionary of strings | the phase of the workload |
| epoch | int32 | the popularity from which its candidates are drawn |
| num_candidates, candidate_seed | int32, uint64 | the candidate set |
| backlog | int32 | derived events of the user before its first request; 0 at later requests |
| item, action, timestamp_s | lists of int64, uint8, int64 | events appended since the user's last request |

The catalogue, from which the rest is derived, is JSON in the file's metadata. The same trace gives the same bytes.
"""

import json
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from helmrec.errors import ConfigError, TraceError
from helmrec.traffic.arrow import pyarrow
from helmrec.traffic.trace import Catalogue, Trace, index_histories
from helmrec.types import IntArray

_KEY = b"helmrec.trace"
_FORMAT = 1
_ROW_GROUP = 1 << 17
_TENSORS = ".safetensors"
_DTYPES: dict[str, Any] = {
    "time_s": np.float64,
    "user": np.int64,
    "num_new": np.int32,
    "num_candidates": np.int32,
    "candidate_seed": np.uint64,
    "phase": np.int16,
    "epoch": np.int32,
    "backlog": np.int32,
    "item": np.int64,
    "action": np.uint8,
    "timestamp_s": np.int64,
}


def write_trace(trace: Trace, path: Path) -> None:
    """Check a trace and write it; a failed write leaves no file of that name."""
    trace.check()
    check_library(path)
    stored = {"format": _FORMAT, "phases": trace.phase_names, "catalogue": trace.catalogue.model_dump(mode="json")}
    write = _write_tensors if path.suffix == _TENSORS else _write_parquet
    partial = path.with_name(path.name + ".partial")
    try:
        write(trace, partial, json.dumps(stored))
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise TraceError(f"cannot write {path}: {error}") from None


def read_trace(path: Path) -> Trace:
    """Read and check a trace; raise TraceError with the file and the reason if it is not one."""
    check_library(path)
    if not path.is_file():
        raise TraceError(f"no such trace: {path}")
    try:
        trace = _read_tensors(path) if path.suffix == _TENSORS else _read_parquet(path)
        trace.check()
    except (TraceError, ConfigError) as error:
        raise TraceError(f"{path}: {error}") from None
    return trace


def check_library(path: Path) -> None:
    """Raise ConfigError if the library for this kind of trace file is missing. Call it before long work."""
    if path.suffix != _TENSORS:
        pyarrow("a trace as Parquet needs", f", or name the file *{_TENSORS}")


def _write_parquet(trace: Trace, path: Path, stored: str) -> None:
    arrow, parquet = pyarrow("Parquet files need")
    table = arrow.table(_columns(trace, arrow)).replace_schema_metadata({_KEY: stored})
    parquet.write_table(table, path, compression="zstd", row_group_size=_ROW_GROUP)


def _read_parquet(path: Path) -> Trace:
    arrow, parquet = pyarrow("Parquet files need")
    try:
        table = parquet.read_table(path)
    except (arrow.ArrowException, OSError) as error:
        raise TraceError(f"not a Parquet file that can be read: {error}") from None
    return _trace(table, *_metadata((table.schema.metadata or {}).get(_KEY)))


def _write_tensors(trace: Trace, path: Path, stored: str) -> None:
    arrays = {name: np.ascontiguousarray(getattr(trace, name)) for name in _DTYPES}
    path.write_bytes(save(arrays, metadata={_KEY.decode(): stored}))  # `save_file` ignores the umask


def _read_tensors(path: Path) -> Trace:
    try:
        with safe_open(path, framework="np") as file:
            stored = (file.metadata() or {}).get(_KEY.decode())
            arrays = {name: file.get_tensor(name) for name in file.offset_keys()}
    except (SafetensorError, OSError) as error:
        raise TraceError(f"not a safetensors file that can be read: {error}") from None
    catalogue, phase_names = _metadata(stored)
    if arrays.keys() != _DTYPES.keys():
        raise TraceError(f"its arrays must be {', '.join(_DTYPES)}, got {', '.join(sorted(arrays))}")
    for name, dtype in _DTYPES.items():
        _typed(name, arrays[name], dtype)
    return Trace(catalogue=catalogue, phase_names=phase_names, **arrays)


def _columns(trace: Trace, arrow: Any) -> dict[str, Any]:
    histories = index_histories(trace)
    is_first = histories.visit == 0
    backlog = np.where(is_first, trace.backlog[trace.user], 0).astype(np.int32)
    num_own = trace.num_new - backlog
    starts = np.zeros(trace.num_requests + 1, np.int64)
    np.cumsum(num_own, out=starts[1:])
    order = _by_request(trace.user, num_own, histories.own_start)
    offsets = arrow.array(starts.astype(np.int32)) if starts[-1] < 2**31 else arrow.array(starts)
    lists = arrow.ListArray if starts[-1] < 2**31 else arrow.LargeListArray
    phases = arrow.DictionaryArray.from_arrays(arrow.array(trace.phase), arrow.array(trace.phase_names, arrow.string()))
    return {
        "time_s": trace.time_s,
        "user": trace.user,
        "phase": phases,
        "epoch": trace.epoch,
        "num_candidates": trace.num_candidates,
        "candidate_seed": trace.candidate_seed,
        "backlog": backlog,
        "item": lists.from_arrays(offsets, trace.item[order]),
        "action": lists.from_arrays(offsets, trace.action[order]),
        "timestamp_s": lists.from_arrays(offsets, trace.timestamp_s[order]),
    }


@numba.njit(cache=True)
def _by_request(user: IntArray, num_own: NDArray[np.int32], own_start: IntArray) -> IntArray:
    """The index, among events by user, of the events of each request, in order of requests."""
    order, at, count = np.empty(own_start[-1], np.int64), own_start.copy(), 0
    for r in range(user.size):
        for _ in range(num_own[r]):
            order[count] = at[user[r]]
            at[user[r]] += 1
            count += 1
    return order


def _metadata(stored: bytes | str | None) -> tuple[Catalogue, tuple[str, ...]]:
    if stored is None:
        raise TraceError(f"not a trace: it has no {_KEY.decode()!r} metadata")
    try:
        values = json.loads(stored)
        version, catalogue, phases = values["format"], values["catalogue"], values["phases"]
    except (ValueError, KeyError, TypeError) as error:
        raise TraceError(f"its {_KEY.decode()!r} metadata cannot be read: {error!r}") from None
    if version != _FORMAT:
        raise TraceError(f"trace format must be {_FORMAT}, got {version!r}")
    return Catalogue(**catalogue), tuple(phases)


def _trace(table: Any, catalogue: Catalogue, phase_names: tuple[str, ...]) -> Trace:
    user = _flat(table, "user", np.int64)
    num_users = int(user.max(initial=-1)) + 1
    if user.size and (user.min() < 0 or num_users > user.size):
        raise TraceError(f"user must be numbered from 0 without gaps, got {user.min()} to {user.max()}")
    backlog_at, num_own = _flat(table, "backlog", np.int32), _list_lengths(table, "item")
    backlog = np.zeros(num_users, np.int32)
    np.maximum.at(backlog, user, backlog_at)
    own_start = np.zeros(num_users + 1, np.int64)
    own_start[1:] = np.cumsum(np.bincount(user, num_own, num_users))
    order = _by_request(user, num_own, own_start)
    return Trace(
        catalogue=catalogue,
        phase_names=phase_names,
        time_s=_flat(table, "time_s", np.float64),
        user=user,
        num_new=num_own + backlog_at,
        num_candidates=_flat(table, "num_candidates", np.int32),
        candidate_seed=_flat(table, "candidate_seed", np.uint64),
        phase=_phase(table, phase_names),
        epoch=_flat(table, "epoch", np.int32),
        backlog=backlog,
        item=_scattered(table, "item", np.int64, order),
        action=_scattered(table, "action", np.uint8, order),
        timestamp_s=_scattered(table, "timestamp_s", np.int64, order),
    )


def _phase(table: Any, names: tuple[str, ...]) -> NDArray[np.int16]:
    column = _column(table, "phase").combine_chunks()
    codes = {name: code for code, name in enumerate(names)}
    stored = column.dictionary.to_pylist() if hasattr(column, "dictionary") else None
    if stored is None or not codes.keys() >= set(stored):
        raise TraceError(f"phase must be a dictionary of {', '.join(names)}, got {stored}")
    return np.array([codes[name] for name in stored], np.int16)[column.indices.to_numpy()]


def _column(table: Any, name: str) -> Any:
    if name not in table.column_names:
        raise TraceError(f"column {name!r} is missing, got {', '.join(table.column_names)}")
    column = table.column(name)
    if column.null_count:
        raise TraceError(f"{name} must have no nulls, got {column.null_count}")
    return column


def _flat(table: Any, name: str, dtype: Any) -> Any:
    """A copy of a column: Arrow's memory is read-only, for which loops would be compiled a second time."""
    return _typed(name, _column(table, name).to_numpy(), dtype).copy()


def _typed(name: str, values: NDArray[Any], dtype: Any) -> NDArray[Any]:
    if values.dtype != dtype:
        raise TraceError(f"{name} must be {np.dtype(dtype)}, got {values.dtype}")
    return values


def _lists(table: Any, name: str) -> Any:
    column = _column(table, name).combine_chunks()
    if not hasattr(column, "offsets"):
        raise TraceError(f"{name} must be lists, got {column.type}")
    return column


def _list_lengths(table: Any, name: str) -> NDArray[np.int32]:
    return np.diff(_lists(table, name).offsets.to_numpy()).astype(np.int32)


def _scattered(table: Any, name: str, dtype: Any, order: IntArray) -> Any:
    """List values, reordered from requests to users."""
    values = _typed(name, _lists(table, name).flatten().to_numpy(), dtype)
    if values.size != order.size:
        raise TraceError(f"{name} must have as many events as item ({order.size}), got {values.size}")
    scattered = np.empty_like(values)
    scattered[order] = values
    return scattered
