"""Compiles the loops of the history stores before the first event arrives."""

import functools
import tempfile

from helmrec.history.config import HistoryConfig
from helmrec.history.embedded import EmbeddedHistory
from helmrec.history.events import EventSchema, NewEvents

_NUM_EVENTS = 1_000  # more than a page


@functools.cache
def compile_loops() -> None:
    """Use a scratch store in every way once. All kinds of stores share these loops."""
    schema = EventSchema(num_items=2, num_actions=2)
    ones = [1] * _NUM_EVENTS
    with tempfile.TemporaryDirectory() as folder, EmbeddedHistory(folder, schema, HistoryConfig()) as store:
        for base_version in (0, _NUM_EVENTS):
            store.append(1, base_version, NewEvents(ones, ones, ones))
        store.append(1, _NUM_EVENTS, NewEvents(ones, ones, ones))  # sent again
        store.read_last(1, _NUM_EVENTS // 2)
        store.check()
        store.delete(1)
