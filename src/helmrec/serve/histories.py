"""Histories the node keeps: opened for a model, read for ranking, and appended to without blocking the event loop."""

import asyncio
from pathlib import Path
from typing import Protocol

from helmrec.errors import ConfigError
from helmrec.history.config import HistoryConfig
from helmrec.history.embedded import EmbeddedHistory, HistoryStats
from helmrec.history.events import Events, EventSchema, NewEvents
from helmrec.history.store import Appended, HistoryStore, UserState
from helmrec.model.config import ModelConfig

_SHARED = ("redis://", "rediss://", "unix://")


class Store(HistoryStore, Protocol):
    """A store that says what it holds."""

    def stats(self) -> HistoryStats: ...


class Histories:
    """The events of all users, as the handlers of one server need them. Owns the store and closes it."""

    def __init__(self, store: Store, window: int) -> None:
        self._store = store
        self._window = window

    @classmethod
    def open(cls, path: Path | str, model: ModelConfig, config: HistoryConfig) -> "Histories":
        """Open the store at `path` for this model, or make one there. An address of a Redis is one that nodes share."""
        if config.max_events_per_user < model.window:
            raise ConfigError(
                f"history_max_events_per_user must be at least the model's window, {model.window}, "
                f"got {config.max_events_per_user}"
            )
        schema = EventSchema.of_model(model)
        if str(path).startswith(_SHARED):
            return cls(_shared(str(path), schema, config), model.window)
        return cls(EmbeddedHistory(path, schema, config), model.window)

    def read(self, user_id: int) -> Events:
        """As much of a history as the model looks at; nothing, at version 0, of an unknown user.

        Read at once, not in a thread: a few hundred microseconds at most, and whoever reads and submits without
        awaiting in between cannot bring back a user who is forgotten meanwhile.
        """
        return self._store.read_last(user_id, self._window)

    async def append(self, user_id: int, base_version: int, events: NewEvents) -> Appended:
        """Returns when the events are kept; raises what the store raises."""
        return await asyncio.wrap_future(self._store.submit(user_id, base_version, events))

    def state(self, user_id: int) -> UserState | None:
        return self._store.state(user_id)

    async def delete(self, user_id: int) -> bool:
        """False if nothing was kept of the user."""
        return await asyncio.to_thread(self._store.delete, user_id)

    def stats(self) -> HistoryStats:
        return self._store.stats()

    async def close(self) -> None:
        await asyncio.to_thread(self._store.close)


def _shared(url: str, schema: EventSchema, config: HistoryConfig) -> Store:
    try:
        from helmrec.history.redis import RedisHistory  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise ConfigError(f"history_path: {url} needs helmrec[cluster] to be installed ({error})") from None
    return RedisHistory(url, schema, config)
