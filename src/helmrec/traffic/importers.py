"""Readers of published interaction logs, plain or gzip. Each returns the same four columns.

They know file formats only; `imported` converts a log to a trace.
"""

import gzip
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from helmrec.errors import ConfigError, TraceError
from helmrec.traffic.arrow import pyarrow
from helmrec.types import IntArray

_TAOBAO_ACTIONS = ("pv", "fav", "cart", "buy")
_KUAIRAND_SIGNALS = ("is_click", "long_view", "is_like")


@dataclass(frozen=True, slots=True, eq=False)
class Log:
    """Events of a log, in the order of the file. Ids are numbered from 0 by first use."""

    user: IntArray
    item: IntArray
    action: NDArray[np.uint8]
    timestamp_s: IntArray
    num_actions: int


def read_log(kind: str, path: Path) -> Log:
    """Read a log; raise TraceError with the file and the reason if it cannot be read."""
    if kind not in READERS:
        raise ConfigError(f"kind must be one of {', '.join(READERS)}, got {kind!r}")
    if not path.is_file():
        raise TraceError(f"no such file: {path}")
    arrow, _ = pyarrow("importing needs")
    try:
        log = READERS[kind](path)
    except (arrow.ArrowException, OSError, EOFError, UnicodeDecodeError, ValueError) as error:
        raise TraceError(f"{path} cannot be read as {kind}: {error}") from None
    if not log.user.size:
        raise TraceError(f"{path} has no events")
    if log.timestamp_s.min() < 0:
        raise TraceError(f"{path}: timestamps must be at least 0, got {log.timestamp_s.min()}")
    return log


def _taobao(path: Path) -> Log:
    """UserBehavior.csv: user,item,category,behaviour,seconds; behaviours pv, buy, cart, fav."""
    table = _csv(path, ("user", "item", "category", "behaviour", "timestamp"))
    action = table["behaviour"].dictionary_encode().combine_chunks()
    names = action.dictionary.to_pylist()
    if unknown := set(names) - set(_TAOBAO_ACTIONS):
        raise ValueError(f"behaviour must be one of {', '.join(_TAOBAO_ACTIONS)}, got {min(unknown)!r}")
    codes = np.array([_TAOBAO_ACTIONS.index(name) for name in names], np.uint8)
    return _log(table, codes[action.indices.to_numpy()], len(_TAOBAO_ACTIONS))


def _amazon(path: Path) -> Log:
    """Reviews as JSON lines: the releases of 2014 and 2018 (seconds) and that of 2023 (milliseconds)."""
    import pyarrow as pa  # noqa: PLC0415 - checked by `read_log`
    from pyarrow import json  # noqa: PLC0415

    old = {"reviewerID": pa.string(), "asin": pa.string(), "overall": pa.float64(), "unixReviewTime": pa.int64()}
    new = {"user_id": pa.string(), "parent_asin": pa.string(), "rating": pa.float64(), "timestamp": pa.int64()}
    schema = pa.schema({**old, **new})
    options = json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    table = json.read_json(path, parse_options=options, read_options=json.ReadOptions(block_size=1 << 24))
    fields = tuple(old if table["reviewerID"].null_count < table.num_rows else new)
    table = table.select(fields).rename_columns(["user", "item", "rating", "timestamp"])
    _refuse_nulls(table, fields)
    rating = table["rating"].to_numpy()
    return _log(table, _stars(rating, 5), 5, ticks_per_s=1 if fields == tuple(old) else 1_000)


def _movielens(path: Path) -> Log:
    """ratings.csv with a header, ratings.dat with `::`, or u.data with tabs; half stars are supported."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        first = file.readline()
    columns = ("user", "item", "rating", "timestamp")
    if b"::" in first:
        table = _double_colons(path)
    elif b"\t" in first:
        table = _csv(path, columns, delimiter="\t")
    else:
        table = _csv(path, columns, has_header=True)
    rating = table["rating"].cast("float64").to_numpy()
    return _log(table, _stars(rating * 2, 10), 10)


def _movietweetings(path: Path) -> Log:
    """ratings.dat: user::movie::rating::seconds, ratings from 0 to 10."""
    table = _double_colons(path)
    rating = table["rating"].cast("float64").to_numpy()
    return _log(table, _stars(rating + 1, 11), 11)


def _kuairand(path: Path) -> Log:
    """log_*.csv with a header and milliseconds; the action is the strongest of click, long view and like."""
    table = _csv(path, None, has_header=True)
    if missing := {"user_id", "video_id", "time_ms", *_KUAIRAND_SIGNALS} - set(table.column_names):
        raise ValueError(f"column {min(missing)!r} is missing")
    action = np.zeros(table.num_rows, np.uint8)
    for strength, signal in enumerate(_KUAIRAND_SIGNALS, start=1):
        action[table[signal].cast("int64").to_numpy() > 0] = strength
    table = table.select(["user_id", "video_id", "time_ms"]).rename_columns(["user", "item", "timestamp"])
    return _log(table, action, 1 + len(_KUAIRAND_SIGNALS), ticks_per_s=1_000)


READERS: dict[str, Callable[[Path], Log]] = {
    "taobao": _taobao,
    "amazon": _amazon,
    "movielens": _movielens,
    "movietweetings": _movietweetings,
    "kuairand": _kuairand,
}


def _log(table: Any, action: NDArray[np.uint8], num_actions: int, ticks_per_s: int = 1) -> Log:
    _refuse_nulls(table, table.column_names)
    return Log(
        user=_numbered(table["user"]),
        item=_numbered(table["item"]),
        action=action,
        timestamp_s=table["timestamp"].cast("int64").to_numpy() // ticks_per_s,
        num_actions=num_actions,
    )


def _numbered(column: Any) -> IntArray:
    """Ids numbered by first use."""
    return column.dictionary_encode().combine_chunks().indices.to_numpy().astype(np.int64)


def _stars(rating: NDArray[np.float64], most: int) -> NDArray[np.uint8]:
    """Ratings from 1 to `most` as actions from 0 on."""
    if wrong := rating[~((rating >= 1) & (rating <= most))].tolist():
        raise ValueError(f"ratings run from 1 to {most} (in steps as stored), got {wrong[0]}")
    return (rating - 1).astype(np.uint8)


def _refuse_nulls(table: Any, names: Sequence[str]) -> None:
    for name, column in zip(names, table.columns, strict=True):
        if column.null_count:
            raise ValueError(f"{name} is missing in {column.null_count} lines")


def _double_colons(path: Path) -> Any:
    """`a::b` split at every colon has an empty column between any two."""
    names = ("user", "_1", "item", "_2", "rating", "_3", "timestamp")
    return _csv(path, names, delimiter=":").select(["user", "item", "rating", "timestamp"])


def _csv(path: Path, names: Sequence[str] | None, delimiter: str = ",", *, has_header: bool = False) -> Any:
    import pyarrow as pa  # noqa: PLC0415 - checked by `read_log`
    from pyarrow import csv  # noqa: PLC0415

    read = csv.ReadOptions(column_names=names, skip_rows=1 if has_header and names is not None else 0)
    return csv.read_csv(
        path,
        read_options=read,
        parse_options=csv.ParseOptions(delimiter=delimiter, quote_char=False),
        convert_options=csv.ConvertOptions(column_types={"timestamp": pa.int64(), "behaviour": pa.string()}),
    )
