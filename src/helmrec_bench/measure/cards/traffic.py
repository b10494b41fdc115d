"""Engines and requests for measurements of serving on a GPU: the dlrmv3 shape with K feature rows a token."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from helmrec.collector import PROCESS
from helmrec.config import EngineConfig
from helmrec.engine.engine import Engine
from helmrec.engine.intake import Prepared
from helmrec.engine.probe import EngineProbe
from helmrec.engine.warm_up import make_request, warm_up
from helmrec.memory.stats import PoolStats
from helmrec.model.config import ITEM, EncoderConfig, ModelConfig
from helmrec.model.profiles import profile
from helmrec.model.weights import LoadedModel, random_dense
from helmrec_bench.measure.requests import Crowd, Visitors, in_threads

PROFILE_OF = {1: "dlrmv3", 6: "dlrmv3", 24: "wide"}
NUM_CANDIDATES, MEAN_EVENTS = 2_048, 6_700


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


def equal_rows_model(config: ModelConfig) -> LoadedModel:
    """Random weights. Rows of a table are equal, which no kernel can tell and which takes no memory to make."""
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(config.row_dim, generator=generator).to(getattr(torch, config.row_dtype))
    tables = {table.name: row.expand(table.num_rows, config.row_dim) for table in config.tables}
    return LoadedModel(config, 1, random_dense(config, generator), tables)


def serving_engine(model: ModelConfig | LoadedModel, **settings: Any) -> Engine:
    loaded = equal_rows_model(model) if isinstance(model, ModelConfig) else model
    fixed: dict[str, Any] = {"device": "cuda", "max_batch_requests": 8, "max_batch_tokens": 70_016}
    engine = Engine(loaded, EngineConfig(**fixed | {"queue_limit": 1 << 20} | settings))
    warm_up(engine)
    PROCESS.take_over()  # as a server does: a collection that looks at every library took 100 to 200 ms
    PROCESS.settle()
    return engine


def free_memory() -> None:
    """Give back the memory of an engine that was closed and forgotten, before another one is made."""
    PROCESS.release()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def card_crowd(num_hot: int, mean_events: int = MEAN_EVENTS, num_candidates: int = NUM_CANDIDATES) -> Crowd:
    return Crowd(num_hot, 2_000, 2 * mean_events - 2_001, num_candidates)


class PreparedTraffic:
    """Requests of a crowd, through intake; made by several threads."""

    def __init__(self, probe: EngineProbe, crowd: Crowd, seed: int = 0) -> None:
        self.probe = probe
        self.visitors = Visitors(probe.engine.model_config, crowd, seed)

    def take(self, num: int, hot_share: float) -> list[Prepared]:
        return self.prepare([self.visitors.next_parts(hot_share) for _ in range(num)])

    def user_of(self, num_events: int) -> Prepared:
        """A request of a new user with such a history."""
        return self.prepare([self.visitors.new(num_events)])[0]

    def prepare(self, parts: list[tuple[Any, ...]]) -> list[Prepared]:
        model = self.probe.engine.model_config
        return in_threads(lambda *each: self.probe.prepare(make_request(model, *each)), parts)


def hit_rates(before: PoolStats, after: PoolStats) -> dict[str, float]:
    """Of what was asked between two looks."""
    hits, misses = after.row_hits - before.row_hits, after.row_misses - before.row_misses
    tokens = after.total_tokens - before.total_tokens
    return {
        "row_hit_rate": round(hits / max(1, hits + misses), 4),
        "token_reuse_rate": round((after.reused_tokens - before.reused_tokens) / max(1, tokens), 4),
    }


@dataclass(frozen=True)
class Served:
    """What a run of requests measured."""

    seconds: float
    service_ms: list[float]  # of each request, from the plan of its batch to its scores
    step_ms: list[float]  # between the ends of steps
    rates: dict[str, float]
    bytes_by_cause: dict[str, int]

    def describe(self) -> dict[str, Any]:
        p50, p99 = np.percentile(self.service_ms, (50, 99)).round(3).tolist()
        return {
            "requests_per_s": round(len(self.service_ms) / self.seconds, 1),
            "service_p50_ms": p50,
            "service_p99_ms": p99,
            **self.rates,
            "mib_by_cause": {cause: round(num / 2**20, 1) for cause, num in self.bytes_by_cause.items() if num},
        }


def serve(
    probe: EngineProbe, requests: list[Prepared], before_step: Callable[[int], None] = lambda step: None
) -> Served:
    """Everything queued at once, as fast as it goes; `before_step` is called with the number of each step."""
    engine = probe.engine
    before = engine.stats().pool
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    futures = [probe.submit(request) for request in requests]
    ends, step = [started], 0
    while True:
        before_step(step)
        num_ended = probe.num_ended
        if not engine.step():
            break
        step += 1
        if probe.num_ended > num_ended:
            ends.append(time.perf_counter())
    results = [future.result(timeout=0) for future in futures]
    after = engine.stats().pool
    return Served(
        seconds=ends[-1] - started,
        service_ms=[result.timing.plan_ms + result.timing.compute_ms for result in results],
        step_ms=(np.diff(ends) * 1e3).tolist(),
        rates=hit_rates(before, after),
        bytes_by_cause={k: v - before.bytes_by_cause.get(k, 0) for k, v in after.bytes_by_cause.items()},
    )
