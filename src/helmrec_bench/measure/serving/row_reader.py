"""CPU time of the thread that follows a stream of rows, by part and row: read, checksum, decode, check, convert, copy.

    helmrec bench run row-reader                     # half a minute

Rows are those of the dlrmv3 shape, 1 KiB of float16, from a folder in memory. Times are CPU time of the thread, the
least of several tries. `blake2b` is what a cryptographic checksum would take.
"""

import hashlib
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from helmrec.deltas.checks import check_delta
from helmrec.deltas.checksum import xxh64
from helmrec.deltas.delta import Delta, TablePart, decode, encode
from helmrec.deltas.folder import DeltaFolder
from helmrec.engine.row_values import new_values, pinned_block
from helmrec.memory.row_master import RowMaster
from helmrec.model.config import ITEM
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.measure.cards.traffic import serving_config
from helmrec_bench.measure.training import IN_MEMORY, distinct_items

TABLE_BYTES = 400 << 20
SIZES = (500, 10_000)  # rows of a delta
TRIES = 12


def cpu_s(work: Callable[[], object]) -> float:
    """Least CPU time of this thread."""
    found = []
    for _ in range(TRIES):
        started_s = time.thread_time()
        work()
        found.append(time.thread_time() - started_s)
    return min(found)


def measure(folder: Path, num_rows: int, dtype: type[np.floating]) -> dict[str, Any]:
    """Nanoseconds a row of each part, for a delta of so many rows."""
    config, rng = serving_config(6, TABLE_BYTES), np.random.default_rng(0)
    tables = {table.name: torch.zeros((table.num_rows, config.row_dim), dtype=torch.float16) for table in config.tables}
    master, ids = RowMaster(tables), distinct_items(rng, num_rows, config.features[0].num_rows)
    values = rng.standard_normal((num_rows, config.row_dim)).astype(dtype)
    delta = Delta("s", 1, 0, time.time(), (TablePart(ITEM, ids, values),))
    place, data = DeltaFolder(folder, is_made=True), bytearray(encode(delta))
    place.write(delta)
    update = check_delta(config, decode(data, "a delta"))
    parts: dict[str, Callable[[], object]] = {
        "read_and_decode": lambda: next(place.read(0)),
        "decode": lambda: decode(data, "a delta"),
        "checksum": lambda: xxh64(data),
        "check": lambda: check_delta(config, delta),
        "convert_and_copy": lambda: pinned_block(update.rows, new_values(master, update)),
        "blake2b": lambda: hashlib.blake2b(data, digest_size=16).digest(),
    }
    times_s = {name: cpu_s(work) for name, work in parts.items()}
    whole_s = times_s["read_and_decode"] + times_s["check"] + times_s["convert_and_copy"]
    return {
        "rows": num_rows,
        "values": np.dtype(dtype).name,
        "whole_ns_a_row": round(1e9 * whole_s / num_rows),
        "parts_ns_a_row": {name: round(1e9 * each / num_rows) for name, each in times_s.items()},
    }


def main(flags: Namespace) -> None:
    found = []
    for num_rows in SIZES:
        for dtype in (np.float16, np.float32):
            with tempfile.TemporaryDirectory(dir=IN_MEMORY if IN_MEMORY.is_dir() else None) as name:
                found.append(measure(Path(name), num_rows, dtype))
            print(found[-1], flush=True)
    write_measurement(flags.out, {"row_bytes": 1_024, "deltas": found})
