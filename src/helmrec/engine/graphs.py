"""The dense stage as CUDA graphs, one for each of a few sizes, so that a launch costs the host little.

A step is padded to the next size. Padding tokens belong to no sequence, read no rows, are written to an unused row
and keep no K/V, so they cost arithmetic only. The dense stage runs on a stream of high priority; the rows of the next
step are read at the same time, as soon as this step has embedded its own.
"""

import time
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from helmrec.engine.assemble import Assembly
from helmrec.engine.capture import MULTIPLE, GraphMaker, bucket_sizes, fitting
from helmrec.engine.dense import Memory, Progress, Scored, WaitForPages
from helmrec.engine.padding import EMPTY, NOWHERE, StepArrays, context_places, pad_candidates, pad_tokens
from helmrec.engine.request_terms import RequestTerms
from helmrec.engine.row_graphs import GraphReading, RowGraphs, RowShape, StepBefore
from helmrec.engine.row_stage import DeviceRowStage
from helmrec.engine.staging import Blocks, StagedField, Staging, block_bytes
from helmrec.engine.timeline import Mark, Timeline
from helmrec.kernels.attention_plan import AttentionPlan
from helmrec.kernels.ragged import RaggedBatch
from helmrec.model.hstu import DenseInput, HstuModel
from helmrec.types import IntArray


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """The largest step that is captured."""

    num_events: int
    num_sequences: int
    num_candidates: int
    num_pages: int  # of one sequence's page table
    pages_per_move: int  # that EMB gives up in one move
    refill_bytes: int  # rows read ahead in one refill


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """The graphs of one number of events, over their own view of the shared block."""

    size: int
    staging: Staging
    embed: torch.cuda.CUDAGraph
    layers: torch.cuda.CUDAGraph


@dataclass(frozen=True, slots=True)
class CapturedHead:
    """The graphs of one number of candidates."""

    staging: Staging
    pick: torch.cuda.CUDAGraph  # copies the candidates' rows, before the next step overwrites them
    score: torch.cuda.CUDAGraph


@dataclass(frozen=True, slots=True, eq=False)
class GraphLaunch:
    """A step whose scores arrive in pinned memory."""

    reading: GraphReading
    ended: torch.cuda.Event
    logits: NDArray[np.float32]  # valid after `ended`, until the step after the next
    clock: "DeviceClock"

    def wait(self) -> Scored:
        ended_ago_s = self.clock.wait(self.ended)
        return Scored(self.logits.copy(), self.reading.count_misses(), ended_ago_s)

    def admit(self) -> None:
        """Do nothing: the device has admitted the missed rows right after it read them."""


class DeviceClock:
    """Dates events of a device on the host's clock, without additional waits for the device."""

    def __init__(self) -> None:
        self._seen: tuple[torch.cuda.Event, float] | None = None  # an event the host waited for, and its time

    def wait(self, event: torch.cuda.Event) -> float:
        """Wait for an event that records its time; return how many seconds ago it happened."""
        was_over = event.query()
        event.synchronize()
        now_s = time.monotonic()
        if not was_over or self._seen is None:
            self._seen = (event, now_s)
            return 0.0
        before, before_s = self._seen
        return max(0.0, now_s - before_s - before.elapsed_time(event) / 1e3)


class GraphedDense:
    """Runs the dense stage as graphs: rows, embed and layers by number of events, head by number of candidates."""

    def __init__(self, model: HstuModel, memory: Memory, rows: DeviceRowStage, limits: GraphLimits) -> None:
        config, device = model.config, model.device
        self._model, self._memory, self._limits = model, memory, limits
        self.rows = rows
        self._event_sizes = bucket_sizes(limits.num_events)
        self._head_sizes = bucket_sizes(limits.num_candidates)
        self._head_features = np.array(model.head_features)
        largest, most = self._event_sizes[-1], self._head_sizes[-1]
        num_tables = len(config.user_context) + len(config.request_context)
        self._row_shape = RowShape(len(config.features), num_tables, limits.num_sequences, largest)
        self._row_graphs = RowGraphs(rows, self._row_shape)
        self._blocks = Blocks.allocate(block_bytes(self._step_fields(largest)), device)
        self._head_blocks = Blocks.allocate(block_bytes(self._head_fields(most)), device)
        self._head_rows = self._row_graphs.values.new_zeros((len(model.head_features), most, config.row_dim))
        self._x = torch.zeros((self._num_tokens(largest), config.dim), dtype=model.dtype, device=device)
        self._scores = torch.zeros((most, config.num_tasks), dtype=torch.float32, device=device)
        is_card = device.type == "cuda"
        self._scores_host = torch.zeros((2, *self._scores.shape), dtype=torch.float32, pin_memory=is_card)
        self._terms = RequestTerms(config, limits.num_sequences, device)
        self._plan = self._make_plan()
        self._maker = GraphMaker()
        self._steps: dict[int, CapturedStep] = {}
        self._heads: dict[int, CapturedHead] = {}
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._sent = torch.cuda.Event()  # of the latest step, as is the next
        self._before = StepBefore(torch.cuda.Event(), torch.cuda.Event())
        self._turn = 0
        self._clock = DeviceClock()
        self.last_step: CapturedStep  # graphs of the latest step, for measurements
        self.last_head: CapturedHead

    @property
    def num_graphs(self) -> int:
        return self._row_graphs.num_graphs + 2 * (len(self._steps) + len(self._heads))

    @property
    def buffer_bytes(self) -> int:
        """Device memory of the static buffers, without the memory pools of the graphs."""
        buffers = (self._blocks.device, self._head_blocks.device, self._head_rows, self._x, self._scores)
        return self._row_graphs.buffer_bytes + sum(buffer.nbytes for buffer in buffers)

    def warm_up(self, progress: Progress) -> None:
        """Compile every kernel and capture every size, largest first so that smaller ones reuse its memory."""
        self._row_graphs.capture_background(self._limits.pages_per_move, self._limits.refill_bytes)
        total = 5 * len(self._event_sizes) + 2 * len(self._head_sizes)
        for size in reversed(self._event_sizes):
            self._row_graphs.capture(size)
            self._steps[size] = self._capture_step(size)
            progress(self.num_graphs, total)
        for size in reversed(self._head_sizes):
            self._heads[size] = self._capture_head(size)
            progress(self.num_graphs, total)
        torch.cuda.synchronize()

    @torch.inference_mode()
    def launch(self, step: Assembly, wait_for_pages: WaitForPages, timeline: Timeline) -> GraphLaunch:
        """As `EagerDense.launch`; returns before the step has ended."""
        assert self._is_within_limits(step), "the scheduler made a step that no graph holds"
        captured = self._steps[fitting(self._event_sizes, step.event_at.size)]
        head = self._heads[fitting(self._head_sizes, step.candidates.size)]
        self.last_step, self.last_head = captured, head
        timeline.wait_for(self._sent)  # the step before has been copied out of the blocks that this one fills
        context_at = context_places(step, self._limits.num_sequences)
        reading = self._row_graphs.read(step, captured.size, context_at, self._before, timeline)
        self._load(captured, head, step, context_at)
        self.stream.wait_event(reading.gathered)
        timeline.mark(Mark.COMPUTING, self.stream)
        captured.embed.replay()
        head.pick.replay()
        embedded = torch.cuda.Event()
        embedded.record(self.stream)
        wait_for_pages()
        captured.layers.replay()
        head.score.replay()
        self._turn ^= 1
        logits = self._scores_host[self._turn, : step.candidates.size]
        logits.copy_(self._scores[: step.candidates.size], non_blocking=True)
        timeline.mark(Mark.ENDED, self.stream)
        ended = torch.cuda.Event(enable_timing=True)
        ended.record(self.stream)
        self._before = StepBefore(embedded, ended)
        timeline.leave_host()
        return GraphLaunch(reading, ended, logits.numpy(), self._clock)

    def _is_within_limits(self, step: Assembly) -> bool:
        return (
            step.event_at.size <= self._event_sizes[-1]
            and step.candidates.size <= self._head_sizes[-1]
            and len(step.num_new) <= self._limits.num_sequences
        )

    def _load(self, captured: CapturedStep, head: CapturedHead, step: Assembly, context_at: IntArray) -> None:
        """Fill the blocks and start their copies."""
        pad_tokens(StepArrays.staged(captured.staging.host), StepArrays.of(step), context_at)
        host = head.staging.host
        pad_candidates(host["at"], host["rows"], step.candidates, step.head_at, self._head_features * captured.size)
        captured.staging.send()
        head.staging.send()
        self._terms.load(step)
        self._plan.load(step.cu_tokens, step.num_resident, step.num_new, len(self._model.config.request_context))
        self._sent.record(self.stream)

    # Layout.

    def _num_tokens(self, size: int) -> int:
        """Return the flat rows of a step: its events, its context tokens, and one unused row for padding."""
        return -(-(size + self._row_shape.num_context + 1) // MULTIPLE) * MULTIPLE

    def _step_fields(self, size: int) -> list[StagedField]:
        sequences = self._limits.num_sequences
        per_event = [StagedField(name, (size,), torch.int64) for name in ("event_at", "actions", "positions", "gaps")]
        return [
            *per_event,
            StagedField("context_at", (self._row_shape.num_context,), torch.int64),
            StagedField("write_slots", (self._num_tokens(size),), torch.int64),
            StagedField("cu_tokens", (sequences + 1,), torch.int32),
            StagedField("num_resident", (sequences,), torch.int32),
            StagedField("num_new", (sequences,), torch.int32),
            StagedField("page_table", (sequences, self._limits.num_pages), torch.int32),
        ]

    def _head_fields(self, size: int) -> list[StagedField]:
        return [
            StagedField("at", (size,), torch.int64),
            StagedField("rows", (len(self._model.head_features), size), torch.int64),
        ]

    def _make_plan(self) -> AttentionPlan:
        config, num_tokens = self._model.config, self._x.shape[0]
        q, v = (self._x.new_empty((num_tokens, config.num_heads, dim)) for dim in (config.qk_dim, config.v_dim))
        sizes = (self._memory.k_pages.shape[2], self._limits.num_sequences)
        return AttentionPlan(q, v, *sizes, config.attention_window, has_bias=config.attention_bias is not None)

    # Capture.

    def _capture_step(self, size: int) -> CapturedStep:
        staging = Staging(self._step_fields(size), self._blocks)
        tokens = self._static_input(staging, size)
        x = self._x[: self._num_tokens(size)]
        pad_tokens(StepArrays.staged(staging.host), EMPTY, NOWHERE)  # no sequences: safe to run while capturing
        staging.send()
        self._plan.load(EMPTY.cu_tokens, EMPTY.num_resident, EMPTY.num_new, 0)
        embed = self._maker.capture(partial(self._model.embed, tokens, x))
        return CapturedStep(size, staging, embed, self._maker.capture(partial(self._run_layers, x, tokens.ragged)))

    def _capture_head(self, size: int) -> CapturedHead:
        staging = Staging(self._head_fields(size), self._head_blocks)
        pad_candidates(staging.host["at"], staging.host["rows"], NOWHERE, NOWHERE, self._head_features)
        staging.send()
        pick = self._maker.capture(partial(self._pick_rows, staging.device["rows"], size))
        return CapturedHead(staging, pick, self._maker.capture(partial(self._run_head, staging.device["at"], size)))

    def _run_layers(self, x: Tensor, batch: RaggedBatch) -> None:
        batch = replace(batch, v_scale=self._terms.v_scale(x.shape[0]))
        y = self._model.layers(x, self._memory.k_pages, self._memory.v_pages, batch)
        if y.data_ptr() != x.data_ptr():
            x.copy_(y)

    def _pick_rows(self, where: Tensor, size: int) -> None:
        for rows, index in zip(self._head_rows, where, strict=True):
            torch.index_select(self._row_graphs.values, 0, index, out=rows[:size])

    def _run_head(self, at: Tensor, size: int) -> None:
        states, query = self._x.index_select(0, at), self._terms.of_candidates(at)
        self._scores[:size].copy_(self._model.head(states, self._head_rows[:, :size], query))

    def _static_input(self, staging: Staging, size: int) -> DenseInput:
        config, device = self._model.config, staging.device
        rows, split = self._row_graphs.values_of(size), len(config.features) * size
        ragged = {name: device[name] for name in ("cu_tokens", "num_resident", "num_new", "page_table", "write_slots")}
        return DenseInput(
            event_rows=rows[:split].unflatten(0, (len(config.features), size)),
            event_at=device["event_at"],
            actions=device["actions"],
            positions=device["positions"],
            gaps=device["gaps"],
            context_rows=rows[split:],
            context_at=device["context_at"],
            context_counts=(self._limits.num_sequences,) * self._row_shape.num_tables,
            ragged=RaggedBatch(
                **ragged,
                num_context=len(config.request_context),
                page_tokens=self._memory.k_pages.shape[2],
                plan=self._plan,
                window=config.attention_window,
                **self._terms.ragged,
            ),
            query=self._terms.of_context,
        )
