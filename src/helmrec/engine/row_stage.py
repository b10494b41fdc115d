"""The row stage: reads the rows of a step through a cache indexed on the host or the device."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from helmrec.engine.assemble import Assembly
from helmrec.engine.row_values import pinned_block, split_block
from helmrec.kernels.row_codec import RowCodec
from helmrec.kernels.row_kernels import RowKernels
from helmrec.kernels.row_lookup import Lookup
from helmrec.kernels.row_table import Missed
from helmrec.kernels.row_write import RowTargets
from helmrec.memory.arena import Arena
from helmrec.memory.device_rows import Capture, DeviceRows
from helmrec.memory.embedding_cache import ABSENT, EmbeddingCache, repeats_of
from helmrec.memory.row_master import HostRows
from helmrec.memory.streams import InStream, fork, join
from helmrec.memory.tiered_rows import TieredRows
from helmrec.types import IntArray


class Reading(Protocol):
    """The rows of one step, on the device."""

    @property
    def values(self) -> Tensor:
        """Rows as the pool stores them, (rows, width), in the order of `Assembly.rows`."""

    def count_misses(self) -> IntArray:  # (requests,)
        """Count the rows that came from the host, by request; called once, when the step has ended."""

    def admit(self) -> None:
        """Admit missed rows to the cache, unless the stage has done so; off the request path."""


@dataclass(frozen=True, slots=True, eq=False)
class SentRows:
    """New rows where a stage writes them from: all that were sent together, or a part of them."""

    rows: IntArray  # of this part
    values: Tensor  # (rows sent, width) as the master stores them
    places: Tensor | None = None  # (rows sent,) all rows on the device, for an index there
    sent: torch.cuda.Event | None = None  # after the copy to a card
    first: int = 0  # where this part begins in `values`, `places` and `on_host`
    on_host: Tensor | None = None  # the values there, for rows that are on disk

    def part(self, start: int, end: int) -> "SentRows":
        """Return rows [start, end) of these, in the same memory."""
        return replace(self, rows=self.rows[start:end], first=self.first + start)


class RowStage(Protocol):
    """Reads rows for steps, in the order of the steps."""

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """Stream in which it accesses the pool; None is the caller's."""

    def read(self, step: Assembly) -> Reading: ...

    def refill(self, budget_bytes: int) -> None:
        """Read rows ahead of demand into empty slots; off the request path."""

    def send(self, rows: IntArray, values: Tensor) -> SentRows:
        """Bring new values to where `write` takes them, beside running steps. Any thread may call it."""

    def write(self, new: SentRows) -> None:
        """Replace rows in the master and in the pool: launched steps read the old values, later ones the new.

        A shared master has the new values already, written while no step read rows.
        """

    def finish_reads(self) -> None:
        """Wait until launched steps have read their rows; their layers go on."""

    def finish_writes(self) -> None:
        """Wait until the host may read what was written to the master; the layers of running steps go on."""


@dataclass(frozen=True, slots=True, eq=False)
class HostReading:
    """Rows of a step that the host looked up."""

    stage: "HostRowStage"
    step: Assembly
    values: Tensor
    rows: IntArray
    absent: IntArray  # positions of the missed ones, each row once

    def count_misses(self) -> IntArray:
        return self.step.count_by_request(self.absent)

    def admit(self) -> None:
        self.stage.admit(self.rows[self.absent], self.values, self.absent)


class HostRowStage:
    """Reads rows through an index on the host. Eviction is exact: the host knows the globally coldest row."""

    stream = None

    def __init__(self, cache: EmbeddingCache, arena: Arena, master: HostRows, codec: RowCodec) -> None:
        """codec: of rows in the arena."""
        self._cache = cache
        self._arena = arena
        self._master = master
        self._codec = codec
        self._refills = not isinstance(master, TieredRows)  # evicted rows may be on disk

    def read(self, step: Assembly) -> HostReading:
        rows = step.rows
        slots = self._cache.lookup(rows)
        absent, repeats = np.flatnonzero(slots == ABSENT), repeats_of(slots)
        device = self._arena.rows.device
        values = self._recoded(self._master.gather(rows[absent])).to(device)
        if absent.size < rows.size:
            missed, values = values, self._arena.rows[torch.from_numpy(np.maximum(slots, 0)).to(device)]
            values[torch.from_numpy(absent).to(device)] = missed
        if repeats.places.size:
            places, sources = (torch.from_numpy(each).to(device) for each in (repeats.places, repeats.sources))
            values[places] = values[sources]
        return HostReading(self, step, values, rows, absent)

    def _recoded(self, rows: Tensor) -> Tensor:
        """Return rows of the master as the arena stores them."""
        return self._master.codec.recode(rows, self._codec)

    def admit(self, missed: IntArray, gathered: Tensor, positions: IntArray) -> None:
        """Copy admitted rows from the values a step has read, so that no row crosses the bus twice."""
        if not missed.size:
            return
        admission = self._cache.admit(missed, positions)
        try:
            self._arena.keep_rows(admission.slots, gathered, admission.positions)
        except BaseException:
            self._cache.withdraw(admission)
            raise
        self._cache.publish(admission)

    def refill(self, budget_bytes: int) -> None:
        if not self._refills:
            return
        refill = self._cache.refill(budget_bytes // self._master.codec.stride)
        try:
            self._arena.write_rows(refill.slots, self._recoded(self._master.gather(refill.rows)))
        except BaseException:
            self._cache.withdraw(refill)
            raise
        self._cache.publish(refill, is_cold=True)

    def send(self, rows: IntArray, values: Tensor) -> SentRows:
        return SentRows(rows, values)

    def write(self, new: SentRows) -> None:
        """A launched step has its own copy of the rows it reads, so the master may be written at once."""
        values = new.values[new.first : new.first + new.rows.size]
        if not self._master.is_shared:
            self._master.update(new.rows, values)
        slots = self._cache.peek(new.rows)
        resident = slots != ABSENT
        self._arena.write_rows(slots[resident], self._recoded(values[torch.from_numpy(resident)]))

    def finish_reads(self) -> None:
        """A launched step has read its rows."""

    def finish_writes(self) -> None:
        """Nothing is under way."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceReading:
    """Rows of a step that the device looked up."""

    cache: DeviceRows
    step: Assembly
    values: Tensor
    lookup: Lookup

    def count_misses(self) -> IntArray:
        missed = self.lookup.is_missed.nonzero().flatten().cpu().numpy()
        num_hits = len(self.values) - missed.size
        self.cache.observe(num_hits, missed.size, self.cache.table.tally.cpu().numpy())
        return self.step.count_by_request(missed)

    def admit(self) -> None:
        """Do nothing: the device has admitted the missed rows right after it read them."""


class DeviceRowStage:
    """Reads rows through an index on the device, on its own stream, operation by operation. Twin: `row_graphs.py`."""

    def __init__(self, cache: DeviceRows, arena: Arena, master: HostRows, kernels: RowKernels) -> None:
        """kernels: they convert rows of the master, if the arena stores them in another form."""
        self.cache = cache
        self.stream = cache.stream
        self.arena_rows = arena.rows
        self._row_bytes = master.codec.stride
        self._master_rows = master.rows
        self._tier = master if isinstance(master, TieredRows) else None
        written = None if master.is_shared or self._tier is not None else master.rows
        self._targets = RowTargets(cache.table.index, arena.rows, written)
        self._kernels = kernels
        self.count_by_sequence = kernels.count_by_sequence
        self._copies = None if cache.stream is None else torch.cuda.Stream(arena.rows.device)
        # Beside reads from the host: reads of resident rows, and what the caller has to do.
        self._residents = None if cache.stream is None else torch.cuda.Stream(arena.rows.device)
        self._others = None if cache.stream is None else torch.cuda.Stream(arena.rows.device)
        self._written = None if cache.stream is None else torch.cuda.Event()

    def read(self, step: Assembly) -> DeviceReading:
        cache, device = self.cache, self.arena_rows.device
        with InStream(cache.stream):
            rows = torch.from_numpy(step.rows.astype(np.int32)).to(device)
            cache.table.control.copy_(torch.from_numpy(cache.next_control(len(rows))))
            lookup = Lookup.allocate(len(rows), device)
            values = self.arena_rows.new_empty((len(rows), self.arena_rows.shape[1]))
            frames = None if self._tier is None else torch.from_numpy(self._tier.frames_of(step.rows)).to(device)
            self.gather(rows, lookup, values, is_alone=False, frames=frames)
            cache.assign(lookup.missed)
            cache.keep(values)
        if cache.stream is not None:
            torch.cuda.current_stream().wait_stream(cache.stream)
            values.record_stream(torch.cuda.current_stream())
        return DeviceReading(cache, step, values, lookup)

    def gather(
        self,
        rows: Tensor,
        lookup: Lookup,
        values: Tensor,
        *,
        is_alone: bool,
        meanwhile: Callable[[], None] | None = None,
        frames: Tensor | None = None,
    ) -> None:
        """Find rows, read resident ones from the arena and each other row once from the host.

        is_alone: no step computes, so that reading from the host may take more of the card. `meanwhile` is run on the
        device while rows come from the host. frames: where in host memory each row is, if it is not at its number.
        """
        arena, master, kernels = self.arena_rows, self._master_rows, self._kernels
        missed, repeats = lookup.missed, lookup.repeats
        self.cache.find(rows, lookup)
        with fork(self._residents):
            kernels.gather_rows(arena, arena, lookup.sources, values)
        with fork(self._others):
            if meanwhile is not None:
                meanwhile()
        from_host = kernels.gather_host if is_alone else kernels.gather_few
        asked = missed if frames is None else _by_frame(missed, frames)
        from_host(arena, master, asked.sources, values, places=asked.places, count=asked.count)
        kernels.gather_rows(values, values, repeats.sources, values, places=repeats.places, count=repeats.count)
        join(self._residents)
        join(self._others)

    @property
    def tier(self) -> TieredRows | None:
        """The rows in host memory, if others are on disk."""
        return self._tier

    def refill(self, budget_bytes: int) -> None:
        if self._tier is None:  # else evicted rows may be on disk
            self.cache.refill(budget_bytes // self._row_bytes, self._master_rows)

    def capture_refill(self, budget_bytes: int, capture: Capture) -> None:
        if self._tier is None:
            self.cache.capture_refill(budget_bytes // self._row_bytes, self._master_rows, capture)

    def send(self, rows: IntArray, values: Tensor) -> SentRows:
        if self._copies is None or self.stream is None:
            return SentRows(rows, values, torch.from_numpy(rows), on_host=values)
        block, sent = pinned_block(rows, values), torch.cuda.Event()
        with InStream(self._copies):
            there = block.to(self.arena_rows.device, non_blocking=True)
            sent.record(self._copies)
        there.record_stream(self.stream)  # it is freed once `write` has read it
        places, new = split_block(there, values)
        return SentRows(rows, new, places, sent, on_host=None if self._tier is None else values)

    def write(self, new: SentRows) -> None:
        """The card itself writes the master, in the stream that reads rows: the host waits for nothing.

        If rows are on disk, the host writes log and frames, after the row reads of launched steps.
        """
        if self._tier is not None:
            assert new.on_host is not None
            self.finish_reads()
            self._tier.update(new.rows, new.on_host[new.first : new.first + new.rows.size])
        self._write_on_device(new)

    def _write_on_device(self, new: SentRows) -> None:
        assert new.places is not None
        with InStream(self.stream):
            if self.stream is not None and new.sent is not None:
                self.stream.wait_event(new.sent)
            self._kernels.write_rows(new.values, new.places, new.first, new.rows.size, self._targets)
        if self._written is not None:
            self._written.record(self.stream)

    def finish_reads(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()

    def finish_writes(self) -> None:
        if self._written is not None:
            self._written.synchronize()

    def compile_write(self) -> None:
        """Compile what `write` runs, by writing the first row as it is."""
        self._write_on_device(self.send(np.zeros(1, np.int64), self._master_rows[:1].clone()))


def _by_frame(missed: Missed, frames: Tensor) -> Missed:
    """Return the missed rows with their frames as sources, in order of address. Entries after `count` are no rows."""
    of = frames[missed.places.clamp_max(len(frames) - 1)]
    is_row = torch.arange(len(of), device=of.device) < missed.count
    of, order = torch.where(is_row, of, torch.iinfo(torch.int32).max - 1).sort()
    return Missed(~of, missed.places[order], missed.count)
