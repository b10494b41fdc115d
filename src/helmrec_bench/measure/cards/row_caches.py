"""Our embedding cache beside other ways to cache rows: one Zipf trace, one capacity, one locked table.

helmrec bench run row-caches                          # on a machine with a card
helmrec bench run row-caches --device cpu --quick     # a minute's trial of the script itself; its figures mean nothing

Every system is given row ids on the host and must leave the rows, in order, on the device. `ours` is the engine's own
row stage as CUDA graphs. `plain torch` keeps index and exact LRU on the host, gathers misses there and copies them from
pinned memory. `32-way` is the placement rule of FBGEMM's row cache (a row may lie in one of 32 slots, the least
recently used of them goes) in code of our own: its hit rate is that of the rule, its speed is not that of FBGEMM.
"""

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from helmrec.clock import MonotonicClock
from helmrec.engine.assemble import Assembly
from helmrec.engine.padding import NOWHERE
from helmrec.engine.row_graphs import GraphReading, RowGraphs, RowShape, StepBefore
from helmrec.engine.row_stage import DeviceRowStage
from helmrec.engine.timeline import Timeline
from helmrec.kernels.row_kernels import RowKernels, row_kernels
from helmrec.kernels.row_table import Admission
from helmrec.memory.arena import Arena
from helmrec.memory.device_rows import DeviceRows, RowPolicy
from helmrec.memory.geometry import PageGeometry
from helmrec.memory.row_master import RowMaster
from helmrec.types import IntArray
from helmrec_bench.lab.provenance import write_measurement

WAYS = 32
CHECK_EVERY = 25  # steps whose rows are compared with the table
FBGEMM = {
    "system": "FBGEMM TBE / TorchRec row cache",
    "run": False,
    "why": "fbgemm_gpu 1.6.0, by FBGEMM's schedule the release for torch 2.11, is a wheel of 443.4 MiB (cp312, "
    "manylinux_2_28_x86_64), more than could be brought to where this was measured",
}


@dataclass(frozen=True, slots=True)
class Profile:
    """What is read, and from what."""

    num_rows: int
    geometry: PageGeometry
    step_rows: int
    warm_up: int  # steps
    measured: int  # steps
    exponent: float
    shares: tuple[float, ...]  # of the rows that a cache holds


FULL = Profile(8 << 20, PageGeometry(128, 5, 4, 128, 128, 2, 512, 2), 65_536, 100, 100, 1.0, (0.01, 0.05))
QUICK = Profile(4_000, PageGeometry(8, 1, 1, 64, 64, 2, 64, 2), 256, 15, 10, 1.0, (0.1,))


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
        return torch.zeros((num, self.master.row_dim), dtype=self.master.dtype, device=self.device)

    def wait(self) -> None:
        if self.is_card:
            torch.cuda.synchronize()


class Ours:
    """The engine's row stage: graphs on a card, operation by operation elsewhere."""

    def __init__(self, place: CacheSetup, share: float, policy: RowPolicy) -> None:
        profile = place.profile
        arena = Arena(place.pages(share), profile.geometry, torch.bfloat16, place.master.dtype, str(place.device))
        per_page = profile.geometry.rows_per_page
        self._rows = DeviceRows(profile.num_rows, arena.rows, per_page, policy, place.kernels)
        self._stage = DeviceRowStage(self._rows, arena, place.master, place.kernels)
        self._place = place
        self._graphs: RowGraphs | None = None
        self._before: GraphReading | None = None
        self._timeline = Timeline(MonotonicClock())
        self._idle = torch.cuda.Event()  # as if no step computed
        if place.is_card:
            self._graphs = RowGraphs(self._stage, RowShape(1, 0, 1, profile.step_rows))
            self._graphs.capture(profile.step_rows)
            torch.cuda.synchronize()
        self._rows.add_pages(range(place.pages(share)))

    @property
    def hits(self) -> int:
        return self._rows.hits

    def read(self, rows: IntArray) -> Tensor:
        step = _assembly(rows)
        if self._graphs is None:
            reading = self._stage.read(step)
            reading.count_misses()
            return reading.values
        used = torch.cuda.Event()
        used.record()
        before = StepBefore(used, self._idle)
        launched = self._graphs.read(step, self._place.profile.step_rows, NOWHERE, before, self._timeline)
        torch.cuda.current_stream().wait_event(launched.gathered)
        self.finish()  # of the step before: two are on their way, as in the engine
        self._before = launched
        return self._graphs.values_of(rows.size)

    def finish(self) -> None:
        if self._before is not None:
            self._before.gathered.synchronize()
            self._before.count_misses()
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
        shape = (place.profile.step_rows, place.master.row_dim)
        self._staged = torch.empty(shape, dtype=place.master.dtype, pin_memory=place.is_card)
        self._sent = torch.cuda.Event() if place.is_card else None
        self._now = 0
        self.hits = 0

    def read(self, rows: IntArray) -> Tensor:
        wanted = torch.from_numpy(rows)
        slots = self._slot_of[wanted]
        found = slots >= 0
        self.hits += int(found.sum())
        self._now += 1
        self._last[slots[found]] = self._now
        self._admit(wanted[~found].unique())
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


class SetAssociative:
    """Each row may lie in one of 32 slots; the least recently used of these goes. Misses cross the bus in a kernel."""

    def __init__(self, place: CacheSetup, share: float) -> None:
        self._place = place
        self._num_sets = max(1, place.slots(share) // WAYS)
        shape = (self._num_sets, WAYS)
        self._tags = torch.full(shape, -1, device=place.device)
        self._last = torch.full(shape, -1, device=place.device)
        self._data = place.new_rows(self._num_sets * WAYS)
        self._out = place.new_rows(place.profile.step_rows)
        self._hits = torch.zeros((), dtype=torch.int64, device=place.device)
        self._now = 0

    @property
    def hits(self) -> int:
        return int(self._hits)

    def read(self, rows: IntArray) -> Tensor:
        host = torch.from_numpy(rows)
        wanted = (host.pin_memory() if self._place.is_card else host).to(self._place.device, non_blocking=True)
        self._now += 1
        sets = self._set_of(wanted)
        match = self._tags[sets] == wanted[:, None]
        found, slots = match.any(1), sets * WAYS + match.int().argmax(1)
        self._hits += found.sum()
        self._last.view(-1)[slots[found]] = self._now
        out = self._out[: len(wanted)]
        sources = torch.where(found, slots, ~wanted).int()
        self._place.kernels.gather_rows(self._data, self._place.master.rows, sources, out)
        self._admit(wanted, (~found).nonzero().flatten(), out)
        return out

    def _set_of(self, rows: Tensor) -> Tensor:
        mixed = (rows * 0x9E3779B1) & 0xFFFFFFFF
        return (mixed ^ mixed >> 15) % self._num_sets

    def _admit(self, wanted: Tensor, places: Tensor, out: Tensor) -> None:
        """Of the rows missed in one set, the k-th takes the k-th oldest slot, unless this step has read that."""
        missed, which = wanted[places].unique(return_inverse=True)
        place = torch.zeros_like(missed).scatter_(0, which, places)
        sets, order = self._set_of(missed).sort(stable=True)
        missed, place = missed[order], place[order]
        rank = torch.arange(len(sets), device=sets.device) - torch.searchsorted(sets, sets)
        oldest = self._last[sets].argsort(dim=1, stable=True).gather(1, rank.clamp_max(WAYS - 1)[:, None])[:, 0]
        slots = sets * WAYS + oldest
        fits = (rank < WAYS) & (self._last.view(-1)[slots] < self._now)
        slots = slots[fits]
        self._tags.view(-1)[slots], self._last.view(-1)[slots] = missed[fits], self._now
        self._data[slots] = out[place[fits]]

    def finish(self) -> None:
        self._place.wait()


def zipf_steps(profile: Profile, seed: int) -> IntArray:  # (steps, rows)
    """Rows by popularity 1 / rank ** exponent; which row has which rank is drawn, so that neighbours differ."""
    rng = np.random.default_rng(seed)
    below = np.cumsum(1.0 / np.arange(1, profile.num_rows + 1) ** profile.exponent)
    num_steps = profile.warm_up + profile.measured
    drawn = np.sort(rng.random(num_steps * profile.step_rows)) * below[-1]  # sorted, since searching is faster so
    ranks = np.searchsorted(below, drawn)
    rng.shuffle(ranks)
    return rng.permutation(profile.num_rows)[ranks].reshape(num_steps, profile.step_rows)


def make_table(num_rows: int, row_dim: int) -> Tensor:
    """Rows whose first eight bytes are their number."""
    table = torch.zeros((num_rows, row_dim), dtype=torch.float16)
    table.view(torch.int64)[:, 0] = torch.arange(num_rows)
    return table


def measure(place: CacheSetup, make: Callable[[], RowReader], steps: IntArray) -> dict[str, Any]:
    """Warm up, then time the measured steps from the first id on the host to the last row on the device."""
    reader, profile = make(), place.profile
    for i, rows in enumerate(steps[: profile.warm_up]):
        values = reader.read(rows)
        if i % CHECK_EVERY == 0:
            place.wait()
            found = values.view(torch.int64)[:, 0].cpu()
            assert torch.equal(found, torch.from_numpy(rows)), "a row is not its own"
    reader.finish()
    place.wait()
    hits, started = reader.hits, time.perf_counter()
    for rows in steps[profile.warm_up :]:
        reader.read(rows)
    reader.finish()
    place.wait()
    seconds = time.perf_counter() - started
    lookups = profile.measured * profile.step_rows
    row_bytes = place.master.row_dim * place.master.dtype.itemsize
    return {
        "hit_rate": round((reader.hits - hits) / lookups, 4),
        "lookups_per_s": round(lookups / seconds),
        "gb_per_s": round(lookups * row_bytes / seconds / 1e9, 2),
        "ms_per_step": round(1e3 * seconds / profile.measured, 3),
    }


def systems(place: CacheSetup, share: float) -> dict[str, Callable[[], RowReader]]:
    lru, filtered = RowPolicy(is_lru=True, admission=Admission.ALWAYS), RowPolicy(is_lru=True)
    frequency = RowPolicy(is_lru=False, admission=Admission.FREQUENCY)
    return {
        "ours, LRU, every miss enters": lambda: Ours(place, share, lru),
        "ours, LRU, second touch (default)": lambda: Ours(place, share, filtered),
        "ours, frequency": lambda: Ours(place, share, frequency),
        "32-way set-associative LRU (our code, FBGEMM's rule)": lambda: SetAssociative(place, share),
        "plain torch, exact LRU on the host": lambda: PlainTorch(place, share),
    }


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--limit-s", type=float, default=90, help="start no further system after so many seconds")
    parser.add_argument("--seed", type=int, default=0)


def main(flags: Namespace) -> None:
    started, profile = time.monotonic(), QUICK if flags.quick else FULL
    steps, table = zipf_steps(profile, flags.seed), make_table(profile.num_rows, profile.geometry.row_dim)
    tables, is_card = {"rows": table}, flags.device == "cuda"
    master = RowMaster.locked(tables) if is_card else RowMaster.copied(tables)
    place = CacheSetup(torch.device(flags.device), master, row_kernels("triton" if is_card else "torch"), profile)
    print(f"trace and table ready after {time.monotonic() - started:.1f} s", flush=True)
    results: list[dict[str, Any]] = []
    with torch.inference_mode():
        for share in profile.shares:
            for name, make in systems(place, share).items():
                if time.monotonic() - started > flags.limit_s:
                    results.append({"system": name, "share": share, "run": False, "why": "time limit"})
                    continue
                found = measure(place, make, steps)
                results.append({"system": name, "share": share, "slots": place.slots(share), "run": True, **found})
                print(results[-1], f"({time.monotonic() - started:.1f} s)", flush=True)
    master.close()
    trace = {
        "rows": profile.num_rows,
        "row_bytes": master.row_dim * master.dtype.itemsize,
        "step_rows": profile.step_rows,
        "warm_up_steps": profile.warm_up,
        "measured_steps": profile.measured,
        "zipf_exponent": profile.exponent,
        "seed": flags.seed,
    }
    write_measurement(flags.out, {"trace": trace, "systems": [*results, FBGEMM]})
