"""The dense stage of a step, run as it comes: any device, any shape. The twin of `graphs.py`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from helmrec.engine.assemble import Assembly
from helmrec.kernels.ragged import RaggedBatch
from helmrec.memory.embedding_cache import ABSENT
from helmrec.memory.host_tier import RowMaster
from helmrec.model.hstu import DenseInput, HstuModel
from helmrec.types import IntArray

Progress = Callable[[int, int], None]  # told how many of how many are done


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """The rows of a step, in the order of `Assembly.rows`, and where they are."""

    rows: IntArray
    slots: NDArray[np.int32]  # arena slot of each row, or ABSENT
    absent: IntArray  # which of them are absent

    @classmethod
    def find(cls, rows: IntArray, slots: NDArray[np.int32]) -> "StepRows":
        return cls(rows, slots, np.flatnonzero(slots == ABSENT))

    @property
    def missed(self) -> IntArray:
        return self.rows[self.absent]


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """What a step left on the device, until the next one."""

    logits: Tensor  # (candidates, tasks) float32
    rows: Tensor  # (any, row_dim) rows it read
    absent_at: IntArray  # where in them its absent rows lie


class Dense(Protocol):
    """Scores one laid-out step."""

    @property
    def num_graphs(self) -> int: ...

    @property
    def buffer_bytes(self) -> int:
        """Device memory it keeps for itself."""

    def score(self, step: Assembly, rows: StepRows) -> Scored:
        """Logits of all candidates; K/V of new tokens land in their pages."""

    def warm_up(self, progress: Progress) -> None:
        """Do everything that must not happen during the first request."""


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """What the dense stage reads and writes."""

    k_pages: Tensor  # (layers, pages, page_tokens, heads, qk)
    v_pages: Tensor
    rows: Tensor  # (slots, row_dim)
    master: RowMaster


class EagerDense:
    """Operation by operation."""

    num_graphs = 0
    buffer_bytes = 0

    def __init__(self, model: HstuModel, memory: Memory) -> None:
        self._model = model
        self._memory = memory

    def warm_up(self, progress: Progress) -> None:
        """Nothing to prepare: kernels compile when they first run."""

    @torch.inference_mode()
    def score(self, step: Assembly, rows: StepRows) -> Scored:
        model, values = self._model, self._gather(rows)
        tokens = self._input(step, values)
        x = model.embed(tokens, int(step.cu_tokens[-1]))
        x = model.layers(x, self._memory.k_pages, self._memory.v_pages, tokens.ragged)
        chosen = self._put(step.candidates)
        logits = model.head(x[tokens.event_at[chosen]], [tokens.event_rows[i][chosen] for i in model.head_features])
        return Scored(logits, values, rows.absent)

    def _gather(self, rows: StepRows) -> Tensor:  # (rows, row_dim) on the device
        missed = self._memory.master.gather(rows.missed).to(self._model.device)
        if rows.absent.size == rows.slots.size:
            return missed
        values = self._memory.rows.index_select(0, self._put(np.maximum(rows.slots, 0)))
        values[self._put(rows.absent)] = missed
        return values

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
            ),
        )

    def _put(self, array: NDArray[np.int64] | NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._model.device)
