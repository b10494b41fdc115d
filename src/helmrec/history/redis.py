"""A history store in Redis, shared by many nodes: the same pages, hashes and versions as in the embedded store.

One Redis hash per user holds its record and its pages. An append writes only if no other node has written that user
since it was read; a read takes record and pages atomically. Durability is a setting of the Redis server.
"""

import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import redis

from helmrec.errors import HelmRecError, HistoryError, QueueFull
from helmrec.history.config import HistoryConfig
from helmrec.history.events import EventSchema
from helmrec.history.file import Tables, Txn
from helmrec.history.identity import Found, check_identity, describe, make_key
from helmrec.history.pages import PAGE_EVENTS, PAGE_NUMBER_BYTES, page_key
from helmrec.history.redis_client import connect, redis_errors
from helmrec.history.sizes import TableSizes, check_sizes, pack_sizes, sizes_of, unpack_sizes
from helmrec.history.store import HistoryStore
from helmrec.history.users import Append, UserTable, user_of_stored
from helmrec.history.values import Appended, HistoryStats
from helmrec.memory.prefix_hash import SECRET_BYTES
from helmrec.redaction import redact
from helmrec.types import UserId
from helmrec.user_ids import store_key

T = TypeVar("T")
_RECORD = b"record"
_THREADS = 8
_USERS_AT_ONCE = 1_024
# Reads the record and pages of one user atomically. KEYS: the user; ARGV: the number of last events, the events of a
# page. Numbers in Lua are doubles: exact up to 2^53 events.
_READ = """
local record = redis.call('HGET', KEYS[1], 'record')
if not record then return {} end
local version, first = struct.unpack('<I8I8', record)
local from = math.max(first, version - ARGV[1])
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
        self.users = f"{prefix}:users".encode()  # sorted: keys of the embedded store
        self._user = f"{prefix}:user:".encode()

    def user(self, user_id: UserId) -> bytes:
        return self._user + (str(user_id) if isinstance(user_id, int) else f'"{user_id}').encode()


class _WatchedTxn:
    """A transaction for `UserTable` over one watched user: reads at once, writes at the end."""

    def __init__(self, pipe: Any, key: bytes) -> None:
        self._pipe, self._key = pipe, key
        self.writes: dict[bytes, bytes] = {}
        self.deletes: list[bytes] = []

    def get(self, key: bytes, default: bytes | None = None, db: object = None) -> bytes | None:
        value = self._pipe.hget(self._key, _field(key, db))
        return default if value is None else value

    def put(self, key: bytes, value: bytes, db: object = None) -> None:
        self.writes[_field(key, db)] = value

    def delete(self, key: bytes, db: object = None) -> None:
        self.deletes.append(_field(key, db))


class _FetchedTxn:
    """A read-only transaction for `UserTable` over fetched values."""

    def __init__(self, values: dict[bytes, bytes]) -> None:
        self._values = values

    def get(self, key: bytes, default: bytes | None = None, db: object = None) -> bytes | None:
        return self._values.get(_field(key, db), default)


_TABLES = Tables(*cast("tuple[Any, Any]", ("users", "pages")))  # a user's hash holds both


def _field(key: bytes, table: object) -> bytes:
    """Return the field of the user's hash for a key of a table of the embedded store."""
    return key[-PAGE_NUMBER_BYTES:] if table == _TABLES.pages else _RECORD


class RedisHistory(HistoryStore):
    """The store."""

    def __init__(
        self, url: str, schema: EventSchema, config: HistoryConfig | None = None, prefix: str = "helmrec"
    ) -> None:
        """Open the store at `url`, or make one.

        Raises HistoryUnavailable if the server does not answer, HistoryError if the store has other fields, and
        TablesTooSmall if it holds events of larger tables.
        """
        super().__init__(redact(url), schema, config or HistoryConfig())
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
        self._users = UserTable(_TABLES, key, self._schema.num_fields, self._config.max_events_per_user)

    def _note_sizes(self, schema: EventSchema) -> None:
        with redis_errors(self._place), self._client.pipeline() as pipe:
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
        with redis_errors(self._place):
            value = self._client.get(self._keys.sizes)
        return sizes_of(self._schema) if value is None else unpack_sizes(value, self._place)

    def ping(self) -> None:
        """Raise HistoryUnavailable if the server does not answer.

        If the server has lost its data, write the identity again; if another node has done so, use its key.
        """
        with redis_errors(self._place):
            description, sizes = self._client.mget(self._keys.description, self._keys.sizes)
            is_lost = description != self._found.description or sizes is None
            if is_lost:
                self._identify()
        if is_lost:
            self._note_sizes(self._schema)

    def _submit_append(self, new: Append) -> Future[Appended]:
        return self._start(lambda: self._append(new))

    def _submit_delete(self, user_id: UserId) -> Future[bool]:
        return self._start(lambda: self._delete(user_id))

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
                pipe.multi()
                self._write(pipe, new.user_id, txn)
                try:
                    pipe.execute()
                except redis.WatchError:  # another node has written the user: try again
                    continue
                if isinstance(outcome, HelmRecError):
                    raise outcome
                return outcome

    def _write(self, pipe: Any, user_id: UserId, txn: _WatchedTxn) -> None:
        """Queue the writes of a transaction. Without writes, queue a read, so that executing detects a changed user."""
        key = self._keys.user(user_id)
        if not txn.writes:
            pipe.exists(key)
            return
        pipe.hset(key, mapping=txn.writes)
        if txn.deletes:
            pipe.hdel(key, *txn.deletes)
        pipe.zadd(self._keys.users, {store_key(user_id): 0})

    @contextmanager
    def _reading(self, user_id: UserId, num_events: int) -> Iterator[Txn]:
        """Yield a user's record and last events, which one round trip has read."""
        with self._closing:
            self._need_open()
        with redis_errors(self._place):
            values = self._read_script(keys=[self._keys.user(user_id)], args=[num_events, PAGE_EVENTS])
        fetched = {_RECORD: values[0]} if values else {}
        if len(values) > 1:
            record = self._users.record(cast("Txn", _FetchedTxn(fetched)), user_id)
            assert record is not None, "it was read"
            first_page = record.first_of_last(num_events) // PAGE_EVENTS
            fetched |= {
                _field(page_key(user_id, first_page + i), _TABLES.pages): page for i, page in enumerate(values[1:])
            }
        yield cast("Txn", _FetchedTxn(fetched))

    def _delete(self, user_id: UserId) -> bool:
        with redis_errors(self._place), self._write_client.pipeline() as pipe:
            pipe.delete(self._keys.user(user_id))
            pipe.zrem(self._keys.users, store_key(user_id))
            return bool(pipe.execute()[0])

    def user_ids(self) -> Iterator[UserId]:
        after = b"-"
        while True:
            with redis_errors(self._place):
                some = self._client.zrangebylex(self._keys.users, after, b"+", start=0, num=_USERS_AT_ONCE)
            yield from map(user_of_stored, some)
            if len(some) < _USERS_AT_ONCE:
                return
            after = b"(" + some[-1]

    def stats(self) -> HistoryStats:
        """Return the size of the store; bytes are those of the whole server."""
        with redis_errors(self._place):
            memory = self._client.info("memory")
            return HistoryStats(self._client.zcard(self._keys.users), int(memory["used_memory"]))

    def check(self) -> None:
        super().check()
        for user_id in self.user_ids():
            with redis_errors(self._place):
                if not self._client.exists(self._keys.user(user_id)):
                    raise HistoryError(f"the index is damaged: user {user_id} is not there")

    def close(self) -> None:
        with self._closing:
            self._is_closed = True
        self._pool.shutdown()
        self._client.close()
        self._write_client.close()

    def _need_open(self) -> None:
        if self._is_closed:
            raise HistoryError(f"{self._place} is closed")
