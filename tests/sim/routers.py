"""Simple routers for simulated clusters."""

from collections.abc import Mapping

import numpy as np

from helmrec.sim.node.node import Node
from helmrec.traffic.trace import Trace
from helmrec.types import FloatArray, IntArray
from helmrec_bench.cascade import highest_hash


class ByHash:
    """Routes all requests of a user to the same node. When a node fails, only its own users move."""

    def __init__(self, trace: Trace) -> None:
        self._user = trace.user
        self._alive = np.empty(0, np.int64)

    def observe(self, nodes: Mapping[int, Node], now_s: float) -> None:
        self._alive = np.array(list(nodes), np.int64)

    def route_requests(self, requests: IntArray, when_s: FloatArray) -> IntArray:
        return highest_hash(self._user[requests], self._alive)


class LeastLoaded:
    """The node with the fewest unanswered requests, those just sent included."""

    def observe(self, nodes: Mapping[int, Node], now_s: float) -> None:
        self._loads = {index: node.num_unanswered for index, node in nodes.items()}

    def route_requests(self, requests: IntArray, when_s: FloatArray) -> IntArray:
        chosen = np.empty(requests.size, np.int64)
        for i in range(requests.size):
            chosen[i] = min(self._loads, key=self._loads.__getitem__)
            self._loads[int(chosen[i])] += 1
        return chosen
