"""Calls to an engine in another process: requests are prepared here, and handed over ready."""

import asyncio
import time
from collections.abc import Mapping, Sequence

import msgspec

from helmrec.engine.engine import EngineStats
from helmrec.engine.intake import Intake, IntakeRecipe
from helmrec.engine.warm_up import made_up_request
from helmrec.errors import EngineClosed
from helmrec.model.config import ModelConfig
from helmrec.serve.child_process import ChildProcess, size_of, too_large
from helmrec.serve.port import EngineView
from helmrec.serve.prepared_wire import PrepareAgain, pack_prepared, unpack_recipe
from helmrec.serve.replay import AdminCall
from helmrec.serve.ring import Link
from helmrec.serve.wire import FrameKind, NotForTheWire, pack_call, pack_prefill, results_bytes
from helmrec.types import PrefillRequest, PrefillResult, RankRequest, RankResult, UserId

_MOST_TRIES = 4  # to send requests, each to another model than the one before


class EngineCalls(ChildProcess):
    """Makes the calls that every front makes to an engine's process."""

    def __init__(self, ring_bytes: int, environment: Mapping[str, str], model: ModelConfig, max_history: int) -> None:
        super().__init__(ring_bytes, environment)
        self.model = model
        self.intake = Intake(model, version=0, max_history=max_history)  # until the engine gives the recipe of its own

    async def submit(self, requests: Sequence[RankRequest], spent_ms: float = 0.0) -> list[RankResult]:
        came_s = time.monotonic() - spent_ms / 1e3
        for _ in range(_MOST_TRIES):
            link, intake = self._need_link(), self.intake
            packed = pack_prepared(intake.tag, intake.prepare_all(requests), came_s)
            num_bytes = max(results_bytes(requests, self.model.num_tasks), sum(map(size_of, packed)))
            if num_bytes > link.max_frame_bytes:
                raise too_large("requests", num_bytes, link)
            try:
                results: list[RankResult] = await self._ask(link, FrameKind.RANK, *packed)
            except PrepareAgain as again:  # another model was swapped in meanwhile
                self._use(again.recipe)
                continue
            return results
        raise EngineClosed(f"the model was replaced {_MOST_TRIES} times while a request was on its way")

    def _use(self, recipe: IntakeRecipe) -> None:
        """Prepare requests from this recipe, and show its model, from now on."""
        if recipe != self.intake.recipe:
            self.intake, self.model = Intake.of(recipe), ModelConfig.model_validate_json(recipe.model)

    async def prefill(self, request: PrefillRequest, spent_ms: float = 0.0) -> PrefillResult:
        link = self._need_link()
        try:
            parts = pack_prefill(request)
        except NotForTheWire as unfit:
            self.intake.prepare_ahead(request)  # raises what an engine would raise
            raise AssertionError("an engine would accept what cannot be packed") from unfit
        if size_of(parts) > link.max_frame_bytes:
            self.intake.prepare_ahead(request)
            raise too_large("request", size_of(parts), link)
        value: bytes = await self._ask(link, FrameKind.PREFILL, parts)
        return msgspec.msgpack.decode(value, type=PrefillResult)

    async def stats(self) -> EngineStats:
        return await self._call("stats", EngineStats)

    async def look(self) -> EngineView:
        return await self._call("look", EngineView)

    async def forget(self, user_id: UserId) -> None:
        await self._call("forget", None, user_id=user_id)

    async def _take_recipe(self, link: Link) -> None:
        """Get ready to prepare requests for the engine, whose hash has a new key."""
        packed = await self._ask_in_time(link, AdminCall("intake_recipe", {}))
        self._use(unpack_recipe(memoryview(packed)))
        await asyncio.to_thread(self.intake.prepare, made_up_request(self.model, 2))  # loads compiled functions

    async def _ask_in_time(self, link: Link, call: AdminCall) -> bytes:
        answer = self._ask(link, FrameKind.CALL, pack_call(call.name, call.arguments))
        try:
            value: bytes = await asyncio.wait_for(answer, self.hang_s)
            return value
        except TimeoutError:
            raise EngineClosed(f"{call.name} was not answered for {self.hang_s:g} s") from None
