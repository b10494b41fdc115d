"""A port to an engine that another front runs: one more front for the same engine, on the same machine.

It joins through the engine's Unix socket and, when the engine is started again, joins again.
"""

import asyncio
import logging
import os
import socket
from contextlib import suppress
from typing import Never

from numpy.typing import ArrayLike

from helmrec.control.rebalancer import Mode
from helmrec.errors import RequestError
from helmrec.model.config import ModelConfig
from helmrec.serve.engine_calls import EngineCalls
from helmrec.serve.port import Health
from helmrec.serve.ring import Link, open_ring, shared_file
from helmrec.types import Ids

log = logging.getLogger("helmrec.serve")
_TRY_EVERY_S = 0.2


class JoinedPort(EngineCalls):
    """Sends requests to an engine that another front runs."""

    kind = "engine of another front"
    longest_pause_s = 5.0
    most_failed_starts = None  # the front that runs the engine may still make it work

    def __init__(self, path: str, ring_bytes: int, model: ModelConfig, max_history: int) -> None:
        super().__init__(ring_bytes, {}, model, max_history)
        self._path = path

    async def _run_one(self) -> None:
        """Join, and serve until the engine ends."""
        link = await self._join()
        if link is None:
            return
        self._ended.clear()
        self._failure, self._link, self._was_ready = None, link, False
        link.attach(asyncio.get_running_loop(), self._receive)
        self._resuming = asyncio.create_task(self._resume(link))
        try:
            await self._ended.wait()
        finally:
            self._link = None
            if self.health is Health.READY:
                self.health = Health.RESTARTING
            self.reason = self._failure or "it has ended"
            self._lose_calls()
            link.close()

    async def _join(self) -> Link | None:
        """Connect to the engine, as soon as it lets fronts join; None if the port is closed before."""
        while not self._is_over:
            with suppress(OSError):
                return self._connected()
            self.reason = f"no engine listens at {self._path}"
            await self._pause(_TRY_EVERY_S)
        return None

    def _connected(self) -> Link:
        end = socket.socket(socket.AF_UNIX)
        files = []
        try:
            end.connect(self._path)
            files += [shared_file(self._ring_bytes), shared_file(self._ring_bytes)]
            socket.send_fds(end, [b"\0"], files)
            return Link(end, outgoing=open_ring(files[0]), incoming=open_ring(files[1]))
        except BaseException:
            end.close()
            raise
        finally:
            for each in files:
                os.close(each)

    async def _resume(self, link: Link) -> None:
        try:
            await self._take_recipe(link)
        except Exception as error:  # the engine's failure, or a recipe of another release
            if self._link is link:  # else the engine has ended, and that is the reason
                self._failures.note("joining an engine", error)
                self.end(f"it cannot be joined ({type(error).__name__}: {_one_line(error)})")
            return
        self._serve(link)

    async def move_alpha(self, alpha: float) -> None:
        _refuse("alpha", alpha)

    async def set_mode(self, mode: Mode) -> None:
        _refuse("mode", mode)

    async def update_rows(self, table: str, ids: Ids, values: ArrayLike) -> None:
        _refuse("table", table)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _refuse(field: str, value: object) -> Never:
    raise RequestError(field, value, "only the front that runs the engine may change it")
