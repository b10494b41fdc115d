"""The ladder's engines and requests: every rung as settings of an engine, and one course of traffic for all of them.

Engines of one shape share one copy of the tables, which is filled once. Requests are prepared once, too: hashes of one
intake serve every engine.
"""

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from helmrec.collector import PROCESS
from helmrec.config import RelayConfig
from helmrec.control.rebalancer import Rebalancer
from helmrec.control.static import UNTUNED_ALPHA
from helmrec.engine.engine import Engine
from helmrec.engine.intake import Intake, Prepared
from helmrec.engine.probe import EngineProbe
from helmrec.engine.warm_up import make_request
from helmrec.model.config import ModelConfig
from helmrec.model.profiles import profile
from helmrec.model.shared_tables import SharedTables
from helmrec.model.table_memory import TableFiles
from helmrec.model.weights import LoadedModel, random_dense
from helmrec.policies import make_policy, needs_curves
from helmrec.serve.control import Steering
from helmrec_bench.cascade import CascadeConfig
from helmrec_bench.measure.cards.banked_traffic import BankedTraffic
from helmrec_bench.measure.cards.ladder_search import Course, rate_factor
from helmrec_bench.measure.cards.replay import GOAL, CascadeReplay, Event, without_candidates
from helmrec_bench.measure.cards.trade_off import NUM_HOT, POOL_BYTES, TABLE_BYTES
from helmrec_bench.measure.cards.traffic import card_crowd, serving_config, serving_engine
from helmrec_bench.measure.controller.live import COURSES, MIXES, Stretch, plan_times
from helmrec_bench.measure.controller.turns import serve_all
from helmrec_bench.measure.requests import Crowd, Visitors, in_threads

ROWS = {"dlrmv3": 6, "wide": 24}  # a token, by shape
NUM_VISITS = 64  # of a hot user, after which it begins again
SETTLING = Stretch("settling", 1.0, (MIXES[0], MIXES[0]), 0.7)  # before the course; not counted
FP8 = "fp8_e4m3"


class RungKind(NamedTuple):
    """What rungs that share an engine have in common."""

    admits_all: bool  # every prefix at the first visit, every row at the first miss
    low_storage: bool = False  # K/V and rows in the pool in eight bits
    low_compute: bool = False

    def settings(self) -> dict[str, Any]:
        every: dict[str, Any] = {"kv_admission": "always", "row_admission": "always"} if self.admits_all else {}
        stored = {"kv_dtype": FP8, "row_dtype": FP8} if self.low_storage else {}
        return every | stored | ({"compute_dtype": FP8} if self.low_compute else {})


@dataclass(frozen=True)
class Rung:
    """How requests are served. `splits`: "tuned", a constant of its own; "fixed", that of the first rung; "moving"."""

    name: str
    kind: RungKind
    splits: str
    host_tier: bool = False
    relay: bool = False


_OURS, _ALL = RungKind(admits_all=False), RungKind(admits_all=True)
_STORED = _OURS._replace(low_storage=True)
_LOW = _STORED._replace(low_compute=True)
FIRST = Rung("fixed split, LRU", _ALL, "tuned")
CUMULATIVE = (
    FIRST,
    Rung("+ admission", _OURS, "tuned"),
    Rung("+ host tier", _OURS, "tuned", host_tier=True),
    Rung("+ controller", _OURS, "moving", host_tier=True),
    Rung("+ FP8 KV and rows", _STORED, "moving", host_tier=True),
    Rung("+ FP8 compute", _LOW, "moving", host_tier=True),
    Rung("+ relay", _LOW, "moving", host_tier=True, relay=True),
)
ALONE = (
    Rung("admission alone", _OURS, "fixed"),
    Rung("host tier alone", _ALL, "fixed", host_tier=True),
    Rung("controller alone", _ALL, "moving"),
    Rung("FP8 KV and rows alone", _ALL._replace(low_storage=True), "fixed"),
    Rung("FP8 compute alone", _ALL._replace(low_compute=True), "fixed"),
    Rung("relay alone", _ALL, "fixed", relay=True),
)
RUNGS = {rung.name: rung for rung in (*CUMULATIVE, *ALONE)}


@dataclass(frozen=True)
class LadderScale:
    """What differs between a card and a trial on a CPU."""

    device: str
    crowd: Crowd
    num_bank: int  # histories of users who come once
    pool: int | str
    host_kv: str
    warm_up: int  # requests before a course, all at once
    probe: int  # requests that a throughput is measured with
    settle_s: float
    slo_ms: float


CARD = LadderScale("cuda", card_crowd(NUM_HOT), 1_000, POOL_BYTES, "8GiB", 256, 128, 3.0, 80.0)
QUICK = LadderScale("cpu", card_crowd(4, 2_100, 64), 8, "12MiB", "16MiB", 6, 6, 0.2, 2_000.0)


def model_of(shape: str, scale: LadderScale) -> ModelConfig:
    if scale.device == "cuda":
        return serving_config(ROWS[shape], TABLE_BYTES)
    return profile("demo", 20_000).model_copy(update={"user_context": (), "request_context": ()})


def shared_model(config: ModelConfig) -> LoadedModel:
    """Random weights, and tables of equal rows in memory that engines share."""
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(config.row_dim, generator=generator).to(getattr(torch, config.row_dtype))
    files = TableFiles.create(config)
    shared = SharedTables(config, files)
    files.close()
    for part in shared.master.rows.split(1 << 18):  # torch copies a part with all cores
        part.copy_(row.expand_as(part))
    return LoadedModel(config, 1, random_dense(config, generator), {}, shared)


def ladder_traffic(model: ModelConfig, crowd: Crowd, num_bank: int) -> BankedTraffic:
    """Prepared requests, the same for all rungs."""
    intake = Intake(model, 1, 100_000)

    def prepare(parts: list[tuple[Any, ...]]) -> list[Prepared]:
        return in_threads(lambda *each: intake.prepare(make_request(model, *each)), parts)

    return BankedTraffic(Visitors(model, crowd, seed=3), prepare, crowd, num_bank, NUM_VISITS)


class LadderStand:
    """One shape: its tables, its traffic, and one engine at a time."""

    def __init__(self, shape: str, scale: LadderScale) -> None:
        started_s = time.perf_counter()
        self._scale = scale
        self._model = shared_model(model_of(shape, scale))
        self.traffic = ladder_traffic(self._model.config, scale.crowd, scale.num_bank)
        self.rates: dict[float, float] = {}  # arrivals a second by mix at load 0
        self._kind: RungKind | None = None
        self._engine: Engine | None = None
        print(f"{shape}: tables and users ready after {time.perf_counter() - started_s:.1f} s", flush=True)

    def use(self, kind: RungKind) -> None:
        """Have an engine of this kind; one that is there already is kept."""
        if kind != self._kind:
            self.close()
            started_s = time.perf_counter()
            self._engine, self._kind = self._make(kind), kind
            if self._scale.device == "cuda":
                print(f"engine {kind.settings()} ready after {time.perf_counter() - started_s:.1f} s", flush=True)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = self._kind = None
            PROCESS.release()  # the next engine takes it over again; what was frozen of this one can be collected
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _make(self, kind: RungKind) -> Engine:
        scale = self._scale
        small: dict[str, Any] = {"device": "cpu", "max_batch_requests": 4, "max_batch_tokens": 4_096}
        sizes = {"pool_bytes": scale.pool, "alpha": UNTUNED_ALPHA, "host_kv_bytes": scale.host_kv}
        return serving_engine(self._model, **sizes, **kind.settings(), **(small if scale.device == "cpu" else {}))

    def _begin(self, rung: Rung, alpha: float, *, has_curves: bool) -> EngineProbe:
        """Caches as on the first day, the boundary at `alpha`."""
        if self._scale.device == "cpu":  # an index on the host cannot forget what it has seen
            kind = rung.kind
            self.close()
            self.use(kind)
        assert self._engine is not None
        assert self._kind == rung.kind
        probe = EngineProbe(self._engine)
        if self._scale.device == "cpu":
            self._engine.move_alpha(alpha)
            self._engine.settle()
        else:
            probe.clear(alpha)
        probe.clear_prefixes(has_tier=rung.host_tier)
        probe.set_curves(is_on=has_curves)
        probe.set_relay(RelayConfig(budget_ms=self._scale.slo_ms))
        return probe

    def saturated(self, rung: str, alpha: float) -> dict[str, float]:
        """Requests/s by mix, one mix after the other."""
        scale, found = self._scale, dict[str, float]()
        probe = self._begin(RUNGS[rung], alpha, has_curves=False)
        for seed, share in enumerate(MIXES):
            num = scale.warm_up // (2 if seed else 1)  # a later mix finds most of its users in the caches
            requests = self.traffic.take([share] * (num + scale.probe), seed)
            serve_all(probe.engine, requests[:num])
            found[f"{share:g}"] = round(scale.probe / serve_all(probe.engine, requests[num:]), 1)
        return found

    def without_reuse(self, alpha: float) -> float:
        """Requests/s of users who come once, everything queued at once."""
        scale = self._scale
        probe = self._begin(FIRST, alpha, has_curves=False)
        requests = self.traffic.take([0.0] * (scale.warm_up + scale.probe), seed=1)
        serve_all(probe.engine, requests[: scale.warm_up])
        return scale.probe / serve_all(probe.engine, requests[scale.warm_up :])

    def serve(self, rung: str, policy: str, load: int, seed: int, seconds: float) -> Course:
        """Serve a course at a load. Whoever moves the split starts at the untuned one."""
        one, scale = RUNGS[rung], self._scale
        name, _, value = policy.partition(":")
        is_fixed = name == "static"
        events = self._events(one, load, seed, seconds)
        probe = self._begin(one, float(value) if is_fixed else UNTUNED_ALPHA, has_curves=needs_curves(policy))
        serve_all(probe.engine, self.traffic.take([MIXES[0]] * scale.warm_up, seed=0))
        rebalancer = None if is_fixed else self._rebalancer(probe.engine, policy)
        num = sum(event.is_rank and not event.is_warm_up for event in events)
        started_at = probe.engine.stats().pool.alpha
        replay = CascadeReplay(probe, events, rebalancer, most_late=(1 - GOAL) * num)
        seen = replay.run(scale.slo_ms)
        pool = probe.engine.stats().pool
        assert probe.engine.stats().background_failures == 0
        return {
            "offered_per_s": round(num / seconds, 1),
            "keeps": seen.keeps(scale.slo_ms),
            "within_slo": round(float(np.mean(seen.latency_ms <= scale.slo_ms)), 4),
            **seen.describe(),
            "alpha_at_start": round(started_at, 3),
            "alpha_at_end": round(pool.alpha, 3),
        }

    def _rebalancer(self, engine: Engine, policy: str) -> Rebalancer:
        Steering(policy, self._scale.slo_ms).warm_up()  # as a server does before it is ready
        return Rebalancer(engine, make_policy(policy), self._scale.slo_ms)

    def _events(self, rung: Rung, load: int, seed: int, seconds: float) -> list[Event]:
        """Ranks at their times, after a time that is not counted; with the relay, a signal before each."""
        rates = {mix: rate * rate_factor(load) for mix, rate in self.rates.items()}
        settling = plan_times((SETTLING,), rates, self._scale.settle_s, seed)
        counted = plan_times(COURSES["all"], rates, seconds, seed)
        planned = [*settling, *((self._scale.settle_s + due_s, share, name) for due_s, share, name in counted)]
        requests = self.traffic.take([share for _, share, _ in planned], seed)
        ranks = [
            Event(due_s, request, is_rank=True, is_warm_up=name == SETTLING.name)
            for (due_s, _, name), request in zip(planned, requests, strict=True)
        ]
        return sorted([*ranks, *self._signals(ranks, seed)], key=lambda event: event.at_s) if rung.relay else ranks

    def _signals(self, ranks: Sequence[Event], seed: int) -> Iterator[Event]:
        rng = np.random.default_rng(seed)
        ahead_s = CascadeConfig().rank_times(np.zeros(len(ranks)), rng)
        for rank, seconds in zip(ranks, ahead_s.tolist(), strict=True):
            history = without_candidates(rank.request)
            yield Event(rank.at_s - seconds, history, is_rank=False, is_warm_up=rank.is_warm_up)
