"""`/v1/prefill`: a user's history, early in a cascade, so that it is computed before its rank comes."""

import time
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from helmrec.engine.relay.trigger import Verdict
from helmrec.history.events import Events
from helmrec.serve.bodies import decode
from helmrec.serve.front import Front
from helmrec.serve.routes import Endpoint, json_answer
from helmrec.serve.schema import Count, given
from helmrec.types import PrefillRequest, PrefillResult


class PrefillBody(Struct, frozen=True, forbid_unknown_fields=True):
    """Compute this user's history ahead of the rank that is to follow; fields as in a rank's body.

    Without any field of events, the history is the one the server keeps of the user.
    """

    user_id: Count
    items: Annotated[list[int], Meta(description="one id per event")] | UnsetType = UNSET
    actions: Annotated[list[int], Meta(description="one per event")] | UnsetType = UNSET
    timestamps: Annotated[list[int], Meta(description="one per event, never running backwards")] | UnsetType = UNSET
    features: Annotated[dict[str, list[int]], Meta(description="by table: one id per event")] = {}
    context: Annotated[dict[str, int], Meta(description="by table of the user's context: one id")] = {}
    first_event: Annotated[int, Meta(ge=0, description="how many events came before those sent")] = 0
    num_candidates: Annotated[int, Meta(ge=0, description="that the rank will ask for, as far as known")] = 0
    budget_ms: Annotated[float, Meta(gt=0, description="that the rank may take")] | None = None
    hold_ms: (
        Annotated[float, Meta(gt=0, description="how long to hold what was computed, at most relay.max_hold_ms")] | None
    ) = None

    @property
    def is_without_events(self) -> bool:
        """Whether the history is to be the stored one."""
        sent = (self.items is not UNSET, self.actions is not UNSET, self.timestamps is not UNSET)
        return not (any(sent) or self.features or self.first_event)

    def request(self, stored: Events | None = None) -> PrefillRequest:
        """As the engine takes it."""
        history = self if stored is None else stored
        return PrefillRequest(
            user_id=self.user_id,
            items=given("items", history.items),
            actions=given("actions", history.actions),
            timestamps=given("timestamps", history.timestamps),
            features=history.features,
            context=self.context,
            first_event=history.first_event,
            num_candidates=self.num_candidates,
            budget_ms=self.budget_ms,
            hold_ms=self.hold_ms,
        )


class LeaseAnswer(Struct, frozen=True):
    """What is computed is held for the rank, on this node, until then or until the rank has come."""

    token: str
    node: Annotated[str, Meta(description="send the rank here; the header of the same name says so too")]
    hold_ms: Annotated[float, Meta(description="that were granted")]
    expires_at: Annotated[float, Meta(description="seconds since 1970")]
    is_shortened: Annotated[bool, Meta(description="more was asked for than the server's relay.max_hold_ms")]


class PrefillAnswer(Struct, frozen=True):
    """What became of the signal. One that is not admitted costs the rank nothing: it computes what is missing."""

    is_admitted: bool
    reason: Annotated[str, Meta(description="one of: " + ", ".join(Verdict))]
    lease: LeaseAnswer | None = None
    history_version: Annotated[int | None, Meta(description="of the stored history, where that was used")] = None

    @classmethod
    def of(cls, result: PrefillResult, node: str, history_version: int | None) -> "PrefillAnswer":
        lease, held = result.lease, None
        if lease is not None:
            expires_at = time.time() + lease.hold_ms / 1e3
            held = LeaseAnswer(lease.token, node, lease.hold_ms, expires_at, lease.is_shortened)
        return cls(held is not None, str(result.verdict), held, history_version)


class PrefillRoutes:
    """The handler of early signals."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._body = msgspec.json.Decoder(PrefillBody)

    async def prefill(self, request: Request) -> Response:
        front = self._front
        front.need_ready()
        body = decode(self._body, await front.bodies.read(request))
        histories, stored = front.histories, None
        if histories is not None and body.is_without_events:
            (stored,) = await histories.read([body.user_id], front.port.model)
        asked = body.request(stored)  # nothing is awaited between the read and the engine's queue
        result = await front.port.prefill(asked, front.spent_ms(request))
        version = None if stored is None else stored.version
        return json_answer(PrefillAnswer.of(result, front.config.node_name, version))

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint(
                "POST", "/v1/prefill", "Compute a history ahead of its rank", self.prefill, PrefillBody, PrefillAnswer,
                statuses=(400, 409, 413, 415, 429, 503),
            )
        ]  # fmt: skip
