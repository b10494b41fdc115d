"""Requests, and their replay through a real `Pool` (no data behind the slots): what miss curves predict."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from helmrec.config import EngineConfig
from helmrec.memory.embedding_cache import ABSENT, EmbeddingCache
from helmrec.memory.geometry import PageGeometry
from helmrec.memory.miss_curves import GRID, CurveRequest, JointMissCurves, MissCurveConfig
from helmrec.memory.pool import Demand, Pool
from helmrec.memory.prefix_hash import HashKey, History, chain

_KEY = HashKey(bytes(32))  # the same states in every run
KVRule = Literal["always", "second-visit"]
RowRule = Literal["always", "second-touch"]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Visit:
    """One request: how long the user's history is by now, and what is to be ranked."""

    user_id: int
    events: Ints  # (features, num_tokens) rows
    candidates: Ints  # rows

    @property
    def rows(self) -> Ints:
        """Rows of the history, token by token."""
        return self.events.T.ravel()


@dataclass(frozen=True, slots=True)
class Traffic:
    """Zipf users who come back with a few more events, Zipf items, features that follow from the item."""

    num_users: int = 4_000
    num_items: int = 4_000_000
    num_features: int = 3
    num_requests: int = 16_000
    median_events: int = 200
    num_candidates: int = 60
    user_skew: float = 0.8
    item_skew: float = 0.8
    seed: int = 0

    @property
    def num_rows(self) -> int:
        return self.num_features * self.num_items

    @property
    def max_tokens(self) -> int:
        return 8 * self.median_events

    def visits(self) -> Iterator[Visit]:
        rng = np.random.default_rng(self.seed)
        users = _zipf(rng, self.num_users, self.user_skew, self.num_requests)
        lengths = np.minimum(rng.lognormal(np.log(self.median_events), 0.7, self.num_users), self.max_tokens // 2)
        histories = [self._rows(rng, self.max_tokens) for _ in range(self.num_users)]
        lengths = np.maximum(lengths.astype(np.int64), 1)
        for user in users.tolist():
            events = histories[user][:, : lengths[user]]
            yield Visit(user, events, self._rows(rng, self.num_candidates).T.ravel())
            lengths[user] = min(lengths[user] + rng.integers(1, 8), self.max_tokens)

    def _rows(self, rng: np.random.Generator, num: int) -> Ints:
        """(features, num): the item's own row, then coarser and coarser groups of items."""
        ranks = _zipf(rng, self.num_items, self.item_skew, num)
        items = (ranks * 2_654_435_761 + self.seed * 999_983) % self.num_items  # a seed's hot rows are its own
        groups = [items // 49**i + i * self.num_items for i in range(1, self.num_features)]
        return np.stack([items, *groups])


def _zipf(rng: np.random.Generator, size: int, skew: float, num: int) -> Ints:
    """Draws of a bounded Zipf law by inverting its continuous distribution."""
    u, power = rng.random(num), 1 - skew
    return np.minimum(((u * (size**power - 1) + 1) ** (1 / power)).astype(np.int64) - 1, size - 1)


@dataclass(frozen=True, slots=True)
class Setting:
    """A pool and its rules."""

    num_pages: int = 2_000
    kv_rule: KVRule = "second-visit"
    row_rule: RowRule = "second-touch"
    batch_tokens: int = 2_048
    geometry: PageGeometry = PageGeometry(32, 3, 4, 128, 128, 2, 512, 2)  # noqa: RUF009 - frozen

    def curves(self, rate: float, alphas: tuple[float, ...] = GRID) -> JointMissCurves:
        config = MissCurveConfig(
            num_pages=self.num_pages,
            page_tokens=self.geometry.page_tokens,
            rows_per_page=self.geometry.rows_per_page,
            batch_pages=self.geometry.pages_for(self.batch_tokens),
            alphas=alphas,
            sampling_rate=rate,
            half_life_requests=None,
            kv_admission=self.kv_rule,
            row_admission=self.row_rule,
        )
        return JointMissCurves(config)

    def pool(self, alpha: float, traffic: Traffic) -> Pool:
        config = EngineConfig(
            pool_bytes=self.num_pages * self.geometry.page_bytes,
            alpha=alpha,
            row_admission=self.row_rule,
            kv_admission=self.kv_rule,
        )
        return Pool(config, self.geometry, Demand(traffic.num_rows, traffic.max_tokens, self.batch_tokens), _NoMover())


class _NoMover:
    def copy_rows(self, source: Any, target: Any) -> None:
        pass


@dataclass(slots=True)
class Totals:
    """What a replay counted."""

    requests: int = 0
    tokens: int = 0
    reused_tokens: int = 0
    users_hit: int = 0
    rows_read: int = 0
    rows_missed: int = 0


class Replay:
    """Every request through a real pool, one step each, at one alpha."""

    def __init__(self, pool: Pool) -> None:
        assert isinstance(pool.rows, EmbeddingCache)
        self.pool = pool
        self.rows = pool.rows
        self.totals = Totals()

    def serve(self, visit: Visit) -> None:
        columns = np.ascontiguousarray(visit.events)
        states = chain(_KEY, (visit.user_id,), 0, columns)
        history = History(visit.user_id, np.empty(0, np.int64), columns, states)
        plan = self.pool.kv.plan(history, now=0.0)
        assert plan is not None, "the pool is too small for one request"
        read = np.concatenate([visit.rows[plan.num_resident * columns.shape[0] :], visit.candidates])
        missed = read[self.rows.lookup(read) == ABSENT]
        self.pool.kv.commit(plan, now=0.0)
        self.pool.kv.restore_reserve()
        if missed.size:
            self.rows.publish(self.rows.admit(missed, np.arange(missed.size)))
        totals = self.totals
        totals.requests += 1
        totals.tokens += plan.num_tokens
        totals.reused_tokens += plan.num_resident
        totals.users_hit += plan.num_resident > 0
        totals.rows_read += read.size
        totals.rows_missed += missed.size


def observed(visit: Visit) -> CurveRequest:
    """The request as the curves take it."""
    none, num_features = np.empty(0, np.int64), visit.events.shape[0]
    candidates = np.ascontiguousarray(visit.candidates.reshape(-1, num_features).T)
    return CurveRequest(
        visit.user_id, visit.events.shape[1], none, np.ascontiguousarray(visit.events), none, candidates
    )
