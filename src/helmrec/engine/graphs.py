"""The dense stage as CUDA graphs: one per geometric size, so that launches cost nothing and shapes stay few.

A step is padded to the next size. Padding tokens belong to no sequence, read no rows, are written to a row nobody
reads and keep no K/V, so they cost arithmetic only. All graphs share one memory pool and run one at a time.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from helmrec.engine.assemble import Assembly
from helmrec.engine.dense import EagerDense, Memory, Progress, Scored, StepRows
from helmrec.engine.padding import (
    EMPTY,
    NOWHERE,
    RowLayout,
    StepArrays,
    context_places,
    pad_candidates,
    pad_rows,
    pad_tokens,
    padded_places,
)
from helmrec.engine.staging import Blocks, Field, Staging, block_bytes
from helmrec.kernels.attention_plan import AttentionPlan
from helmrec.kernels.ragged import RaggedBatch
from helmrec.kernels.row_gather import SKIP
from helmrec.model.hstu import DenseInput, HstuModel
from helmrec.types import IntArray

_GROWTH = 1.125  # at most an eighth of a step is padding
_SMALLEST = 128
_MULTIPLE = 16
_ORDER_FROM = 16_384  # misses of a step from which sorting pays: with 1 KiB rows it did at 16k, not at 8k


def bucket_sizes(largest: int) -> list[int]:
    """Sizes that grow by an eighth, up to `largest`."""
    sizes: list[int] = []
    size = float(_SMALLEST)
    while not sizes or sizes[-1] < largest:
        sizes.append(-(-int(size) // _MULTIPLE) * _MULTIPLE)
        size *= _GROWTH
    return sizes


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest step that is captured."""

    num_events: int
    num_sequences: int
    num_candidates: int
    num_pages: int  # of one sequence's page table


@dataclass(frozen=True, slots=True)
class Captured:
    """Graphs of one size over their own view of the shared blocks."""

    size: int
    staging: Staging
    graphs: tuple[torch.cuda.CUDAGraph, ...]
    gathers: tuple[torch.cuda.CUDAGraph, ...] = ()  # of a step: rows as they come, and in order of address


class GraphedDense:
    """Gather, embed and layers by number of events, head by number of candidates."""

    def __init__(self, model: HstuModel, memory: Memory, limits: Limits) -> None:
        config, device = model.config, model.device
        self._model, self._memory, self._limits = model, memory, limits
        self._eager = EagerDense(model, memory)
        self._num_context = (len(config.user_context) + len(config.request_context)) * limits.num_sequences
        self._event_sizes = bucket_sizes(limits.num_events)
        self._head_sizes = bucket_sizes(limits.num_candidates)
        self._head_features = np.array(model.head_features)
        largest, most = self._event_sizes[-1], self._head_sizes[-1]
        self._blocks = Blocks.allocate(block_bytes(self._step_fields(largest)), device)
        self._head_blocks = Blocks.allocate(block_bytes(self._head_fields(most)), device)
        num_rows = len(config.features) * largest + self._num_context
        self._rows = torch.zeros((num_rows, config.row_dim), dtype=getattr(torch, config.row_dtype), device=device)
        self._x = torch.zeros((self._num_tokens(largest), config.dim), dtype=model.dtype, device=device)
        self._scores = torch.zeros((most, config.num_tasks), dtype=torch.float32, device=device)
        self._plan = self._make_plan()
        self._pool = torch.cuda.graph_pool_handle()
        self._steps: dict[int, Captured] = {}
        self._heads: dict[int, Captured] = {}
        self.last_step: Captured  # what served the latest step, for those who time it
        self.last_head: Captured

    @property
    def num_graphs(self) -> int:
        captured = (*self._steps.values(), *self._heads.values())
        return sum(len(one.graphs) + len(one.gathers) for one in captured)

    @property
    def buffer_bytes(self) -> int:
        """Device memory of the static buffers; the graphs' shared pool comes on top."""
        buffers = (self._blocks.device, self._head_blocks.device, self._rows, self._x, self._scores)
        return sum(buffer.nbytes for buffer in buffers)

    def warm_up(self, progress: Progress) -> None:
        """Compile every kernel and capture every size, largest first so that smaller ones reuse its memory."""
        total = 4 * len(self._event_sizes) + len(self._head_sizes)
        for size in reversed(self._event_sizes):
            self._steps[size] = self._capture_step(size)
            progress(self.num_graphs, total)
        for size in reversed(self._head_sizes):
            self._heads[size] = self._capture_head(size)
            progress(self.num_graphs, total)
        torch.cuda.synchronize()

    @torch.inference_mode()
    def score(self, step: Assembly, rows: StepRows) -> Scored:
        """As `EagerDense.score`, to which a step beyond the limits falls back."""
        if not self._is_within_limits(step):
            return self._eager.score(step, rows)
        captured = self._steps[_fitting(self._event_sizes, step.event_at.size)]
        absent_at = self._load_step(captured, step, rows)
        self.last_step = captured
        as_they_come, in_order = captured.gathers
        for graph in (in_order if rows.absent.size >= _ORDER_FROM else as_they_come, *captured.graphs):
            graph.replay()
        logits = self._score_candidates(step, captured.size)
        return Scored(logits, self._rows, absent_at)

    def _is_within_limits(self, step: Assembly) -> bool:
        return (
            step.event_at.size <= self._event_sizes[-1]
            and step.candidates.size <= self._head_sizes[-1]
            and len(step.num_new) <= self._limits.num_sequences
        )

    def _score_candidates(self, step: Assembly, size: int) -> Tensor:
        num = step.candidates.size
        captured = self._heads[_fitting(self._head_sizes, num)]
        host = captured.staging.host
        pad_candidates(host["at"], host["rows"], step.candidates, step.event_at, self._head_features * size)
        captured.staging.send()
        self.last_head = captured
        captured.graphs[0].replay()
        return self._scores[:num]

    # Layout.

    def _num_tokens(self, size: int) -> int:
        """Flat rows of a step: its events, its context tokens, and one row for what belongs nowhere."""
        return -(-(size + self._num_context + 1) // _MULTIPLE) * _MULTIPLE

    def _step_fields(self, size: int) -> list[Field]:
        sequences = self._limits.num_sequences
        per_event = [Field(name, (size,), torch.int64) for name in ("event_at", "actions", "positions", "gaps")]
        return [
            *per_event,
            Field("sources", (len(self._model.config.features) * size + self._num_context,), torch.int32),
            Field("context_at", (self._num_context,), torch.int64),
            Field("write_slots", (self._num_tokens(size),), torch.int64),
            Field("cu_tokens", (sequences + 1,), torch.int32),
            Field("num_resident", (sequences,), torch.int32),
            Field("num_new", (sequences,), torch.int32),
            Field("page_table", (sequences, self._limits.num_pages), torch.int32),
        ]

    def _head_fields(self, size: int) -> list[Field]:
        return [Field("at", (size,), torch.int64), Field("rows", (len(self._model.head_features), size), torch.int64)]

    def _rows_of(self, size: int) -> Tensor:
        """(features * size + context, row_dim): where a step of this size wants its rows."""
        return self._rows[: len(self._model.config.features) * size + self._num_context]

    def _make_plan(self) -> AttentionPlan:
        config, num_tokens = self._model.config, self._x.shape[0]
        q, v = (self._x.new_empty((num_tokens, config.num_heads, dim)) for dim in (config.qk_dim, config.v_dim))
        return AttentionPlan(q, v, self._memory.k_pages.shape[2], self._limits.num_sequences)

    def _load_step(self, captured: Captured, step: Assembly, rows: StepRows) -> IntArray:
        """Fill the staging block and start its copy; returns where the absent rows will lie."""
        host, num_features = captured.staging.host, len(self._model.config.features)
        context_at = context_places(step, self._limits.num_sequences)
        pad_tokens(StepArrays.staged(host), StepArrays.of(step), context_at)
        layout = RowLayout(num_features, step.event_at.size, captured.size, context_at)
        pad_rows(host["sources"], rows.slots, layout, SKIP)
        absent_at = padded_places(rows.absent, layout)
        host["sources"][absent_at] = ~rows.missed  # what the gather kernel takes for an absent row
        captured.staging.send()
        self._plan.load(step.cu_tokens, step.num_resident, step.num_new, len(self._model.config.request_context))
        return absent_at

    # Capture.

    def _capture_step(self, size: int) -> Captured:
        staging = Staging(self._step_fields(size), self._blocks)
        tokens = self._static_input(staging, size)
        x = self._x[: self._num_tokens(size)]
        self._load_nothing(staging, size)
        graphs = (
            self._capture(partial(self._embed_into, x, tokens)),
            self._capture(partial(self._run_layers, x, tokens.ragged)),
        )
        return Captured(size, staging, graphs, self._capture_gathers(staging, size))

    def _load_nothing(self, staging: Staging, size: int) -> None:
        """A step of no sequences, safe to run while compiling and capturing."""
        layout = RowLayout(len(self._model.config.features), 0, size, NOWHERE)
        pad_tokens(StepArrays.staged(staging.host), EMPTY, NOWHERE)
        pad_rows(staging.host["sources"], np.empty(0, np.int32), layout, SKIP)
        padded_places(NOWHERE, layout)  # compiles
        staging.send()
        self._plan.load(EMPTY.cu_tokens, EMPTY.num_resident, EMPTY.num_new, 0)

    def _capture_gathers(self, staging: Staging, size: int) -> tuple[torch.cuda.CUDAGraph, ...]:
        """Resident rows from the arena, the others from the host, in one launch."""
        from helmrec.kernels import triton_row_gather  # noqa: PLC0415 - triton is not on every machine

        rows = (self._memory.rows, self._memory.master.rows, staging.device["sources"], self._rows_of(size))
        gathers = (triton_row_gather.gather_rows, triton_row_gather.gather_in_order)
        return tuple(self._capture(partial(gather, *rows)) for gather in gathers)

    def _capture_head(self, size: int) -> Captured:
        staging = Staging(self._head_fields(size), self._head_blocks)
        pad_candidates(staging.host["at"], staging.host["rows"], NOWHERE, NOWHERE, self._head_features)
        staging.send()
        return Captured(size, staging, (self._capture(partial(self._run_head, staging.device, size)),))

    def _capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        with torch.inference_mode():
            work()  # compiles, and lets libraries make their workspaces
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                work()
        return graph

    def _embed_into(self, x: Tensor, tokens: DenseInput) -> None:
        x.copy_(self._model.embed(tokens, x.shape[0]))

    def _run_layers(self, x: Tensor, batch: RaggedBatch) -> None:
        y = self._model.layers(x, self._memory.k_pages, self._memory.v_pages, batch)
        if y.data_ptr() != x.data_ptr():
            x.copy_(y)

    def _run_head(self, where: dict[str, Tensor], size: int) -> None:
        rows = [self._rows.index_select(0, index) for index in where["rows"]]
        self._scores[:size].copy_(self._model.head(self._x.index_select(0, where["at"]), rows))

    def _static_input(self, staging: Staging, size: int) -> DenseInput:
        config, device = self._model.config, staging.device
        rows, split = self._rows_of(size), len(config.features) * size
        num_tables = len(config.user_context) + len(config.request_context)
        ragged = {name: device[name] for name in ("cu_tokens", "num_resident", "num_new", "page_table", "write_slots")}
        return DenseInput(
            event_rows=rows[:split].unflatten(0, (len(config.features), size)),
            event_at=device["event_at"],
            actions=device["actions"],
            positions=device["positions"],
            gaps=device["gaps"],
            context_rows=rows[split:],
            context_at=device["context_at"],
            context_counts=(self._limits.num_sequences,) * num_tables,
            ragged=RaggedBatch(
                **ragged,
                num_context=len(config.request_context),
                page_tokens=self._memory.k_pages.shape[2],
                plan=self._plan,
            ),
        )


def _fitting(sizes: Sequence[int], num: int) -> int:
    """The smallest of the ascending sizes that holds `num`."""
    return sizes[bisect_left(sizes, num)]
