"""The embedding stage as CUDA graphs on its own stream: it reads the rows of one step while another computes.

A step is padded to one of a few sizes. Resident rows are read by a full grid; missed rows at the same time by few
programs with long loops, which keep the bus busy and leave the rest of the card to the compute of another step, or by
more programs if no other step computes.
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
from helmrec.kernels.row_index import ABSENT
from helmrec.kernels.row_lookup import Lookup
from helmrec.kernels.row_table import Control, RowTally
from helmrec.memory.streams import InStream
from helmrec.types import IntArray

_ASSIGN_BESIDE = 16_384  # rows of a step from which slots are assigned while rows come from the host, not afterwards


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
    alone: torch.cuda.CUDAGraph  # these two read rows
    beside_compute: torch.cuda.CUDAGraph
    admit: torch.cuda.CUDAGraph


@dataclass(frozen=True, slots=True)
class StepBefore:
    """What the step before has yet to do."""

    embedded: torch.cuda.Event  # it no longer reads the rows in `RowGraphs.values`
    ended: torch.cuda.Event


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
        self._lookup = Lookup.allocate(most, device)
        self._found = torch.zeros(shape.num_sequences + len(RowTally), dtype=torch.int64, device=device)
        self._found_host = torch.zeros((2, self._found.numel()), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._blocks = Blocks.allocate(block_bytes(self._fields(shape.largest)), device)
        self._maker = GraphMaker()
        self._captured: dict[int, _Captured] = {}
        self._sent = torch.cuda.Event()
        self._turn = 0

    @property
    def num_graphs(self) -> int:
        return 3 * len(self._captured)

    @property
    def buffer_bytes(self) -> int:
        return self.values.nbytes + self._lookup.num_bytes + self._blocks.device.nbytes

    def values_of(self, size: int) -> Tensor:
        """Return the rows of a step of this size: (features * size + context, row_dim)."""
        return self.values[: self._shape.num_rows(size)]

    def read(
        self, step: Assembly, size: int, context_at: IntArray, before: StepBefore, timeline: Timeline
    ) -> GraphReading:
        """Start reading the rows of a step into `values`."""
        captured, stream = self._captured[size], self._cache.stream
        assert stream is not None
        timeline.wait_for(self._sent)  # the step before has been copied out of the block that this one fills
        host, shape = captured.staging.host, self._shape
        pad_rows(host["rows"], step.rows, RowLayout(shape.num_features, step.event_at.size, size, context_at), ABSENT)
        host["control"][:] = self._cache.next_control(step.rows.size)
        host["cu_events"][: len(step.cu_events)] = step.cu_events
        host["cu_events"][len(step.cu_events) :] = step.cu_events[-1]
        gather = captured.alone if before.ended.query() else captured.beside_compute
        self._turn ^= 1
        found, gathered = self._found_host[self._turn], torch.cuda.Event()
        with InStream(stream):
            captured.staging.send()
            self._sent.record(stream)
            stream.wait_event(before.embedded)
            timeline.mark(Mark.READING, stream)
            gather.replay()
            found.copy_(self._found, non_blocking=True)
            timeline.mark(Mark.READ, stream)
            gathered.record(stream)
            captured.admit.replay()
        return GraphReading(self, step, gathered, found.numpy())

    def observe(self, num_rows: int, num_missed: int, tally: NDArray[np.int64]) -> None:
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
        alone, beside = (
            self._maker.capture(partial(self._gather, staging, size, is_alone=way)) for way in (True, False)
        )
        admit = self._maker.capture(partial(self._admit, size))
        self._captured[size] = _Captured(staging, alone, beside, admit)

    def _fields(self, size: int) -> list[StagedField]:
        return [
            StagedField("rows", (self._shape.num_rows(size),), torch.int32),
            StagedField("control", (len(Control),), torch.float64),
            StagedField("cu_events", (self._shape.num_sequences + 1,), torch.int64),
        ]

    def _gather(self, staging: Staging, size: int, *, is_alone: bool) -> None:
        device, values, lookup = staging.device, self.values_of(size), self._lookup_of(size)
        self._cache.table.control.copy_(device["control"])

        def meanwhile() -> None:
            self._count(lookup.is_missed, device["cu_events"])
            if self._assigns_beside(size):
                self._cache.assign(lookup.missed)

        self._stage.gather(device["rows"], lookup, values, is_alone=is_alone, meanwhile=meanwhile)

    def _admit(self, size: int) -> None:
        if not self._assigns_beside(size):
            self._cache.assign(self._lookup_of(size).missed)
        self._cache.keep(self.values_of(size))

    def _assigns_beside(self, size: int) -> bool:
        return self._shape.num_rows(size) >= _ASSIGN_BESIDE

    def _lookup_of(self, size: int) -> Lookup:
        return self._lookup.of_size(self._shape.num_rows(size))

    def _count(self, is_missed: Tensor, cu_events: Tensor) -> None:
        """Count the misses of each sequence, and copy the tally."""
        shape, missed = self._shape, is_missed.long()
        of_events, of_context = missed.split([len(missed) - shape.num_context, shape.num_context])
        running = torch.nn.functional.pad(of_events.view(shape.num_features, -1).sum(0).cumsum(0), (1, 0))
        counts = running[cu_events].diff() + of_context.view(shape.num_tables, shape.num_sequences).sum(0)
        self._found[: shape.num_sequences].copy_(counts)
        self._found[shape.num_sequences :].copy_(self._cache.table.tally)
