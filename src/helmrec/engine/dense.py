"""The dense stage of a step, operation by operation: any device, any shape. The plain twin of `graphs.py`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from helmrec.engine.assemble import Assembly, Outline, StepForm, assemble_outline
from helmrec.engine.row_stage import Reading, RowStage
from helmrec.engine.timeline import Mark, Timeline
from helmrec.kernels.kv_rounding import Pages
from helmrec.kernels.ragged import RaggedBatch
from helmrec.model.hstu import DenseInput, HstuModel, QueryTerms

Progress = Callable[[int, int], None]  # called with the number done and the total
WaitForPages = Callable[[], None]  # makes the current stream wait for pages that come from the host


class Scored(NamedTuple):
    """The scores and row misses of a step."""

    logits: NDArray[np.float32]  # (candidates, tasks)
    row_misses: list[int]  # by request: rows that came from the host
    ended_ago_s: float = 0.0  # time between the end on the device and the wait of the host


class Launched(Protocol):
    """A launched step."""

    def wait(self) -> Scored:
        """Wait until the step has ended and return its scores; may be called once."""

    def admit(self) -> None:
        """Admit the rows that the step missed to the cache; off the request path."""


class Dense(Protocol):
    """Scores laid-out steps."""

    @property
    def rows(self) -> RowStage: ...

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """Stream in which steps compute; None is the caller's."""

    @property
    def num_graphs(self) -> int: ...

    @property
    def buffer_bytes(self) -> int:
        """Device memory of its own buffers."""

    def launch(self, outline: Outline, wait_for_pages: WaitForPages, timeline: Timeline) -> Launched:
        """Start a step in `stream`; K/V of new tokens are in their pages before a later step reads them.

        `wait_for_pages` is called after the embedding stage was launched, so that pages load at the same time.
        `timeline` is marked where stages begin and end.
        """

    def warm_up(self, progress: Progress) -> None:
        """Compile and capture everything that the first request must not wait for."""


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """The K/V pages that the dense stage reads and writes."""

    k_pages: Pages  # (layers, pages, page_tokens, heads, qk)
    v_pages: Pages


@dataclass(frozen=True, slots=True, eq=False)
class EagerLaunch:
    """A step launched operation by operation in the caller's stream."""

    logits: Tensor
    reading: Reading

    def wait(self) -> Scored:
        return Scored(self.logits.cpu().numpy(), self.reading.count_misses().tolist())

    def admit(self) -> None:
        self.reading.admit()


class EagerDense:
    """Runs the dense stage operation by operation."""

    stream = None
    num_graphs = 0
    buffer_bytes = 0

    def __init__(self, model: HstuModel, memory: Memory, rows: RowStage) -> None:
        self._model = model
        self._memory = memory
        self._form = StepForm(model.config, memory.k_pages.shape[2])
        self.rows = rows

    def warm_up(self, progress: Progress) -> None:
        """Do nothing: kernels compile at their first call."""

    @torch.inference_mode()
    def launch(self, outline: Outline, wait_for_pages: WaitForPages, timeline: Timeline) -> EagerLaunch:
        step = assemble_outline(outline, self._form)
        timeline.leave_host()  # on a card, the following calls only enqueue work
        timeline.mark(Mark.READING, self.rows.stream)
        reading = self.rows.read(step)
        timeline.mark(Mark.READ, self.rows.stream)
        timeline.mark(Mark.COMPUTING)
        logits = self.score(step, reading.values, wait_for_pages)
        timeline.mark(Mark.ENDED)
        return EagerLaunch(logits, reading)

    @torch.inference_mode()
    def score(self, step: Assembly, values: Tensor, wait_for_pages: WaitForPages) -> Tensor:  # (candidates, tasks)
        """Compute logits. values: (rows, width), stored as in the pool, in the order of `Assembly.rows`."""
        model, tokens = self._model, self._input(step, values)
        num_tokens = int(step.cu_tokens[-1])
        x = torch.empty((num_tokens + 1, model.config.dim), dtype=model.dtype, device=model.device)
        model.embed(tokens, x)  # to the row after the last token: candidates that are no tokens
        wait_for_pages()
        x = model.layers(x[:num_tokens], self._memory.k_pages, self._memory.v_pages, tokens.ragged)
        rows = tokens.event_rows[model.head_features][:, self._put(step.candidates)]
        return model.head(x[self._put(step.head_at)], rows, tokens.query)

    def _input(self, step: Assembly, values: Tensor) -> DenseInput:
        num_features, num_events = step.event_rows.shape
        split = num_features * num_events
        return DenseInput(
            event_rows=values[:split].unflatten(0, (num_features, num_events)),
            event_at=self._put(step.event_at),
            actions=self._put(step.actions),
            positions=self._put(step.positions),
            gaps=self._put(step.gaps),
            context_rows=values[split:],
            context_at=self._put(step.context_at),
            context_counts=step.context_counts,
            ragged=RaggedBatch(
                cu_tokens=self._put(step.cu_tokens),
                num_resident=self._put(step.num_resident),
                num_new=self._put(step.num_new),
                page_table=self._put(step.page_table),
                write_slots=self._put(step.write_slots),
                num_context=len(self._model.config.request_context),
                page_tokens=self._memory.k_pages.shape[2],
                v_scale=self._v_scale(step),
                window=self._model.config.attention_window,
                num_full=None if step.terms.num_full is None else self._put(step.terms.num_full),
                times=None if step.terms.times is None else self._put(step.terms.times),
                cu_times=None if step.terms.cu_times is None else self._put(step.terms.cu_times),
            ),
            query=self._query_terms(step),
        )

    def _v_scale(self, step: Assembly) -> Tensor | None:
        """Return the factors of values: with a query frame, attention is divided by the length of the request."""
        if step.terms.query is None:
            return None
        scale = np.repeat(1 / step.terms.query.lengths, np.diff(step.cu_tokens))
        return self._put(scale.astype(np.float32)[:, None, None])

    def _query_terms(self, step: Assembly) -> QueryTerms | None:
        if step.terms.query is None:
            return None
        return QueryTerms(
            context_gaps=self._put(step.terms.query.context_gaps[step.context_owner]),
            context_kept=self._put(step.terms.query.context_kept[step.context_owner, step.context_table][:, None]),
            clocks=self._put(np.repeat(step.terms.query.clocks, step.num_candidates, axis=0)),
        )

    def _put(self, array: NDArray[np.int64] | NDArray[np.int32] | NDArray[np.float32]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._model.device)
