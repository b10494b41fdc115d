"""Tables larger than host memory: requests/s and P99 with rows on disk, against all rows in host memory.

    helmrec bench run disk-rows --folder /data/disk-rows      # on a card: 40 GiB of tables, 4, 8 and 16 GiB of memory
    helmrec bench run disk-rows --quick                       # small tables on the CPU

Each case runs in a process of its own, which also shows its start and its peak memory. Bytes from disk are those that
the system counts for the process (`read_bytes` of /proc/self/io), so that the page cache cannot hide in them. Beside
each case the disk's own rate of random reads of 4 KiB is measured, with as many threads. Rows are compared with what
was written. Cases that the output file has are not run again; no case is started that `--limit-s` leaves no time for.
"""

import json
import multiprocessing
import os
import tempfile
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

from helmrec.config import EngineConfig
from helmrec.engine.engine import Engine
from helmrec.engine.intake import Prepared
from helmrec.engine.probe import EngineProbe
from helmrec.engine.warm_up import make_request, warm_up
from helmrec.memory.disk_reads import BLOCK, FileReader, Runs
from helmrec.model.config import ModelConfig, TableConfig
from helmrec.model.folder import VERIFY_BYTES, checksum, find_rows
from helmrec.model.profiles import profile
from helmrec.model.weights import load_model, random_dense, stream_model
from helmrec.types import IntArray, RankResult
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.measure.cards.traffic import card_crowd, hit_rates, serving_config
from helmrec_bench.measure.requests import SPREAD, Crowd, Visitors, in_threads

GIB = 1 << 30
STAMPED = 4  # values at the start of a row that say which row it is
DIGIT = 1_000
LEFT_FOR_A_CASE_S = 100.0
COMPARED = 20_000  # rows
PROBE_S = {"cuda": 4.0, "cpu": 0.5}


class DiskPlan(NamedTuple):
    """What is measured; a card takes the large one."""

    device: str
    table_bytes: int
    memory_bytes: tuple[int, ...]
    pool_bytes: str
    num_warm: int  # requests before those that are counted
    num_counted: int
    hot_share: float
    load_share: float  # of the rate with all rows in memory, at which P99 is measured


CARD = DiskPlan("cuda", 40 * GIB, (16 * GIB, 8 * GIB, 4 * GIB), "6GiB", 1_500, 1_500, 0.85, 0.6)
QUICK = DiskPlan("cpu", 16 << 20, (6 << 20, 3 << 20, 3 << 19), "4MiB", 60, 60, 0.85, 0.4)


class DiskCase(NamedTuple):
    """One engine and one kind of traffic."""

    memory_bytes: int | None  # None: all rows are in memory
    traffic: str  # zipf or drift
    keeps_pages: bool = False  # of the model's files, once they are copied: as before

    @property
    def name(self) -> str:
        memory = "all" if self.memory_bytes is None else f"{self.memory_bytes / GIB:.4g} GiB"
        return f"{self.traffic}, {memory} in memory" + (", pages of the files kept" if self.keeps_pages else "")


def cases(plan: DiskPlan) -> list[DiskCase]:
    every = [DiskCase(memory, traffic) for traffic in ("zipf", "drift") for memory in (None, *plan.memory_bytes)]
    return [*every, DiskCase(None, "zipf", keeps_pages=True)]


def model_config(plan: DiskPlan) -> ModelConfig:
    if plan.device == "cuda":
        return serving_config(24, plan.table_bytes)
    base = profile("demo")
    item = TableConfig(name=base.features[0].name, num_rows=plan.table_bytes // base.row_stride)
    return ModelConfig(**base.model_dump() | {"features": (item, *base.features[1:])})


def stamps(first: int, num: int) -> NDArray[np.float32]:  # (num, STAMPED)
    """Digits of the rows from `first` of a table, scaled to the size of other values; exact in every dtype of rows."""
    digits = np.arange(first, first + num)[:, None] // DIGIT ** np.arange(STAMPED) % DIGIT
    return (digits / 512).astype(np.float32)


def table_parts(config: ModelConfig, table: TableConfig) -> Iterator[bytes]:
    """The rows of a table: equal but for their stamps."""
    dtype = getattr(torch, config.row_dtype)
    row = torch.randn(config.row_dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    part_rows = max(1, (32 << 20) // config.row_bytes)
    part = row.repeat(part_rows, 1)
    for first in range(0, table.num_rows, part_rows):
        num = min(part_rows, table.num_rows - first)
        part[:num, :STAMPED] = torch.from_numpy(stamps(first, num)).to(dtype)
        yield part[:num].view(torch.uint8).numpy().tobytes()


def write_model(folder: Path, plan: DiskPlan) -> None:
    """Write the model, unless it is there, and let its pages leave memory.

    A table over 256 MiB gets no checksum, which would take a minute: engines here do not verify it.
    """
    config = model_config(plan)
    if not (folder / "config.json").exists():
        dense = random_dense(config, torch.Generator().manual_seed(0))
        with (
            patch("helmrec.model.weights.checksum", _checksum_of_small),
            patch("helmrec.model.weights.first_non_finite", lambda values: None),
        ):
            stream_model(folder, config, dense, {table.name: table_parts(config, table) for table in config.tables})
    for path in folder.rglob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _checksum_of_small(path: Path, progress: Any) -> str:
    return checksum(path, progress) if path.stat().st_size <= VERIFY_BYTES else "not computed"


class DriftingVisitors(Visitors):
    """Visitors whose popular items change: each draw moves the order of popularity on by some items."""

    step = 0
    _moved = 0

    def _draw(self, num: int) -> IntArray:
        num_items = self.model.features[0].num_rows
        ranks = np.exp(self._rng.random(num) * np.log(num_items)).astype(np.int64) - 1
        self._moved += self.step
        return (ranks + self._moved) * SPREAD % num_items


def visitors(plan: DiskPlan, config: ModelConfig, traffic: str) -> DriftingVisitors:
    crowd = card_crowd(400) if plan.device == "cuda" else Crowd.around(40, 200, 64)
    made = DriftingVisitors(config, crowd)
    made.step = max(1, config.features[0].num_rows // 200_000) if traffic == "drift" else 0
    return made


def read_bytes() -> int:
    """Bytes that this process has read from storage."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))


def peak_bytes() -> int:
    """Most memory that this process has had; `ru_maxrss` would begin with that of its parent."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1_024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def disk_reads_per_s(path: Path, num_threads: int, seconds: float) -> float:
    """Random reads of 4 KiB past the page cache."""
    reader, num_blocks = FileReader("direct"), path.stat().st_size // BLOCK
    reader.add(path)
    end_s, counts = time.perf_counter() + seconds, [0] * num_threads

    def read(number: int) -> None:
        rng, num = np.random.default_rng(number), 64
        memory = torch.empty(num * BLOCK + BLOCK, dtype=torch.uint8).numpy()
        memory = memory[-memory.ctypes.data % BLOCK :]
        starts, lengths = np.arange(num) * BLOCK, np.full(num, BLOCK)
        while time.perf_counter() < end_s:
            offsets = rng.integers(0, num_blocks, num) * BLOCK
            reader.read(Runs(np.zeros(num, np.int64), offsets, lengths, lengths, starts), memory)
            counts[number] += num

    began_s = time.perf_counter()
    threads = [threading.Thread(target=read, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reader.close()
    return sum(counts) / (time.perf_counter() - began_s)


class DiskStand:
    """An engine and its traffic."""

    def __init__(self, engine: Engine, plan: DiskPlan, traffic: str) -> None:
        self.probe, self.plan = EngineProbe(engine), plan
        self.visitors = visitors(plan, engine.model_config, traffic)

    def take(self, num: int) -> list[Prepared]:
        parts = [self.visitors.next_parts(self.plan.hot_share) for _ in range(num)]
        model = self.probe.engine.model_config
        return in_threads(lambda *each: self.probe.prepare(make_request(model, *each)), parts)

    def serve(self, requests: list[Prepared], rate: float | None) -> tuple[float, list[float]]:
        """Serve requests, all at once or at a rate; return the seconds and the latency of each in milliseconds."""
        engine, futures = self.probe.engine, list[Future[RankResult]]()
        due_s = np.zeros(len(requests)) if rate is None else np.arange(len(requests)) / rate
        ended_s, began_s = np.zeros(len(requests)), time.perf_counter()
        while len(futures) < len(requests) or not all(future.done() for future in futures[-64:]):
            while len(futures) < len(requests) and due_s[len(futures)] <= time.perf_counter() - began_s:
                futures.append(self.probe.submit(requests[len(futures)]))
                futures[-1].add_done_callback(partial(_note_end, ended_s, len(futures) - 1))
            if not engine.step():
                time.sleep(0.0002)
        while not all(future.done() for future in futures):
            engine.step()
        for future in futures:
            future.result(timeout=0)
        return float(ended_s.max() - began_s), ((ended_s - began_s - due_s) * 1e3).tolist()


def _note_end(ended_s: NDArray[np.float64], number: int, _: "Future[RankResult]") -> None:
    ended_s[number] = time.perf_counter()


def compare_rows(engine: Engine, seed: int = 0) -> int:
    """Compare rows that the engine reads, from memory or disk, with what was written; return how many are wrong."""
    config, master, wrong = engine.model_config, EngineProbe(engine).host_rows, 0
    rng = np.random.default_rng(seed)
    dtype = getattr(torch, config.row_dtype)
    for table in config.tables:
        ids = rng.integers(0, table.num_rows, max(1, COMPARED // len(config.tables)))
        found = master.gather(ids + config.offsets[table.name])[:, :STAMPED]
        expected = torch.from_numpy(np.concatenate([stamps(int(each), 1) for each in ids])).to(dtype)
        wrong += int((found != expected).any(1).sum())
    return wrong


def run_case(folder: Path, plan: DiskPlan, case: DiskCase, rate: float | None) -> dict[str, Any]:
    """Measure one case; rate: at which P99 is measured, by default a share of this case's own."""
    keep = patch("helmrec.memory.row_master.page_out", lambda mapped: None)
    began_s, before = time.perf_counter(), read_bytes()
    with keep if case.keeps_pages else nullcontext():
        batches = {"max_batch_requests": 8, "max_batch_tokens": 70_016} if plan.device == "cuda" else {}
        settings: dict[str, Any] = {
            "device": plan.device,
            "pool_bytes": plan.pool_bytes,
            "alpha": 0.5,
            "verify": "never",
        }
        limit = {"queue_limit": 1 << 20, "host_rows_bytes": case.memory_bytes}
        engine = Engine(load_model(folder), EngineConfig(**settings | batches | limit))
    start = {"ready_s": time.perf_counter() - began_s, "peak_bytes": peak_bytes(), "read_bytes": read_bytes() - before}
    found: dict[str, Any] = {"start": start}
    with engine:
        if not case.keeps_pages:
            warm_up(engine)
            found |= _served(engine, plan, case, rate)
        found["wrong_rows"] = compare_rows(engine)
        threads = engine.config.disk_threads
    item = find_rows(folder, engine.model_config.features[0], engine.model_config)
    return found | {"disk_reads_per_s": disk_reads_per_s(item.path, threads, PROBE_S[plan.device])}


def _served(engine: Engine, plan: DiskPlan, case: DiskCase, rate: float | None) -> dict[str, Any]:
    stand = DiskStand(engine, plan, case.traffic)
    stand.serve(stand.take(plan.num_warm), None)
    requests, before = stand.take(plan.num_counted), engine.stats()
    read_before = read_bytes()
    seconds, _ = stand.serve(requests, None)
    after, per_s = engine.stats(), plan.num_counted / seconds
    found: dict[str, Any] = {
        "requests_per_s": per_s,
        "read_bytes": read_bytes() - read_before,
        **hit_rates(before.pool, after.pool),
        "host_ms_a_step": 1e3 * seconds / max(1, after.steps - before.steps),
    }
    if before.row_tier is not None and after.row_tier is not None:
        misses = after.row_tier.memory_misses - before.row_tier.memory_misses
        hits = after.row_tier.memory_hits - before.row_tier.memory_hits
        found |= {
            "memory_hit_rate": hits / max(1, hits + misses),
            "rows_from_disk_per_request": misses / plan.num_counted,
        }
        found["rows_from_disk_per_s"] = misses / seconds
    asked = plan.load_share * per_s if rate is None else rate
    _, latency_ms = stand.serve(stand.take(plan.num_counted // 2), asked)
    found |= {
        "asked_per_s": asked,
        **dict(zip(("p50_ms", "p99_ms"), np.percentile(latency_ms, (50, 99)).tolist(), strict=True)),
    }
    return found


def judged(found: dict[str, Any]) -> dict[str, Any]:
    """Each case against all rows in memory, and against what the disk allows."""
    shares: dict[str, Any] = {}
    for name, each in found.items():
        whole = found.get(f"{name.split(',')[0]}, all in memory")
        if whole is None or "rows_from_disk_per_request" not in each:
            continue
        possible = min(
            whole["requests_per_s"], each["disk_reads_per_s"] / max(1e-9, each["rows_from_disk_per_request"])
        )
        shares[name] = {
            "share_of_all_in_memory": each["requests_per_s"] / whole["requests_per_s"],
            "share_of_what_the_disk_allows": each["requests_per_s"] / possible,
            "p99_over_all_in_memory": each["p99_ms"] / whole["p99_ms"],
        }
    return shares


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="small tables on the CPU")
    parser.add_argument("--folder", type=Path, help="of the model; it is written if it is not there, and stays")
    parser.add_argument("--limit-s", type=float, default=570.0, help="time after which no case is started")


def default_out(flags: Namespace) -> str:
    return "disk-rows-cpu.json" if flags.quick else "disk-rows-h200.json"


def main(flags: Namespace) -> None:
    began_s, plan = time.monotonic(), QUICK if flags.quick else CARD
    needed_s = LEFT_FOR_A_CASE_S if plan is CARD else 10.0
    with tempfile.TemporaryDirectory() as name:
        folder = flags.folder or Path(name) / "model"
        write_model(folder, plan)
        print(f"model after {time.monotonic() - began_s:.0f} s", flush=True)
        found: dict[str, Any] = json.loads(flags.out.read_text())["cases"] if flags.out.exists() else {}
        for case in cases(plan):
            if case.name in found:
                continue
            if time.monotonic() - began_s + needed_s > flags.limit_s:
                print("the time is over; run it again to go on", flush=True)
                break
            whole = found.get(f"{case.traffic}, all in memory", {})
            rate = plan.load_share * whole["requests_per_s"] if "requests_per_s" in whole else None
            fresh = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, mp_context=fresh) as process:
                found[case.name] = process.submit(run_case, folder, plan, case, rate).result()
            print(case.name, found[case.name], flush=True)
            write_measurement(flags.out, {"plan": plan._asdict(), "cases": found, "judged": judged(found)})
