"""Runs a routing policy over simulated nodes, with delayed node reports and answers as in a real cluster.

Only a sample of the rows is simulated. Their hashes are scaled into the lowest part of the range, so that sketches and
samples have the same meaning as on a real node.
"""

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from helmrec.config import Frozen
from helmrec.memory.sampling import row_hash, sampling_threshold
from helmrec.router.nodes import RouteRequest
from helmrec.router.policy import RoutingPolicy
from helmrec.router.settings import StateSettings
from helmrec.router.sketch import DEFAULT_SAMPLES, RowSample, RowSketch, sketch_of_hashes
from helmrec.router.state import ClusterState, NodeReport, Sent
from helmrec.sim.node.config import NodeConfig
from helmrec.sim.node.node import Node
from helmrec.sim.node.rows import ABSENT
from helmrec.sim.node.state import C, Requests
from helmrec.traffic.rows import RowReads, candidate_rows, history_rows
from helmrec.types import FloatArray, IntArray

Words = NDArray[np.uint64]


class Reporting(Frozen):
    """When nodes of a simulated cluster send reports."""

    every_s: float = Field(0.1, gt=0)
    age_s: float = Field(0.0, ge=0, description="age of a report when it arrives")
    is_absent: bool = Field(False, description="no report arrives")
    sketch_every_s: float = Field(2.0, gt=0)


class _DelayedReport(NamedTuple):
    due_s: float
    report: NodeReport


class ReportingRouter:
    """A routing policy and its state of the cluster, as a router for `simulate_cluster`."""

    def __init__(self, policy: RoutingPolicy, requests: Requests, config: NodeConfig, reporting: Reporting) -> None:
        """`requests` and `config`: those of the simulated nodes."""
        kept_from = 1 if config.engine.kv_admission == "always" else 2
        self.state = ClusterState(StateSettings(kept_from_visit=kept_from))
        self._policy, self._requests, self._reporting = policy, requests, reporting
        space = requests.reads.space
        self._rows_per_token = space.num_event_tables
        self._most = sampling_threshold(space.rate)
        self._scratch = np.empty(requests.reads.max_rows, np.int64)
        self._pool_tokens = config.num_pages * config.geometry.page_tokens
        self._known: dict[int, Node] = {}
        self._num_seen: dict[int, int] = {}  # answers of each node processed so far
        self._open: dict[int, Sent] = {}  # request -> what was sent
        self._delayed: deque[_DelayedReport] = deque()
        self._sketches: dict[int, RowSketch] = {}
        self._reported_s = self._sketched_s = -np.inf
        self._num_rounds = 0  # of reports
        self._row_reads: dict[int, tuple[int, int]] = {}  # hits and misses at the last report

    def observe(self, nodes: Mapping[int, Node], now_s: float) -> None:
        """Process joins, losses, answers and reports of the nodes."""
        for index in [i for i, node in self._known.items() if nodes.get(i) is not node]:
            self.state.leave(index)
            del self._known[index], self._num_seen[index]
        for index in sorted(nodes.keys() - self._known.keys()):
            self.state.join(index)
            self._known[index], self._num_seen[index] = nodes[index], 0
        for index, node in nodes.items():
            self._take_answers(index, node)
        if not self._reporting.is_absent and now_s >= self._reported_s + self._reporting.every_s - 1e-9:
            self._reported_s = now_s
            self._report(nodes, now_s)
        while self._delayed and self._delayed[0].due_s <= now_s:
            self.state.report(self._delayed.popleft().report, now_s)

    def _take_answers(self, index: int, node: Node) -> None:
        answered = node.answered
        for request in answered[self._num_seen[index] :].tolist():
            sent = self._open.pop(request, None)
            if sent is not None:
                self.state.finished(sent)
        self._num_seen[index] = answered.size

    def _report(self, nodes: Mapping[int, Node], now_s: float) -> None:
        self._num_rounds += 1
        has_new_rows = now_s >= self._sketched_s + self._reporting.sketch_every_s
        if has_new_rows:
            self._sketched_s = now_s
        for index, node in nodes.items():
            sketch = self._sketch(node) if has_new_rows else None
            self._delayed.append(_DelayedReport(now_s + self._reporting.age_s, self._look(index, node, now_s, sketch)))

    def _look(self, index: int, node: Node, now_s: float, sketch: RowSketch | None) -> NodeReport:
        stats, waiting = node.stats(), node.num_unanswered
        hits, misses = self._row_reads.get(index, (0, 0))
        self._row_reads[index] = stats.row_hits, stats.row_misses
        new_hits, new_misses = max(0, stats.row_hits - hits), max(0, stats.row_misses - misses)
        return NodeReport(
            node=index,
            sequence=self._num_rounds,
            as_of_s=now_s,
            queue_ms=waiting * float(node.state.clocks[C.MS_PER_REQUEST]),
            num_waiting=waiting,
            waiting_tokens=int(self._requests.num_tokens[node.unanswered()].sum()) if waiting else 0,
            alpha=stats.alpha,
            pool_tokens=self._pool_tokens,
            row_hit_rate=new_hits / (new_hits + new_misses) if new_hits + new_misses else float("nan"),
            sketch=sketch,
        )

    def _sketch(self, node: Node) -> RowSketch:
        rows = node.state.rows.links[:-1, 1]
        hashes = _resident_hashes(rows, float(self._requests.reads.space.rate))
        num_rows = round(hashes.size / self._requests.reads.space.rate)
        return sketch_of_hashes(hashes, num_rows, self._most)

    def route_requests(self, requests: IntArray, when_s: FloatArray) -> IntArray:
        """Choose a node for each request, in order of time."""
        chosen = [self._send(*sent) for sent in zip(requests.tolist(), when_s.tolist(), strict=True)]
        return np.array(chosen, np.int64)

    def _send(self, request: int, now_s: float) -> int:
        asked = self.describe(request)
        choice = self._policy.choose(asked, self.state.look(asked.user, now_s), now_s)
        assert choice is not None, "requests are routed while a node is alive"
        self._open[request] = self.state.sent(asked, choice.node, choice.service_ms, now_s)
        return choice.node

    def describe(self, request: int) -> RouteRequest:
        """A request of the trace as the front of a cluster describes it."""
        reads = self._requests.reads
        num_tokens, num_candidates = int(self._requests.num_tokens[request]), int(reads.num_candidates[request])
        num_rows = (num_tokens + num_candidates) * self._rows_per_token
        threshold = min(sampling_threshold(min(1.0, DEFAULT_SAMPLES / max(1, num_rows))), self._most)
        anchor = int(self._requests.anchor[request])
        sample = _sampled_rows(reads, request, anchor, num_tokens, threshold, self._scratch)
        return RouteRequest(
            user=int(reads.user[request]),
            num_tokens=num_tokens,
            num_candidates=num_candidates,
            rows_per_token=self._rows_per_token,
            sample=RowSample(*sample, threshold),
        )


@numba.njit(cache=True, inline="always")
def _scaled_hash(row: int, rate: float) -> np.uint64:
    """The hash of a row, scaled into the part of the range that the sample covers; low bits do not change."""
    return np.uint64(float(row_hash(row) >> np.uint64(11)) * rate) << np.uint64(11) | (
        row_hash(row) & np.uint64((1 << 11) - 1)
    )


@numba.njit(cache=True)
def _resident_hashes(after: NDArray[np.int32], rate: float) -> Words:
    hashes, count = np.empty(after.size, np.uint64), 0
    for row in range(after.size):
        if after[row] != ABSENT:
            hashes[count] = _scaled_hash(row, rate)
            count += 1
    return hashes[:count].copy()


@numba.njit(cache=True)
def _sampled_rows(
    reads: RowReads, request: int, first_event: int, num_tokens: int, threshold: np.uint64, scratch: IntArray
) -> tuple[Words, IntArray]:
    """Hashes of the sampled rows of a request, and the token of each.

    Simulated rows are spread evenly over a history, so the token of a row is estimated from its position among them.
    """
    rate = reads.space.lanes.size / reads.space.num_lanes
    hashes, position = np.empty(2 * scratch.size, np.uint64), np.empty(2 * scratch.size, np.int64)
    count = 0
    num = history_rows(reads, request, first_event, scratch)
    for i in range(num):
        word = _scaled_hash(scratch[i], rate)
        if word <= threshold:
            hashes[count], position[count] = word, i * num_tokens // num
            count += 1
    num = candidate_rows(reads, request, scratch)
    for i in range(num):
        word = _scaled_hash(scratch[i], rate)
        if word <= threshold:
            hashes[count], position[count] = word, num_tokens
            count += 1
    return hashes[:count].copy(), position[:count].copy()
