from collections.abc import Iterator
from pathlib import Path

import pytest

from helmrec.history.config import HistoryConfig
from helmrec.history.embedded import EmbeddedHistory
from tests.history.helpers import SCHEMA


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EmbeddedHistory]:
    """An empty store, sound at teardown."""
    with EmbeddedHistory(tmp_path / "history", SCHEMA, HistoryConfig(sync="os")) as store:
        yield store
        store.check()
