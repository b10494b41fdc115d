import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from helmrec.history.config import HistoryConfig
from helmrec.history.embedded import EmbeddedHistory
from helmrec.history.events import EventSchema
from helmrec.history.store import HistoryStore
from tests.history.helpers import SCHEMA
from tests.history.places import Open, running_redis

_PLACES = itertools.count()


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="redis-") as folder, running_redis(Path(folder)) as url:
        yield url


@pytest.fixture(params=["embedded", "redis"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens an empty place, always the same within a test."""
    if request.param == "embedded":
        return lambda config=None, schema=SCHEMA: EmbeddedHistory(tmp_path / "history", schema, config)
    from helmrec.history.redis import RedisHistory  # noqa: PLC0415 - an extra

    url, prefix = request.getfixturevalue("redis_url"), f"place-{next(_PLACES)}"

    def open_redis(config: HistoryConfig | None = None, schema: EventSchema = SCHEMA) -> HistoryStore:
        patient = {"read_timeout_ms": 30_000, "write_timeout_ms": 30_000}  # however busy the machine is
        return RedisHistory(url, schema, (config or HistoryConfig()).model_copy(update=patient), prefix)

    return open_redis


@pytest.fixture
def store(opened: Open) -> Iterator[HistoryStore]:
    """An empty store, sound at teardown."""
    with opened(HistoryConfig(sync="os")) as store:
        yield store
        store.check()
