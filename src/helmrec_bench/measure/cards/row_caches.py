"""Our embedding cache beside other ways to cache rows, FBGEMM's own among them: same traces, slots and table.

helmrec bench run row-caches --fbgemm FOLDER          # on a machine with a card; FOLDER holds the package fbgemm_gpu
helmrec bench run row-caches --only drifting          # one of the two traces
helmrec bench run row-caches --device cpu --quick     # a minute's trial of the script itself; its figures mean nothing

Every system is given row ids on the host and must leave the rows, in order, on the device. `ours` is the engine's own
row stage as CUDA graphs, with the dense index of resident rows unless its name says compact. `plain torch` keeps index
and exact LRU on the host, gathers misses there and copies them from pinned memory. A hit is a lookup for which nothing
crosses the bus: a row that a step reads several times misses once, which is also how FBGEMM counts.
"""

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from helmrec.clock import MonotonicClock
from helmrec.engine.assemble import Assembly
from helmrec.engine.row_graphs import RowGraphs, RowShape
from helmrec.engine.row_stage import DeviceRowStage
from helmrec.engine.timeline import DeviceTimeline, Mark
from helmrec.kernels.row_index import INDEXES, IndexForm
from helmrec.kernels.row_kernels import RowKernels, row_kernels
from helmrec.kernels.row_table import Admission, RowTally
from helmrec.memory.arena import Arena
from helmrec.memory.device_rows import DeviceRows, RowPolicy
from helmrec.memory.row_master import RowMaster
from helmrec.memory.streams import InStream
from helmrec.types import IntArray
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.measure.cards.fbgemm_rows import FbgemmRows, find_fbgemm
from helmrec_bench.measure.cards.row_traces import (
    DRIFTING,
    FULL,
    QUICK,
    REPEATING,
    Profile,
    make_table,
    numbers_of,
    zipf_steps,
)

CHECK_EVERY = 25  # steps whose rows are compared with the table
PARTS = 5  # of the measured steps: the median part is the time of a step
MANY_ROWS = 10**9  # for which the sizes of both indexes are stated


class RowReader(Protocol):
    """One way to have rows on the device."""

    def read(self, rows: IntArray) -> Tensor:  # (rows, row_dim)
        """The rows, in order; valid until the next read. Need not have arrived yet."""

    def finish(self) -> None:
        """Wait for what was read."""

    @property
    def hits(self) -> int:
        """As far as known; all of them after `finish`."""


@dataclass(frozen=True, slots=True)
class CacheSetup:
    """Where all systems live."""

    device: torch.device
    master: RowMaster
    kernels: RowKernels
    profile: Profile

    @property
    def is_card(self) -> bool:
        return self.device.type == "cuda"

    def pages(self, share: float) -> int:
        return max(1, round(share * self.profile.num_rows / self.profile.geometry.rows_per_page))

    def slots(self, share: float) -> int:
        return self.pages(share) * self.profile.geometry.rows_per_page

    def new_rows(self, num: int) -> Tensor:
        return torch.zeros((num, self.master.codec.dim), dtype=self.master.codec.dtype, device=self.device)

    def wait(self) -> None:
        if self.is_card:
            torch.cuda.synchronize()


class Ours:
    """The engine's row stage: graphs on a card, operation by operation elsewhere."""

    def __init__(self, place: CacheSetup, share: float, policy: RowPolicy, form: IndexForm = IndexForm.DENSE) -> None:
        profile = place.profile
        arena = Arena(place.pages(share), profile.geometry, torch.bfloat16, place.master.codec.dtype, str(place.device))
        per_page = profile.geometry.rows_per_page
        self._rows = DeviceRows(profile.num_rows, arena.rows, per_page, policy, place.kernels, form)
        self._stage = DeviceRowStage(self._rows, arena, place.master, place.kernels)
        self._place = place
        self._graphs: RowGraphs | None = None
        self._before: tuple[torch.cuda.Event, Tensor] | None = None  # the end of the step before, and what it found
        self._turn = 0
        if place.is_card:
            self._timelines = [DeviceTimeline(MonotonicClock()) for _ in range(2)]
            self._graphs = RowGraphs(self._stage, RowShape(1, 0, 1, profile.step_rows))
            self._graphs.capture(profile.step_rows)
            self._found = torch.zeros((2, self._graphs.found.numel()), dtype=torch.int64, pin_memory=True)
            torch.cuda.synchronize()
        self._rows.add_pages(range(place.pages(share)))

    @property
    def hits(self) -> int:
        return self._rows.hits

    @property
    def admissions(self) -> dict[str, int]:
        """Rows admitted, and rows for which a compact index had no entry, since the start. Waits for the device."""
        admitted, refused = self._rows.table.tally[[RowTally.ADMITTED, RowTally.REFUSED]].tolist()
        return {"admitted": admitted, "refused": refused}

    def read(self, rows: IntArray) -> Tensor:
        step = _assembly(rows)
        if self._graphs is None:
            reading = self._stage.read(step)
            reading.count_misses()
            return reading.values
        used = torch.cuda.Event()
        used.record()
        self._turn ^= 1
        size, host = self._place.profile.step_rows, self._graphs.host(self._place.profile.step_rows, self._turn)
        host["rows"][:], host["cu_events"][:] = rows, (0, rows.size)
        timeline = self._timelines[self._turn]
        with InStream(self._graphs.stream):
            self._graphs.stream.wait_event(used)
            self._graphs.read(size, self._turn, rows.size, None, timeline)  # no step computes
        torch.cuda.current_stream().wait_event(timeline.event(Mark.READ))
        found, ended = self._found[self._turn], torch.cuda.Event()
        found.copy_(self._graphs.found, non_blocking=True)
        ended.record()
        self.finish()  # of the step before: two are on their way, as in the engine
        self._before = (ended, found)
        return self._graphs.values_of(rows.size)

    def finish(self) -> None:
        if self._before is not None and self._graphs is not None:
            ended, found = self._before
            ended.synchronize()
            self._graphs.count_misses(found.numpy(), 1, self._place.profile.step_rows)
            self._before = None


def _assembly(rows: IntArray) -> Assembly:
    """A step of one request that reads these rows, and nothing else of a step."""
    one, none = np.zeros(1, np.int32), np.empty(0, np.int64)
    return Assembly(
        *(np.arange(rows.size), none, none, none),  # places, actions, positions and time gaps of events
        candidates=none,
        head_at=none,
        num_rows=np.array([rows.size]),
        cu_events=np.array([0, rows.size]),
        cu_tokens=one,
        num_resident=one,
        num_new=one,
        page_table=np.zeros((1, 1), np.int32),
        write_slots=none,
        rows=rows,
        num_candidates=[0],
        context_at=none,
        context_owner=none,
        context_table=none,
        context_counts=(),
    )


class PlainTorch:
    """Index and exact LRU in host tensors; misses gathered by the CPU and copied from pinned memory."""

    def __init__(self, place: CacheSetup, share: float) -> None:
        num_slots = place.slots(share)
        self._place = place
        self._data = place.new_rows(num_slots)
        self._slot_of = torch.full((place.profile.num_rows,), -1)
        self._row_of = torch.full((num_slots,), -1)
        self._last = torch.full((num_slots,), -1)
        shape = (place.profile.step_rows, place.master.codec.dim)
        self._staged = torch.empty(shape, dtype=place.master.codec.dtype, pin_memory=place.is_card)
        self._sent = torch.cuda.Event() if place.is_card else None
        self._now = 0
        self.hits = 0

    def read(self, rows: IntArray) -> Tensor:
        wanted = torch.from_numpy(rows)
        slots = self._slot_of[wanted]
        found = slots >= 0
        missed = wanted[~found].unique()
        self.hits += len(wanted) - len(missed)
        self._now += 1
        self._last[slots[found]] = self._now
        self._admit(missed)
        return self._data[self._slot_of[wanted].to(self._place.device)]

    def _admit(self, missed: Tensor) -> None:
        num = len(missed)
        assert num <= len(self._last), "a step misses more rows than there are slots"
        slots = self._last.topk(num, largest=False).indices
        evicted = self._row_of[slots]
        self._slot_of[evicted[evicted >= 0]] = -1
        self._slot_of[missed], self._row_of[slots], self._last[slots] = slots, missed, self._now
        if self._sent is not None:
            self._sent.synchronize()  # the copy of the step before has left the pinned buffer
        torch.index_select(self._place.master.rows, 0, missed, out=self._staged[:num])
        arrived = self._staged[:num].to(self._place.device, non_blocking=True)
        if self._sent is not None:
            self._sent.record()
        self._data[slots.to(self._place.device)] = arrived

    def finish(self) -> None:
        self._place.wait()


def measure(place: CacheSetup, make: Callable[[], RowReader], steps: IntArray) -> dict[str, Any]:
    """Warm up, then time the measured steps in parts, from the first id on the host to the last row on the device."""
    reader, profile = make(), place.profile
    for i, rows in enumerate(steps[: profile.warm_up]):
        values = reader.read(rows)
        if i % CHECK_EVERY == 0:
            place.wait()
            assert torch.equal(numbers_of(values), torch.from_numpy(rows)), "a row is not its own"
    reader.finish()
    place.wait()
    hits, parts = reader.hits, np.split(steps[profile.warm_up :], PARTS)
    times_ms = sorted(_read_ms(place, reader, part) / len(part) for part in parts)
    lookups, ms = profile.measured * profile.step_rows, times_ms[PARTS // 2]
    row_bytes = place.master.codec.dim * place.master.codec.dtype.itemsize
    return {
        "hit_rate": round((reader.hits - hits) / lookups, 4),
        "lookups_per_s": round(profile.step_rows / ms * 1e3),
        "gb_per_s": round(profile.step_rows * row_bytes / ms / 1e6, 2),
        "ms_per_step": round(ms, 3),
        "ms_fastest_part": round(times_ms[0], 3),
        "ms_slowest_part": round(times_ms[-1], 3),
        **(reader.admissions if isinstance(reader, Ours) else {}),
    }


def _read_ms(place: CacheSetup, reader: RowReader, steps: IntArray) -> float:
    started = time.perf_counter()
    for rows in steps:
        reader.read(rows)
    reader.finish()
    place.wait()
    return (time.perf_counter() - started) * 1e3


LRU = RowPolicy(is_lru=True, admission=Admission.ALWAYS)
SECOND_TOUCH = RowPolicy(is_lru=True)
FREQUENCY = RowPolicy(is_lru=False, admission=Admission.FREQUENCY)


def systems(
    place: CacheSetup, share: float, steps: IntArray, *, has_fbgemm: bool
) -> dict[str, Callable[[], RowReader]]:
    found: dict[str, Callable[[], RowReader]] = {
        "ours, frequency": lambda: Ours(place, share, FREQUENCY),
        "ours, LRU, second touch (default)": lambda: Ours(place, share, SECOND_TOUCH),
        "ours, LRU, every miss enters": lambda: Ours(place, share, LRU),
        "ours, frequency, compact index": lambda: Ours(place, share, FREQUENCY, IndexForm.COMPACT),
        "ours, LRU, second touch, compact index": lambda: Ours(place, share, SECOND_TOUCH, IndexForm.COMPACT),
    }
    if has_fbgemm:
        for kind in ("LFU", "LRU"):
            found[f"FBGEMM, {kind}"] = partial(FbgemmRows, place.master.rows, place.slots(share), kind, steps)
    if not place.profile.drift:
        found["plain torch, exact LRU on the host"] = lambda: PlainTorch(place, share)
    return found


def over_the_bus(place: CacheSetup, share: float, steps: IntArray) -> dict[str, Any]:
    """Rows and bytes that cross the bus in a measured step: each row once, and each lookup by itself, as it was."""
    arena = Arena(
        place.pages(share), place.profile.geometry, torch.bfloat16, place.master.codec.dtype, str(place.device)
    )
    per_page = place.profile.geometry.rows_per_page
    cache = DeviceRows(place.profile.num_rows, arena.rows, per_page, SECOND_TOUCH, place.kernels)
    stage = DeviceRowStage(cache, arena, place.master, place.kernels)
    cache.add_pages(range(place.pages(share)))
    once = each = 0
    for i, rows in enumerate(steps):
        reading = stage.read(_assembly(rows))
        place.wait()
        assert torch.equal(numbers_of(reading.values), torch.from_numpy(rows)), "a row is not its own"
        reading.count_misses()
        if i >= place.profile.warm_up:
            missed = int(reading.lookup.missed.count)
            once, each = once + missed, each + missed + int(reading.lookup.repeats.count)
    measured, row_bytes = place.profile.measured, place.master.codec.dim * place.master.codec.dtype.itemsize
    return {
        "share": share,
        "slots": place.slots(share),
        "lookups_per_step": place.profile.step_rows,
        "rows_once_a_step": round(once / measured, 1),
        "rows_each_lookup": round(each / measured, 1),
        "bytes_once_a_step": round(once * row_bytes / measured),
        "bytes_each_lookup": round(each * row_bytes / measured),
    }


def index_bytes(shares: tuple[float, ...]) -> list[dict[str, Any]]:
    """Sizes of both indexes of tables with MANY_ROWS rows."""
    sizes = [(share, round(share * MANY_ROWS)) for share in shares]
    return [
        {
            "rows": MANY_ROWS,
            "share": share,
            "slots": slots,
            **{form.value: index.bytes_for(MANY_ROWS, slots) for form, index in INDEXES.items()},
        }
        for share, slots in sizes
    ]


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--limit-s", type=float, default=240, help="start no further system after so many seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("steady", "drifting"), help="one of the traces; repeats go with steady")
    parser.add_argument("--fbgemm", type=Path, help="folder with the package fbgemm_gpu, if it is not installed")


@contextmanager
def placed(profile: Profile, device: str) -> Iterator[CacheSetup]:
    """The table of a profile, locked on a card."""
    tables, is_card = {"rows": make_table(profile.num_rows, profile.geometry.row_dim)}, device == "cuda"
    master = RowMaster.locked(tables) if is_card else RowMaster.copied(tables)
    yield CacheSetup(torch.device(device), master, row_kernels("triton" if is_card else "torch"), profile)
    master.close()


def main(flags: Namespace) -> None:
    started, results = time.monotonic(), []
    has_fbgemm = flags.device == "cuda" and find_fbgemm(flags.fbgemm)
    named = {"steady": FULL, "drifting": DRIFTING}
    if flags.quick:
        named = {"steady": QUICK, "drifting": replace(QUICK, drift=0.005)}
    profiles = [profile for name, profile in named.items() if flags.only in (None, name)]
    with torch.inference_mode(), placed(profiles[0], flags.device) as full:
        for profile in profiles:
            steps, place = zipf_steps(profile, flags.seed), replace(full, profile=profile)
            print(f"trace ready after {time.monotonic() - started:.1f} s", flush=True)
            for share in profile.shares:
                for name, make in systems(place, share, steps, has_fbgemm=has_fbgemm).items():
                    about = {"system": name, "drift": profile.drift, "share": share, "slots": place.slots(share)}
                    is_run = time.monotonic() - started <= flags.limit_s
                    found = measure(place, make, steps) if is_run else {"why": "time limit"}
                    results.append({**about, "run": is_run, **found})
                    print(results[-1], f"({time.monotonic() - started:.1f} s)", flush=True)
    repeating, repeats = replace(REPEATING, warm_up=5, measured=5) if flags.quick else REPEATING, []
    if flags.only != "drifting":
        with torch.inference_mode(), placed(repeating, flags.device) as place:
            steps = zipf_steps(repeating, flags.seed)
            repeats = [over_the_bus(place, share, steps) for share in repeating.shares]
    if not has_fbgemm:
        results.append({"system": "FBGEMM", "run": False, "why": "fbgemm_gpu is not installed here"})
    traces = {"profiles": [asdict(profile) for profile in (*profiles, repeating)], "seed": flags.seed}
    found = {"trace": traces, "systems": results, "repeats": repeats, "index_bytes": index_bytes(profiles[0].shares)}
    write_measurement(flags.out, found)
    print(*table(found), sep="\n", flush=True)


def table(found: dict[str, Any]) -> list[str]:
    """One line for each figure."""
    lines = [f"{'system':40}{'drift':>7}{'share':>7}{'ms a step':>11}{'hits':>8}"]
    for each in found["systems"]:
        about = f"{each['system']:40}{each.get('drift', ''):>7}{each.get('share', ''):>7}"
        lines.append(about + (f"{each['ms_per_step']:>11}{each['hit_rate']:>8}" if each["run"] else f"  {each['why']}"))
    for each in found["repeats"]:
        kib = [each[name] / 1024 for name in ("bytes_each_lookup", "bytes_once_a_step")]
        lines.append(
            f"repeats, share {each['share']}: KiB a step over the bus {kib[0]:.0f} each lookup, {kib[1]:.0f} once"
        )
    return lines
