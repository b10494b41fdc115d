"""Timed steps as values that can be written to a file and fitted again."""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from helmrec.errors import ConfigError
from helmrec.types import FloatArray


@dataclass(frozen=True, slots=True)
class MeasuredWork:
    """Work of one step."""

    num_requests: int
    num_tokens: int
    num_pairs: float
    hit_rows: int
    missed_rows: int
    loaded_bytes: float  # KV pages from the host


@dataclass(frozen=True, slots=True)
class Timed:
    """A single step, or a burst of steps that were all queued at its start."""

    case: str
    steps: tuple[MeasuredWork, ...]
    ends_ms: tuple[float, ...]  # when results were available, since the first step was planned
    host_ms: float | None = None  # until the first step was launched; None in a burst
    background_ms: float | None = None  # from the results to when the next step could be planned

    @property
    def is_burst(self) -> bool:
        return len(self.steps) > 1

    @property
    def span_ms(self) -> float:
        """Time to compare with a prediction: of a burst, from the first results to the last."""
        return self.ends_ms[-1] - (self.ends_ms[0] if self.is_burst else 0.0)


@dataclass(frozen=True, slots=True)
class Measured:
    """All runs timed with one model on one device."""

    device: str
    profile: str
    rows_per_token: int
    row_bytes: int
    overlaps: bool
    sorted_from_rows: int  # misses from which a step reads them in order of address; 0: always
    hit_gb_per_s: float
    intake_ms: float
    made: dict[str, str]  # command, commit, date, versions
    timed: tuple[Timed, ...]

    def works(self) -> FloatArray:  # (steps, columns as `replay` takes them)
        row_bytes = self.row_bytes
        return np.array(
            [
                (
                    step.num_requests,
                    step.num_tokens,
                    step.num_pairs,
                    step.hit_rows + step.missed_rows,
                    step.hit_rows * row_bytes,
                    step.missed_rows * row_bytes,
                    step.missed_rows,
                    step.loaded_bytes,
                )
                for each in self.timed
                for step in each.steps
            ],
            np.float64,
        )


class _File(msgspec.Struct, frozen=True):
    measured: list[Measured]


def write_measured(path: Path, measured: list[Measured]) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(_File(measured)), indent=1) + b"\n")


def read_measured(path: Path) -> list[Measured]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_File).measured
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"cannot read timed steps {path}: {error}") from None
