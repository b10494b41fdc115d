"""How fast traces are made, stored and read as rows, and what keeping a few lanes does to hit ratios.

Writes docs/measurements/traces-cpu.json.
"""

import tempfile
import time
from argparse import Namespace
from itertools import islice
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from helmrec.model.profiles import profile
from helmrec.traffic.describe import describe
from helmrec.traffic.families import Shape, family, preset
from helmrec.traffic.generate import generate
from helmrec.traffic.requests import rank_requests
from helmrec.traffic.rows import RowReads, candidate_rows, history_rows, row_reads, row_space
from helmrec.traffic.trace import Trace, index_histories
from helmrec.traffic.trace_file import read_trace, write_trace
from helmrec_bench.lab.provenance import write_measurement

IntArray = NDArray[np.int64]


def main(flags: Namespace) -> None:
    generate(family("steady", Shape(duration_s=5)), 0)  # compile
    started = time.perf_counter()
    million = generate(family("diurnal", Shape(duration_s=4 * 3_600)), 0)
    results: dict[str, Any] = {
        "generate": {"requests": million.num_requests, "seconds": round(time.perf_counter() - started, 2)},
        "file": _file(million),
        "row_reads": [_row_speed(name, lanes) for name in ("dlrmv3", "wide") for lanes in (1, 5)],
        "engine_requests_per_s": {name: _request_speed(name) for name in ("dlrmv3", "wide")},
        "lanes_against_all_rows": _lane_error(),
        "meta_2021_preset": _meta(),
    }
    write_measurement(flags.out, results)


def _file(trace: Trace) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.parquet"
        start = time.perf_counter()
        write_trace(trace, path)
        middle = time.perf_counter()
        read_trace(path)
        end = time.perf_counter()
        return {
            "bytes_per_request": round(path.stat().st_size / trace.num_requests, 1),
            "write_s": round(middle - start, 2),
            "read_s": round(end - middle, 2),
        }


def _row_speed(name: str, num_lanes: int) -> dict[str, Any]:
    """All requests read everything: no KV hit is assumed."""
    trace = generate(family("steady", Shape(duration_s=400)), 0)
    reads = row_reads(trace, row_space(trace, profile(name, 1_000_000), num_lanes / 256))
    out = np.empty(reads.max_rows, np.int64)
    _read_all(reads, 10, out)
    best, rows = np.inf, 0
    for _ in range(3):
        start = time.perf_counter()
        rows = _read_all(reads, trace.num_requests, out)
        best = min(best, time.perf_counter() - start)
    return {
        "profile": name,
        "rate": num_lanes / 256,
        "requests_per_s": round(trace.num_requests / best),
        "rows_per_s": round(rows / best),
        "rows_per_request": round(rows / trace.num_requests, 1),
    }


@numba.njit(cache=True)
def _read_all(reads: RowReads, num_requests: int, out: IntArray) -> int:
    rows = 0
    for r in range(num_requests):
        rows += history_rows(reads, r, 0, out)
        rows += candidate_rows(reads, r, out)
    return rows


def _request_speed(name: str) -> int:
    trace, model, count = generate(family("steady", Shape(duration_s=60)), 0), profile(name, 1_000_000), 2_000
    next(rank_requests(trace, model))
    start = time.perf_counter()
    for _ in islice(rank_requests(trace, model), count):
        pass
    return round(count / (time.perf_counter() - start))


def _lane_error() -> list[dict[str, Any]]:
    """LRU over the rows of all requests, histories read at first visits only, then new events and candidates."""
    shape = Shape(duration_s=120, num_items=1 << 22)
    trace, model = generate(family("steady", shape), 0), profile("kuairand", 1 << 22)
    results: list[dict[str, Any]] = []
    for kept in (256, 1, 2, 5):
        reads = row_reads(trace, row_space(trace, model, kept / 256))
        first = np.where(index_histories(trace).visit == 0, 0, reads.length - trace.num_new)
        sizes = [round(share * reads.space.num_kept_rows) for share in (0.01, 0.03, 0.1, 0.3)]
        start = time.perf_counter()
        ratios = [round(_lru_hits(reads, first, size), 4) for size in sizes]
        results.append({"rate": kept / 256, "seconds": round(time.perf_counter() - start, 2), "hit_ratios": ratios})
    for result in results[1:]:
        result["largest_error"] = max(
            round(abs(a - b), 4) for a, b in zip(result["hit_ratios"], results[0]["hit_ratios"], strict=True)
        )
    return results


@numba.njit(cache=True)
def _lru_hits(reads: RowReads, first: IntArray, size: int) -> float:
    """Hit ratio of an LRU of `size` rows: a list through dense row numbers, the head being the number of rows."""
    end = reads.space.first_kept[-1]
    after, before = np.full(end + 1, -1, np.int64), np.full(end + 1, -1, np.int64)
    after[end] = before[end] = end
    out = np.empty(1 << 16, np.int64)
    hits = total = held = 0
    for r in range(first.size):
        for part in range(2):
            count = candidate_rows(reads, r, out) if part else history_rows(reads, r, first[r], out)
            for row in out[:count]:
                total += 1
                if after[row] >= 0:
                    hits += 1
                    after[before[row]], before[after[row]] = after[row], before[row]
                elif held < size:
                    held += 1
                else:
                    last = before[end]
                    after[before[last]], before[end] = end, before[last]
                    after[last] = -1
                top = after[end]
                after[end], before[row], after[row], before[top] = row, end, top, row
    return hits / total


def _meta() -> dict[str, float]:
    found = describe(generate(family("steady", preset("meta-2021")), 0)).full
    return {name: round(getattr(found, name), 4) for name in ("mean", "once_rows", "once_reads", "hot_reads")}
