"""One simulated node under a virtual clock: send it requests, advance time, read its statistics, move its boundary.

This class holds the arrays; the compiled `loop` works on them and makes the decisions of the engine's own classes. It
knows no policy and no router.
"""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from helmrec.costs.calibrated import CostModel, reload_ms
from helmrec.memory.kv_admission import reserved_pages
from helmrec.memory.prefix_book import Kv, check_book, make_book
from helmrec.memory.stats import PoolStats
from helmrec.sim.node.config import NodeConfig, make_setup
from helmrec.sim.node.host import Host, check_host, make_host
from helmrec.sim.node.loop import run_until
from helmrec.sim.node.plan import row_capacity
from helmrec.sim.node.relay import R, check_relay, make_relay, with_signals
from helmrec.sim.node.rows import Row, RowState, check_rows, make_rows, resize
from helmrec.sim.node.state import (
    C,
    Environment,
    Faults,
    Inbox,
    Member,
    N,
    NodeState,
    Outcomes,
    Requests,
    Setup,
    no_faults,
)
from helmrec.sim.node.visits import make_visits
from helmrec.steps import CAPACITY, Step, Steps, latest
from helmrec.traffic.rows import candidate_rows, context_rows, history_rows
from helmrec.types import IntArray

_Number = TypeVar("_Number", np.int64, np.float64)
_DRAINS = 16  # shrinks that wait for running steps, of which there are at most two


class Node:
    """A simulated node. `send` adds requests; `outcomes` and `answered` hold the results."""

    def __init__(
        self,
        config: NodeConfig,
        cost: CostModel,
        requests: Requests,
        outcomes: Outcomes,
        faults: Faults | None = None,
    ) -> None:
        self.config = config
        self.setup = make_setup(config, cost, requests.reads.space.rate)
        self.requests = requests
        self.outcomes = outcomes
        self.faults = faults or no_faults()
        self.state = _make_state(config, self.setup, requests)
        _compile_readers(requests, self.state.scratch)
        self._num_taken = 0
        self._inbox = Inbox(np.empty(0, np.int64), np.empty(0), np.empty(0, np.int64))
        self.aim(config.engine.alpha)
        self._start_at_target()

    def _start_at_target(self) -> None:
        pages, num = self.state.kv.counts, self.state.counts[N.TARGET]
        pages[Kv.FREE] -= num
        pages[Kv.EMB] = num
        resize(self.state.rows, row_capacity(self.setup, num))

    @property
    def now_s(self) -> float:
        return float(self.state.clocks[C.NOW_S])

    @property
    def num_queued(self) -> int:
        return int(self.state.counts[N.QUEUED])

    @property
    def num_unanswered(self) -> int:
        """Requests sent and neither answered nor refused: the load of the node."""
        return int(self.state.counts[N.INBOX_END] - self.state.counts[N.LOGGED])

    @property
    def has_evicted(self) -> bool:
        """Whether both caches have evicted. Results of a cache that is still filling up are too good."""
        return bool(self.state.rows.counts[Row.EVICTIONS] and self.state.kv.counts[Kv.EVICTED])

    @property
    def answered(self) -> IntArray:
        """Requests in the order they were answered or refused."""
        return self._inbox.log[: self.state.counts[N.LOGGED]]

    def send(self, requests: IntArray, times_s: NDArray[np.float64]) -> None:
        """Add requests of the trace that arrive at these times, in order and later than the time simulated so far."""
        counts = self.state.counts
        begin, end = int(counts[N.INBOX_END]), int(counts[N.INBOX_END]) + requests.size
        if end > self._inbox.request.size:
            request, time_s, log = self._inbox
            self._inbox = Inbox(_enlarged(request, end), _enlarged(time_s, end), _enlarged(log, end))
        self._inbox.request[begin:end] = requests
        self._inbox.time_s[begin:end] = times_s
        counts[N.INBOX_END] = end

    def send_signals(self, requests: IntArray, times_s: NDArray[np.float64]) -> None:
        """Add early signals of these requests of the trace; times as in `send`."""
        self.state = self.state._replace(relay=with_signals(self.state.relay, requests, times_s))

    def run_until(self, until_s: float) -> None:
        """Advance to `until_s`; a step that the node waits for may end later."""
        env = Environment(self.setup, self.requests, self._inbox, self.outcomes, self.faults)
        run_until(self.state, env, until_s)

    def aim(self, alpha: float) -> None:
        """Set the target of the boundary, which moves between steps, a bounded number of pages at a time."""
        target = self.config.pages_at(alpha)
        self.state.counts[N.TARGET] = target
        self.state.kv.counts[Kv.RESERVE] = reserved_pages(self.config.num_pages - target, self.setup.batch_pages)

    def unanswered(self) -> IntArray:
        """Requests sent to this node that it has not answered: running, queued or not yet arrived."""
        counts, state = self.state.counts, self.state
        begin = int(counts[N.QUEUE_BEGIN])
        places = state.queue[(begin + np.arange(counts[N.QUEUED])) % state.queue.size]
        steps = {int(counts[N.IN_FLIGHT]), int(counts[N.ENDING])} - {-1}
        ranks = [which for which in sorted(steps) if state.members[which, 0, Member.ASKED]]
        running = [state.members[which, : state.size[which], Member.REQUEST] for which in ranks]
        coming = self._inbox.request[counts[N.INBOX_NEXT] : counts[N.INBOX_END]]
        return np.concatenate([*running, self._inbox.request[places], coming])

    def take_steps(self) -> Steps:
        """Steps that ended since the last call, oldest first; at most the latest `CAPACITY` of them."""
        begin, self._num_taken = self._num_taken, int(self.state.counts[N.ENDED])
        return latest(self.state.ended, begin, self._num_taken)

    def stats(self) -> PoolStats:
        """Statistics as the engine's pool reports them; rows are scaled up from the sample."""
        pages, counts, rate = self.state.kv.counts, self.state.counts, self.setup.rate
        rows, host = self.state.rows.counts, self.state.host.counts
        missed = min(round(float(self.state.clocks[C.MISSED_ROWS])), int(counts[N.ROWS_READ]))
        return PoolStats(
            alpha=float(pages[Kv.EMB] / self.config.num_pages),
            alpha_target=float(counts[N.TARGET] / self.config.num_pages),
            alpha_min=0.0,
            alpha_max=self.config.alpha_max,
            num_pages=self.config.num_pages,
            free_pages=int(pages[Kv.FREE]),
            emb_pages=int(pages[Kv.EMB]),
            kv_pages=int(pages[Kv.HELD]),
            draining_pages=int(pages[Kv.DRAINING]),
            page_bytes=self.setup.page_bytes,
            page_tokens=self.setup.rules.page_tokens,
            row_hits=int(counts[N.ROWS_READ]) - missed,
            row_misses=missed,
            row_evictions=round(rows[Row.EVICTIONS] / rate),
            row_refills=round(rows[Row.REFILLS] / rate),
            resident_rows=round(rows[Row.RESIDENT] / rate),
            row_capacity=int(pages[Kv.EMB]) * self.setup.rows_per_page,
            reused_tokens=int(pages[Kv.REUSED]),
            total_tokens=int(pages[Kv.TOTAL]),
            resident_users=int(pages[Kv.USERS]),
            kv_evicted_pages=int(pages[Kv.EVICTED]),
            kv_refused_prefixes=int(pages[Kv.REFUSED]),
            stale_cuts=int(pages[Kv.STALE]),
            unmatched_histories=int(pages[Kv.UNMATCHED]),
            host_pages=int(host[Host.PAGES]),
            host_saved_pages=int(host[Host.SAVED]),
            host_reloaded_pages=int(host[Host.RELOADED]),
            host_evicted_pages=int(host[Host.EVICTED]),
            bytes_by_cause=self.bytes_by_cause(),
            leases=int(self.state.relay.counts[R.LEASES]),
            leased_pages=int(self.state.relay.counts[R.HELD_PAGES]),
        )

    def bytes_by_cause(self) -> dict[str, int]:
        """Bytes moved since the start."""
        causes = {
            "row-miss": N.MISS_BYTES,
            "row-refill": N.REFILL_BYTES,
            "kv-save": N.SAVE_BYTES,
            "kv-reload": N.RELOAD_BYTES,
            "boundary-grow": N.GROW_BYTES,
            "row-update": N.UPDATE_BYTES,
        }
        return {cause: int(self.state.counts[place]) for cause, place in causes.items()}

    def check(self) -> None:
        """Assert the invariants of all parts."""
        counts = self.state.counts
        check_book(self.state.kv, self.setup.rules, self.config.num_pages)
        check_rows(self.state.rows)
        check_host(self.state.host)
        check_relay(self.state.relay)
        assert counts[N.LOGGED] == counts[N.SERVED] + counts[N.REFUSED], "an answer is not counted"
        assert self.unanswered().size == self.num_unanswered, "a request vanished"
        assert self.state.rows.counts[Row.CAPACITY] == row_capacity(self.setup, self.state.kv.counts[Kv.EMB])


def _make_state(config: NodeConfig, setup: Setup, requests: Requests) -> NodeState:
    reads, space, most = requests.reads, requests.reads.space, setup.max_batch_requests
    counts = np.zeros(len(N), np.int64)
    counts[N.IN_FLIGHT] = counts[N.ENDING] = -1
    is_filtered = config.engine.row_admission == "second-touch"
    num_slots = round(config.num_pages * setup.rows_per_page * setup.rate)
    clocks = np.zeros(len(C))
    clocks[C.LAST_ENDED_S] = -np.inf
    clocks[C.RELOAD_PAGE_S] = reload_ms(setup.terms, float(setup.page_bytes), 1.0) / 1e3
    return NodeState(
        counts=counts,
        clocks=clocks,
        queue=np.zeros(setup.queue_limit, np.int64),
        size=np.zeros(2, np.int64),
        members=np.zeros((2, most, len(Member)), np.int64),
        arrived_s=np.zeros((2, most)),
        step=np.zeros((2, 4)),
        log=np.zeros((2, len(Step))),
        ended=np.zeros((CAPACITY, len(Step))),
        drains=np.zeros((_DRAINS, 2), np.int64),
        scratch=np.empty(reads.max_rows, np.int64),
        kv=make_book(config.num_pages, reads.backlog.size, num_slots=config.num_pages),
        visits=make_visits(reads.backlog.size),
        rows=make_rows(space.num_kept_rows, num_slots, _max_missed(config, setup, requests), is_filtered=is_filtered),
        memory=_make_memory(config, setup, requests),
        host=make_host(config.engine.host_kv_bytes // setup.page_bytes),
        relay=make_relay(reads.backlog.size),
    )


def _make_memory(config: NodeConfig, setup: Setup, requests: Requests) -> RowState:
    """Rows in host memory, evicted by LRU; without rows on disk, none, since nobody asks."""
    if config.engine.host_rows_bytes is None:
        return make_rows(1, 1, 1, is_filtered=False)
    num_rows = requests.reads.space.num_kept_rows
    capacity = round(config.memory_rows * setup.rate)
    memory = make_rows(num_rows, capacity, _max_missed(config, setup, requests), is_filtered=False)
    memory.counts[Row.CAPACITY] = capacity
    return memory


def _compile_readers(requests: Requests, scratch: IntArray) -> None:
    """Compile the functions that read rows and allocate, before functions that do not allocate call them (`jit`)."""
    if requests.window.size:
        history_rows(requests.reads, 0, int(requests.anchor[0]), scratch)
        candidate_rows(requests.reads, 0, scratch)
        context_rows(requests.reads, 0, scratch)


def _max_missed(config: NodeConfig, setup: Setup, requests: Requests) -> int:
    """Most rows that a step may miss. Some lanes get twice their share of events; rows beyond are not admitted."""
    tokens = setup.max_batch_tokens + config.model.max_request_tokens
    num_lanes, tables = requests.reads.space.num_lanes, requests.reads.space.salt.size
    turns = tokens // num_lanes + 2 * setup.max_batch_requests + 2
    return int(min(2 * turns * requests.reads.space.lanes.size, tokens) + setup.max_batch_requests) * tables


def _enlarged(column: NDArray[_Number], size: int) -> NDArray[_Number]:
    larger = np.empty(size + size // 2, column.dtype)
    larger[: column.size] = column
    return larger
