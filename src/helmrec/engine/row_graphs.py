"""The embedding stage as CUDA graphs on its own stream: it reads the rows of one step while another computes.

A step is padded to one of a few sizes. Resident rows are read by a full grid; missed rows at the same time by few
programs with long loops, which keep the bus busy and leave the rest of the card to the compute of another step, or by
more programs if no other step computes.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from helmrec.engine.capture import GraphMaker
from helmrec.engine.row_stage import DeviceRowStage
from helmrec.engine.staging import BlockPart, Blocks, HostArrays, StagedField, Staging, block_bytes
from helmrec.engine.timeline import DeviceTimeline, Mark
from helmrec.kernels.row_index import ABSENT
from helmrec.kernels.row_lookup import Lookup
from helmrec.kernels.row_table import Control, Missed, RowTally
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
class CapturedRows:
    """The graphs of one number of events, over their own view of the shared block."""

    staging: Staging
    sent: BlockPart
    alone: torch.cuda.CUDAGraph  # these two read rows
    beside_compute: torch.cuda.CUDAGraph
    admit: torch.cuda.CUDAGraph | None  # None: the graphs above also admit them


class RowGraphs:
    """The graphs that find, gather and admit rows, by number of events. Steps are read in the order of launch."""

    def __init__(self, stage: DeviceRowStage, shape: RowShape) -> None:
        self._stage = stage
        self._cache, arena_rows = stage.cache, stage.arena_rows
        self._shape = shape
        device, most = arena_rows.device, shape.num_rows(shape.largest)
        self.values = arena_rows.new_zeros((most, arena_rows.shape[1]))  # rows of the latest step
        self._lookup = Lookup.allocate(most, device)
        # Misses of each sequence of the latest step, then the tally; complete once its rows have been read.
        self.found = torch.zeros(shape.num_sequences + len(RowTally), dtype=torch.int64, device=device)
        self._blocks = Blocks.allocate(block_bytes(self._fields(shape.largest)), device)
        self._maker = GraphMaker()
        self._captured: dict[int, CapturedRows] = {}

    @property
    def stream(self) -> torch.cuda.Stream:
        """Stream in which rows are read."""
        assert self._cache.stream is not None
        return self._cache.stream

    @property
    def num_graphs(self) -> int:
        return sum(self.num_graphs_of(size) for size in self._captured)

    @property
    def buffer_bytes(self) -> int:
        return self.values.nbytes + self._lookup.num_bytes + self._blocks.device.nbytes

    def num_graphs_of(self, size: int) -> int:
        """Return the number of graphs of a step of this size."""
        return 2 if self._assigns_beside(size) else 3

    def values_of(self, size: int) -> Tensor:
        """Return the rows of a step of this size: (features * size + context, row_dim)."""
        return self.values[: self._shape.num_rows(size)]

    def host(self, size: int, turn: int) -> HostArrays:
        """Return the arrays that a step of this size fills before `read`: "rows" and "cu_events"."""
        return self._captured[size].staging.hosts[turn]

    def read(
        self, size: int, turn: int, num_rows: int, embedded: torch.cuda.Event | None, timeline: DeviceTimeline
    ) -> None:
        """Start reading the rows of a step, `num_rows` of them, into `values`. Then READ is marked.

        Called with `stream` as the current one. embedded: happens when the step that still runs no longer reads
        `values`; None: no step runs.
        """
        captured, stream = self._captured[size], self.stream
        host = captured.staging.hosts[turn]
        host["control"][:] = self._cache.next_control(num_rows)
        if (tier := self._stage.tier) is not None:
            is_row = host["rows"] != ABSENT
            host["frames"][:] = 0
            host["frames"][is_row] = tier.frames_of(host["rows"][is_row].astype(np.int64))
        captured.sent.send(turn)
        if embedded is not None:
            stream.wait_event(embedded)
        timeline.mark(Mark.READING, stream)
        (captured.alone if embedded is None else captured.beside_compute).replay()
        timeline.mark(Mark.READ, stream)
        if captured.admit is not None:
            captured.admit.replay()

    def count_misses(self, found: IntArray, num_requests: int, num_rows: int) -> list[int]:
        """Return the misses of each request of a step that has ended. found: its value of `self.found`."""
        misses: list[int] = found[:num_requests].tolist()
        num_missed = sum(misses)
        self._cache.observe(num_rows - num_missed, num_missed, found[self._shape.num_sequences :])
        return misses

    # Capture.

    def capture_background(self, pages_per_move: int, refill_bytes: int) -> None:
        """Prepare what runs between steps in the same stream: giving up pages, reading rows ahead, writing rows."""
        self._stage.compile_write()
        self._cache.capture_moves(pages_per_move, self._maker.capture)
        self._stage.capture_refill(refill_bytes, self._maker.capture)

    def capture(self, size: int) -> None:
        staging = Staging(self._fields(size), self._blocks)
        sent = self._blocks.part(staging.start, staging.end)
        host = staging.hosts[0]
        host["rows"][:] = ABSENT
        if self._stage.tier is not None:
            host["frames"][:] = 0
        host["control"][:] = 0
        host["cu_events"][:] = 0
        sent.send(0)
        alone, beside = (
            self._maker.capture(partial(self._gather, staging, size, is_alone=way)) for way in (True, False)
        )
        admit = None if self._assigns_beside(size) else self._maker.capture(partial(self._admit, size))
        self._captured[size] = CapturedRows(staging, sent, alone, beside, admit)

    def _fields(self, size: int) -> list[StagedField]:
        return [
            StagedField("rows", (self._shape.num_rows(size),), torch.int32),
            StagedField("control", (len(Control),), torch.float64),
            StagedField("cu_events", (self._shape.num_sequences + 1,), torch.int64),
            *([] if self._stage.tier is None else [StagedField("frames", (self._shape.num_rows(size),), torch.int32)]),
        ]

    def _gather(self, staging: Staging, size: int, *, is_alone: bool) -> None:
        device, values, lookup = staging.device, self.values_of(size), self._lookup_of(size)
        self._cache.table.control.copy_(device["control"])

        def meanwhile() -> None:
            self._count(lookup.missed, device["cu_events"], size)
            if self._assigns_beside(size):
                self._cache.assign(lookup.missed)

        frames = None if self._stage.tier is None else device["frames"]
        self._stage.gather(device["rows"], lookup, values, is_alone=is_alone, meanwhile=meanwhile, frames=frames)
        if self._assigns_beside(size):
            self._cache.keep(values)

    def _admit(self, size: int) -> None:
        """Assign slots and keep rows after READ, since a small step would wait long for the slots."""
        self._cache.assign(self._lookup_of(size).missed)
        self._cache.keep(self.values_of(size))

    def _assigns_beside(self, size: int) -> bool:
        return self._shape.num_rows(size) >= _ASSIGN_BESIDE

    def _lookup_of(self, size: int) -> Lookup:
        return self._lookup.of_size(self._shape.num_rows(size))

    def _count(self, missed: Missed, cu_events: Tensor, size: int) -> None:
        """Count the misses of each sequence, and copy the tally."""
        by_sequence, tally = self.found.split([self._shape.num_sequences, len(RowTally)])
        self._stage.count_by_sequence(missed, cu_events, self._shape.num_features, size, by_sequence)
        tally.copy_(self._cache.table.tally)
