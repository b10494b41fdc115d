"""Replace the served model under load: the new engine starts beside the old one, then takes over.

A request is scored by the engine that accepted it. KV of the old weights is not reused; the new engine inherits the
list of hot rows, the split and the state of the controller.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from numpy.typing import ArrayLike

from helmrec.deltas.consumer import StreamStart
from helmrec.deltas.delta import NamedModel
from helmrec.deltas.snapshot import check_named
from helmrec.errors import EngineClosed, ModelError
from helmrec.model.config import ModelConfig
from helmrec.serve.port import Health, InProcessPort
from helmrec.types import Ids, UserId

log = logging.getLogger("helmrec.serve")
_LOOK_EVERY_S = 0.01


class SwappingPort:
    """Serves one engine in this process, and can replace it. During a swap both engines are in memory."""

    num_restarts = 0

    def __init__(self, first: InProcessPort, make: Callable[[Path, StreamStart | None], InProcessPort]) -> None:
        """`make` builds an engine from a model's folder, in a thread; with the place of its rows in a stream."""
        self._make = make
        self._loop: asyncio.AbstractEventLoop | None = None
        self._following: set[Future[None]] = set()  # swaps that the stream of row deltas asked for
        self._retiring: list[InProcessPort] = []
        self._next: InProcessPort | None = None  # that is to take over
        self._one_at_a_time = asyncio.Lock()
        self._is_over = False
        self.num_swaps = 0  # completed: the new engine has taken over
        self._serve_with(first)

    def _serve_with(self, port: InProcessPort) -> None:
        """Make `port` the current engine. Calls go to it directly, without a wrapper for each method."""
        self.current = port
        self.submit, self.prefill, self.intake_recipe = port.submit, port.prefill, port.intake_recipe
        self.stats, self.look, self.row_sketch = port.stats, port.look, port.row_sketch
        self.move_alpha, self.set_mode, self.update_rows = port.move_alpha, port.set_mode, port.update_rows

    @property
    def model(self) -> ModelConfig:
        return self.current.model

    @property
    def health(self) -> Health:
        return self.current.health

    @property
    def reason(self) -> str | None:
        return self.current.reason

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.current.follow_models(self._swap_from_stream)
        self.current.start()

    def _swap_from_stream(self, model: NamedModel, start: StreamStart) -> None:
        """Begin to swap in a model that the stream of row deltas names. Called in the thread that steps the engine."""
        assert self._loop is not None
        swapping = asyncio.run_coroutine_threadsafe(self._follow(model, start), self._loop)
        self._following.add(swapping)
        swapping.add_done_callback(self._following.discard)

    async def _follow(self, model: NamedModel, start: StreamStart) -> None:
        """Swap; on a failure the stream stops there, and the old model serves on."""
        asked_by = self.current
        try:
            async with self._one_at_a_time:
                if asked_by is self.current:  # else an admin call has swapped another model in, which follows by itself
                    folder = await asyncio.to_thread(check_named, model)
                    await self._take_over(folder, start)
        except EngineClosed:
            if not self._is_over:
                asked_by.reject_model("its engine did not get ready")
        except Exception as error:  # whatever is wrong with that model: the old one serves
            log.exception("a model of the row stream was not swapped in")
            asked_by.reject_model(" ".join(str(error).split())[:300])

    async def place_rows(self, table: str, ids: Ids, values: ArrayLike) -> int:
        """Update rows of the current model; return the number of swaps before it."""
        port, num_swaps = self.current, self.num_swaps
        await port.update_rows(table, ids, values)
        return num_swaps

    async def follow_log(self) -> None:
        """Apply the row updates that the front has added to their log, also to an engine that is about to take over."""
        for port in (self.current,) if self._next is None else (self.current, self._next):
            await port.follow_log()

    async def forget(self, user_id: UserId) -> None:
        for port in (self.current, *self._retiring):
            await port.forget(user_id)

    async def swap(self, model: str) -> None:
        """Serve the model in this folder from now on. Returns when the old engine has answered all of its requests.

        Raises if the new model cannot be loaded or started; the old one then serves on. Raises nothing after the new
        one has taken over.
        """
        async with self._one_at_a_time:
            await self._take_over(Path(model), None)

    async def _take_over(self, model: Path, start: StreamStart | None) -> None:
        """Replace the engine. `start`: the place in the stream of row deltas that the model's rows have."""
        if self._is_over:
            raise EngineClosed("the server is about to stop")
        started_s = time.perf_counter()
        old, new = self.current, await asyncio.to_thread(self._make, model, start)
        try:
            check_fits(new.model, old.model)
            if start is not None:
                check_tables(new.model, old.model)
            await asyncio.to_thread(new.inherit, old)
            await self._get_ready(new)
            self._next = new
            await new.follow_log()  # what was added since it was made
        except BaseException:
            self._next = None
            await new.retire()
            raise
        self._next = None
        self._serve_with(new)
        self.num_swaps += start is None  # of admin calls: the front does not see those of a stream
        self._retiring.append(old)
        ready_s = time.perf_counter()
        try:
            await old.retire()
        except Exception:
            log.exception("the engine of the old model did not close cleanly")
        finally:
            self._retiring.remove(old)
        seconds = {"ready_s": ready_s - started_s, "drained_s": time.perf_counter() - ready_s}
        log.info("model swapped", extra={name: round(value, 3) for name, value in seconds.items()})

    async def _get_ready(self, port: InProcessPort) -> None:
        port.follow_models(self._swap_from_stream)
        port.start()
        while port.health is Health.STARTING:
            await asyncio.sleep(_LOOK_EVERY_S)
        if port.health is not Health.READY or self._is_over:
            raise EngineClosed(f"the new model's engine did not get ready: {port.reason or 'the server stops'}")

    async def close(self) -> None:
        self._is_over = True
        await self.current.close()


def check_fits(new: ModelConfig, old: ModelConfig) -> None:
    """Raise ModelError unless clients and stored histories work with the new model unchanged."""
    for field, kept in _contract(old).items():
        if (found := _contract(new)[field]) != kept:
            raise ModelError(f"the model cannot be swapped in: its {field} must be {kept!r}, got {found!r}")


def check_tables(new: ModelConfig, old: ModelConfig) -> None:
    """Raise ModelError unless both have the same rows, as stored histories and later deltas need it."""
    sizes = [{table.name: table.num_rows for table in model.tables} for model in (new, old)]
    if sizes[0] != sizes[1]:
        raise ModelError(f"the model cannot be swapped in: its tables must be {sizes[1]}, got {sizes[0]}")


def _contract(model: ModelConfig) -> dict[str, object]:
    """Return the properties that clients and stored histories depend on.

    Depth and widths may differ. The number of rows is checked separately, by a front that stores histories.
    """
    return {
        "name": model.name,
        "features": [table.name for table in model.features],
        "user_context": [table.name for table in model.user_context],
        "request_context": [table.name for table in model.request_context],
        "num_tasks": model.num_tasks,
        "window": model.window,
    }
