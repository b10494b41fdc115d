"""A model replaced by another while requests go on: the new engine gets ready beside the old one, then takes over.

A request is scored whole by the engine that took it. What the old engine's KV knew is of no use to other weights; which
rows were hot, the split and what the controller learned are handed on.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from numpy.typing import ArrayLike

from helmrec.control.rebalancer import Mode
from helmrec.engine.engine import EngineStats
from helmrec.errors import EngineClosed, ModelError
from helmrec.model.config import ModelConfig
from helmrec.serve.port import EngineView, Health, InProcessPort
from helmrec.types import Ids, PrefillRequest, PrefillResult, RankRequest, RankResult

log = logging.getLogger("helmrec.serve")
_LOOK_EVERY_S = 0.01


class SwappingPort:
    """Engines in this process, one after the other. Both are in memory while one follows the other."""

    num_restarts = 0

    def __init__(self, first: InProcessPort, make: Callable[[Path], InProcessPort]) -> None:
        """`make` builds an engine on a model's folder; it may take as long as it takes."""
        self._current = first
        self._make = make
        self._retiring: list[InProcessPort] = []
        self._one_at_a_time = asyncio.Lock()
        self._is_over = False
        self.num_swaps = 0  # that have taken over

    @property
    def current(self) -> InProcessPort:
        """The engine that takes what comes now."""
        return self._current

    @property
    def model(self) -> ModelConfig:
        return self._current.model

    @property
    def health(self) -> Health:
        return self._current.health

    @property
    def reason(self) -> str | None:
        return self._current.reason

    def start(self) -> None:
        self._current.start()

    async def submit(self, requests: Sequence[RankRequest], spent_ms: float = 0.0) -> list[RankResult]:
        return await self._current.submit(requests, spent_ms)

    async def prefill(self, request: PrefillRequest, spent_ms: float = 0.0) -> PrefillResult:
        return await self._current.prefill(request, spent_ms)

    async def stats(self) -> EngineStats:
        return await self._current.stats()

    async def look(self) -> EngineView:
        return await self._current.look()

    async def move_alpha(self, alpha: float) -> None:
        await self._current.move_alpha(alpha)

    async def set_mode(self, mode: Mode) -> None:
        await self._current.set_mode(mode)

    async def update_rows(self, table: str, ids: Ids, values: ArrayLike) -> None:
        """Of the model that serves; the rows of one that is about to follow are its own."""
        await self.place_rows(table, ids, values)

    async def place_rows(self, table: str, ids: Ids, values: ArrayLike) -> int:
        """Update rows; returns how many swaps came before the model that took them."""
        port, num_swaps = self._current, self.num_swaps
        await port.update_rows(table, ids, values)
        return num_swaps

    async def forget(self, user_id: int) -> None:
        for port in (self._current, *self._retiring):
            await port.forget(user_id)

    async def swap(self, model: str) -> None:
        """Serve the model in this folder from now on; returns when the old one has answered what it took.

        Whatever goes wrong with the new model is raised, and the old one goes on as if nothing had happened. Once the
        new one has taken over, nothing is raised any more.
        """
        async with self._one_at_a_time:
            if self._is_over:
                raise EngineClosed("the server is about to stop")
            started_s = time.perf_counter()
            old, new = self._current, await asyncio.to_thread(self._make, Path(model))
            try:
                check_fits(new.model, old.model)
                await asyncio.to_thread(new.inherit, old)
                await self._get_ready(new)
            except BaseException:
                await new.retire()
                raise
            self._current = new
            self.num_swaps += 1
            self._retiring.append(old)
            ready_s = time.perf_counter()
            try:
                await old.retire()
            except Exception:
                log.exception("the engine of the model before did not end as it should")
            finally:
                self._retiring.remove(old)
            seconds = {"ready_s": ready_s - started_s, "drained_s": time.perf_counter() - ready_s}
            log.info("model swapped", extra={name: round(value, 3) for name, value in seconds.items()})

    async def _get_ready(self, port: InProcessPort) -> None:
        port.start()
        while port.health is Health.STARTING:
            await asyncio.sleep(_LOOK_EVERY_S)
        if port.health is not Health.READY or self._is_over:
            raise EngineClosed(f"the new model's engine did not get ready: {port.reason or 'the server stops'}")

    async def close(self) -> None:
        self._is_over = True
        await self._current.close()


def check_fits(new: ModelConfig, old: ModelConfig) -> None:
    """Raise ModelError unless clients, and the store of histories, can go on as they are."""
    for field, kept in _contract(old).items():
        if (found := _contract(new)[field]) != kept:
            raise ModelError(f"the model cannot be swapped in: its {field} must be {kept!r}, got {found!r}")


def _contract(model: ModelConfig) -> dict[str, object]:
    """What clients and stored histories rely on; depth and widths may differ.

    So may the number of rows, as far as this can tell: a front that keeps histories asks for no fewer.
    """
    return {
        "name": model.name,
        "features": [table.name for table in model.features],
        "user_context": [table.name for table in model.user_context],
        "request_context": [table.name for table in model.request_context],
        "num_tasks": model.num_tasks,
        "window": model.window,
    }
