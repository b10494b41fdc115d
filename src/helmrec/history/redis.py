"""A history store in Redis, shared by many nodes: the same pages, hashes and versions as in the embedded store.

One Redis hash per user holds its record and its pages. An append writes only if no other node has written that user
since it was read; a read takes record and pages atomically. Durability is a setting of the Redis server.
"""

import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self, TypeVar, cast

import numpy as np
import redis

from helmrec.errors import HelmRecError, HistoryError, QueueFull
from helmrec.history.config import HistoryConfig
from helmrec.history.embedded import HistoryStats
from helmrec.history.events import Events, EventSchema, NewEvents, check_whole, to_columns, to_events
from helmrec.history.file import Tables, Txn
from helmrec.history.identity import Found, check_identity, describe, make_key
from helmrec.history.pages import PAGE_EVENTS, PAGE_KEY_BYTES, UserRecord, page_key, unpack_user, user_key, user_of_key
from helmrec.history.redis_client import connect, redis_errors
from helmrec.history.sizes import TableSizes, check_sizes, pack_sizes, sizes_of, unpack_sizes
from helmrec.history.store import Appended, UserState
from helmrec.history.users import Append, UserTable
from helmrec.memory.history import SECRET_BYTES
from helmrec.redaction import redact

T = TypeVar("T")
_RECORD = b"record"
_THREADS = 8
_USERS_AT_ONCE = 1_024
# Reads the record and pages of one user atomically. KEYS: the user; ARGV: the number of last events, or, if negative,
# -1 - the first event; the events of a page. Numbers in Lua are doubles: exact up to 2^53 events.
_READ = """
local record = redis.call('HGET', KEYS[1], 'record')
if not record then return {} end
local version, first = struct.unpack('<I8I8', record)
local from = tonumber(ARGV[1])
if from < 0 then from = -from - 1 else from = version - from end
from = math.max(first, from)
local found = {record}
if from >= version then return found end
for page = math.floor(from / ARGV[2]), math.floor((version - 1) / ARGV[2]) do
  found[#found + 1] = redis.call('HGET', KEYS[1], struct.pack('>I8', page)) or ''
end
return found
"""


class _Keys:
    """The keys of the store in Redis."""

    def __init__(self, prefix: str) -> None:
        self.description = f"{prefix}:history".encode()
        self.own_secret = f"{prefix}:history-key".encode()
        self.sizes = f"{prefix}:sizes".encode()
        self.users = f"{prefix}:users".encode()  # sorted: ids, big-endian
        self.num_pages = f"{prefix}:pages".encode()
        self._user = f"{prefix}:user:".encode()

    def user(self, user_id: int) -> bytes:
        return self._user + str(user_id).encode()


class _WatchedTxn:
    """A transaction for `UserTable` over one watched user: reads at once, writes at the end."""

    def __init__(self, pipe: Any, key: bytes) -> None:
        self._pipe, self._key = pipe, key
        self.writes: dict[bytes, bytes] = {}
        self.deletes: list[bytes] = []

    def get(self, key: bytes, default: bytes | None = None, db: object = None) -> bytes | None:
        value = self._pipe.hget(self._key, _field(key))
        return default if value is None else value

    def put(self, key: bytes, value: bytes, db: object = None) -> None:
        self.writes[_field(key)] = value

    def delete(self, key: bytes, db: object = None) -> None:
        self.deletes.append(_field(key))


class _FetchedTxn:
    """A read-only transaction for `UserTable` over fetched values."""

    def __init__(self, values: dict[bytes, bytes]) -> None:
        self._values = values

    def get(self, key: bytes, default: bytes | None = None, db: object = None) -> bytes | None:
        return self._values.get(_field(key), default)


def _field(key: bytes) -> bytes:
    """Return the field of the user's hash for a key of the embedded store."""
    return key[-8:] if len(key) == PAGE_KEY_BYTES else _RECORD


def _num_pages(record: bytes) -> int:
    """Return the number of pages of a user with this record."""
    found = unpack_user(record)
    assert found is not None, "it was just packed"
    return -(-found.version // PAGE_EVENTS) - found.first_event // PAGE_EVENTS


class RedisHistory:
    """The store. `HistoryStore` documents the contract of its methods."""

    def __init__(
        self, url: str, schema: EventSchema, config: HistoryConfig | None = None, prefix: str = "helmrec"
    ) -> None:
        """Open the store at `url`, or make one.

        Raises HistoryUnavailable if the server does not answer, HistoryError if the store has other fields, and
        TablesTooSmall if it holds events of larger tables.
        """
        self._config = config or HistoryConfig()
        self._schema = schema
        self._place = redact(url)  # as errors may name it
        self._keys = _Keys(prefix)
        self._found = Found(None, None)
        self._closing = threading.Lock()
        self._is_closed = False
        self._num_waiting = 0
        with redis_errors(self._place):
            self._client = connect(url, self._config.read_timeout_ms)
            self._write_client = connect(url, self._config.write_timeout_ms)
            self._read_script = self._client.register_script(_READ)
            self._identify()
            self._note_sizes(schema)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="history-redis")

    def _identify(self) -> None:
        """Check the identity of the store, or write it; nodes that do so at the same time get the same key.

        A server that has lost its data gets the key that this node had before.
        """
        secret, names, client = self._config.secret, self._keys, self._client
        if client.get(names.description) is None:
            if secret is None:
                client.set(names.own_secret, self._found.own_secret or secrets.token_bytes(SECRET_BYTES), nx=True)
            key = make_key(self._place, secret, client.get(names.own_secret))
            client.set(names.description, describe(self._schema, key, secret), nx=True)
        self._found = Found(client.get(names.description), client.get(names.own_secret))
        key = check_identity(self._place, self._found, self._schema, secret)
        tables = Tables(*cast("tuple[Any, Any]", (None, None)))  # a user's hash holds both
        self._users = UserTable(tables, key, self._schema.num_fields, self._config.max_events_per_user)

    def _note_sizes(self, schema: EventSchema) -> None:
        """Record these table sizes; raise TablesTooSmall if events were appended under larger ones.

        A store without users drops the sizes recorded before.
        """
        with self._client.pipeline() as pipe:
            while True:
                pipe.watch(self._keys.sizes, self._keys.users)
                value = pipe.get(self._keys.sizes) if pipe.zcard(self._keys.users) else None
                taken = {} if value is None else unpack_sizes(value, self._place)
                check_sizes(taken, schema, self._place)
                pipe.multi()
                if taken != sizes_of(schema):
                    pipe.set(self._keys.sizes, pack_sizes(sizes_of(schema)))
                try:
                    pipe.execute()
                    return
                except redis.WatchError:
                    continue

    def sizes(self) -> TableSizes:
        """Return the largest table sizes, by field, under which any node appended events."""
        with redis_errors(self._place):
            value = self._client.get(self._keys.sizes)
        return sizes_of(self._schema) if value is None else unpack_sizes(value, self._place)

    def follow(self, schema: EventSchema) -> None:
        if schema.feature_names != self._schema.feature_names:
            raise HistoryError(f"{self._place} keeps {self._schema.field_names}, not {schema.field_names}")
        with redis_errors(self._place):
            self._note_sizes(schema)
        self._schema = schema  # events checked before are also within the larger limits

    def ping(self) -> None:
        """Raise HistoryUnavailable if the server does not answer.

        If the server has lost its data, write the identity again; if another node has done so, use its key.
        """
        with redis_errors(self._place):
            description, sizes = self._client.mget(self._keys.description, self._keys.sizes)
            if description != self._found.description or sizes is None:
                self._identify()
                self._note_sizes(self._schema)

    def submit(self, user_id: int, base_version: int, events: NewEvents) -> Future[Appended]:
        check_whole("user_id", user_id)
        check_whole("base_version", base_version)
        columns = to_columns(self._schema, events, self._config.max_append_events)
        new = Append(int(user_id), int(base_version), columns)
        return self._start(lambda: self._append(new))

    def _start(self, work: Callable[[], T]) -> Future[T]:
        with self._closing:
            self._need_open()
            if self._num_waiting >= self._config.queue_limit:
                raise QueueFull(f"{self._config.queue_limit} appends wait for the history store")
            self._num_waiting += 1
            future = self._pool.submit(work)
        future.add_done_callback(self._note_done)
        return future

    def _note_done(self, _: object) -> None:
        with self._closing:
            self._num_waiting -= 1

    def append(self, user_id: int, base_version: int, events: NewEvents) -> Appended:
        return self.submit(user_id, base_version, events).result()

    def _append(self, new: Append) -> Appended:
        key = self._keys.user(new.user_id)
        with redis_errors(self._place), self._write_client.pipeline() as pipe:
            while True:
                pipe.watch(key)
                txn = _WatchedTxn(pipe, key)
                outcome: Appended | HelmRecError
                try:
                    outcome = self._users.append(cast("Txn", txn), new)
                except HelmRecError as error:  # it may have read a partial write of another node
                    outcome = error
                num_before = max(1, pipe.hlen(key))  # the record is no page
                pipe.multi()
                self._write(pipe, new.user_id, txn, num_before - 1)
                try:
                    pipe.execute()
                except redis.WatchError:  # another node has written the user: try again
                    continue
                if isinstance(outcome, HelmRecError):
                    raise outcome
                return outcome

    def _write(self, pipe: Any, user_id: int, txn: _WatchedTxn, num_pages: int) -> None:
        """Queue the writes of a transaction. Without writes, queue a read, so that executing detects a changed user."""
        key = self._keys.user(user_id)
        if not txn.writes:
            pipe.exists(key)
            return
        pipe.hset(key, mapping=txn.writes)
        if txn.deletes:
            pipe.hdel(key, *txn.deletes)
        pipe.zadd(self._keys.users, {user_key(user_id): 0})
        pipe.incrby(self._keys.num_pages, _num_pages(txn.writes[_RECORD]) - num_pages)

    def read_last(self, user_id: int, num_events: int) -> Events:
        """Return the last events, at most this many; for an unknown user none, at version 0."""
        check_whole("num_events", num_events)
        return self._read(user_id, int(num_events), lambda version: version - num_events)

    def read_from(self, user_id: int, first_event: int) -> Events:
        """Return the events from this absolute index on that are still kept."""
        check_whole("first_event", first_event)
        return self._read(user_id, -int(first_event) - 1, lambda _: first_event)

    def _read(self, user_id: int, wanted: int, start: Callable[[int], int]) -> Events:
        check_whole("user_id", user_id)
        record, txn = self._fetch(int(user_id), wanted, start)
        version = 0 if record is None else record.version
        first_event = version if record is None else max(record.first_event, start(version))
        if record is None or first_event >= version:
            empty = np.empty((self._schema.num_fields, 0), np.int64)
            return to_events(self._schema, version, empty)
        found = self._users.read(txn, int(user_id), record, first_event)
        skip = first_event % PAGE_EVENTS
        return to_events(self._schema, first_event, found.columns[:, skip:])

    def _fetch(self, user_id: int, wanted: int, start: Callable[[int], int]) -> tuple[UserRecord | None, Txn]:
        """Fetch a user's record and the wanted pages in one round trip."""
        with self._closing:
            self._need_open()
        with redis_errors(self._place):
            values = self._read_script(keys=[self._keys.user(user_id)], args=[wanted, PAGE_EVENTS])
        if not values:
            return None, cast("Txn", _FetchedTxn({}))
        record = self._users.record(cast("Txn", _FetchedTxn({_RECORD: values[0]})), user_id)
        assert record is not None, "it is there"
        first_page = max(record.first_event, start(record.version)) // PAGE_EVENTS
        pages = {_field(page_key(user_id, first_page + i)): value for i, value in enumerate(values[1:])}
        return record, cast("Txn", _FetchedTxn({_RECORD: values[0], **pages}))

    def state(self, user_id: int) -> UserState | None:
        """None if the user is unknown."""
        check_whole("user_id", user_id)
        record, _ = self._fetch(int(user_id), 0, lambda version: version)
        return None if record is None else self._users.state(record)

    def submit_delete(self, user_id: int) -> Future[bool]:
        """Delete a user; False if there was none."""
        check_whole("user_id", user_id)
        return self._start(lambda: self._delete(int(user_id)))

    def delete(self, user_id: int) -> bool:
        return self.submit_delete(user_id).result()

    def _delete(self, user_id: int) -> bool:
        key = self._keys.user(user_id)
        with redis_errors(self._place), self._write_client.pipeline() as pipe:
            while True:
                pipe.watch(key)
                num_fields = pipe.hlen(key)
                pipe.multi()
                pipe.delete(key)
                pipe.zrem(self._keys.users, user_key(user_id))
                pipe.decrby(self._keys.num_pages, max(0, num_fields - 1))
                try:
                    return bool(pipe.execute()[0])
                except redis.WatchError:
                    continue

    def user_ids(self) -> Iterator[int]:
        """Yield all users, ascending. Users added or removed during the iteration may or may not be included."""
        after = b"-"
        while True:
            with redis_errors(self._place):
                some = self._client.zrangebylex(self._keys.users, after, b"+", start=0, num=_USERS_AT_ONCE)
            yield from map(user_of_key, some)
            if len(some) < _USERS_AT_ONCE:
                return
            after = b"(" + some[-1]

    def stats(self) -> HistoryStats:
        """Return the size of the store; bytes are those of the whole server."""
        with redis_errors(self._place):
            memory = self._client.info("memory")
            num_pages = int(self._client.get(self._keys.num_pages) or 0)
            num_users = self._client.zcard(self._keys.users)
        return HistoryStats(num_users, num_pages, int(memory["used_memory"]), int(memory.get("maxmemory", 0)))

    def check(self) -> None:
        """Read everything; raise HistoryError if any history or the index is damaged."""
        num_pages = 0
        for user_id in self.user_ids():
            record, txn = self._fetch(user_id, -1, lambda _: 0)
            if record is None:
                raise HistoryError(f"the index is damaged: user {user_id} is not there")
            self._users.check(txn, user_id)
            num_pages += -(-record.version // PAGE_EVENTS) - record.first_event // PAGE_EVENTS
        if num_pages != self.stats().num_pages:
            raise HistoryError(
                f"the index is damaged: {self.stats().num_pages} pages are counted, {num_pages} are there"
            )

    def close(self) -> None:
        """Finish all submitted work, then close the connections. Closing twice is allowed."""
        with self._closing:
            self._is_closed = True
        self._pool.shutdown()
        self._client.close()
        self._write_client.close()

    def _need_open(self) -> None:
        if self._is_closed:
            raise HistoryError(f"{self._place} is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
