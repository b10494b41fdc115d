"""The embedding stage as CUDA graphs on its own stream: it reads the rows of one step while another computes.

A step is padded to one of a few sizes. Resident rows are read by a full grid; missed rows by few programs with long
loops, which keep the bus busy and leave the rest of the card to the compute of another step.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from helmrec.engine.assemble import Assembly
from helmrec.engine.capture import GraphMaker
from helmrec.engine.padding import NOWHERE, RowLayout, pad_rows
from helmrec.engine.row_stage import DeviceRowStage
from helmrec.engine.staging import Blocks, StagedField, Staging, block_bytes
from helmrec.engine.timeline import Mark, Timeline
from helmrec.kernels.row_gather import SKIP
from helmrec.kernels.row_table import ABSENT, Control, Missed, RowTally
from helmrec.memory.streams import InStream
from helmrec.types import IntArray

ORDER_FROM = 16_384  # expected misses of a step from which they are sorted; with 1 KiB rows 16k gained, 8k did not


@dataclass(frozen=True, slots=True)
class RowShape:
    """The most rows that a step may read, by kind."""

    num_features: int
    num_tables: int  # context tables: each has a row per sequence
    num_sequences: int
    largest: int  # events in the largest size

    @property
    def num_context(self) -> int:
        return self.num_tables * self.num_sequences

    def num_rows(self, size: int) -> int:
        return self.num_features * size + self.num_context


@dataclass(frozen=True, slots=True)
class _Captured:
    staging: Staging
    unordered: torch.cuda.CUDAGraph
    ordered: torch.cuda.CUDAGraph
    admit: torch.cuda.CUDAGraph


@dataclass(frozen=True, slots=True, eq=False)
class GraphReading:
    """A launched read of rows into `RowGraphs.values`."""

    graphs: "RowGraphs"
    step: Assembly
    gathered: torch.cuda.Event
    found: NDArray[np.int64]  # (sequences + tally,) complete before `gathered`

    def count_misses(self) -> IntArray:  # (requests,)
        misses = self.found[: len(self.step.num_rows)].copy()
        self.graphs.observe(self.step.rows.size, int(misses.sum()), self.found[-len(RowTally) :].copy())
        return misses


class RowGraphs:
    """The graphs that find, gather and admit rows, by number of events. Steps are read in the order of launch."""

    def __init__(self, stage: DeviceRowStage, shape: RowShape) -> None:
        self._stage = stage
        self._cache, arena_rows = stage.cache, stage.arena_rows
        self._shape = shape
        device, most = arena_rows.device, shape.num_rows(shape.largest)
        self.values = arena_rows.new_zeros((most, arena_rows.shape[1]))  # rows of the latest step
        self._sources = torch.full((most,), SKIP, dtype=torch.int32, device=device)
        self._missed = Missed.allocate(most, device)
        self._found = torch.zeros(shape.num_sequences + len(RowTally), dtype=torch.int64, device=device)
        self._found_host = torch.zeros((2, self._found.numel()), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._blocks = Blocks.allocate(block_bytes(self._fields(shape.largest)), device)
        self._maker = GraphMaker()
        self._captured: dict[int, _Captured] = {}
        self._sent = torch.cuda.Event()
        self._turn = 0
        self._miss_rate = 0.0

    @property
    def num_graphs(self) -> int:
        return 3 * len(self._captured)

    @property
    def buffer_bytes(self) -> int:
        missed = self._missed
        buffers = (self.values, self._sources, missed.sources, missed.places, self._blocks.device)
        return sum(buffer.nbytes for buffer in buffers)

    def values_of(self, size: int) -> Tensor:
        """Return the rows of a step of this size: (features * size + context, row_dim)."""
        return self.values[: self._shape.num_rows(size)]

    def read(
        self, step: Assembly, size: int, context_at: IntArray, after: torch.cuda.Event, timeline: Timeline
    ) -> GraphReading:
        """Start reading the rows of a step into `values`, which may be overwritten after the event `after`."""
        captured, stream = self._captured[size], self._cache.stream
        assert stream is not None
        timeline.wait_for(self._sent)  # the step before has been copied out of the block that this one fills
        host, shape = captured.staging.host, self._shape
        pad_rows(host["rows"], step.rows, RowLayout(shape.num_features, step.event_at.size, size, context_at), ABSENT)
        host["control"][:] = self._cache.next_control(step.rows.size)
        host["cu_events"][: len(step.cu_events)] = step.cu_events
        host["cu_events"][len(step.cu_events) :] = step.cu_events[-1]
        gather = captured.ordered if self._miss_rate * step.rows.size >= ORDER_FROM else captured.unordered
        self._turn ^= 1
        found, gathered = self._found_host[self._turn], torch.cuda.Event()
        with InStream(stream):
            captured.staging.send()
            self._sent.record(stream)
            stream.wait_event(after)
            timeline.mark(Mark.READING, stream)
            gather.replay()
            found.copy_(self._found, non_blocking=True)
            timeline.mark(Mark.READ, stream)
            gathered.record(stream)
            captured.admit.replay()
        return GraphReading(self, step, gathered, found.numpy())

    def observe(self, num_rows: int, num_missed: int, tally: NDArray[np.int64]) -> None:
        self._miss_rate = num_missed / max(1, num_rows)
        self._cache.observe(num_rows - num_missed, num_missed, tally)

    # Capture.

    def capture_background(self, pages_per_move: int, refill_bytes: int) -> None:
        """Prepare what runs between steps in the same stream: giving up pages, reading rows ahead, writing rows."""
        self._stage.compile_write()
        self._cache.capture_moves(pages_per_move, self._maker.capture)
        self._stage.capture_refill(refill_bytes, self._maker.capture)

    def capture(self, size: int) -> None:
        staging = Staging(self._fields(size), self._blocks)
        pad_rows(
            staging.host["rows"], np.empty(0, np.int64), RowLayout(self._shape.num_features, 0, size, NOWHERE), ABSENT
        )
        staging.host["control"][:] = 0
        staging.host["cu_events"][:] = 0
        staging.send()
        unordered, ordered = (
            self._maker.capture(partial(self._gather, staging, size, is_ordered=is_ordered))
            for is_ordered in (False, True)
        )
        admit = self._maker.capture(partial(self._cache.admit, self._missed_of(size), self.values_of(size)))
        self._captured[size] = _Captured(staging, unordered, ordered, admit)

    def _fields(self, size: int) -> list[StagedField]:
        return [
            StagedField("rows", (self._shape.num_rows(size),), torch.int32),
            StagedField("control", (len(Control),), torch.float64),
            StagedField("cu_events", (self._shape.num_sequences + 1,), torch.int64),
        ]

    def _missed_of(self, size: int) -> Missed:
        num = self._shape.num_rows(size)
        return Missed(self._missed.sources[:num], self._missed.places[:num], self._missed.count)

    def _gather(self, staging: Staging, size: int, *, is_ordered: bool) -> None:
        device, missed, values = staging.device, self._missed_of(size), self.values_of(size)
        sources = self._sources[: self._shape.num_rows(size)]
        self._cache.table.control.copy_(device["control"])
        self._cache.find(device["rows"], sources, missed)
        self._stage.gather(sources, missed.in_order() if is_ordered else missed, values)
        self._count(device["rows"], sources, device["cu_events"])

    def _count(self, rows: Tensor, sources: Tensor, cu_events: Tensor) -> None:
        """Count the misses of each sequence, and copy the tally."""
        shape = self._shape
        missed = ((rows >= 0) & (sources == SKIP)).long()
        of_events, of_context = missed.split([len(missed) - shape.num_context, shape.num_context])
        running = torch.nn.functional.pad(of_events.view(shape.num_features, -1).sum(0).cumsum(0), (1, 0))
        counts = running[cu_events].diff() + of_context.view(shape.num_tables, shape.num_sequences).sum(0)
        self._found[: shape.num_sequences].copy_(counts)
        self._found[shape.num_sequences :].copy_(self._cache.table.tally)
