"""Other ways to choose a node, behind the same protocol and with the same care: what ours is held against.

All know which nodes are alive, and say what they expect by the same prices. Each says what else it looks at.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
from pydantic import Field

from helmrec.config import Frozen
from helmrec.costs.routing import RouterCost
from helmrec.router.hashing import rendezvous
from helmrec.router.nodes import Flags, Floats, Nodes, RouteRequest
from helmrec.router.policy import Choice, EmbKVAware, RoutingPolicy, Weighing, price
from helmrec.router.settings import RouterSettings
from helmrec.types import IntArray


class _Baseline(ABC):
    """Prices the request, then picks a place among the living."""

    def __init__(self, cost: RouterCost) -> None:
        defaults = RouterSettings()
        self._weighing = Weighing(cost, defaults.sketch_weight, defaults.hit_rate)

    def choose(self, request: RouteRequest, nodes: Nodes, now_s: float) -> Choice | None:
        alive = np.flatnonzero(nodes.is_alive)
        if not alive.size:
            return None
        place, prices = self._pick(request, nodes, alive), price(self._weighing, request, nodes)
        return Choice(int(nodes.ids[place]), float(prices.expected_ms[place]), float(prices.service_ms[place]))

    @abstractmethod
    def _pick(self, request: RouteRequest, nodes: Nodes, alive: IntArray) -> int:
        """One of the `alive` places."""


class RandomNode(_Baseline):
    """Looks at nothing."""

    def __init__(self, cost: RouterCost, rng: np.random.Generator) -> None:
        super().__init__(cost)
        self._rng = rng

    def _pick(self, request: RouteRequest, nodes: Nodes, alive: IntArray) -> int:
        return int(alive[self._rng.integers(alive.size)])


class PowerOfTwo(_Baseline):
    """Looks at the waiting requests of two nodes drawn at random, and takes the less busy one."""

    def __init__(self, cost: RouterCost, rng: np.random.Generator) -> None:
        super().__init__(cost)
        self._rng = rng

    def _pick(self, request: RouteRequest, nodes: Nodes, alive: IntArray) -> int:
        first = int(self._rng.integers(alive.size))
        second = (first + 1 + int(self._rng.integers(alive.size - 1))) % alive.size if alive.size > 1 else first
        return int(min(alive[first], alive[second], key=lambda place: nodes.num_waiting[place]))


class LeastLoaded(_Baseline):
    """Looks at waiting requests; of equals the first."""

    def _pick(self, request: RouteRequest, nodes: Nodes, alive: IntArray) -> int:
        return int(alive[nodes.num_waiting[alive].argmin()])


class SessionHash(_Baseline):
    """Looks at the user's id: always the same node, while it is there."""

    def _pick(self, request: RouteRequest, nodes: Nodes, alive: IntArray) -> int:
        return rendezvous(request.user, nodes.ids, np.ones(nodes.num_nodes), nodes.is_alive)


class _ScoreSettings(Frozen):
    load_weight: float = Field(0.5, ge=0, le=1, description="of relative load, against the share of hits")


class _HitScore(_Baseline):
    """The best sum of hit share and idleness, as cache-aware routers score; of equals the user's own by hash."""

    def __init__(self, cost: RouterCost, load_weight: float = 0.5) -> None:
        super().__init__(cost)
        self._settings = _ScoreSettings(load_weight=load_weight)

    def _pick(self, request: RouteRequest, nodes: Nodes, alive: IntArray) -> int:
        load = nodes.num_waiting / max(1.0, nodes.num_waiting[alive].max())
        weight = self._settings.load_weight
        score = (1 - weight) * self._hits(request, nodes) - weight * load
        return _first_by_hash(request.user, nodes, nodes.is_alive & (score >= score[alive].max() - 1e-12))

    @abstractmethod
    def _hits(self, request: RouteRequest, nodes: Nodes) -> Floats:
        """Share of the request each node would not have to fetch or compute, 0 to 1."""


class KVAware(_HitScore):
    """Looks at load and at the user's resident tokens."""

    def _hits(self, request: RouteRequest, nodes: Nodes) -> Floats:
        return np.minimum(1.0, nodes.resident_tokens / max(1, request.num_tokens))


class EmbAware(_HitScore):
    """Looks at load and at how many of the request's rows are resident, as if no KV were."""

    def _hits(self, request: RouteRequest, nodes: Nodes) -> Floats:
        blind = nodes._replace(resident_tokens=np.zeros(nodes.num_nodes, np.int64))
        num_rows = (request.num_tokens + request.num_candidates) * request.rows_per_token
        return 1 - price(self._weighing, request, blind).absent_rows / max(1, num_rows)


class DynamoStyle(_Baseline):
    """Looks at blocks to compute and blocks in work: the lowest weighted sum, as Dynamo at temperature 0."""

    def __init__(self, cost: RouterCost, overlap_weight: float = 1.0, block_tokens: int = 128) -> None:
        super().__init__(cost)
        self._overlap_weight, self._block_tokens = overlap_weight, block_tokens

    def _pick(self, request: RouteRequest, nodes: Nodes, alive: IntArray) -> int:
        new_tokens = request.num_tokens - np.minimum(nodes.resident_tokens, request.num_tokens)
        cost = self._overlap_weight * np.ceil(new_tokens / self._block_tokens)
        cost += np.ceil(nodes.waiting_tokens / self._block_tokens)
        return _first_by_hash(request.user, nodes, nodes.is_alive & (cost <= cost[alive].min()))


def _first_by_hash(user: int, nodes: Nodes, among: Flags) -> int:
    return rendezvous(user, nodes.ids, np.ones(nodes.num_nodes), among)


def policies(cost: RouterCost, rng: np.random.Generator) -> dict[str, Callable[[], RoutingPolicy]]:
    """Every policy by the name reports use, with its defaults."""
    return {
        "emb-kv-aware": lambda: EmbKVAware(cost),
        "kv-aware": lambda: KVAware(cost),
        "emb-aware": lambda: EmbAware(cost),
        "dynamo-style": lambda: DynamoStyle(cost),
        "session-hash": lambda: SessionHash(cost),
        "least-loaded": lambda: LeastLoaded(cost),
        "power-of-two": lambda: PowerOfTwo(cost, rng),
        "random": lambda: RandomNode(cost, rng),
    }


def make_router(name: str, cost: RouterCost, rng: np.random.Generator) -> RoutingPolicy:
    """A baseline as clusters find it, through the entry points of this package."""
    return policies(cost, rng)[name]()
