"""The rows of a delta that become visible together, and what takes them: an engine, or the keeper of shared tables."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from helmrec.deltas.delta import NamedModel
from helmrec.engine.intake import RowUpdate
from helmrec.engine.runner import StagedRows
from helmrec.model.config import ModelConfig
from helmrec.types import RowPosition


class TakesRows(Protocol):
    """What a consumer needs of an engine, or of the keeper of shared tables."""

    @property
    def model_config(self) -> ModelConfig: ...

    def stage_rows(self, update: RowUpdate) -> StagedRows: ...

    def apply_rows(self, update: StagedRows, position: RowPosition | None = None) -> None: ...

    def start_at(self, position: RowPosition) -> None: ...


class DeltaHead(NamedTuple):
    """A delta without its rows, whose memory the reading thread frees once they are staged."""

    stream: str
    sequence: int
    made_s: float
    model: NamedModel | None
    is_skip: bool


@dataclass(frozen=True, slots=True, eq=False)
class RowSlice:
    """Rows of a delta that become visible together."""

    staged: StagedRows
    after: RowPosition  # once they are visible
    delta: DeltaHead

    @property
    def sequence(self) -> int:
        return self.delta.sequence

    @property
    def num_rows(self) -> int:
        return self.staged.rows.size
