"""A stream of row deltas for measurements: a trainer in a process of its own, and what an engine makes of it.

    python -m helmrec_bench.measure.training PLACE --rows 1000000 --row-dim 512 --rows-per-s 200000 --delta-rows 10000

The trainer pushes new rows of popular items, as requests draw them, until it is ended. Rows are float16.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from helmrec.deltas.checks import compile_checks
from helmrec.deltas.consumer import ConsumerLimits, RowConsumer
from helmrec.deltas.delta import Delta
from helmrec.deltas.producer import DeltaProducer
from helmrec.deltas.source import DeltaSink, open_source
from helmrec.engine.engine import Engine
from helmrec.engine.row_stream import RowStreamStats
from helmrec.model.config import ITEM, ModelConfig
from helmrec.types import IntArray, UserId
from helmrec_bench.measure.requests import popular_items

IN_MEMORY = Path("/dev/shm")
_KEPT_S, _KEPT_BYTES = 60.0, 2 << 30  # deltas of this time stay, but not more than so many bytes
_SPARE_BYTES = 1 << 30


_TRAINER_CORES = 2


def leave_cores_to_trainer() -> None:
    """Keep this process off the cores that a trainer will have: in production it is another machine's.

    To be called before threads start. Where there are few cores, all share them.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= 4 * _TRAINER_CORES:
        os.sched_setaffinity(0, cores[:-_TRAINER_CORES])


def _take_other_cores(pid: int) -> None:
    """Keep a trainer to the cores that were left to it."""
    if others := set(range(os.cpu_count() or 1)) - os.sched_getaffinity(0):
        os.sched_setaffinity(pid, others)


@dataclass(frozen=True, slots=True)
class UpdateRate:
    """How fast rows change."""

    rows_per_s: float
    delta_rows: int

    def num_kept(self, row_dim: int) -> int:
        """Deltas that stay, for a server that lags."""
        most = _KEPT_BYTES // (self.delta_rows * 2 * row_dim)
        return max(2, min(most, round(_KEPT_S * self.rows_per_s / self.delta_rows)))


class NotedSource:
    """A source that remembers when each delta was made."""

    def __init__(self, source: DeltaSink) -> None:
        self._source, self.name = source, source.name
        self.made_s: dict[int, float] = {}

    def read(self, after: int) -> Iterator[Delta]:
        for delta in self._source.read(after):
            self.made_s[delta.sequence] = delta.made_s
            yield delta

    def newest(self) -> int:
        return self._source.newest()

    def close(self) -> None:
        self._source.close()


class Follower:
    """Applies a stream between steps, as a server does, and notes how old each delta is when it becomes visible."""

    def __init__(self, place: str, engine: Engine) -> None:
        self._source, self._engine = NotedSource(open_source(place)), engine
        self._consumer = RowConsumer(self._source, engine, limits=ConsumerLimits())
        self._seen, self._started_s = 0, time.monotonic()
        self.lags_s: list[float] = []
        self._apply_s = 0.0  # of the thread that steps the engine
        self._consumer.start()

    def catch_up(self) -> None:
        """Apply what there is, as a server does before it is ready. Lags count from then on."""
        self._consumer.catch_up()
        self._seen = self._engine.row_position.sequence

    def tick(self, now: float) -> None:
        started_s = time.perf_counter()
        self._consumer.apply(now)
        self._apply_s += time.perf_counter() - started_s
        at = self._engine.row_position.sequence
        if at > self._seen:
            wall_s = time.time()
            self.lags_s += [wall_s - self._source.made_s[each] for each in range(self._seen + 1, at + 1)]
            self._seen = at

    def record(self, user_id: UserId, latency_ms: float | None) -> None:
        """Nothing depends on latencies."""

    def stats(self) -> RowStreamStats:
        return self._consumer.stats()

    def describe(self) -> dict[str, Any]:
        """What was applied, how late, and the CPU time of the thread that reads and checks."""
        stats, took_s = self.stats(), time.monotonic() - self._started_s
        assert stats.stop is None, stats
        cpu_s = self._consumer.reader_cpu_s()
        p50, p99, most = np.percentile(self.lags_s, (50, 99, 100)).round(4).tolist() if self.lags_s else (None,) * 3
        return {
            "rows_per_s": round(stats.rows / took_s),
            "deltas": stats.deltas,
            "lag_p50_s": p50,
            "lag_p99_s": p99,
            "lag_most_s": most,
            "apply_share": round(self._apply_s / took_s, 4),
            "reader_cpu_share": round(cpu_s / took_s, 4),
            "reader_ns_a_row": round(1e9 * cpu_s / max(1, stats.rows)),
        }

    def close(self) -> None:
        self._consumer.close()


@contextmanager
def training(model: ModelConfig, rate: UpdateRate, engine: Engine) -> Iterator[Follower]:
    """A trainer that pushes at this rate, and a follower of it, from its first delta on."""
    compile_checks()  # as a server does before it is ready, else the first deltas wait for it
    with (
        tempfile.TemporaryDirectory(dir=_place_for(model, rate)) as folder,
        pushing(folder, model, rate, rate.num_kept(model.row_dim)),
    ):
        follower = Follower(folder, engine)
        try:
            yield follower
        finally:
            follower.close()


@contextmanager
def pushing(folder: str, model: ModelConfig, rate: UpdateRate, num_kept: int) -> Iterator[None]:
    """A trainer that pushes to a folder, which has its first delta when this begins."""
    sizes = {"rows": model.features[0].num_rows, "row-dim": model.row_dim, "rows-per-s": rate.rows_per_s}
    flags = [f"--{name}={value}" for name, value in (sizes | {"delta-rows": rate.delta_rows}).items()]
    trainer = subprocess.Popen([sys.executable, "-m", __name__, folder, *flags, f"--keep={num_kept}"])
    _take_other_cores(trainer.pid)
    try:
        source = open_source(folder)
        while not source.newest():
            assert trainer.poll() is None, "the trainer has ended"
            time.sleep(0.01)
        yield
        assert trainer.poll() is None, "the trainer has ended"
    finally:
        trainer.terminate()
        trainer.wait(10)


def _place_for(model: ModelConfig, rate: UpdateRate) -> Path | None:
    """Memory, if it has room: what is measured is the server, not a disk. None: where temporary files are."""
    needed = rate.num_kept(model.row_dim) * rate.delta_rows * 2 * model.row_dim + _SPARE_BYTES
    return IN_MEMORY if IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free > needed else None


def distinct_items(rng: np.random.Generator, num: int, num_items: int) -> IntArray:
    """So many different items, popular ones more often than others."""
    found = np.zeros(0, np.int64)
    while found.size < num:
        found = np.unique(np.concatenate([found, popular_items(rng, num, num_items)]))
    return rng.permutation(found)[:num]


def push_until_ended() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place")
    parser.add_argument("--rows", type=int, required=True, help="of the item table")
    parser.add_argument("--row-dim", type=int, required=True)
    parser.add_argument("--rows-per-s", type=float, required=True)
    parser.add_argument("--delta-rows", type=int, required=True)
    parser.add_argument("--keep", type=int, help="newest deltas that stay")
    flags = parser.parse_args()
    rng = np.random.default_rng(0)
    values = [(rng.standard_normal((flags.delta_rows, flags.row_dim)) / 8).astype(np.float16) for _ in range(4)]
    with DeltaProducer(flags.place, flags.keep) as producer:
        started_s = time.monotonic()
        while True:
            at = producer.newest
            producer.push(ITEM, distinct_items(rng, flags.delta_rows, flags.rows), values[at % 4], step=at)
            due_s = started_s + producer.newest * flags.delta_rows / flags.rows_per_s
            time.sleep(max(0.0, due_s - time.monotonic()))


if __name__ == "__main__":
    push_until_ended()
