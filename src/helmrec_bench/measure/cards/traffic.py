"""Requests and engines for measurements of serving on a card: the dlrmv3 shape with K feature rows a token.

Items follow Zipf's law with exponent one; every other feature is a function of the item, as a category or a shop is.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from helmrec.collector import PROCESS
from helmrec.config import EngineConfig
from helmrec.engine.engine import Engine
from helmrec.engine.intake import Prepared
from helmrec.engine.warm_up import warm_up
from helmrec.kernels.row_table import RowTally
from helmrec.memory.device_rows import DeviceRows
from helmrec.memory.expander import ReloadCosts, StepCosts
from helmrec.model.config import ITEM, EncoderConfig, ModelConfig
from helmrec.model.profiles import profile
from helmrec.model.weights import LoadedModel, random_dense
from helmrec.types import IntArray, RankRequest

PROFILE_OF = {1: "dlrmv3", 6: "dlrmv3", 24: "wide"}
NUM_CANDIDATES = 2_048
NEW_EVENTS = 16  # of a hot user between two visits
_FACTOR = 2_654_435_761


def serving_config(rows_per_token: int, table_bytes: int) -> ModelConfig:
    """The dlrmv3 shape with tables of about so many bytes in all."""
    name = PROFILE_OF[rows_per_token]
    row_bytes = 2 * profile(name).row_dim
    shares = 1 + 0.25 * (rows_per_token - 2) if rows_per_token > 1 else 1
    config = profile(name, int(table_bytes / row_bytes / shares)).model_copy(update={"user_context": ()})
    if rows_per_token > 1:
        return config
    item = EncoderConfig(name="item", tables=(ITEM,))
    only = {"features": config.features[:1], "encoders": (item,), "candidate_encoder": item}
    return config.model_copy(update=only)


def serving_engine(config: ModelConfig, **settings: Any) -> Engine:
    """Random weights. Rows of a table are equal, which no kernel can tell and which takes no memory to make."""
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(config.row_dim, generator=generator).to(getattr(torch, config.row_dtype))
    tables = {table.name: row.expand(table.num_rows, config.row_dim) for table in config.tables}
    model = LoadedModel(config, 1, random_dense(config, generator), tables)
    fixed: dict[str, Any] = {"device": "cuda", "max_batch_requests": 8, "max_batch_tokens": 70_016}
    engine = Engine(model, EngineConfig(**fixed | {"queue_limit": 1 << 20} | settings))
    warm_up(engine)
    PROCESS.take_over()  # as a server does: a collection that looks at every library took 100 to 200 ms
    PROCESS.settle()
    return engine


def set_limit(engine: Engine, name: str, value: int) -> None:
    """Change a setting that an engine reads at each step."""
    object.__setattr__(engine.config, name, value)


@dataclass(frozen=True)
class Mix:
    """Who asks."""

    hot_share: float  # of requests that come from hot users
    num_hot: int
    mean_events: int = 6_700


class Traffic:
    """A stream of requests: hot users return with a few more events each time, cold ones come once."""

    def __init__(self, engine: Engine, mix: Mix, seed: int = 0) -> None:
        self._engine = engine
        self._config = engine.model_config
        self._mix = mix
        self._rng = np.random.default_rng(seed)
        self._lengths = self._rng.integers(2_000, 2 * mix.mean_events - 2_000, mix.num_hot)
        self._items = [self._draw(int(length) + 200 * NEW_EVENTS) for length in self._lengths]
        self._visits = np.zeros(mix.num_hot, np.int64)
        self._next_cold = 1 << 40

    def take(self, num: int) -> list[Prepared]:
        """The next requests, through intake; made by several threads."""
        asked = [self._next() for _ in range(num)]
        with ThreadPoolExecutor(8) as threads:
            return list(threads.map(lambda each: self._engine._intake.prepare(self._request(*each)), asked))

    def user_of(self, num_events: int) -> Prepared:
        """A request of a new user with such a history."""
        self._next_cold += 1
        request = self._request(self._next_cold, self._draw(num_events), self._draw(NUM_CANDIDATES))
        return self._engine._intake.prepare(request)

    def visit(self, user: int, number: int) -> tuple[int, IntArray, IntArray]:
        """What a hot user asks when it comes for the `number`-th time."""
        end = int(self._lengths[user]) + number % 200 * NEW_EVENTS
        return user, self._items[user][:end], self._draw(NUM_CANDIDATES)

    def stranger(self) -> tuple[int, IntArray, IntArray]:
        """What a user asks whom nobody has seen."""
        self._next_cold += 1
        num_events = int(self._rng.integers(2_000, 2 * self._mix.mean_events - 2_000))
        return self._next_cold, self._draw(num_events), self._draw(NUM_CANDIDATES)

    def _next(self) -> tuple[int, IntArray, IntArray]:
        if self._rng.random() >= self._mix.hot_share:
            return self.stranger()
        user = int(self._rng.integers(self._mix.num_hot))
        self._visits[user] += 1
        return self.visit(user, int(self._visits[user]))

    def _draw(self, num: int) -> IntArray:
        """Zipf with exponent one: the logarithm of the rank is uniform. Ranks are spread over the table."""
        num_items = self._config.features[0].num_rows
        ranks = np.exp(self._rng.random(num) * np.log(num_items)).astype(np.int64) - 1
        return ranks * _FACTOR % num_items

    def _request(self, user: int, items: IntArray, candidates: IntArray) -> RankRequest:
        others = self._config.features[1:]
        return RankRequest(
            user_id=user,
            items=items,
            actions=items % self._config.num_actions,
            timestamps=np.arange(items.size) * 60,
            candidates=candidates,
            features={t.name: (items * (2 * i + 3)) % t.num_rows for i, t in enumerate(others)},
            candidate_features={t.name: (candidates * (2 * i + 3)) % t.num_rows for i, t in enumerate(others)},
        )


@dataclass(frozen=True)
class Served:
    """What a run of requests measured."""

    seconds: float
    service_ms: list[float]  # of each request, from the plan of its batch to its scores
    step_ms: list[float]  # between the ends of steps
    row_hit_rate: float
    token_reuse_rate: float
    bytes_by_cause: dict[str, int]

    def describe(self) -> dict[str, Any]:
        return {
            "requests_per_s": round(len(self.service_ms) / self.seconds, 1),
            "service_p50_ms": round(float(np.percentile(self.service_ms, 50)), 3),
            "service_p99_ms": round(float(np.percentile(self.service_ms, 99)), 3),
            "row_hit_rate": round(self.row_hit_rate, 4),
            "token_reuse_rate": round(self.token_reuse_rate, 4),
            "mib_by_cause": {cause: round(num / 2**20, 1) for cause, num in self.bytes_by_cause.items() if num},
        }


def serve(engine: Engine, requests: list[Prepared], before_step: Any = lambda step: None) -> Served:
    """Everything queued at once, as fast as it goes; `before_step` is called with the number of each step."""
    before = engine.stats().pool
    torch.cuda.synchronize()
    started = time.perf_counter()
    futures = [engine._scheduler.submit(request, engine._clock.now()) for request in requests]
    ends, step = [started], 0
    while True:
        before_step(step)
        num_ended = engine._pipeline.num_ended
        if not engine.step():
            break
        step += 1
        if engine._pipeline.num_ended > num_ended:
            ends.append(time.perf_counter())
    results = [future.result(timeout=0) for future in futures]
    after = engine.stats().pool
    hits, misses = after.row_hits - before.row_hits, after.row_misses - before.row_misses
    return Served(
        seconds=ends[-1] - started,
        service_ms=[result.timing.plan_ms + result.timing.compute_ms for result in results],
        step_ms=(np.diff(ends) * 1e3).tolist(),
        row_hit_rate=hits / max(1, hits + misses),
        token_reuse_rate=(after.reused_tokens - before.reused_tokens)
        / max(1, after.total_tokens - before.total_tokens),
        bytes_by_cause={k: v - before.bytes_by_cause.get(k, 0) for k, v in after.bytes_by_cause.items()},
    )


def forget(engine: Engine, alpha: float) -> None:
    """Empty both caches and the host tier, and set the boundary, so that runs do not see each other."""
    engine.check()
    pool = engine._pool
    engine.move_alpha(0.0)
    engine.settle()
    pool.kv.evict(1 << 40)
    pool.kv._visits = type(pool.kv._visits)()
    rows = pool.rows
    assert isinstance(rows, DeviceRows)
    torch.cuda.synchronize()
    rows.table.tally[RowTally.GHOSTS] = 0
    rows.table.seen.zero_()
    torch.cuda.synchronize()
    expander = pool.expander
    if expander.num_slots:  # what reloads cost was learned under the load before
        expander.costs = ReloadCosts(StepCosts(), engine._runner._host._time_a_page())
    expander.clear(expander.num_slots)
    engine.move_alpha(alpha)
    engine.settle()
    engine.check()
