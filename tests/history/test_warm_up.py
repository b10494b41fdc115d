"""A store that serves compiles nothing: its reads have a timeout."""

from pathlib import Path

from numba.core.registry import CPUDispatcher

from helmrec.history import pages
from helmrec.history.config import HistoryConfig
from helmrec.history.embedded import EmbeddedHistory
from helmrec.history.events import EventSchema, NewEvents
from helmrec.history.warm_up import compile_loops
from helmrec.memory import prefix_hash
from helmrec.model.config import TableConfig


def compiled() -> dict[str, int]:
    loops = {**vars(pages), "_begin": prefix_hash._begin}
    return {name: len(loop.overloads) for name, loop in loops.items() if isinstance(loop, CPUDispatcher)}


def test_nothing_is_compiled_after_the_warm_up(tmp_path: Path) -> None:
    compile_loops()
    before = compiled()
    schema = EventSchema(num_items=100, num_actions=4, features=(TableConfig(name="category", num_rows=20),))
    with EmbeddedHistory(tmp_path, schema, HistoryConfig()) as store:
        for base_version in (0, 300):
            times = list(range(base_version, base_version + 300))
            store.append(7, base_version, NewEvents([3] * 300, [1] * 300, times, {"category": [2] * 300}))
        store.read_last(7, 450)
        store.check()
    assert before["_copy_columns"] == before["_count_sound"] == 1
    assert compiled() == before
