"""Miss curves fed with the requests that a simulated node serves."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np

from helmrec.costs.calibrated import CostModel
from helmrec.memory.miss_curves import (
    MOST_WAITING,
    HistoryVisit,
    JointCurves,
    JointMissCurves,
    MissCurveConfig,
    put_aside,
    sampling_rate_of,
    serve,
    shadows,
)
from helmrec.memory.sampling import keep_sampled, sampling_threshold
from helmrec.sim.node.config import NodeConfig, prepare_requests
from helmrec.sim.node.node import Node
from helmrec.sim.node.state import Status, make_outcomes
from helmrec.traffic.rows import RowReads, candidate_rows, context_rows, history_rows
from helmrec.traffic.trace import Trace
from helmrec.types import IntArray

_WAITING_ROWS = 1 << 16  # rows read at once: latency does not matter here
_MOST_BYTES = 1 << 24  # for the rows of requests that are served together


class _TraceRows(NamedTuple):
    """The requests of a trace and the rows that they read."""

    reads: RowReads
    anchor: IntArray  # (requests,) first event of the window
    num_context: int
    rows_per_event: int
    threshold: np.uint64  # of the hash of a row, up to which it is sampled


class NodeCurveFeed:
    """Passes served requests to the miss curves, in order.

    The curves see no more rows than an engine's would: the rows of a trace, which are a sample already, are sampled
    again if they are more.
    """

    def __init__(self, node: Node) -> None:
        config, setup = node.config, node.setup
        engine = config.engine
        rate = min(setup.rate, sampling_rate_of(config.num_pages * setup.rows_per_page))
        self._node = node
        self._threshold = sampling_threshold(rate / setup.rate)
        seen = MissCurveConfig.of_engine(engine, config.geometry, engine.max_batch_tokens)
        self._curves = JointMissCurves(seen.model_copy(update={"sampling_rate": rate, "waiting_rows": _WAITING_ROWS}))
        self._window: dict[int, int] = {}  # of each user's last request
        self._most_rows = 3 * node.requests.reads.max_rows  # of a request: each of three calls needs this room
        self._most_together = max(1, min(MOST_WAITING, _MOST_BYTES // (8 * self._most_rows)))
        self._visits = np.empty((self._most_together, 4), np.int64)

    def observe(self, requests: IntArray) -> None:
        """Pass on those of these requests that were served."""
        served = requests[self._node.outcomes.status[requests] == Status.SERVED]
        trace, visits = self._node.requests, self._visits
        users, windows = trace.reads.user[served].tolist(), trace.window[served].tolist()
        begin, num = 0, 0
        for user, window, num_tokens in zip(users, windows, trace.num_tokens[served].tolist(), strict=True):
            if num == self._most_together or self._curves.kv.forgets_for(user):
                self._serve(served[begin : begin + num])
                begin, num = begin + num, 0
            unchanged = None if self._window.get(user, window) == window else 0
            self._window[user] = window
            visits[num] = self._curves.arrive(user, num_tokens, unchanged)
            num += 1
        self._serve(served[begin:])

    def _serve(self, requests: IntArray) -> None:
        trace, setup, curves = self._node.requests, self._node.setup, self._curves
        curves.make_room(self._most_rows * requests.size, requests.size)
        rows = _TraceRows(trace.reads, trace.anchor, setup.num_context, setup.rows_per_event, self._threshold)
        _serve(curves.state, self._visits, rows, requests, curves.decay)

    def curves(self) -> JointCurves | None:
        """The estimates; None while too few requests were observed."""
        return self._curves.curves_if_enough()


def record_curves(trace: Trace, config: NodeConfig, cost: CostModel, tick_s: float = 1.0) -> list[JointCurves | None]:
    """Miss curves at the end of every tick. They depend on the requests only, which are the same at any split."""
    node = Node(config, cost, prepare_requests(trace, config), make_outcomes(trace.num_requests))
    node.send(np.arange(trace.num_requests), trace.time_s)
    feed, curves, num_fed = NodeCurveFeed(node), list[JointCurves | None](), 0
    for tick in range(1, int(np.ceil(trace.duration_s / tick_s)) + 1):
        node.run_until(tick * tick_s)
        feed.observe(node.answered[num_fed:])
        num_fed = node.answered.size
        curves.append(feed.curves())
    return curves


def curves_at(curves: Sequence[JointCurves | None], tick_s: float, now_s: float) -> JointCurves | None:
    """The recorded curves of the last tick that ended by `now_s`; None before the first."""
    num_ended = min(int(now_s / tick_s + 1e-9), len(curves))
    return curves[num_ended - 1] if num_ended else None


@numba.njit(cache=True)
def _serve(arrays: tuple[Any, ...], visits: IntArray, rows: _TraceRows, requests: IntArray, decay: float) -> None:
    """Serve requests at every split, in order, and collect their rows."""
    state, reads = shadows(arrays), rows.reads
    pending = state.pending
    for i in range(requests.size):
        request, visit = requests[i], visits[i]
        history = HistoryVisit(visit[0], visit[1], visit[2], visit[3])
        num_history = rows.num_context + (history.num_tokens - rows.num_context) * rows.rows_per_event
        num_candidates = int(reads.num_candidates[request]) * rows.rows_per_event
        reused = serve(state, history, num_history, num_candidates, decay)
        first = min(reused.min(), history.num_tokens)
        out = pending.rows[pending.ends[pending.num_steps[0]] :]
        num = 0 if first else context_rows(reads, request, out)
        event = rows.anchor[request] + max(0, first - rows.num_context)
        num += history_rows(reads, request, event, out[num:])
        num = keep_sampled(out[:num], rows.threshold)
        num_all = num + keep_sampled(out[num : num + candidate_rows(reads, request, out[num:])], rows.threshold)
        put_aside(pending, reused, first, history.num_tokens, num, num_all)
