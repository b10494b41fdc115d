"""The tables that engines of a host share, as their front sees them: one keeper, and during a swap two.

Updates of rows go to every keeper in use. A model that the stream of row deltas names is swapped in here: its keeper
follows the stream from the model on, and the engines change over one by one.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from numpy.typing import ArrayLike

from helmrec.deltas.consumer import StreamStart
from helmrec.deltas.delta import NamedModel
from helmrec.deltas.snapshot import check_named
from helmrec.engine.row_stream import RowStreamStats
from helmrec.errors import EngineClosed
from helmrec.model.folder import read_manifest
from helmrec.serve.port import Health
from helmrec.serve.process_port import ProcessPort
from helmrec.serve.row_keeper import RowKeeper
from helmrec.serve.swap import check_tables
from helmrec.types import Ids

log = logging.getLogger("helmrec.serve")
MakeKeeper = Callable[[Path, StreamStart | None], RowKeeper]  # of a model's folder, whose rows have this place
Everywhere = Callable[[Callable[[ProcessPort], Awaitable[None]]], Awaitable[None]]


class Keepers:
    """Keepers of the tables that some engines read. Used in one event loop."""

    def __init__(self, make: MakeKeeper, first: RowKeeper, ports: Sequence[ProcessPort]) -> None:
        """Before the start: have these engines read the tables of `first`."""
        self._make = make
        self._of = dict.fromkeys(ports, first)
        for port in ports:
            port.tables = first
        self._one_at_a_time = asyncio.Lock()
        self._following: set[asyncio.Task[None]] = set()  # swaps that the stream asked for
        self._swap: Callable[[str, StreamStart], Awaitable[None]] | None = None

    @property
    def all(self) -> list[RowKeeper]:
        """The keepers of the tables in use."""
        return list(dict.fromkeys(self._of.values()))

    def reasons(self, *states: Health) -> list[str]:
        """Return why keepers in one of these states are not ready."""
        return [f"keeper: {keeper.reason}" for keeper in self.all if keeper.reason and keeper.health in states]

    def start(self, swap: Callable[[str, StreamStart], Awaitable[None]]) -> None:
        """Start the first keeper. `swap` is called with a model of the stream, and the place of its rows in it."""
        self._swap = swap
        for keeper in self.all:
            self._start(keeper)

    def _start(self, keeper: RowKeeper) -> None:
        keeper.follow_models(lambda model, start: self._begin_swap(keeper, model, start))
        keeper.start()

    async def row_stream(self) -> RowStreamStats | None:
        """Return the state of the stream; of several keepers, of the one that is furthest behind."""
        found = [await keeper.row_stream() for keeper in self.all]
        known = [each for each in found if each is not None]
        return min(known, key=lambda each: each.position) if known else None

    async def update_rows(self, table: str, ids: Ids, values: ArrayLike) -> None:
        await asyncio.gather(*(keeper.update_rows(table, ids, values) for keeper in self.all))

    async def swap(self, model: str, start: StreamStart | None, everywhere: Everywhere) -> None:
        """Swap with new tables. Both are in memory until the last engine has swapped, or some engine refuses to."""
        async with self._one_at_a_time:
            before, new = self.all, await asyncio.to_thread(self._make, Path(model), start)
            self._start(new)

            async def swap_one(port: ProcessPort) -> None:
                await port.swap(str(new.model), new)
                self._of[port] = new

            try:
                await new.until_ready()
                await everywhere(swap_one)
            finally:
                unused = {*before, new} - {*self.all}
                await asyncio.gather(*(keeper.close() for keeper in unused))

    async def close(self) -> None:
        for task in self._following:
            task.cancel()
        if self._following:
            await asyncio.wait(self._following)
        await asyncio.gather(*(keeper.close() for keeper in self.all))

    # Models of the stream.

    def _begin_swap(self, asked_by: RowKeeper, model: NamedModel, start: StreamStart) -> None:
        task = asyncio.create_task(self._follow(asked_by, model, start))
        self._following.add(task)
        task.add_done_callback(self._following.discard)

    async def _follow(self, asked_by: RowKeeper, model: NamedModel, start: StreamStart) -> None:
        """Swap; on a failure the stream stops there, and the old model serves on."""
        async with self._one_at_a_time:
            pass  # an earlier swap is over
        if asked_by not in self.all:
            return
        assert self._swap is not None
        try:
            folder = await asyncio.to_thread(check_named, model)
            check_tables((await asyncio.to_thread(read_manifest, folder)).model, asked_by.config)
            await self._swap(str(folder), start)
        except Exception as error:  # whatever is wrong with that model: the old one serves
            if not isinstance(error, EngineClosed):
                log.exception("a model of the row stream was not swapped in")
            await asked_by.reject_model(" ".join(str(error).split())[:300])
