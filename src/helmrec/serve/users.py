"""`/v1/events` and `/v1/users`: append to stored histories, read them, delete them."""

import asyncio
from urllib.parse import unquote

import msgspec
import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from helmrec.errors import HelmRecError, HistoryError, RequestError, StaleVersion
from helmrec.history.values import Appended
from helmrec.serve import problems
from helmrec.serve.bodies import decode
from helmrec.serve.front import Front
from helmrec.serve.histories import StoredHistories
from helmrec.serve.routes import Endpoint, json_answer
from helmrec.serve.schema import (
    AppendOutcome,
    BulkAnswer,
    BulkBody,
    EventsAnswer,
    EventsBody,
    ForgetAnswer,
    HistoryAnswer,
    UserAnswer,
)
from helmrec.types import UserId
from helmrec.user_ids import user_of_path

MAX_LAST = 100_000  # events of one answer


class UserRoutes:
    """Handlers of stored histories. Without a store, only deleting from the caches is possible."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._body = msgspec.json.Decoder(EventsBody)
        self._bulk_body = msgspec.json.Decoder(BulkBody)

    async def append(self, request: Request) -> Response:
        histories = self._need_histories()
        done = await self._append(histories, decode(self._body, await self._front.bodies.read(request)))
        return json_answer(EventsAnswer(done.first_event, done.version, done.is_repeat))

    async def _append(self, histories: StoredHistories, body: EventsBody) -> Appended:
        try:
            done = await histories.append(body.user_id, body.base, body.events(), self._front.port.model)
        except StaleVersion:
            self._front.metrics.count_append("stale", 0)
            raise
        self._front.metrics.count_append("repeat" if done.is_repeat else "kept", len(body.items))
        return done

    async def append_many(self, request: Request) -> Response:
        """Append for many users at once: what waits for the store's writer together shares a transaction."""
        histories = self._need_histories()
        appends = decode(self._bulk_body, await self._front.bodies.read(request)).appends
        by_user: dict[UserId, list[int]] = {}
        for at, each in enumerate(appends):
            by_user.setdefault(each.user_id, []).append(at)
        outcomes = [AppendOutcome()] * len(appends)

        async def append_in_order(places: list[int]) -> None:
            outcome = AppendOutcome()
            for at in places:  # after an error the others would be stale, and a client could not tell why
                outcome = await self._outcome(histories, appends[at]) if outcome.error is None else outcome
                outcomes[at] = outcome

        await asyncio.gather(*(append_in_order(places) for places in by_user.values()))
        return json_answer(BulkAnswer(outcomes))

    async def _outcome(self, histories: StoredHistories, body: EventsBody) -> AppendOutcome:
        try:
            done = await self._append(histories, body)
        except HelmRecError as error:
            if isinstance(error, HistoryError) and not isinstance(error, problems.SHOWN_HISTORY_ERRORS):
                raise
            problem = problems.of_error(error, "")
            return AppendOutcome(error=problem.detail, type=problem.type)
        return AppendOutcome(done.version, done.is_repeat)

    async def show(self, request: Request) -> Response:
        user_id = _user_id(request)
        state = await self._need_histories().state(user_id)
        if state is None:
            raise HTTPException(404, f"no events are kept of user {user_id}")
        return json_answer(
            UserAnswer(user_id, state.version, state.first_event, state.last_timestamp, f"{state.seal:016x}")
        )

    async def events(self, request: Request) -> Response:
        user_id, histories = _user_id(request), self._need_histories()
        found = await histories.last(user_id, _whole("last", request.query_params.get("last", "100"), MAX_LAST, 1))
        if not found.version:
            raise HTTPException(404, f"no events are kept of user {user_id}")
        columns = {name: np.asarray(getattr(found, name)).tolist() for name in ("items", "actions", "timestamps")}
        features = {name: np.asarray(ids).tolist() for name, ids in found.features.items()}
        return json_answer(HistoryAnswer(user_id, found.version, found.first_event, **columns, features=features))

    async def forget(self, request: Request) -> Response:
        """Delete the history first, then the caches: a later rank finds no events, and an earlier one is refused."""
        user_id, histories = _user_id(request), self._front.histories
        self._front.need_ready()
        if histories is None:
            await self._front.port.forget(user_id)
            return json_answer(ForgetAnswer(user_id, had_events=False))
        with histories.forgetting(user_id):  # running reads must not cache the user again
            had_events = await histories.delete(user_id)
            await self._front.port.forget(user_id)
        return json_answer(ForgetAnswer(user_id, had_events))

    def _need_histories(self) -> StoredHistories:
        if self._front.histories is None:
            raise HTTPException(404, "this server keeps no histories: it was given no history_path")
        return self._front.histories

    def endpoints(self) -> list[Endpoint]:
        user = "/v1/users/{user_id}"
        return [
            Endpoint(
                "POST", "/v1/events", "Append to a user's history", self.append, EventsBody, EventsAnswer,
                statuses=(400, 404, 409, 413, 415, 429, 503, 507),
            ),
            Endpoint(
                "POST", "/v1/events/bulk", "Append for many users", self.append_many, BulkBody, BulkAnswer,
                statuses=(400, 404, 413, 415, 503),
            ),
            Endpoint(
                "GET", user, "Where a user's history stands", self.show, gives=UserAnswer, statuses=(400, 404, 429, 503)
            ),
            Endpoint(
                "GET", f"{user}/events", "The last events of a user", self.events, gives=HistoryAnswer,
                statuses=(400, 404, 429, 503),
                query={"last": {"type": "integer", "minimum": 1, "maximum": MAX_LAST, "default": 100}},
            ),
            Endpoint("DELETE", user, "Forget a user", self.forget, gives=ForgetAnswer, statuses=(400, 429, 503, 507)),
        ]  # fmt: skip


def _user_id(request: Request) -> UserId:
    """The user in the path, which is still percent-encoded (`edge.Edge`)."""
    try:
        return user_of_path(unquote(request.path_params["user_id"], errors="strict"))
    except UnicodeDecodeError:
        raise RequestError("user_id", request.path_params["user_id"][:100], "UTF-8 is needed") from None


def _whole(field: str, text: str, most: int, least: int = 0) -> int:
    if text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) <= most:
        return int(text)
    raise RequestError(field, text[:100], f"an integer from {least} to {most} is needed")
