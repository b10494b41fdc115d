"""Which rows to keep: our orders and admissions, batch by batch as a card runs them, beside those of libCacheSim.

helmrec bench run row-orders --log ratings.dat      # a MovieTweetings log; without it, synthetic traces only
helmrec bench run row-orders --quick                # tiny traces, to try the script

A trace is a list of steps. Ours are `DeviceRows` with plain kernels: a step looks all its rows up, then admits.
Policies of libCacheSim see one lookup after the other, which is easier. A lookup is a hit if nothing crosses the bus
for it: a row that a step reads several times misses once. `FBGEMM's rule` is LFU over counts of all rows, never aged,
in sets of 32 ways, in code of our own.
"""

import tempfile
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from helmrec.kernels.row_kernels import row_kernels
from helmrec.kernels.row_lookup import Lookup
from helmrec.kernels.row_table import Admission
from helmrec.memory.device_rows import DeviceRows, RowPolicy
from helmrec.traffic.importers import READERS
from helmrec.types import IntArray
from helmrec_bench.lab.provenance import write_measurement

SHARES = (0.01, 0.05, 0.2)  # of the rows that occur
HISTORY, REQUESTS = 50, 8  # of the log: events that a request reads, requests of a step
LATEST = 16_000  # requests taken from the log; their users' histories are whole
WAYS = 32
THEIRS = ("LRU", "LFU", "ARC", "TwoQ", "Sieve", "S3FIFO", "WTinyLFU")  # LFUDA takes minutes on the log
DEFAULT = "LRU, second touch"
OURS = {
    "LRU, always": RowPolicy(is_lru=True, admission=Admission.ALWAYS),
    DEFAULT: RowPolicy(is_lru=True),
    "frequency, second touch": RowPolicy(is_lru=False),
    **{
        f"frequency, half-life {each}": RowPolicy(is_lru=False, admission=Admission.FREQUENCY, half_life=each)
        for each in (32, 64, 128)
    },
}


@dataclass(frozen=True, slots=True)
class RowTrace:
    """Steps of lookups; the first half warms caches up."""

    name: str
    rows: NDArray[np.int64]
    ends: IntArray  # (steps + 1,) with a leading 0
    num_rows: int

    @property
    def middle(self) -> int:
        """The first lookup that counts."""
        return int(self.ends[(len(self.ends) - 1) // 2])


@dataclass(frozen=True, slots=True)
class Drift:
    """How the popularity of rows changes: which share of rows swap theirs in a step, and when all do."""

    name: str
    per_step: float = 0.0
    shift_at: int | None = None


def drifting(drift: Drift, num_rows: int, step_rows: int, num_steps: int, seed: int) -> RowTrace:
    """Rows by popularity 1 / rank; which row has which rank is drawn, and changes."""
    rng = np.random.default_rng(seed)
    below = np.cumsum(1.0 / np.arange(1, num_rows + 1))
    name_of, steps = rng.permutation(num_rows), []
    for step in range(num_steps):
        if step == drift.shift_at:
            rng.shuffle(name_of)
        swapped = rng.choice(num_rows, int(drift.per_step * num_rows), replace=False)
        name_of[swapped] = name_of[rng.permutation(swapped)]
        steps.append(name_of[np.searchsorted(below, rng.random(step_rows) * below[-1])])
    return RowTrace(drift.name, np.concatenate(steps), np.arange(num_steps + 1) * step_rows, num_rows)


def logged(path: Path, kind: str, num_requests: int) -> RowTrace:
    """Each rating is a request that reads the latest items of its user and the rated one; eight requests a step."""
    log = READERS[kind](path)
    order = np.argsort(log.timestamp_s, kind="stable")
    first = order.size - num_requests
    histories: dict[int, list[int]] = {}
    read: list[int] = []
    ends = [0]
    for i, (user, item) in enumerate(zip(log.user[order].tolist(), log.item[order].tolist(), strict=True)):
        history = histories.setdefault(user, [])
        history.append(item)
        if i >= first:
            read += history[-HISTORY - 1 :]
            if (i + 1 - first) % REQUESTS == 0:
                ends.append(len(read))
    rows = np.unique(read[: ends[-1]], return_inverse=True)[1]
    return RowTrace(f"log of {kind}", rows, np.array(ends), int(rows.max()) + 1)


@dataclass(frozen=True, slots=True)
class Missing:
    """Lookups of rows that were not resident, as a share of those that count."""

    once: float  # each row once a step, which is what crosses the bus
    each: float  # every lookup by itself


def replay(trace: RowTrace, slots: int, policy: RowPolicy) -> Missing:
    """Serve a trace by the device's rules, in plain torch."""
    cache = DeviceRows(trace.num_rows, torch.zeros(slots, 1), 1, policy, row_kernels("torch"))
    cache.add_pages(range(slots))
    rows, once, each = torch.from_numpy(trace.rows).int(), 0, 0
    for begin, end in zip(trace.ends[:-1].tolist(), trace.ends[1:].tolist(), strict=True):
        cache.table.control.copy_(torch.from_numpy(cache.next_control(end - begin)))
        lookup = Lookup.allocate(end - begin, rows.device)
        cache.find(rows[begin:end], lookup)
        cache.assign(lookup.missed)
        missed, again = int(lookup.missed.count), int(lookup.repeats.count)
        cache.observe(end - begin - missed, missed, cache.table.tally.numpy().copy())
        if begin >= trace.middle:
            once, each = once + missed, each + missed + again
    cache.check()
    counted = trace.rows.size - trace.middle
    return Missing(once / counted, each / counted)


def their_hits(name: str, trace: RowTrace, slots: int, reader: Any) -> float:
    """The hit rate of a policy of libCacheSim."""
    cache = getattr(import_module("libcachesim"), name)(cache_size=slots)
    cache.process_trace(reader, 0, trace.middle)
    reader.reset()
    missed, _ = cache.process_trace(reader, trace.middle, trace.rows.size - trace.middle)
    reader.reset()
    return 1 - float(missed)


def fbgemm_rule_hits(trace: RowTrace, slots: int) -> float:
    """LFU over counts of all rows; a missed row replaces the least frequent of its set if that was read less often."""
    num_sets = max(1, slots // WAYS)
    count, tags = np.zeros(trace.num_rows + 1, np.int64), np.full((num_sets, WAYS), trace.num_rows)
    is_resident, misses = np.zeros(trace.num_rows + 1, np.bool_), 0
    for begin, end in zip(trace.ends[:-1], trace.ends[1:], strict=True):
        rows, num = np.unique(trace.rows[begin:end], return_counts=True)
        count[rows] += num
        missed = rows[~is_resident[rows]]
        misses += missed.size if begin >= trace.middle else 0
        sets = (missed * 0x9E3779B1 & 0xFFFFFFFF) % num_sets
        order = np.lexsort((-count[missed], sets))
        missed, sets = missed[order], sets[order]
        rank = np.arange(missed.size) - np.searchsorted(sets, sets)
        missed, sets, rank = missed[rank < WAYS], sets[rank < WAYS], rank[rank < WAYS]
        way = np.argsort(count[tags[sets]], axis=1, kind="stable")[np.arange(sets.size), rank]
        wins = count[missed] > count[tags[sets, way]]
        missed, sets, way = missed[wins], sets[wins], way[wins]
        is_resident[tags[sets, way]], is_resident[missed] = False, True
        tags[sets, way] = missed
    return 1 - misses / (trace.rows.size - trace.middle)


def compare(trace: RowTrace, share: float, folder: Path) -> dict[str, Any]:
    """Hit rates of all policies on one trace at one size."""
    libcachesim = import_module("libcachesim")  # not installed everywhere
    slots = max(WAYS, round(share * trace.num_rows))
    file = folder / "trace.bin"
    lines = np.zeros(trace.rows.size, [("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])
    lines["id"], lines["size"], lines["next"] = trace.rows + 1, 1, -2
    lines.tofile(file)
    reader = libcachesim.TraceReader(str(file), libcachesim.TraceType.ORACLE_GENERAL_TRACE)
    ours = {name: replay(trace, slots, policy) for name, policy in OURS.items()}
    hit_rate = {f"ours: {name}": round(1 - missing.once, 4) for name, missing in ours.items()}
    hit_rate["FBGEMM's rule: LFU, 32 ways"] = round(fbgemm_rule_hits(trace, slots), 4)
    hit_rate |= {f"libCacheSim {name}": round(their_hits(name, trace, slots, reader), 4) for name in THEIRS}
    crossed = {"once a step": round(ours[DEFAULT].once, 4), "each lookup by itself": round(ours[DEFAULT].each, 4)}
    size = {"trace": trace.name, "share": share, "slots": slots, "lookups": trace.rows.size}
    return {**size, "hit_rate": hit_rate, "rows_over_the_bus_a_lookup": crossed}


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--log", type=Path, help="ratings.dat of MovieTweetings")
    parser.add_argument("--quick", action="store_true", help="tiny traces")
    parser.add_argument("--seed", type=int, default=0)


def main(flags: Namespace) -> None:
    num_rows, step_rows, num_steps = (5_000, 256, 40) if flags.quick else (400_000, 4_096, 240)
    drifts = [
        Drift("steady"),
        Drift("slow drift: 0.05% of rows a step", 0.0005),
        Drift("fast drift: 0.5% of rows a step", 0.005),
        Drift("shift: all rows, at three quarters", shift_at=num_steps * 3 // 4),
    ]
    traces = [drifting(each, num_rows, step_rows, num_steps, flags.seed) for each in drifts]
    if flags.log is not None:
        traces.insert(0, logged(flags.log, "movietweetings", 400 if flags.quick else LATEST))
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for trace in traces:
            for share in SHARES:
                results.append(compare(trace, share, Path(folder)))
                print(results[-1], flush=True)
    synthetic = {"rows": num_rows, "step_rows": step_rows, "steps": num_steps, "seed": flags.seed}
    write_measurement(flags.out, {"synthetic": synthetic, "orders": results})
