"""Tables larger than host memory: requests/s and P99 with rows on disk, against all rows in host memory.

    helmrec bench run disk-rows --folder /data/large-model    # on a card: 40 GiB of tables, 4, 8 and 16 GiB of memory
    helmrec bench run disk-rows --quick                       # small tables on the CPU

Each size of memory has a process of its own, which also shows its start and its peak memory, then the first requests
with nothing in memory, then both kinds of traffic with the most popular rows in memory, as after a restart with a
snapshot. Bytes from disk are those that the system counts for the process (`read_bytes` of /proc/self/io), so that the
page cache cannot hide in them. Beside each case the disk's own rate of random reads of 4 KiB is measured, with as many
threads. Rows are compared with what was written. While the model is written, another process compiles the kernels.

Cases that the output file has are not run again; no case is started that `--limit-s` leaves no time for.
"""

import json
import multiprocessing
import tempfile
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
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
from helmrec.engine.dense import Progress
from helmrec.engine.engine import Engine
from helmrec.engine.intake import Prepared
from helmrec.engine.probe import EngineProbe
from helmrec.engine.warm_up import make_request, warm_up
from helmrec.memory.disk_reads import BLOCK, FileReader, Runs
from helmrec.memory.row_master import RowMaster
from helmrec.model.config import ModelConfig
from helmrec.model.folder import find_rows
from helmrec.model.weights import load_model
from helmrec.types import IntArray, RankResult
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.measure.cards.traffic import card_crowd, hit_rates
from helmrec_bench.measure.large_model import GIB, STAMPED, large_config, note_since, stamps, write_large_model
from helmrec_bench.measure.requests import SPREAD, Crowd, Visitors, in_threads

TRAFFICS = ("zipf", "drift")
COMPARED = 20_000  # rows
FILLED = 0.75  # of the memory, before requests are counted
SUSTAINED = 0.9  # P99 is measured at a rate of at most this share of what the case serves


class DiskPlan(NamedTuple):
    """What is measured; a card takes the large one."""

    device: str
    table_bytes: int
    memory_bytes: tuple[int, ...]
    pool_bytes: str
    num_hot: int  # users who return
    num_cold: int  # requests with nothing in memory
    most_requests: int  # of each part
    warm_s: float  # of requests before those that are counted
    counted_s: float
    paced_s: float  # of requests at a rate, for P99
    probe_s: float
    case_s: float  # expected, of a case
    alpha: float = 0.25
    hot_share: float = 0.85
    load_share: float = 0.6  # of the rate with all rows in memory, at which P99 is measured


CARD = DiskPlan(
    "cuda", 40 * GIB, (8 * GIB, 4 * GIB, 16 * GIB), "12GiB", 120, 24, 800, 4.0, 5.0, 4.0, probe_s=2.0, case_s=60.0
)
QUICK = DiskPlan(
    "cpu", 16 << 20, (3 << 20, 3 << 19, 6 << 20), "4MiB", 40, 8, 100, 0.5, 0.5, 0.5, probe_s=0.3, case_s=10.0
)


class DiskCase(NamedTuple):
    """One engine; it serves both kinds of traffic."""

    memory_bytes: int | None  # None: all rows are in memory
    is_before: bool = False  # only a start, without graphs: tables are copied from mapped files, whose pages stay

    @property
    def name(self) -> str:
        memory = "all" if self.memory_bytes is None else f"{self.memory_bytes / GIB:.4g} GiB"
        return f"{memory} in memory" + (", pages of the files kept" if self.is_before else "")


ALL = DiskCase(None)


def cases(plan: DiskPlan) -> list[DiskCase]:
    return [ALL, *map(DiskCase, plan.memory_bytes), DiskCase(None, is_before=True)]


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
    crowd = card_crowd(plan.num_hot) if plan.device == "cuda" else Crowd.around(plan.num_hot, 200, 64)
    made = DriftingVisitors(config, crowd, seed=TRAFFICS.index(traffic))
    made.step = max(1, config.features[0].num_rows // 200_000) if traffic == "drift" else 0
    return made


def popular_rows(config: ModelConfig, num: int) -> IntArray:
    """At most `num` rows of the most popular items, table after table."""
    first, *others = config.features
    num_items, found, larger = max(1, num // len(config.features)), np.empty(0, np.int64), np.empty(0, np.int64)
    while larger.size <= num and num_items <= first.num_rows:
        items, found = np.arange(num_items) * SPREAD % first.num_rows, larger
        parts = [np.sort(items) + config.offsets[first.name]]
        for i, table in enumerate(others):
            parts.append(np.unique(items * (2 * i + 3) % table.num_rows) + config.offsets[table.name])
        larger, num_items = np.concatenate(parts), int(1.1 * num_items) + 1
    return larger if larger.size <= num else found


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

    def take_for(self, rate: float, seconds: float) -> list[Prepared]:
        """About as many requests as are served in a time."""
        return self.take(int(min(self.plan.most_requests, max(self.plan.num_cold, rate * seconds))))

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
        wrong += int((found != torch.from_numpy(stamps(ids)).to(dtype)).any(1).sum())
    return wrong


def make_engine(folder: Path, plan: DiskPlan, memory_bytes: int | None, *, has_graphs: bool = True) -> Engine:
    batches = {"max_batch_requests": 8, "max_batch_tokens": 70_016} if plan.device == "cuda" else {}
    settings: dict[str, Any] = {"device": plan.device, "pool_bytes": plan.pool_bytes, "alpha": plan.alpha}
    limits: dict[str, Any] = {"queue_limit": 1 << 20, "host_rows_bytes": memory_bytes, "verify": "never"}
    limits["cuda_graphs"] = has_graphs
    return Engine(load_model(folder), EngineConfig(**settings | batches | limits))


def _copy_mapped(folder: Path, _shape: ModelConfig, _config: EngineConfig, progress: Progress) -> RowMaster:
    """Copy the tables from mapped files, in place of `helmrec.engine.setup.read_master`: as before."""
    return RowMaster.copied(load_model(folder).tables, progress)


def run_case(folder: Path, plan: DiskPlan, case: DiskCase, whole: Mapping[str, float], main_s: float) -> dict[str, Any]:
    """Measure one case. whole: requests/s of each traffic with all rows in memory, if they are known."""
    note = partial(note_since, main_s)
    note(f"{case.name}: its process runs")
    keep = patch("helmrec.engine.setup.read_master", _copy_mapped)
    began_s, before = time.perf_counter(), read_bytes()
    with keep if case.is_before else nullcontext():
        engine = make_engine(folder, plan, case.memory_bytes, has_graphs=not case.is_before)
    start: dict[str, Any] = {"ready_s": time.perf_counter() - began_s, "seconds": dict(engine.start_up.seconds)}
    start |= {"peak_bytes": peak_bytes(), "read_bytes": read_bytes() - before}
    found: dict[str, Any] = {"start": start}
    note(f"{case.name}: started, {start}")
    with engine:
        if not case.is_before:
            warm_up(engine)
            note(f"{case.name}: host code is compiled")
            if case.memory_bytes is not None:
                found |= _filled(engine, plan)
                note(f"{case.name}: filled, {found['cold']}, {found['fill_s']:.1f} s")
            for traffic in TRAFFICS:
                found[traffic] = _served(DiskStand(engine, plan, traffic), whole.get(traffic))
                note(f"{case.name}, {traffic}: {found[traffic]}")
        found["wrong_rows"] = compare_rows(engine)
        threads = engine.config.disk_threads
    item = find_rows(folder, engine.model_config.features[0], engine.model_config)
    found["disk_reads_per_s"] = disk_reads_per_s(item.path, threads, plan.probe_s)
    note(f"{case.name}: {found['wrong_rows']} wrong rows, {found['disk_reads_per_s']:.0f} reads/s of the disk")
    return found


def _filled(engine: Engine, plan: DiskPlan) -> dict[str, Any]:
    """Serve the first requests with nothing in memory, then fill it as a snapshot does."""
    stand = DiskStand(engine, plan, "zipf")
    seconds, latency_ms = stand.serve(stand.take(plan.num_cold), None)
    cold = {"requests": plan.num_cold, "first_ms": min(latency_ms), "requests_per_s": plan.num_cold / seconds}
    began_s, tier = time.perf_counter(), engine.stats().row_tier
    assert tier is not None
    engine.warm(popular_rows(engine.model_config, int(FILLED * tier.capacity_rows)))
    return {"cold": cold, "fill_s": time.perf_counter() - began_s}


def _served(stand: DiskStand, whole: float | None) -> dict[str, Any]:
    """whole: requests/s with all rows in memory."""
    engine, plan = stand.probe.engine, stand.plan
    seconds, _ = stand.serve(stand.take(2 * plan.num_cold), None)
    requests = stand.take_for(2 * plan.num_cold / seconds, plan.warm_s)
    seconds, _ = stand.serve(requests, None)
    requests, before = stand.take_for(len(requests) / seconds, plan.counted_s), engine.stats()
    read_before = read_bytes()
    seconds, _ = stand.serve(requests, None)
    after, per_s = engine.stats(), len(requests) / seconds
    found: dict[str, Any] = {
        "requests": len(requests),
        "requests_per_s": per_s,
        "read_bytes": read_bytes() - read_before,
        **hit_rates(before.pool, after.pool),
        "ms_a_step": 1e3 * seconds / max(1, after.steps - before.steps),
    }
    if before.row_tier is not None and after.row_tier is not None:
        misses = after.row_tier.memory_misses - before.row_tier.memory_misses
        hits = after.row_tier.memory_hits - before.row_tier.memory_hits
        found |= {
            "memory_hit_rate": hits / max(1, hits + misses),
            "filled_share": before.row_tier.resident_rows / before.row_tier.capacity_rows,
            "rows_from_disk_per_request": misses / len(requests),
            "rows_from_disk_per_s": misses / seconds,
        }
    asked = min(plan.load_share * (whole or per_s), SUSTAINED * per_s)
    requests = stand.take_for(asked, plan.paced_s)
    _, latency_ms = stand.serve(requests, asked)
    p50, p99 = np.percentile(latency_ms, (50, 99)).tolist()
    return found | {"asked_per_s": asked, "paced_requests": len(requests), "p50_ms": p50, "p99_ms": p99}


def compile_ahead(folder: Path, plan: DiskPlan, main_s: float) -> None:
    """Compile what cases run, on small tables of the same shape, with and without rows on disk."""
    small = plan._replace(table_bytes=plan.table_bytes // 16, num_cold=8, most_requests=8)
    write_large_model(folder, large_config(small.device, small.table_bytes), lambda _: None)
    for memory_bytes in (small.table_bytes // 2, None):
        with make_engine(folder, small, memory_bytes) as engine:
            warm_up(engine)
            _served(DiskStand(engine, small, "zipf"), None)
        note_since(main_s, "compiled what reads rows " + ("in memory" if memory_bytes is None else "on disk"))


def judged(found: Mapping[str, Any]) -> dict[str, Any]:
    """Each case against all rows in memory, and against what the disk allows."""
    shares: dict[str, Any] = {}
    for name, case in found.items():
        for traffic in TRAFFICS:
            each, whole = case.get(traffic, {}), found.get(ALL.name, {}).get(traffic)
            if whole is None or "rows_from_disk_per_request" not in each:
                continue
            allowed = case["disk_reads_per_s"] / max(1e-9, each["rows_from_disk_per_request"])
            shares[f"{traffic}, {name}"] = {
                "share_of_all_in_memory": each["requests_per_s"] / whole["requests_per_s"],
                "share_of_what_the_disk_allows": each["requests_per_s"] / min(whole["requests_per_s"], allowed),
                "p99_over_all_in_memory": each["p99_ms"] / whole["p99_ms"],
                "asked_over_all_in_memory": each["asked_per_s"] / whole["asked_per_s"],
            }
    return shares


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="small tables on the CPU")
    parser.add_argument("--folder", type=Path, help="of the model; it is written if it is not there, and stays")
    parser.add_argument("--gib", type=float, help="of tables, in place of 40; for a disk that is too slow or too small")
    parser.add_argument("--limit-s", type=float, default=570.0, help="time after which no case is started")


def default_out(flags: Namespace) -> str:
    return "disk-rows-cpu.json" if flags.quick else "disk-rows-h200.json"


def known_cases(out: Path, plan: DiskPlan) -> dict[str, Any]:
    """Cases that an earlier run of the same plan has written."""
    if not out.exists():
        return {}
    known = json.loads(out.read_text())
    if known["plan"] != json.loads(json.dumps(plan._asdict())):
        raise SystemExit(f"{out} holds cases of another plan: give another --out, or remove it")
    return dict(known["cases"])


def main(flags: Namespace) -> None:
    main_s, plan = time.monotonic(), QUICK if flags.quick else CARD
    if flags.gib is not None:
        plan = plan._replace(table_bytes=int(flags.gib * GIB))
    note, fresh = partial(note_since, main_s), multiprocessing.get_context("spawn")
    found = known_cases(flags.out, plan)
    missing = [case for case in cases(plan) if case.name not in found]
    with tempfile.TemporaryDirectory() as name:
        folder = flags.folder or Path(name) / "model"
        with ProcessPoolExecutor(1, mp_context=fresh) as process:
            compiled = process.submit(compile_ahead, Path(name) / "small", plan, main_s)
            write_large_model(folder, large_config(plan.device, plan.table_bytes), note)
            compiled.result()
        longest_s = plan.case_s
        for case in missing:
            case_s = time.monotonic()
            if case_s - main_s + longest_s > flags.limit_s:
                note(f"no time for {case.name}; run it again to go on")
                break
            whole = {traffic: each["requests_per_s"] for traffic, each in _traffics(found.get(ALL.name, {}))}
            with ProcessPoolExecutor(1, mp_context=fresh) as process:
                found[case.name] = process.submit(run_case, folder, plan, case, whole, main_s).result()
            longest_s = max(longest_s, time.monotonic() - case_s)
            write_measurement(flags.out, {"plan": plan._asdict(), "cases": found, "judged": judged(found)})
    note("the end")


def _traffics(case: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(traffic, case[traffic]) for traffic in TRAFFICS if traffic in case]
