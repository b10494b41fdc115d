"""The requests and results of the public interface."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = Sequence[int] | NDArray[np.integer]
IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
UserId = int | str  # the number 7 and the string "7" are two users


@dataclass(frozen=True, slots=True)
class RankRequest:
    """Rank `candidates` for a user with this history.

    `items`, `actions`, `timestamps` and every entry of `features` have one value per event, oldest first.
    A client that sends only the last events of a history says with `first_event` how many came before
    them; without it every call would look like a new history. `context` holds one row id for each of the
    model's context tables. `user_id` is a number, or a string of at most 256 bytes in UTF-8.
    """

    user_id: UserId
    items: Ids
    actions: Ids
    timestamps: Ids
    candidates: Ids
    features: Mapping[str, Ids] = field(default_factory=dict)
    candidate_features: Mapping[str, Ids] = field(default_factory=dict)
    context: Mapping[str, int] = field(default_factory=dict)
    first_event: int = 0
    request_time: int | None = None
    deadline_ms: float | None = None


@dataclass(frozen=True, slots=True)
class LabelledRequest:
    """A request, and the labels of its candidates for the first task, if they are known."""

    request: RankRequest
    labels: FloatArray | None = None


# These two are made for each request by the thread that steps the engine, and frozen ones take three times as long.
@dataclass(slots=True)
class Timing:
    """The time of a request by stage."""

    queue_ms: float
    plan_ms: float
    compute_ms: float

    @property
    def total_ms(self) -> float:
        return self.queue_ms + self.plan_ms + self.compute_ms


@dataclass(frozen=True, slots=True)
class RowPosition:
    """A position in the stream of row deltas: rows up to it are visible, and no others of the stream."""

    sequence: int = 0  # the last delta that is visible as a whole; 0: none
    offset: int = 0  # rows of the next delta that are visible already: large deltas are applied in slices


@dataclass(slots=True)
class RankResult:
    """Scores (logits, one column per task), and the work and time they took."""

    scores: NDArray[np.float32]  # (num_candidates, num_tasks)
    reused_tokens: int
    computed_tokens: int
    row_hits: int
    row_misses: int  # rows read from the host: a row that a step reads several times counts once
    window_start: int  # absolute index of the first event the model saw
    truncated_events: int  # events sent that lie before the window
    timing: Timing
    row_position: RowPosition = RowPosition()  # of the rows it was scored with


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """Compute a user's history before its rank request arrives.

    Fields of the history as in `RankRequest`. `num_candidates` and `budget_ms` describe the expected rank request;
    `hold_ms` is how long the computed prefix is held for it, up to the engine's bound.
    """

    user_id: UserId
    items: Ids
    actions: Ids
    timestamps: Ids
    features: Mapping[str, Ids] = field(default_factory=dict)
    context: Mapping[str, int] = field(default_factory=dict)
    first_event: int = 0
    num_candidates: int = 0
    budget_ms: float | None = None
    hold_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Lease:
    """A promise to hold a user's prefix until a rank request has used it, or until `expires_s`."""

    token: str
    user_id: UserId
    expires_s: float  # by the engine's clock
    hold_ms: float  # from the grant to `expires_s`
    is_shortened: bool = False  # the signal asked for more than `RelayConfig.max_hold_ms`


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """The decision about a prefill request, and its lease if one was granted."""

    verdict: str  # a value of `relay.trigger.Verdict`
    lease: Lease | None


class AttentionWindow(NamedTuple):
    """Local attention: a token sees `length` tokens before it. The last `tail` before the candidates see all of them.

    A candidate stands right after the last token before the candidates. With a tail, it sees all of them.
    """

    length: int
    tail: int = 0
