"""A server in front of a tiny engine, shared by tests that leave it as they found it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from helmrec.clock import MonotonicClock
from helmrec.engine.engine import Engine
from helmrec.history.config import HistoryConfig
from helmrec.serve.app import make_app
from helmrec.serve.histories import StoredHistories
from helmrec.serve.port import InProcessPort
from helmrec.serve.settings import ServeConfig
from tests.helpers import tiny_config, tiny_engine
from tests.serve.asgi import Caller

TOKEN = "open sesame"


@pytest.fixture
def served() -> Engine:
    """The engine behind `caller`."""
    return tiny_engine(clock=MonotonicClock(), audit_every=2)


@pytest.fixture
def histories(tmp_path: Path) -> StoredHistories:
    """A store behind `caller`, which closes it."""
    return StoredHistories.open(tmp_path / "histories", tiny_config(), HistoryConfig(sync="os", map_bytes=1 << 20))


@pytest.fixture
def keeper(served: Engine, histories: StoredHistories) -> Iterator[Caller]:
    """A server that keeps histories."""
    with Caller(make_app(InProcessPort(served), ServeConfig(), histories)) as keeper:
        keeper.wait_until_ready()
        yield keeper
        served.check()


@pytest.fixture
def caller(served: Engine) -> Iterator[Caller]:
    config = ServeConfig(max_body_bytes=100_000, admin_token=TOKEN)
    with Caller(make_app(InProcessPort(served), config)) as caller:
        caller.wait_until_ready()
        yield caller
        served.check()
