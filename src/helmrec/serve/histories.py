"""Stored histories: read and appended to without blocking the event loop.

Reads run in a few threads, because a store in a folder blocks on its disk as one in Redis blocks on the network, and
threads serve both. If the store does not answer, a circuit breaker refuses calls at once while a background task tries
the store again.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

from helmrec.clock import Clock, MonotonicClock
from helmrec.errors import (
    ConfigError,
    Forgotten,
    HelmRecError,
    HistoryError,
    HistoryUnavailable,
    ModelError,
    QueueFull,
    TablesTooSmall,
)
from helmrec.history.config import HistoryConfig
from helmrec.history.embedded import EmbeddedHistory
from helmrec.history.events import Events, EventSchema, NewEvents, find_beyond
from helmrec.history.sizes import check_sizes, sizes_of
from helmrec.history.store import HistoryStore
from helmrec.history.values import Appended, HistoryStats, UserState
from helmrec.history.warm_up import compile_loops
from helmrec.model.config import ModelConfig
from helmrec.redaction import redact
from helmrec.serve.breaker import Breaker
from helmrec.types import UserId

log = logging.getLogger("helmrec.serve")
T = TypeVar("T")
_SHARED = ("redis://", "rediss://", "unix://")
_PING_EVERY_S = 1.0  # while the store answers, so that /readyz is right without traffic


class _Read:
    """A running read of some users."""

    def __init__(self, user_ids: Sequence[UserId]) -> None:
        self.user_ids = frozenset(user_ids)
        self.forgotten: UserId | None = None  # a user among them who was forgotten since the read began


class _TimedCall(Generic[T]):
    """A call of the store that measures how long it has been running."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._started_s: float | None = None

    def run(self) -> T:
        self._started_s = time.perf_counter()
        return self._work()

    @property
    def ran_ms(self) -> float:
        return 0.0 if self._started_s is None else (time.perf_counter() - self._started_s) * 1e3


class StoredHistories:
    """The stored events of all users, for the handlers of one server. Owns the store and closes it.

    Used in one event loop.
    """

    def __init__(
        self, store: HistoryStore, model: ModelConfig, config: HistoryConfig, clock: Clock | None = None
    ) -> None:
        self._store = store
        self._config = config
        self._model, self._schema = model, EventSchema.of_model(model)
        self._breaker = Breaker(config.breaker_failures, config.breaker_pause_s, clock or MonotonicClock())
        self._threads = ThreadPoolExecutor(config.read_threads, thread_name_prefix="history-read")
        self._num_waiting = 0
        self._reads: set[_Read] = set()
        self._being_forgotten: Counter[UserId] = Counter()
        self._following = asyncio.Lock()
        self._last_failure = ""
        self._pings: asyncio.Task[None] | None = None

    @classmethod
    def open(cls, path: Path | str, model: ModelConfig, config: HistoryConfig) -> "StoredHistories":
        """Open or create the store at `path`, a folder, or the address of a Redis that nodes share."""
        if config.max_events_per_user < model.window:
            raise ConfigError(
                f"history_max_events_per_user must be at least the model's window, {model.window}, "
                f"got {config.max_events_per_user}"
            )
        compile_loops()  # else compilation would delay the first read, and count as a timeout of the store
        schema = EventSchema.of_model(model)
        if str(path).startswith(_SHARED):
            return cls(_shared(str(path), schema, config), model, config)
        return cls(EmbeddedHistory(path, schema, config), model, config)

    def start(self) -> None:
        """Ping the store from time to time, so that `problem` is right without traffic."""
        self._pings = asyncio.get_running_loop().create_task(self._ping_forever())

    @property
    def problem(self) -> str | None:
        """Why stored histories cannot be used now; None if they can."""
        return None if self._breaker.is_closed else f"the history store does not answer ({self._last_failure})"

    @property
    def num_failures(self) -> int:
        """Calls that the store did not answer in time."""
        return self._breaker.num_failures

    async def read(self, user_ids: Sequence[UserId], model: ModelConfig) -> list[Events]:
        """Read the events in the model's window, for each user; none, at version 0, for an unknown user.

        Raise Forgotten if a user was forgotten since the call began. A caller that submits the result without awaiting
        anything in between cannot cache a forgotten user again. Raise HistoryUnavailable if the store does not answer
        in time, TablesTooSmall if an event has an id that the model lacks.
        """
        schema, read = self._schema_of(model), _Read(user_ids)
        read.forgotten = next((user for user in user_ids if self._being_forgotten[user]), None)
        self._reads.add(read)
        try:
            found: list[Events] = []
            step = self._config.read_threads  # at most so many at once: other calls must get threads too
            for start in range(0, len(user_ids), step):
                some = user_ids[start : start + step]
                found += await _all([self._call(self._reading(user_id, schema, model.window)) for user_id in some])
        finally:
            self._reads.remove(read)
        if read.forgotten is not None:
            raise Forgotten(f"user {read.forgotten} was forgotten while the history was read")
        return found

    def _reading(self, user_id: UserId, schema: EventSchema, window: int) -> Callable[[], Events]:
        def work() -> Events:
            events = self._store.read_last(user_id, window)
            if (beyond := find_beyond(schema, events)) is not None:
                field, largest = beyond
                raise TablesTooSmall(f"{field} of user {user_id} reach {largest}: the model's table is smaller")
            return events

        return work

    async def last(self, user_id: UserId, num_events: int) -> Events:
        """Read the last events of a user, at most this many, also those outside the model's window or tables."""
        return await self._call(lambda: self._store.read_last(user_id, num_events))

    async def append(
        self, user_id: UserId, base_version: int | None, events: NewEvents, model: ModelConfig
    ) -> Appended:
        """Append events; returns when they are stored. Raises what the store raises.

        Without `base_version` they are appended to the current version; StaleVersion if another append comes between.
        Ids must be within the tables of the served model. After HistoryUnavailable the events may be stored or not:
        the same append may be repeated, and is stored once.
        """
        await self._follow(model)
        if base_version is None:
            state = await self.state(user_id)
            base_version = 0 if state is None else state.version
        return await self._write(lambda: self._store.submit(user_id, base_version, events))

    async def _follow(self, model: ModelConfig) -> None:
        """After a model swap, make the store check ids against the tables of the new model."""
        async with self._following:
            if self._model is model:
                return
            schema = self._schema_of(model)
            if schema != self._schema:
                await self._call(lambda: self._store.follow(schema), self._config.write_timeout_ms)
            self._model, self._schema = model, schema

    def _schema_of(self, model: ModelConfig) -> EventSchema:
        return self._schema if model is self._model else EventSchema.of_model(model)

    async def check_swap(self, model: ModelConfig, served: ModelConfig) -> None:
        """Raise ModelError if events that are stored, or appended during the swap, may have ids that `model` lacks."""
        schema = EventSchema.of_model(model)
        try:
            for sizes in (sizes_of(EventSchema.of_model(served)), await self._call(self._store.sizes)):
                check_sizes(sizes, schema, "the history store")
        except TablesTooSmall as error:
            raise ModelError(f"the model cannot be swapped in while histories are kept: {error}") from None

    async def state(self, user_id: UserId) -> UserState | None:
        return await self._call(lambda: self._store.state(user_id))

    async def delete(self, user_id: UserId) -> bool:
        """Delete a user; False if nothing was stored. Call within `forgetting`, so that running reads are refused."""
        assert self._being_forgotten[user_id], "running reads must be refused"
        return await self._write(lambda: self._store.submit_delete(user_id))

    @contextmanager
    def forgetting(self, user_id: UserId) -> Iterator[None]:
        """Refuse reads of a user, running ones included, while store and engine forget the user."""
        for read in self._reads:
            if user_id in read.user_ids:
                read.forgotten = user_id
        self._being_forgotten[user_id] += 1
        try:
            yield
        finally:
            self._being_forgotten[user_id] -= 1
            self._being_forgotten += Counter()  # drops zero counts

    async def stats(self) -> HistoryStats | None:
        """Return the size of the store; None while it does not answer."""
        try:
            return await self._call(self._store.stats)
        except (HistoryError, QueueFull):
            return None

    async def close(self) -> None:
        if self._pings is not None:
            self._pings.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._store.close)

    async def _call(self, work: Callable[[], T], timeout_ms: float | None = None) -> T:
        """Run `work` in a thread. HistoryUnavailable after the timeout, or at once if the breaker is open."""
        if not self._breaker.admit():
            raise HistoryUnavailable(self.problem or "the history store is being tried again")
        if self._num_waiting >= self._config.queue_limit:
            self._breaker.dropped()
            raise QueueFull(f"{self._config.queue_limit} reads wait for the history store")
        timeout_ms = timeout_ms or self._config.read_timeout_ms
        job = _TimedCall(work)
        future = self._threads.submit(job.run)
        self._num_waiting += 1
        try:
            done = await _within(timeout_ms, future)
        except TimeoutError:
            raise self._too_slow(job.ran_ms, timeout_ms) from None
        except HistoryUnavailable as error:
            self._note_failure("it cannot be reached", str(error))
            raise
        except HelmRecError:  # it did answer
            self._note_success()
            raise
        except BaseException:
            self._breaker.dropped()
            raise
        finally:
            self._num_waiting -= 1
        self._note_success()
        return done

    def _too_slow(self, ran_ms: float, timeout_ms: float) -> HelmRecError:
        """Return the error of a timeout: QueueFull if the call mostly waited for a thread, else a store failure."""
        if ran_ms < timeout_ms / 2 and self._breaker.is_closed:
            return QueueFull(f"no thread was free to read the history store for {timeout_ms:g} ms")
        reason = f"no answer for {timeout_ms:g} ms"
        self._note_failure(reason, reason)
        return HistoryUnavailable(f"the history store: {reason}")

    async def _write(self, submit: Callable[[], "Future[T]"]) -> T:
        """Wait for the store's writer. Failures of writes do not open the breaker.

        So a store that can be read but not written, such as a Redis replica, is still read.
        """
        if self.problem is not None:
            raise HistoryUnavailable(self.problem)
        timeout_ms = self._config.write_timeout_ms
        try:
            return await _within(timeout_ms, submit())
        except TimeoutError:
            raise HistoryUnavailable(f"the history store did not write within {timeout_ms:g} ms") from None

    def _note_failure(self, kind: str, reason: str) -> None:
        """Count a failure. Clients see `kind`; `reason` may contain addresses and file names, and is only logged."""
        was_closed = self._breaker.is_closed
        self._breaker.failed()
        self._last_failure = kind
        if was_closed and not self._breaker.is_closed:
            log.error("the history store does not answer", extra={"reason": reason})

    def _note_success(self) -> None:
        was_closed = self._breaker.is_closed
        self._breaker.succeeded()
        if not was_closed:
            log.info("the history store answers again")

    async def _ping_forever(self) -> None:
        while True:
            pause_s = self._config.breaker_pause_s
            try:
                await self._call(self._store.ping)
                pause_s = _PING_EVERY_S
            except (HistoryUnavailable, QueueFull):  # counted already, or busy with other calls
                pass
            except HistoryError as error:
                log.error("the history store is damaged", extra={"reason": str(error)})
            except Exception:
                log.exception("the history store could not be pinged")
            await asyncio.sleep(pause_s)


async def _within(timeout_ms: float, future: "Future[T]") -> T:
    """Wait for a future. On TimeoutError it is cancelled: if it has not begun, it never will."""
    try:
        async with asyncio.timeout(timeout_ms / 1e3):
            return await asyncio.wrap_future(future)
    except TimeoutError:
        if future.done() and not future.cancelled():  # the event loop was late, not the store
            return future.result()
        raise


async def _all(calls: Sequence[Awaitable[T]]) -> list[T]:
    """Wait for all calls; raise the first error once all have ended."""
    if len(calls) == 1:
        return [await calls[0]]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]


def _shared(url: str, schema: EventSchema, config: HistoryConfig) -> HistoryStore:
    try:
        from helmrec.history.redis import RedisHistory  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise ConfigError(f"history_path: {redact(url)} needs pip install 'helmrec[cluster]' ({error})") from None
    return RedisHistory(url, schema, config)
