"""What it costs to read embedding rows where they are, on a card: part of `make gpu`.

Checks the gather on the card, then times it with every row missing (over the bus, from a 16 GiB locked table), alone
and beside dense compute on a high-priority stream, and with every row resident. Rows are read as they come, in order of
address after a full sort, and as the engine reads them: each once, bucket by bucket of addresses. In that order they
are also read in eight bits: from a table that holds them so, and rounded as they are read.
"""

import itertools
import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from helmrec.kernels import triton_row_recode
from helmrec.kernels.row_codec import Recoding, RowCodec
from helmrec.kernels.row_lookup import Lookup
from helmrec.kernels.row_table import Admission, RowTable
from helmrec.kernels.triton_row_gather import ALONE, BESIDE_COMPUTE, BUS_ALONE, Launch, gather_rows
from helmrec.kernels.triton_row_lookup import find
from helmrec.memory.row_master import LockedBuffer
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.measure.cards.kernels import run_checks, times_ms

TABLE_BYTES = 16 << 30
READ_BYTES = 128 << 20
NUM_HITS = 64 << 10
ARENA_BYTES = 8 << 30
NUM_SETS = 4  # of row ids, in turn, so that no launch finds the rows of the one before in a cache
COMPUTE_MS = 150  # how long compute runs beside gathers


LAYER_TOKENS = 8 * (4_096 + 256)
COMPUTES = {
    "products of a dlrmv3 layer, 8 x 4096+256": [(LAYER_TOKENS, 512, 2_048), (LAYER_TOKENS, 1_536, 512)],
    "products of 8192 x 8192 x 8192": [(8_192, 8_192, 8_192)],
}
Gather = Callable[[Tensor, Tensor, Tensor, Tensor, Launch], None]


def as_they_come(arena: Tensor, master: Tensor, sources: Tensor, out: Tensor, launch: Launch) -> None:
    gather_rows(arena, master, sources, out, launch=launch)


def in_order(arena: Tensor, master: Tensor, sources: Tensor, out: Tensor, launch: Launch) -> None:
    """By address, as the engine does it when many rows are missed; the sort counts."""
    ordered, places = sources.sort()
    gather_rows(arena, master, ordered, out, places=places, launch=launch)


class ByBucket:
    """As the engine reads rows that it misses: found in an empty table, each once, in buckets of addresses."""

    def __init__(self, gather: Callable[..., None] = gather_rows) -> None:
        """gather: of missed rows."""
        self._gather = gather
        self._made: dict[tuple[int, int], tuple[RowTable, Lookup]] = {}

    def __call__(self, arena: Tensor, master: Tensor, sources: Tensor, out: Tensor, launch: Launch) -> None:
        size = (len(master), len(sources))
        if size not in self._made:  # before a graph is captured, since every way is checked first
            table = RowTable.allocate(len(master), 1, sources.device, Admission.ALWAYS)
            self._made[size] = table, Lookup.allocate(len(sources), sources.device)
        table, lookup = self._made[size]
        missed, repeats = lookup.missed, lookup.repeats
        find(table, ~sources, lookup, is_lru=True)
        self._gather(arena, master, missed.sources, out, places=missed.places, count=missed.count, launch=launch)
        gather_rows(out, out, repeats.sources, out, places=repeats.places, count=repeats.count)


by_bucket = ByBucket()
ROUNDING = Recoding(*(RowCodec(512, torch.bfloat16, code) for code in (None, "fp8_e4m3")))
rounded = ByBucket(partial(triton_row_recode.gather_rows, recoding=ROUNDING))


@dataclass(frozen=True)
class ReadWay:
    """One way to read rows."""

    gather: Gather
    launch: Launch

    def describe(self) -> dict[str, Any]:
        orders: dict[Any, str] = {in_order: "address", **dict.fromkeys((by_bucket, rounded), "buckets of addresses")}
        programs = self.launch.programs or "full grid"
        return {"order": orders.get(self.gather, "as they come"), "programs": programs, "tile": self.launch.tile_bytes}


class ReadWork:
    """A gather of rows drawn at random, one set of them after the other."""

    def __init__(self, arena: Tensor, master: Tensor, num: int, *, hits: bool) -> None:
        """arena and master: (records, words) whose every word tells its place."""
        self._arena, self._master, source = arena, master, arena if hits else master
        self._drawn = [torch.randint(0, len(source), (num,), device="cuda", dtype=torch.int32) for _ in range(NUM_SETS)]
        self._sources = self._drawn if hits else [~rows for rows in self._drawn]
        self._out = torch.full((num, source.shape[1]), -1, dtype=source.dtype, device="cuda")
        self.num_bytes = NUM_SETS * self._out.nbytes

    def capture(self, way: ReadWay) -> torch.cuda.CUDAGraph:
        """All sets in one graph, each checked first."""
        for rows, sources in zip(self._drawn, self._sources, strict=True):
            self._out.fill_(-1)
            way.gather(self._arena, self._master, sources, self._out, way.launch)
            assert torch.equal(self._out, self._expected(rows)), "a row is not its own"
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for sources in self._sources:
                way.gather(self._arena, self._master, sources, self._out, way.launch)
        return graph

    def _expected(self, rows: Tensor) -> Tensor:
        columns = torch.arange(self._out.shape[1], device="cuda")
        return rows.long()[:, None] * len(columns) + columns


class RoundedWork(ReadWork):
    """Rows of the master that are rounded to eight bits as they are read."""

    def __init__(self, master: Tensor, num: int) -> None:
        super().__init__(master, master.view(ROUNDING.source.dtype), num, hits=False)
        self._out = torch.zeros((num, ROUNDING.target.width), dtype=torch.uint8, device="cuda")

    def _expected(self, rows: Tensor) -> Tensor:
        return ROUNDING.source.recode(self._master[rows.long().cpu()], ROUNDING.target).cuda()


def numbered(data: Tensor) -> Tensor:
    """Fill memory so that every word of 8 bytes is its own place."""
    words, chunk = data.view(torch.int64), 1 << 25
    for start in range(0, len(words), chunk):
        part = words[start : start + chunk]
        torch.arange(start, start + len(part), out=part)
    return words


def measure_alone(work: ReadWork, way: ReadWay) -> dict[str, Any]:
    times = times_ms(work.capture(way).replay)
    median, tenth = statistics.median(times), len(times) // 10
    return {
        "ms": round(median / NUM_SETS, 4),
        "p10_ms": round(times[tenth] / NUM_SETS, 4),
        "p90_ms": round(times[-1 - tenth] / NUM_SETS, 4),
        "gb_per_s": round(work.num_bytes / median / 1e6, 1),
    }


class Beside(NamedTuple):
    compute_ms: float
    gather_ms: float | None  # of one replay, over those that ran while compute did


class Compute:
    """Products of (m, k) and (k, n) in bf16, as many as take about COMPUTE_MS."""

    def __init__(self, name: str, products: list[tuple[int, int, int]]) -> None:
        self.name = name
        self._operands = [
            tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((m, k), (k, n), (m, n)))
            for m, k, n in products
        ]
        self._repeats = 1
        self._repeats = int(COMPUTE_MS / statistics.median(times_ms(self.run)))

    def run(self) -> None:
        for _ in range(self._repeats):
            for a, b, c in self._operands:
                torch.mm(a, b, out=c)


def run_beside(compute: Compute, gather: torch.cuda.CUDAGraph, num_gathers: int) -> Beside:
    """Compute on a high-priority stream, gathers one after the other on another."""
    high, low = torch.cuda.Stream(priority=-1), torch.cuda.Stream(priority=0)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(num_gathers + 1)]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    with torch.cuda.stream(low):
        marks[0].record()
        for mark in marks[1:]:
            gather.replay()
            mark.record()
    with torch.cuda.stream(high):
        start.record()
        compute.run()
        end.record()
    torch.cuda.synchronize()
    compute_ms = start.elapsed_time(end)
    at = [start.elapsed_time(mark) for mark in marks]
    assert num_gathers < 2 or at[-1] > compute_ms, "too few gathers to cover the compute"
    inside = [time for time in at if 0 < time < compute_ms]
    return Beside(compute_ms, (inside[-1] - inside[0]) / (len(inside) - 1) if len(inside) > 1 else None)


def measure_beside(work: ReadWork, way: ReadWay, compute: Compute) -> dict[str, Any]:
    """Gather and compute at the same time, and compute alone before and after, each several times."""
    gather = work.capture(way)
    run_beside(compute, gather, 1)  # warms up
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    gather.replay()
    end.record()
    torch.cuda.synchronize()
    enough = int(2.5 * COMPUTE_MS / start.elapsed_time(end)) + 2
    before, *together, after = (run_beside(compute, gather, num) for num in (0, enough, enough, enough, 0))
    alone_ms = (before.compute_ms + after.compute_ms) / 2
    compute_ms = statistics.median(run.compute_ms for run in together)
    gather_ms = statistics.median(run.gather_ms for run in together if run.gather_ms is not None)
    return {
        "ms": round(gather_ms / NUM_SETS, 4),
        "gb_per_s": round(work.num_bytes / gather_ms / 1e6, 1),
        "compute": compute.name,
        "compute_alone_ms": round(alone_ms, 2),
        "compute_beside_ms": round(compute_ms, 2),
        "compute_slowdown": round(compute_ms / alone_ms - 1, 4),
    }


def describe(name: str, row_bytes: int, way: ReadWay) -> dict[str, Any]:
    return {"work": name, "row_bytes": row_bytes, **way.describe()}


def measure(words: Tensor, arena: Tensor) -> Iterator[dict[str, Any]]:
    """words: the locked table; arena: as much of the same in HBM as hits are drawn from."""
    plain = [ReadWay(as_they_come, launch) for launch in (ALONE, BESIDE_COMPUTE)]
    ordered = [ReadWay(in_order, launch) for launch in (ALONE, BESIDE_COMPUTE)]
    alone = [
        ReadWay(by_bucket, launch) for launch in (ALONE, BUS_ALONE, *(Launch(n, 16 << 10, 8) for n in (32, 64, 264)))
    ]
    beside = [ReadWay(by_bucket, launch) for launch in (BESIDE_COMPUTE, *(Launch(n, 64 << 10, 8) for n in (4, 12, 16)))]
    hits = ReadWork(arena.view(-1, 128), words.view(-1, 128), NUM_HITS, hits=True)
    for way in plain:
        yield {**describe("hit alone", 1024, way), **measure_alone(hits, way)}
    computes = [Compute(name, products) for name, products in COMPUTES.items()]
    for row_bytes in (1024, 4096):
        master, slots = words.view(-1, row_bytes // 8), arena.view(-1, row_bytes // 8)
        misses = ReadWork(slots, master, READ_BYTES // row_bytes, hits=False)
        for way in plain + ordered + alone:
            yield {**describe("miss alone", row_bytes, way), **measure_alone(misses, way)}
        for compute, way in itertools.product(computes, [ordered[1], *beside]):
            yield {**describe("miss beside compute", row_bytes, way), **measure_beside(misses, way, compute)}
    coded = ROUNDING.target.stride
    records = words[: len(words) // coded * coded].view(-1, coded // 8)
    forms: dict[str, tuple[ReadWork, Gather]] = {
        "miss of a row in eight bits": (ReadWork(records, records, READ_BYTES // 1024, hits=False), by_bucket),
        "miss that is rounded": (RoundedWork(words.view(-1, 128), READ_BYTES // 1024), rounded),
    }
    for name, (work, gather) in forms.items():
        row_bytes = coded if gather is by_bucket else 1024
        yield {**describe(f"{name}, alone", row_bytes, way := ReadWay(gather, BUS_ALONE)), **measure_alone(work, way)}
        for compute in computes:
            way = ReadWay(gather, BESIDE_COMPUTE)
            yield {**describe(f"{name}, beside compute", row_bytes, way), **measure_beside(work, way, compute)}


def huge_bytes() -> int:
    """Memory of this machine that lies in huge pages."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages"))


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--skip-checks", action="store_true", help="time only")


def main(flags: Namespace) -> None:
    if not flags.skip_checks:
        run_checks("row_gather", "row_table", "row_updates")
    started = time.perf_counter()
    buffer = LockedBuffer(TABLE_BYTES)
    words = numbered(buffer.data)
    filled = time.perf_counter()
    buffer.lock()
    locked = time.perf_counter()
    host = {
        "table_bytes": TABLE_BYTES,
        "fill_s": round(filled - started, 1),
        "lock_s": round(locked - filled, 1),
        "huge_page_bytes": huge_bytes(),
    }
    print(host, flush=True)
    arena = torch.arange(ARENA_BYTES // 8, device="cuda")
    results = []
    for result in measure(words, arena):
        results.append(result)
        print(result, flush=True)
    buffer.close()
    write_measurement(flags.out, {"host": host, "read_bytes": READ_BYTES, "rows": results})
