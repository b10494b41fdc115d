"""`/v1/prefill`: takes a user's history early in a cascade, to compute it before the rank request arrives."""

import time
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from helmrec.engine.relay.trigger import Verdict
from helmrec.history.events import Events
from helmrec.serve.bodies import decode
from helmrec.serve.front import Front, spent_ms, started_s
from helmrec.serve.routes import Endpoint, json_answer
from helmrec.serve.schema import HistoryBody
from helmrec.types import PrefillRequest, PrefillResult


class PrefillBody(HistoryBody, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Compute this user's history ahead of its rank request, whose fields it shares.

    Without fields of events, the stored history of the user is used.
    """

    num_candidates: Annotated[int, Meta(ge=0, description="expected number of candidates of the rank request")] = 0
    budget_ms: Annotated[float, Meta(gt=0, description="latency budget of the rank request")] | None = None
    hold_ms: Annotated[float, Meta(gt=0, description="time to hold the prefix, at most relay.max_hold_ms")] | None = (
        None
    )

    def request(self, stored: Events | None = None) -> PrefillRequest:
        """The request for the engine."""
        return PrefillRequest(
            **self.history(stored),
            num_candidates=self.num_candidates,
            budget_ms=self.budget_ms,
            hold_ms=self.hold_ms,
        )


class LeaseAnswer(Struct, frozen=True):
    """The prefix is held on this node until this lease ends or the rank request has been served."""

    token: str
    node: Annotated[str, Meta(description="node to send the rank request to; also in the header of the same name")]
    hold_ms: Annotated[float, Meta(description="granted time")]
    expires_at: Annotated[float, Meta(description="seconds since 1970")]
    is_shortened: Annotated[bool, Meta(description="whether more than the server's relay.max_hold_ms was requested")]


class PrefillAnswer(Struct, frozen=True):
    """The decision about the signal. If it is not admitted, the rank request computes the missing tokens itself."""

    is_admitted: bool
    reason: Annotated[str, Meta(description="one of: " + ", ".join(Verdict))]
    lease: LeaseAnswer | None = None
    history_version: Annotated[int | None, Meta(description="version of the stored history, if that was used")] = None

    @classmethod
    def of(cls, result: PrefillResult, node: str, history_version: int | None) -> "PrefillAnswer":
        lease, held = result.lease, None
        if lease is not None:
            expires_at = time.time() + lease.hold_ms / 1e3
            held = LeaseAnswer(lease.token, node, lease.hold_ms, expires_at, lease.is_shortened)
        return cls(held is not None, str(result.verdict), held, history_version)


class PrefillRoutes:
    """The endpoint of early signals."""

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
        result = await front.port.prefill(asked, spent_ms(started_s(request)))
        version = None if stored is None else stored.version
        return json_answer(PrefillAnswer.of(result, front.config.node_name, version))

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint(
                "POST", "/v1/prefill", "Compute a history ahead of its rank", self.prefill, PrefillBody, PrefillAnswer,
                statuses=(400, 409, 413, 415, 429, 503),
            )
        ]  # fmt: skip
