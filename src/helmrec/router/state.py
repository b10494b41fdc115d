"""A router's estimate of the state of every node: updated by its own sends at once, and by the nodes' reports.

After a send, the router assumes that the node holds the user's prefix, until the node has been sent more tokens than
fit, `prefix_ttl_s` has passed, or a report says otherwise. Knows no policy and no socket; time comes with every call.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from helmrec.errors import ConfigError
from helmrec.router.nodes import Flags, Floats, Nodes, RouteRequest, blank_nodes
from helmrec.router.settings import StateSettings
from helmrec.router.sketch import RowSketch
from helmrec.types import IntArray


class UserTokens(NamedTuple):
    """KV tokens a node reports for a user; 0 when it holds none."""

    user: int
    resident_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class NodeReport:
    """State of a node as it reports it. Covers everything before `as_of_s`, by the router's clock."""

    node: int
    sequence: int  # increases with every report of a node since it joined
    as_of_s: float
    queue_ms: float
    num_waiting: int
    waiting_tokens: int
    alpha: float
    pool_tokens: int  # KV tokens that fit the whole pool, at alpha 0
    row_hit_rate: float
    sketch: RowSketch | None = None
    users: tuple[UserTokens, ...] = ()  # users whose KV changed in a way the router cannot predict


class Sent(NamedTuple):
    """One request sent to a node and not answered; pass it to `finished` when it ends."""

    serial: int
    node: int
    sent_s: float
    service_ms: float
    num_tokens: int
    life: int  # which join of the node it was sent to


class _Guess(NamedTuple):
    """KV that a node is assumed to hold for a user."""

    resident_tokens: int
    visits: int
    written_tokens: int  # the node's count at the user's last visit
    expires_s: float
    life: int  # which join of the node it belongs to; after another join the node is empty


_NOTHING = _Guess(0, 0, 0, 0.0, 0)


class _Load(NamedTuple):
    """Work that waits on a node."""

    queue_ms: float = 0.0
    num_waiting: float = 0.0
    waiting_tokens: float = 0.0

    def plus(self, sent: Sent, sign: int) -> "_Load":
        return _Load(
            max(0.0, self.queue_ms + sign * sent.service_ms),
            max(0.0, self.num_waiting + sign),
            max(0.0, self.waiting_tokens + sign * sent.num_tokens),
        )


_NO_LOAD = _Load()


@dataclass(slots=True)
class _Ledger:
    """Load of one node: what its last report contains, and the requests sent after it."""

    reported: _Load = _NO_LOAD
    unreported: _Load = _NO_LOAD
    open: dict[int, Sent] = field(default_factory=dict)  # unreported sends by serial, oldest first

    def add(self, sent: Sent) -> None:
        self.open[sent.serial] = sent
        self.unreported = self.unreported.plus(sent, 1)

    def remove(self, sent: Sent) -> None:
        if self.open.pop(sent.serial, None) is None:
            self.reported = self.reported.plus(sent, -1)
        else:
            self.unreported = self.unreported.plus(sent, -1) if self.open else _NO_LOAD

    def forget_before(self, time_s: float) -> None:
        """Drop sends up to `time_s`: a report contains them, or they were answered long ago."""
        while self.open and (oldest := next(iter(self.open.values()))).sent_s <= time_s:
            self.remove(oldest)


class ClusterState:
    """The nodes of a cluster and the estimated state of each."""

    def __init__(self, settings: StateSettings | None = None) -> None:
        self.settings = settings or StateSettings()
        if self.settings.sketch_bits & (self.settings.sketch_bits - 1):
            raise ConfigError(f"sketch_bits must be a power of two, got {self.settings.sketch_bits}")
        self._place: dict[int, int] = {}  # node -> index into everything below
        self._nodes = self._blank([])
        self._ledgers: list[_Ledger] = []
        self._reported_s = np.empty(0)
        self._sequence: list[float] = []  # of the last accepted report
        self._loads = np.zeros((6, 0))  # two _Loads: reported, then unreported
        self._queue = np.zeros((2, 0))  # milliseconds of work, and the time at which it was estimated
        self._room_tokens: list[float] = []  # KV tokens that fit at the node's alpha; infinite before its first report
        self._written_tokens: list[int] = []  # KV tokens of all prefixes it was sent to keep
        self._guesses: OrderedDict[int, dict[int, _Guess]] = OrderedDict()  # user -> node -> guess
        self._num_sent = 0
        self._num_joined = 0
        self._life: list[int] = []  # number of the node's join

    def _blank(self, ids: list[int]) -> Nodes:
        return blank_nodes(np.array(ids, np.int64), self.settings.sketch_bits // 64)

    def join(self, node: int) -> None:
        """Add an empty node. A node that is known already is replaced."""
        self.leave(node)
        self._place[node] = len(self._place)
        self._nodes = _mapped(lambda a, b: np.concatenate([a, b], axis=-1), self._nodes, self._blank([node]))
        self._ledgers.append(_Ledger())
        self._reported_s = np.append(self._reported_s, -np.inf)
        self._sequence.append(-np.inf)
        self._loads = np.hstack([self._loads, np.zeros((6, 1))])
        self._queue = np.hstack([self._queue, np.zeros((2, 1))])
        self._room_tokens.append(np.inf)
        self._written_tokens.append(0)
        self._num_joined += 1
        self._life.append(self._num_joined)

    def leave(self, node: int) -> None:
        """Remove a node and all that is known about it. Unknown nodes are ignored."""
        place = self._place.pop(node, None)
        if place is None:
            return
        self._place = {other: at - (at > place) for other, at in self._place.items()}
        self._nodes = _mapped(lambda column: np.delete(column, place, axis=-1), self._nodes)
        self._reported_s = np.delete(self._reported_s, place)
        self._loads = np.delete(self._loads, place, axis=1)
        self._queue = np.delete(self._queue, place, axis=1)
        for column in (self._ledgers, self._sequence, self._room_tokens, self._written_tokens, self._life):
            del column[place]

    def look(self, user: int, now_s: float) -> Nodes:
        """Return all nodes as they are for a request of this user. Valid until the state changes.

        The queue of a node that reports shrinks as time passes. A node that does not report may be stuck: its sends
        count until `finished` or until `open_ttl_s` has passed.
        """
        stale_s = now_s - self.settings.stale_s
        is_fresh, load = _current(self._reported_s, self._loads, self._queue, now_s, stale_s)
        seen: dict[str, NDArray[Any]] = {
            "is_fresh": is_fresh,
            "queue_ms": load[0],
            "num_waiting": load[1],
            "waiting_tokens": load[2],
        }
        guesses = self._guesses.get(user)
        if guesses:
            seen |= self._prefixes(guesses, now_s)
        return self._nodes._replace(**seen)

    def _prefixes(self, guesses: dict[int, _Guess], now_s: float) -> dict[str, IntArray]:
        """Return the columns of `Nodes` that depend on the user."""
        held = np.zeros((2, len(self._place)), np.int64)
        for node, guess in guesses.items():
            place = self._place.get(node)
            if place is None or not self._holds(place, guess, now_s):
                continue
            is_kept = guess.visits >= self.settings.kept_from_visit
            others = self._written_tokens[place] - guess.written_tokens
            fits = is_kept and others + guess.resident_tokens <= self._room_tokens[place]
            held[:, place] = guess.resident_tokens if fits else 0, guess.visits
        return {"resident_tokens": held[0], "visits": held[1]}

    def _holds(self, place: int, guess: _Guess, now_s: float) -> bool:
        return guess.life == self._life[place] and guess.expires_s >= now_s

    def sent(self, request: RouteRequest, node: int, service_ms: float, now_s: float) -> Sent:
        """Record that a request was sent: it adds to the node's load, and the node will hold the user's prefix."""
        place = self._place[node]
        self._num_sent += 1
        sent = Sent(self._num_sent, node, now_s, service_ms, request.num_tokens, self._life[place])
        self._ledgers[place].forget_before(now_s - self.settings.open_ttl_s)
        self._ledgers[place].add(sent)
        self._publish(place)
        self._enqueue(place, now_s, service_ms)
        self._guess(request, place, now_s)
        return sent

    def _guess(self, request: RouteRequest, place: int, now_s: float) -> None:
        """Assume that the node keeps this prefix from visit `kept_from_visit` on, and that it displaces others."""
        node, kept_from = int(self._nodes.ids[place]), self.settings.kept_from_visit
        before = self._guesses.get(request.user, {}).get(node)
        if before is None or not self._holds(place, before, now_s):
            before = _NOTHING
        if before.visits + 1 >= kept_from:
            known = before.resident_tokens if before.visits >= kept_from else 0
            self._written_tokens[place] += max(0, request.num_tokens - known)
        self._remember(place, UserTokens(request.user, request.num_tokens), before.visits + 1, now_s)

    def _remember(self, place: int, held: UserTokens, visits: int, now_s: float) -> None:
        expires_s = now_s + self.settings.prefix_ttl_s
        guess = _Guess(held.resident_tokens, visits, self._written_tokens[place], expires_s, self._life[place])
        guesses = self._guesses.setdefault(held.user, {})
        guesses.pop(node := int(self._nodes.ids[place]), None)
        guesses[node] = guess
        if len(guesses) > self.settings.max_homes:
            del guesses[next(iter(guesses))]
        self._guesses.move_to_end(held.user)
        while len(self._guesses) > self.settings.max_users:
            self._guesses.popitem(last=False)

    def finished(self, sent: Sent) -> None:
        """Record that a request was answered, refused or lost. Its node may have left or restarted since."""
        place = self._place.get(sent.node)
        if place is not None and self._life[place] == sent.life:
            self._ledgers[place].remove(sent)
            self._publish(place)

    def report(self, report: NodeReport, now_s: float) -> None:
        """Replace estimates by a node's report. Reports of unknown nodes, and outdated ones, are ignored.

        Reports are ordered by `sequence` alone: their times may be estimates, or go back.
        """
        place = self._place.get(report.node)
        if place is None or report.sequence <= self._sequence[place]:
            return
        self._sequence[place] = report.sequence
        ledger = self._ledgers[place]
        ledger.forget_before(report.as_of_s)
        ledger.reported = _Load(report.queue_ms, report.num_waiting, report.waiting_tokens)
        self._publish(place)
        self._queue[:, place] = report.queue_ms, report.as_of_s
        for sent in ledger.open.values():
            self._enqueue(place, sent.sent_s, sent.service_ms)
        self._reported_s[place] = report.as_of_s
        self._room_tokens[place] = (1 - report.alpha) * report.pool_tokens
        self._nodes.row_hit_rate[place] = report.row_hit_rate
        if report.sketch is not None:
            self._take_sketch(place, report.sketch)
        for held in report.users:
            self.correct(report.node, held, now_s)

    def _take_sketch(self, place: int, sketch: RowSketch) -> None:
        fits = sketch.words.size == len(self._nodes.sketch_words)
        if fits:
            self._nodes.sketch_words[:, place] = sketch.words
        self._nodes.sketch_threshold[place] = sketch.threshold if fits else 0
        self._nodes.sketch_fill[place] = sketch.fill

    def correct(self, node: int, held: UserTokens, now_s: float) -> None:
        """Set the KV tokens that a node holds for one user, as known from a report or an answer."""
        place = self._place.get(node)
        if place is None:
            return
        guesses = self._guesses.get(held.user, {})
        if held.resident_tokens:
            visits = guesses[node].visits if node in guesses else 0
            self._remember(place, held, max(self.settings.kept_from_visit, visits), now_s)
        elif guesses.pop(node, None) and not guesses:
            del self._guesses[held.user]

    def _enqueue(self, place: int, now_s: float, service_ms: float) -> None:
        left_ms, since_s = self._queue[:, place].tolist()
        now_s = max(now_s, since_s)
        self._queue[:, place] = max(0.0, left_ms - (now_s - since_s) * 1e3) + service_ms, now_s

    def _publish(self, place: int) -> None:
        ledger = self._ledgers[place]
        self._loads[:3, place], self._loads[3:, place] = ledger.reported, ledger.unreported

    @property
    def num_users(self) -> int:
        """Users whose prefix is assumed to be on some node."""
        return len(self._guesses)

    def check(self) -> None:
        """Every column has one entry per node, loads add up, and memory is bounded."""
        count = len(self._place)
        assert sorted(self._place.values()) == list(range(count))
        assert all(column.shape[-1] == count for column in (*self._nodes, self._loads, self._queue, self._reported_s))
        lists = (self._ledgers, self._sequence, self._room_tokens, self._written_tokens, self._life)
        assert all(len(column) == count for column in lists)
        assert all(self._nodes.ids[place] == node for node, place in self._place.items())
        for place, ledger in enumerate(self._ledgers):
            assert abs(sum(s.service_ms for s in ledger.open.values()) - ledger.unreported.queue_ms) < 1e-6
            assert len(ledger.open) == ledger.unreported.num_waiting
            assert tuple(self._loads[:, place]) == (*ledger.reported, *ledger.unreported)
        assert len(self._guesses) <= self.settings.max_users
        assert all(0 < len(guesses) <= self.settings.max_homes for guesses in self._guesses.values())


@numba.njit(cache=True)
def _current(reported_s: Floats, loads: Floats, queue: Floats, now_s: float, stale_s: float) -> tuple[Flags, Floats]:
    """Return which nodes have reported since `stale_s`, and the load of all: milliseconds, requests, tokens."""
    is_fresh, load = reported_s >= stale_s, loads[3:].copy()
    for i in range(reported_s.size):
        if is_fresh[i]:
            load[0, i] = max(0.0, queue[0, i] - (now_s - queue[1, i]) * 1e3)
            load[1, i] += loads[1, i]
            load[2, i] += loads[2, i]
    return is_fresh, load


def _mapped(change: Callable[..., NDArray[Any]], *nodes: Nodes) -> Nodes:
    """Apply `change` to every column."""
    return Nodes._make(change(*columns) for columns in zip(*nodes, strict=True))
