"""Settings of synthetic traffic, which TOML files can hold.

`generate` makes a trace from them; `families` has named ones.
"""

import tomllib
from pathlib import Path
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from helmrec.config import Frozen
from helmrec.errors import ConfigError


def lanes_for(num_items: int) -> int:
    """The number of lanes: at most 256, with at least 1,024 items per lane if possible.

    The items of a block are equally popular, so more lanes would flatten the head of a small catalogue.
    """
    return min(256, 1 << max(0, (num_items // 1_024).bit_length() - 1))


def _as_pair(value: object) -> object:
    """A single number is a constant ramp."""
    return (value, value) if isinstance(value, int | float) else value


_PAIR = BeforeValidator(_as_pair)
_Positive = Annotated[float, Field(gt=0)]
_Count = Annotated[int, Field(ge=0)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Exponent = Annotated[float, Field(ge=0, le=4)]
PositiveRamp = Annotated[tuple[_Positive, _Positive], _PAIR]
CountRamp = Annotated[tuple[_Count, _Count], _PAIR]
ShareRamp = Annotated[tuple[_Share, _Share], _PAIR]
ExponentRamp = Annotated[tuple[_Exponent, _Exponent], _PAIR]


class Phase(Frozen):
    """A period of traffic. A pair of numbers is a ramp: from the first at the start to the second at the end."""

    name: str = Field(min_length=1)
    duration_s: float = Field(gt=0)
    rate: PositiveRamp = Field((100, 100), description="requests per second, Poisson")
    hot_share: ShareRamp = Field((0.7, 0.7), description="share of requests made by hot users")
    hot_users: int = Field(2_000, ge=1, description="size of the hot set")
    hot_first: CountRamp = Field(
        (0, 0),
        description="first user of the hot set: other values select other users, a ramp changes them gradually",
    )
    history: PositiveRamp = Field((6_700, 6_700), description="median length of a history at the user's first request")
    item_exponent: ExponentRamp = Field((1.2, 1.2), description="Zipf exponent of item popularity")
    flash_share: ShareRamp = Field((0, 0), description="share of draws that go to flash items")
    flash_items: int = Field(1_024, ge=1, description="number of flash items, rounded up to complete blocks")
    drift_items_per_hour: float = Field(0.0, ge=0, description="new items that enter at the top of popularity")


class Users(Frozen):
    """How often users return, and the length of their histories."""

    hot_exponent: float = Field(0.6, ge=0, le=4, description="Zipf exponent of visits over the hot set")
    history_sigma: float = Field(0.35, ge=0, le=4, description="spread of the log of history lengths")
    min_history: int = Field(1, ge=0)
    max_history: int = Field(14_000, ge=1)
    new_events: float = Field(8.0, ge=1, description="mean events appended between two visits")
    cold_return: float = Field(0.2, ge=0, le=1, description="chance that a cold request is by a user seen before")
    return_median_s: float = Field(93.0, gt=0, description="of cold users; the published news-click median")
    return_sigma: float = Field(7.2, ge=0, description="spread of its log; 7.2 gives a 75th percentile of 3.3 hours")

    @model_validator(mode="after")
    def _has_room(self) -> Self:
        if self.max_history < self.min_history:
            raise ValueError(f"max_history must be at least min_history ({self.min_history}), not {self.max_history}")
        return self


class Workload(Frozen):
    """Everything that determines a synthetic trace except its seed."""

    name: str = Field(min_length=1)
    num_items: int = Field(1_000_000, ge=1)
    num_lanes: int | None = Field(None, ge=1, description="default: depends on the number of items")
    item_shift: float = Field(4.0, gt=0, description="ranks well below it are equally popular")
    num_candidates: int = Field(2_048, ge=1)
    num_actions: int = Field(4, ge=1, le=256)
    epoch_s: float = Field(10.0, gt=0, description="interval between changes of ramped or drifting popularity")
    repeat: int = Field(1, ge=1, description="number of times that the phases are repeated")
    opening: tuple[Phase, ...] = Field((), description="phases before these, not repeated, such as a warm-up")
    users: Users = Users()
    phases: tuple[Phase, ...] = Field(min_length=1)

    @property
    def lanes(self) -> int:
        return self.num_lanes or lanes_for(self.num_items)

    @property
    def all_phases(self) -> tuple[Phase, ...]:
        """In order of time."""
        return self.opening + self.phases * self.repeat

    @property
    def duration_s(self) -> float:
        return sum(phase.duration_s for phase in self.all_phases)


def load_workload(path: Path) -> Workload:
    """Read a workload from TOML; unknown keys are errors."""
    try:
        return Workload(**tomllib.loads(path.read_text()))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read workload {path}: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
