"""Types of the bodies and answers of `/v1`, used for decoding, encoding and the OpenAPI document."""

from dataclasses import fields
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType

from helmrec.errors import RequestError
from helmrec.history.events import Events, NewEvents
from helmrec.types import RankRequest, RankResult, RowPosition, Timing
from helmrec.user_ids import MAX_USER_BYTES

Count = Annotated[int, Meta(ge=0)]
UserIdField = (
    Annotated[int, Meta(ge=0)] | Annotated[str, Meta(min_length=1, max_length=MAX_USER_BYTES, description="UTF-8")]
)
MAX_APPENDS = 1_000  # of one bulk call


class HistoryBody(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A user and a history; events run from the oldest to the newest.

    Without any field of events, the history is the one the server keeps of the user.
    """

    user_id: UserIdField
    items: Annotated[list[int], Meta(description="one id per event")] | UnsetType = UNSET
    actions: Annotated[list[int], Meta(description="one per event")] | UnsetType = UNSET
    timestamps: Annotated[list[int], Meta(description="one per event, never running backwards")] | UnsetType = UNSET
    features: Annotated[dict[str, list[int]], Meta(description="by table: one id per event")] = {}
    context: Annotated[dict[str, int], Meta(description="by table: one id")] = {}
    first_event: Annotated[int, Meta(ge=0, description="number of events before those sent")] = 0

    @property
    def is_without_events(self) -> bool:
        """Whether the history is to be the stored one."""
        given = (self.items is not UNSET, self.actions is not UNSET, self.timestamps is not UNSET)
        return not (any(given) or self.features or self.first_event)

    def history(self, stored: Events | None) -> dict[str, Any]:
        """Return the fields that all requests have; RequestError if the client did not send one of them."""
        source, history = self if stored is None else stored, {}
        for name in ("items", "actions", "timestamps", "features", "first_event"):
            history[name] = getattr(source, name)
            if history[name] is UNSET:
                raise RequestError(name, None, "is required")
        return {"user_id": self.user_id, "context": self.context, **history}


class RankBody(HistoryBody, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rank candidates for a user with this history; events run from the oldest to the newest.

    Without any field of events, the history is the one the server keeps of the user.
    """

    candidates: Annotated[list[int], Meta(description="ids to score")]
    candidate_features: Annotated[dict[str, list[int]], Meta(description="by table: one id per candidate")] = {}
    request_time: Annotated[Count | None, Meta(description="now, on the clock of the timestamps")] = None
    deadline_ms: Annotated[float, Meta(gt=0)] | None = None

    def request(self, header_deadline_ms: float | None, stored: Events | None = None) -> RankRequest:
        """Convert to the engine's type. If header and body both have a deadline, the smaller one applies."""
        return RankRequest(
            **self.history(stored),
            candidates=self.candidates,
            candidate_features=self.candidate_features,
            request_time=self.request_time,
            deadline_ms=tighter(self.deadline_ms, header_deadline_ms),
        )


class RankAnswer(Struct, frozen=True):
    """Scores (logits), and how they were computed."""

    scores: Annotated[list[list[float]], Meta(description="a row per candidate, a column per task")]
    reused_tokens: int
    computed_tokens: int
    row_hits: int
    row_misses: int
    window_start: Annotated[int, Meta(description="absolute index of the first event the model saw")]
    truncated_events: Annotated[int, Meta(description="events sent that lie before the window")]
    timing: Timing
    history_version: Annotated[int | None, Meta(description="of the stored history, where that was used")] = None
    row_position: Annotated[RowPosition, Meta(description="of the rows in the stream of row deltas")] = RowPosition()

    @classmethod
    def of(cls, result: RankResult, history_version: int | None) -> "RankAnswer":
        others: dict[str, Any] = {name: getattr(result, name) for name in _RESULT_FIELDS}
        return cls(scores=result.scores.tolist(), history_version=history_version, **others)

    def result(self) -> RankResult:
        return RankResult(np.array(self.scores, np.float32), *(getattr(self, name) for name in _RESULT_FIELDS))


_RESULT_FIELDS = [field.name for field in fields(RankResult) if field.name != "scores"]


class EventsBody(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """New events of a user, oldest first; every field has one value per event."""

    user_id: UserIdField
    base_version: (
        Annotated[
            int,
            Meta(
                ge=0,
                description="how many events the user had before these; 0 if new. Without it they are appended to "
                "what is there: for one writer, whose repeated calls are not recognised",
            ),
        ]
        | UnsetType
    ) = UNSET
    items: Annotated[list[int], Meta(description="one id per event")]
    actions: Annotated[list[int], Meta(description="one per event")]
    timestamps: Annotated[list[int], Meta(description="one per event, never running backwards")]
    features: Annotated[dict[str, list[int]], Meta(description="by table: one id per event")] = {}

    @property
    def base(self) -> int | None:
        """The version to append to; None: the current one."""
        return None if self.base_version is UNSET else self.base_version

    def events(self) -> NewEvents:
        return NewEvents(self.items, self.actions, self.timestamps, self.features)


class EventsAnswer(Struct, frozen=True):
    """The appended events. They are stored on disk and outlive the process."""

    first_event: Annotated[int, Meta(description="absolute index of the first of them")]
    version: Annotated[int, Meta(description="of the user, now: the next base_version")]
    is_repeat: Annotated[bool, Meta(description="they were there already: this acknowledges them again")]


class BulkBody(Struct, frozen=True, forbid_unknown_fields=True):
    """Appends of many users. Those of one user are done in their order, each whether or not others are refused."""

    appends: Annotated[list[EventsBody], Meta(min_length=1, max_length=MAX_APPENDS)]


class AppendOutcome(Struct, frozen=True, omit_defaults=True):
    """What came of one append: the version, or an error."""

    version: Annotated[int | None, Meta(description="of the user, now; absent if nothing was appended")] = None
    is_repeat: Annotated[bool, Meta(description="the events were there already")] = False
    error: Annotated[str | None, Meta(description="why nothing was appended")] = None
    type: Annotated[str | None, Meta(description="which of our errors it is")] = None


class BulkAnswer(Struct, frozen=True):
    outcomes: Annotated[list[AppendOutcome], Meta(description="one per append, in their order")]


class UserAnswer(Struct, frozen=True):
    """Length and hash of a user's stored history."""

    user_id: int | str
    version: Annotated[int, Meta(description="events it ever had: the next base_version")]
    first_event: Annotated[int, Meta(description="absolute index of the oldest event still kept")]
    last_timestamp: int
    seal: Annotated[str, Meta(description="hash of the whole history, in hex: equal seals, equal histories")]


class HistoryAnswer(Struct, frozen=True):
    """The last events of a user's stored history, oldest first."""

    user_id: int | str
    version: Annotated[int, Meta(description="events it ever had")]
    first_event: Annotated[int, Meta(description="absolute index of the first event here")]
    items: list[int]
    actions: list[int]
    timestamps: list[int]
    features: Annotated[dict[str, list[int]], Meta(description="by table: one id per event")]


class ForgetAnswer(Struct, frozen=True):
    """The user is deleted from history store and caches."""

    user_id: int | str
    had_events: bool


class AlphaBody(Struct, frozen=True, forbid_unknown_fields=True):
    """Target embedding share of the pool."""

    alpha: Annotated[float, Meta(ge=0, le=1)]


class AlphaAnswer(Struct, frozen=True):
    """Current and target embedding share of the pool."""

    alpha: float
    alpha_target: float


class ModeBody(Struct, frozen=True, forbid_unknown_fields=True):
    """`adaptive`: the policy moves the boundary; `static`: it goes to the best constant known; `freeze`: it stays."""

    mode: Literal["adaptive", "static", "freeze"]


class RowsBody(Struct, frozen=True, forbid_unknown_fields=True):
    """New values of some rows of a table."""

    table: str
    ids: Annotated[list[int], Meta(description="distinct")]
    values: Annotated[list[list[float]], Meta(description="one row of numbers per id")]


class RowsAnswer(Struct, frozen=True):
    updated: int


class HealthAnswer(Struct, frozen=True, omit_defaults=True):
    status: str
    reason: Annotated[str | None, Meta(description="why it is not ready, where something went wrong")] = None
    histories: Annotated[str | None, Meta(description="why stored histories cannot be used, if so")] = None


class Problem(Struct, frozen=True, omit_defaults=True):
    """An error (RFC 9457); `field` and `value` are set if one field of the request is wrong."""

    title: str
    status: int
    detail: str
    request_id: str
    type: Annotated[str, Meta(description="which of our errors it is")] = "about:blank"
    field: str | None = None
    value: str | int | float | bool | None = None
    current_version: Annotated[int | None, Meta(description="of the user, where base_version was stale")] = None
    error: Annotated[str | None, Meta(description="the detail again, where the Open Inference Protocol looks")] = None


def tighter(one_ms: float | None, other_ms: float | None) -> float | None:
    """Return the smaller of two deadlines, either of which may be absent."""
    if one_ms is None or other_ms is None:
        return other_ms if one_ms is None else one_ms
    return min(one_ms, other_ms)
