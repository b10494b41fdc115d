"""The log of row updates that engines of a host read, as their front sees it: one log, and during a swap two."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from numpy.typing import ArrayLike

from helmrec.cluster.keepers import Everywhere
from helmrec.serve.host_log import HostLog
from helmrec.serve.process_port import ProcessPort
from helmrec.types import Ids


class HostLogs:
    """Logs that some engines read, whose rows are on disk. Used in one event loop."""

    def __init__(self, make: Callable[[Path], HostLog], model: Path, ports: Sequence[ProcessPort]) -> None:
        """Before the start: have these engines read one log, made with the folder of a model."""
        self._make, first = make, make(model)
        self._of = dict.fromkeys(ports, first)
        for port in ports:
            port.log = first

    @property
    def all(self) -> list[HostLog]:
        """The logs in use."""
        return list(dict.fromkeys(self._of.values()))

    async def update_rows(self, table: str, ids: Ids, values: ArrayLike) -> None:
        try:
            await asyncio.gather(*(row_log.update_rows(table, ids, values) for row_log in self.all))
        finally:  # after a failure too: engines then have what the log has
            await asyncio.gather(*(port.follow_log_now_or_later() for port in self._of))

    async def swap(self, model: str, everywhere: Everywhere) -> None:
        """Swap with a new log. Updates go to both until the last engine has swapped, or some engine refuses to."""
        before, new = self.all, await asyncio.to_thread(self._make, Path(model))

        async def swap_one(port: ProcessPort) -> None:
            await port.swap(model, row_log=new)
            self._of[port] = new

        try:
            await everywhere(swap_one)
        finally:
            for unused in {*before, new} - {*self.all}:
                unused.close()

    def close(self) -> None:
        for row_log in self.all:
            row_log.close()
