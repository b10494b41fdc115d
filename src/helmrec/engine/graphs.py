"""The dense stage as CUDA graphs, one for each of a few sizes, so that a launch costs the host little.

A step is padded to the next size. Padding tokens belong to no sequence, read no rows, are written to an unused row
and keep no K/V, so they cost arithmetic only. The dense stage runs on a stream of high priority; the rows of the next
step are read at the same time, as soon as this step has embedded its own.
"""

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from helmrec.engine.assemble import ModelTerms, Outline, StepForm
from helmrec.engine.capture import MULTIPLE, GraphMaker, bucket_sizes, fitting
from helmrec.engine.dense import Memory, Progress, Scored, WaitForPages
from helmrec.engine.layout import StepArrays
from helmrec.engine.request_terms import RequestTerms, term_fields
from helmrec.engine.row_graphs import RowGraphs, RowShape
from helmrec.engine.row_stage import DeviceRowStage
from helmrec.engine.staging import BlockPart, Blocks, HostArrays, StagedField, Staging, block_bytes
from helmrec.engine.timeline import STEPS_IN_FLIGHT, DeviceTimeline, Mark, Timeline
from helmrec.kernels.attention_plan import AttentionPlan, Scores, multiplies_codes
from helmrec.kernels.ragged import RaggedBatch
from helmrec.memory.streams import InStream
from helmrec.model.hstu import DenseInput, HstuModel


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
    embed: torch.cuda.CUDAGraph  # and copies the candidates' rows, before the next step overwrites them
    layers: torch.cuda.CUDAGraph


@dataclass(frozen=True, slots=True)
class CapturedHead:
    """The graphs of one number of candidates."""

    size: int
    staging: Staging
    scores: tuple[torch.cuda.CUDAGraph, ...]  # one per host block, to which it copies misses and scores


class _StepBefore(NamedTuple):
    """What the step before may have yet to do."""

    embedded: torch.cuda.Event  # it no longer reads the rows in `RowGraphs.values`
    ended: torch.cuda.Event


class _Staged(NamedTuple):
    """Where a step of one number of events and of candidates is laid out, and what is sent of it."""

    arrays: StepArrays
    sent: BlockPart


@dataclass(frozen=True, slots=True, eq=False)
class GraphLaunch:
    """A step whose scores arrive in pinned memory."""

    dense: "GraphedDense"
    step: Outline
    ended: torch.cuda.Event
    received: HostArrays  # valid after `ended`, until the step after the next

    def wait(self) -> Scored:
        ended_ago_s = self.dense.clock.wait(self.ended)
        step = self.step
        misses = self.dense.row_graphs.count_misses(self.received["found"], len(step.members), step.total_rows)
        return Scored(self.received["scores"][: step.total_candidates].copy(), misses, ended_ago_s)

    def admit(self) -> None:
        """Do nothing: the device has admitted the missed rows right after it read them."""


class DeviceClock:
    """Dates events of a device on the host's clock, without additional waits for the device."""

    def __init__(self) -> None:
        self._last: tuple[torch.cuda.Event, float] | None = None  # the event that was dated last, and its time

    def forget(self, event: torch.cuda.Event) -> None:
        """Count from this event no longer: it is recorded again."""
        if self._last is not None and self._last[0] is event:
            self._last = None

    def has_happened(self, event: torch.cuda.Event) -> bool:
        """Return whether an event has happened; asks the device only if the host has not waited for this one last."""
        return (self._last is not None and self._last[0] is event) or event.query()

    def wait(self, event: torch.cuda.Event) -> float:
        """Wait for an event that records its time; return how many seconds ago it happened."""
        was_over = event.query()
        if not was_over:
            event.synchronize()
        now_s = at_s = time.monotonic()
        if was_over and self._last is not None:
            before, before_s = self._last
            at_s = min(now_s, before_s + before.elapsed_time(event) / 1e3)
        self._last = (event, at_s)
        return now_s - at_s


class GraphedDense:
    """Runs the dense stage as graphs: rows, embed and layers by number of events, head by number of candidates.

    What a step sends lies in one block, so that it is one copy: arrays of the head end at a fixed place, what every
    step has follows, then the arrays by event.
    """

    def __init__(self, model: HstuModel, memory: Memory, rows: DeviceRowStage, limits: GraphLimits) -> None:
        config, device = model.config, model.device
        self._model, self._memory, self._limits = model, memory, limits
        self.rows = rows
        self._event_sizes = bucket_sizes(limits.num_events)
        self._head_sizes = bucket_sizes(limits.num_candidates)
        largest, most = self._event_sizes[-1], self._head_sizes[-1]
        self._form = StepForm(config, memory.k_pages.shape[2], limits.num_sequences)
        self._row_shape = RowShape(len(config.features), self._form.num_tables, limits.num_sequences, largest)
        self.row_graphs = RowGraphs(rows, self._row_shape)
        # Rows of the candidates of the latest step, by feature of the head.
        self._head_rows = self.row_graphs.values.new_zeros((len(model.head_features), most, model.row_codec.width))
        self._x = torch.zeros((self._num_tokens(largest), config.dim), dtype=model.dtype, device=device)
        self._plan = self._make_plan()
        parts = [self._head_fields(most), self._common_fields(), self._step_fields(largest)]
        self._blocks = Blocks.allocate(sum(block_bytes(fields) for fields in parts), device)
        self._common = Staging(parts[1], self._blocks, block_bytes(parts[0]))
        self._plan.work = self._common.device["work"]
        self._terms = RequestTerms(limits.num_sequences, self._common)
        self._received_blocks = Blocks.allocate(block_bytes(self._received_fields(most)), device)
        self._received = Staging(self._received_fields(most), self._received_blocks)
        self._maker = GraphMaker()
        self._steps: dict[int, CapturedStep] = {}
        self._heads: dict[int, CapturedHead] = {}
        self._staged: dict[tuple[int, int, int], _Staged] = {}  # by number of events, of candidates, and turn
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._turn = 0
        self.clock = DeviceClock()
        self._before = _StepBefore(torch.cuda.Event(), torch.cuda.Event())
        self.last_step: CapturedStep  # graphs of the latest step, for measurements
        self.last_head: CapturedHead

    @property
    def num_graphs(self) -> int:
        return self.row_graphs.num_graphs + 2 * len(self._steps) + STEPS_IN_FLIGHT * len(self._heads)

    @property
    def buffer_bytes(self) -> int:
        """Device memory of the static buffers, without the memory pools of the graphs."""
        buffers = (self._blocks.device, self._received_blocks.device, self._head_rows, self._x)
        return self.row_graphs.buffer_bytes + sum(buffer.nbytes for buffer in buffers)

    def warm_up(self, progress: Progress) -> None:
        """Compile every kernel and capture every size, largest first so that smaller ones reuse its memory."""
        self.row_graphs.capture_background(self._limits.pages_per_move, self._limits.refill_bytes)
        total = STEPS_IN_FLIGHT * len(self._head_sizes)
        total += sum(2 + self.row_graphs.num_graphs_of(size) for size in self._event_sizes)
        for size in reversed(self._event_sizes):
            self.row_graphs.capture(size)
            self._steps[size] = self._capture_step(size)
            progress(self.num_graphs, total)
        for size in reversed(self._head_sizes):
            self._heads[size] = self._capture_head(size)
            progress(self.num_graphs, total)
        torch.cuda.synchronize()

    def launch(self, outline: Outline, wait_for_pages: WaitForPages, timeline: Timeline) -> GraphLaunch:
        """As `EagerDense.launch`; returns before the step has ended.

        At most two steps run at once. So the host blocks of this one are free: they were used two steps ago.
        """
        assert isinstance(timeline, DeviceTimeline), "a step of graphs is timed by events"
        assert self._is_within_limits(outline), "the scheduler made a step that no graph holds"
        captured = self._steps[fitting(self._event_sizes, outline.num_events)]
        head = self._heads[fitting(self._head_sizes, outline.total_candidates)]
        self.last_step, self.last_head = captured, head
        self._turn ^= 1
        turn, stream = self._turn, self.stream
        staged = self._stage(captured, head)
        terms = self._form.fill(outline, staged.arrays)
        is_alone = self.clock.has_happened(self._before.ended)
        embedded = None if is_alone else self._before.embedded
        with InStream(self.row_graphs.stream) as current:
            self.row_graphs.read(captured.size, turn, outline.total_rows, embedded, timeline)
            self._load(self._common.hosts[turn], staged.arrays, terms, len(outline.members))
            current.change_to(stream)
            staged.sent.send(turn)
            stream.wait_event(timeline.event(Mark.READ))
            timeline.mark(Mark.COMPUTING, stream)
            captured.embed.replay()
            timeline.mark(Mark.EMBEDDED, stream)
            wait_for_pages()
            captured.layers.replay()
            head.scores[turn].replay()
        ended = timeline.event(Mark.ENDED)
        self.clock.forget(ended)
        timeline.mark(Mark.ENDED, stream)
        self._before = _StepBefore(timeline.event(Mark.EMBEDDED), ended)
        timeline.leave_host()
        return GraphLaunch(self, outline, ended, self._received.hosts[turn])

    def _is_within_limits(self, step: Outline) -> bool:
        return (
            step.num_events <= self._event_sizes[-1]
            and step.total_candidates <= self._head_sizes[-1]
            and len(step.members) <= self._limits.num_sequences
        )

    def _load(self, common: HostArrays, arrays: StepArrays, terms: ModelTerms, num_requests: int) -> None:
        """Fill in what every step sends."""
        self._terms.load(common, terms, arrays.cu_tokens[: num_requests + 1])
        lengths = (arrays.cu_tokens, arrays.num_resident, arrays.num_new)
        self._plan.fill(common["work"], *lengths, self._form.shape.num_request)

    def _stage(self, captured: CapturedStep, head: CapturedHead) -> _Staged:
        """Return where the step of this turn is laid out."""
        key = (captured.size, head.size, self._turn)
        if (staged := self._staged.get(key)) is None:
            staged = self._staged[key] = self._make_staged(captured, head)
        return staged

    def _make_staged(self, captured: CapturedStep, head: CapturedHead) -> _Staged:
        tokens, heads = captured.staging.hosts[self._turn], head.staging.hosts[self._turn]
        rows = self.row_graphs.host(captured.size, self._turn)
        split = self._form.num_features * captured.size
        arrays = StepArrays(
            event_rows=rows["rows"][:split].reshape(self._form.num_features, captured.size),
            context_rows=rows["rows"][split:],
            cu_events=rows["cu_events"],
            head_at=heads["at"],
            **tokens,
        )
        return _Staged(arrays, self._blocks.part(head.staging.start, captured.staging.end))

    # Layout.

    def _num_tokens(self, size: int) -> int:
        """Return the flat rows of a step: its events, its context tokens, and one unused row for padding."""
        return -(-(size + self._row_shape.num_context + 1) // MULTIPLE) * MULTIPLE

    def _step_fields(self, size: int) -> list[StagedField]:
        sequences = self._limits.num_sequences
        per_event = [StagedField(name, (size,), torch.int32) for name in ("event_at", "actions", "positions", "gaps")]
        return [
            *per_event,
            StagedField("candidates", (min(size, self._head_sizes[-1]),), torch.int32),
            StagedField("context_at", (self._row_shape.num_context,), torch.int64),
            StagedField("write_slots", (self._num_tokens(size),), torch.int64),
            StagedField("cu_tokens", (sequences + 1,), torch.int32),
            StagedField("num_resident", (sequences,), torch.int32),
            StagedField("num_new", (sequences,), torch.int32),
            StagedField("page_table", (sequences, self._limits.num_pages), torch.int32),
        ]

    def _head_fields(self, size: int) -> list[StagedField]:
        return [StagedField("at", (size,), torch.int32)]

    def _common_fields(self) -> list[StagedField]:
        """Arrays that every step sends, of whatever size."""
        return [
            StagedField("work", tuple(self._plan.work.shape), torch.int32),
            *term_fields(self._model.config, self._limits.num_sequences),
        ]

    def _received_fields(self, num_candidates: int) -> list[StagedField]:
        return [
            StagedField("found", tuple(self.row_graphs.found.shape), torch.int64),
            StagedField("scores", (num_candidates, self._model.config.num_tasks), torch.float32),
        ]

    def _make_plan(self) -> AttentionPlan:
        config, num_tokens = self._model.config, self._x.shape[0]
        q, v = (self._x.new_empty((num_tokens, config.num_heads, dim)) for dim in (config.qk_dim, config.v_dim))
        sizes = (self._memory.k_pages.shape[2], self._limits.num_sequences)
        scores: Scores = "plain" if config.attention_bias is None else "biased"
        has_plain_scores = scores == "plain" and config.attention_window is None
        if has_plain_scores and multiplies_codes(q, v, self._memory.k_pages, self._memory.v_pages, config.dim):
            scores = "codes"
        return AttentionPlan(q, v, *sizes, config.attention_window, scores)

    # Capture.

    def _capture_step(self, size: int) -> CapturedStep:
        staging = Staging(self._step_fields(size), self._blocks, self._common.end)
        tokens = self._static_input(staging, size)
        x = self._x[: self._num_tokens(size)]
        host = staging.hosts[0]  # no sequences: safe to run while capturing
        for array in (*self._common.hosts[0].values(), *host.values()):
            array.fill(0)
        for name, nowhere in (("event_at", len(x) - 1), ("context_at", len(x) - 1), ("write_slots", -1)):
            host[name].fill(nowhere)
        self._blocks.part(self._common.start, staging.end).send(0)
        embed = self._maker.capture(partial(self._embed, tokens, staging.device["candidates"], x))
        return CapturedStep(size, staging, embed, self._maker.capture(partial(self._run_layers, x, tokens.ragged)))

    def _capture_head(self, size: int) -> CapturedHead:
        fields = self._head_fields(size)
        staging = Staging(fields, self._blocks, self._common.start - block_bytes(fields))
        for array in staging.hosts[0].values():
            array.fill(0)
        self._blocks.part(staging.start, staging.end).send(0)
        work = (partial(self._run_head, staging.device["at"], size, turn) for turn in range(STEPS_IN_FLIGHT))
        return CapturedHead(size, staging, tuple(self._maker.capture(each) for each in work))

    def _embed(self, tokens: DenseInput, candidates: Tensor, x: Tensor) -> None:
        self._model.embed(tokens, x)
        # What follows is read later in the step, and overwritten by the row reads of the next one.
        self._received.device["found"].copy_(self.row_graphs.found)
        for feature, rows in zip(self._model.head_features, self._head_rows, strict=True):
            torch.index_select(tokens.event_rows[feature], 0, candidates, out=rows[: len(candidates)])

    def _run_layers(self, x: Tensor, batch: RaggedBatch) -> None:
        batch = replace(batch, v_scale=self._terms.v_scale(x.shape[0]))
        y = self._model.layers(x, self._memory.k_pages, self._memory.v_pages, batch)
        if y.data_ptr() != x.data_ptr():
            x.copy_(y)

    def _run_head(self, at: Tensor, size: int, turn: int) -> None:
        states, query = self._x.index_select(0, at), self._terms.of_candidates(at)
        self._received.device["scores"][:size].copy_(self._model.head(states, self._head_rows[:, :size], query))
        self._received_blocks.part(0, block_bytes(self._received_fields(size))).receive(turn)

    def _static_input(self, staging: Staging, size: int) -> DenseInput:
        config, device = self._model.config, staging.device
        rows, split = self.row_graphs.values_of(size), len(config.features) * size
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
