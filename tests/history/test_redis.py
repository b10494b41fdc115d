"""What only a store that several nodes share can get wrong."""

import signal
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helmrec.errors import HistoryError, HistoryFull, HistoryUnavailable, StaleVersion
from helmrec.history.config import HistoryConfig
from helmrec.history.events import EventSchema
from helmrec.history.pages import PAGE_EVENTS
from helmrec.history.store import HistoryStore
from helmrec.history.values import Appended
from tests.history.helpers import SCHEMA, events_of, same
from tests.history.places import redis_process, running_redis

redis = pytest.importorskip("helmrec.history.redis", reason="helmrec[cluster] is not installed")
PASSWORD = "hunter2secret"
PATIENT = HistoryConfig(read_timeout_ms=30_000, write_timeout_ms=30_000)  # however busy the machine is


def open_at(url: str, prefix: str, config: HistoryConfig | None = None) -> HistoryStore:
    store: HistoryStore = redis.RedisHistory(url, SCHEMA, config or PATIENT, prefix)
    return store


def test_what_one_node_appends_the_other_reads_at_once(redis_url: str) -> None:
    with open_at(redis_url, "two") as one, open_at(redis_url, "two") as other:
        for at in range(0, 400, 40):
            (one, other)[at // 40 % 2].append(1, at, events_of(1, at, 40))
            assert same(one.read_last(1, 999), events_of(1, 0, at + 40))
            assert same(other.read_last(1, 60), events_of(1, max(0, at - 20), min(60, at + 40)))
            assert one.state(1) == other.state(1)
        assert other.delete(1)
        assert one.state(1) is None
        one.check()


def test_of_two_nodes_that_append_to_one_version_one_is_kept_and_one_is_stale(redis_url: str) -> None:
    def append(store: HistoryStore, base: int, whose: int) -> Appended | StaleVersion:
        try:
            return store.append(1, base, events_of(whose, base, 3))
        except StaleVersion as stale:
            return stale

    stores = [open_at(redis_url, "race") for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        for base in range(0, 3 * 60, 3):
            done = list(threads.map(append, stores, [base] * 2, [1, 2]))
            kept = [each for each in done if isinstance(each, Appended)]
            stale = [each for each in done if isinstance(each, StaleVersion)]
            assert len(kept) == len(stale) == 1, done
            assert stale[0].current == base + 3
    assert PAGE_EVENTS < 180, "a page was filled on the way"
    stores[0].check()
    for store in stores:
        store.close()


def test_a_store_of_other_fields_is_refused(redis_url: str) -> None:
    open_at(redis_url, "fields").close()
    with pytest.raises(HistoryError, match="was made for"):
        redis.RedisHistory(redis_url, EventSchema(num_items=9, num_actions=2), None, "fields")


def test_a_server_that_is_not_there_or_goes_is_told_with_its_address() -> None:
    with pytest.raises(HistoryError, match=r"unix:///nowhere/redis\.sock"):
        redis.RedisHistory("unix:///nowhere/redis.sock", SCHEMA)
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        with running_redis(Path(folder)) as url:
            store = open_at(url, "gone")
            store.append(1, 0, events_of(1, 0, 3))
        for call in (lambda: store.read_last(1, 3), lambda: store.append(1, 3, events_of(1, 3, 1)), store.stats):
            with pytest.raises(HistoryError, match=r"redis\.sock"):
                call()
        store.close()


def test_damage_is_told_and_never_served(redis_url: str) -> None:
    with open_at(redis_url, "damage") as store:
        store.append(1, 0, events_of(1, 0, 300))
        client, key = store._client, store._keys.user(1)  # type: ignore[attr-defined]
        page = bytearray(client.hget(key, (1).to_bytes(8, "big")))
        page[-1] ^= 1
        client.hset(key, (1).to_bytes(8, "big"), bytes(page))
        with pytest.raises(HistoryError, match="damaged from event 126 on"):
            store.read_last(1, 300)
        with pytest.raises(HistoryError, match="damaged"):
            store.check()
        assert same(store.read_last(1, 40), events_of(1, 260, 40)), "the last page is sound"


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{PASSWORD}@127.0.0.1:1/0",
        f"redis://me:{PASSWORD}@127.0.0.1:1/0",
        f"unix:///nowhere/redis.sock?password={PASSWORD}",
        f"redis://:{PASSWORD}/with#special@127.0.0.1:1/0",
        f"redis://:{PASSWORD}@127.0.0.1:port/0",
        f"reddis://:{PASSWORD}@127.0.0.1:1/0",
    ],
)
def test_no_error_shows_the_password_of_the_address(url: str) -> None:
    with pytest.raises(HistoryError) as caught:
        redis.RedisHistory(url, SCHEMA)
    shown = "".join(traceback.format_exception(caught.value))
    assert PASSWORD not in shown
    assert "***" in str(caught.value)


def test_a_wrong_password_is_not_shown_either() -> None:
    folder = tempfile.TemporaryDirectory(prefix="redis-")
    with folder, running_redis(Path(folder.name), "--requirepass", "right") as url:
        with pytest.raises(HistoryUnavailable) as caught:
            redis.RedisHistory(f"{url}?password={PASSWORD}", SCHEMA)
        assert PASSWORD not in "".join(traceback.format_exception(caught.value))
        redis.RedisHistory(f"{url}?password=right", SCHEMA).close()


def test_a_server_that_hangs_is_waited_for_as_long_as_was_said_and_a_lost_connection_is_made_anew() -> None:
    config = HistoryConfig(read_timeout_ms=50, write_timeout_ms=100)
    with tempfile.TemporaryDirectory(prefix="redis-") as folder, redis_process(Path(folder)) as process:
        store = open_at(f"unix://{folder}/redis.sock", "hangs", config)
        store.append(1, 0, events_of(1, 0, 3))
        process.send_signal(signal.SIGSTOP)
        for call in (
            lambda: store.read_last(1, 3),
            store.ping,
            store.stats,
            lambda: store.append(1, 3, events_of(1, 3, 3)),
        ):
            started_s = time.perf_counter()
            with pytest.raises(HistoryUnavailable, match=r"redis\.sock: Timeout"):
                call()
            assert time.perf_counter() - started_s < 1
        process.send_signal(signal.SIGCONT)
        assert same(store.read_last(1, 3), events_of(1, 0, 3))
        admin = store._client  # type: ignore[attr-defined]
        admin.client_kill_filter(skipme=False)
        assert same(store.read_last(1, 3), events_of(1, 0, 3)), "on a new connection"
        store.append(1, store.read_last(1, 9).version, events_of(1, 6, 1))
        store.close()


def test_an_error_of_a_write_does_not_show_what_was_written(redis_url: str) -> None:
    with open_at(redis_url, "unseen") as store:
        client = store._client  # type: ignore[attr-defined]
        client.config_set("maxmemory", "1")
        try:
            with pytest.raises(HistoryFull) as caught:
                store.append(1, 0, events_of(1, 0, 3))
        finally:
            client.config_set("maxmemory", "0")
        assert "HSET" not in str(caught.value)
        assert store.append(1, 0, events_of(1, 0, 3)).version == 3


@pytest.mark.parametrize("is_new_node_first", [False, True])
def test_nodes_agree_on_a_key_again_when_the_server_lost_everything(redis_url: str, is_new_node_first: bool) -> None:
    prefix = f"lost-{is_new_node_first}"
    with open_at(redis_url, prefix) as one, open_at(redis_url, prefix) as other:
        one.append(1, 0, events_of(1, 0, 3))
        client = one._client  # type: ignore[attr-defined]
        client.delete(*client.keys(f"{prefix}:*"))
        if is_new_node_first:
            open_at(redis_url, prefix).close()
        for store in (one, other):
            store.ping()
        one.append(2, 0, events_of(2, 0, 5))
        with open_at(redis_url, prefix) as new:
            assert new.state(2) == other.state(2) == one.state(2)
            assert same(new.read_last(2, 9), events_of(2, 0, 5))
            new.check()
