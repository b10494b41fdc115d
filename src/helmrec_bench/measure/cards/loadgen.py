"""The largest rate MLPerf LoadGen finds valid on a card: dlrmv3 shape, Server scenario, P99 within 80 ms.

With reuse, and without: then every request comes from a user nobody knows, with a history of the same length. Runs are
shorter than a submission's 600 s; the file says how long. Requests reach the engine prepared, as a sample library may
hold them, and once more as a client sends them, so that checking and hashing count too.

Folders of models of that shape, such as an imported DLRMv3 and one of our own form, are measured without reuse.
Precisions are measured one after the other, with reuse and without; calls with the same `--out` fill one file and go on
where the call before stopped, if the commit is the same.

    helmrec bench run loadgen-card                   # on a card; writes docs/measurements/gpu-loadgen-h200.json
    helmrec bench run loadgen-card --models A B      # these model folders, in turn
    helmrec bench run loadgen-card --precisions model fp8-all --steps 3 --seconds 4
    helmrec bench run loadgen-card --quick           # anywhere, a small shape: does the script work
"""

import itertools
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from helmrec.collector import PROCESS
from helmrec.engine.engine import Engine
from helmrec.engine.probe import EngineProbe
from helmrec.engine.warm_up import make_request
from helmrec.model.config import ModelConfig
from helmrec.model.precision import FULL_PRECISION, LOW_PRECISIONS, Precision
from helmrec.model.weights import LoadedModel, load_model
from helmrec.types import RankResult
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.loadgen import LoadGenConfig, LoadGenVerdict, ServerScenario, largest_valid
from helmrec_bench.measure.cards.measured_parts import MeasuredParts
from helmrec_bench.measure.cards.traffic import (
    PreparedTraffic,
    card_crowd,
    free_memory,
    hit_rates,
    serving_config,
    serving_engine,
)
from helmrec_bench.measure.requests import Crowd, in_threads
from helmrec_bench.report.files import markdown_table

SPARE = 1.15  # LoadGen draws how many queries fit the time
PRECISIONS = {"model": FULL_PRECISION, **LOW_PRECISIONS}
LOWEST = 0.8  # of the saturated rate, where the search of each precision begins: 0.87 to 0.96 were valid


@dataclass(frozen=True)
class SearchPlan:
    """Sizes of a run."""

    device: str
    table_bytes: int
    pool_bytes: int
    alpha: float
    hot_share: float  # of requests that come from hot users
    crowd: Crowd
    batches: tuple[int, ...]  # requests in a step, to choose from
    seconds: float  # of each point
    warm_up: int  # requests
    saturated: int  # requests, to see what the engine can do at most
    latency_ms: float = 80.0


FULL = SearchPlan("cuda", 40 << 30, 64 << 30, 0.3, 0.85, card_crowd(400), (8, 16), 5.0, 2_000, 640)
QUICK = SearchPlan("cpu", 64 << 20, 1 << 30, 0.3, 0.85, card_crowd(3, 2_001), (2,), 3.0, 4, 4, 60_000.0)


def say(text: str) -> None:
    print(f"{time.perf_counter() - STARTED_S:6.1f} s  {text}", flush=True)


STARTED_S = time.perf_counter()


class Offers:
    """Submits requests of a crowd; `is_known` False makes every user a new one."""

    def __init__(self, traffic: PreparedTraffic, hot_share: float, *, is_known: bool) -> None:
        self._traffic, self._hot_share, self._is_known = traffic, hot_share, is_known
        self._next_new = itertools.count(1 << 50)

    @property
    def engine(self) -> Engine:
        return self._traffic.probe.engine

    def make(self, num: int, *, is_prepared: bool) -> Callable[[], "Future[RankResult]"]:
        """A function that submits one after the other of `num` requests."""
        traffic, probe = self._traffic, self._traffic.probe
        parts = [traffic.visitors.next_parts(self._hot_share) for _ in range(num)]
        if not self._is_known:
            parts = [(next(self._next_new), items, candidates) for _, items, candidates in parts]
        if is_prepared:
            prepared = iter(traffic.prepare(parts))
            return lambda: probe.submit(next(prepared))
        requests = iter(in_threads(partial(make_request, probe.engine.model_config), parts))
        return lambda: probe.engine.submit(next(requests))


def saturate(engine: Engine, offers: Offers, num: int) -> float:
    """Requests a second when all are queued at once."""
    offer = offers.make(num, is_prepared=True)
    started_s = time.perf_counter()
    futures = [offer() for _ in range(num)]
    while not futures[-1].done():
        engine.step()
    took_s = time.perf_counter() - started_s
    for future in futures:
        future.result(timeout=10)
    return num / took_s


def judged(engine: Engine, offers: Offers, plan: SearchPlan, qps: float, *, is_prepared: bool) -> LoadGenVerdict:
    offer = offers.make(int(SPARE * qps * plan.seconds) + 64, is_prepared=is_prepared)
    config = LoadGenConfig(target_qps=qps, seconds=plan.seconds, latency_ms=plan.latency_ms)
    PROCESS.settle()
    verdict = ServerScenario(engine, offer, config).run()
    say(
        f"{qps:8.1f}/s {'VALID' if verdict.is_valid else 'INVALID'} p50 {verdict.percentiles_ms['50']:.1f} "
        f"p99 {verdict.percentiles_ms['99']:.1f} ms, {verdict.num_queries} queries {'; '.join(verdict.problems)}"
    )
    return verdict


def search(
    engine: Engine, offers: Offers, plan: SearchPlan, steps: int, *, is_prepared: bool = True, lowest: float = 0.5
) -> dict[str, Any]:
    """Points that close in on the largest valid rate, from a share of what the engine does when saturated."""
    saturate(engine, offers, plan.warm_up)
    limit = best_batch = 0.0
    for batch in plan.batches:
        EngineProbe(engine).set_limit("max_batch_requests", batch)
        seen = saturate(engine, offers, plan.saturated)
        say(f"saturated, {batch} requests a step: {seen:.1f}/s")
        if seen > limit:
            limit, best_batch = seen, batch
    EngineProbe(engine).set_limit("max_batch_requests", int(best_batch))
    before = engine.stats().pool
    seen_all = largest_valid(
        lambda qps: judged(engine, offers, plan, qps, is_prepared=is_prepared), lowest * limit, 1.05 * limit, steps
    )
    after = engine.stats().pool
    valid = [verdict for verdict in seen_all if verdict.is_valid]
    return {
        "is_prepared": is_prepared,
        "saturated_per_s": round(limit, 1),
        "max_batch_requests": best_batch,
        "largest_valid_qps": round(max(verdict.target_qps for verdict in valid), 1) if valid else None,
        **hit_rates(before, after),
        "points": [asdict(verdict) for verdict in seen_all],
    }


def shape(plan: SearchPlan) -> ModelConfig:
    config = serving_config(6, plan.table_bytes)
    return config if plan.device == "cuda" else config.model_copy(update={"num_layers": 1})


def compare(flags: Namespace, plan: SearchPlan) -> None:
    """Find the largest rates of model folders in turn, every user new; in reverse once more, if time is left."""
    results, offers = described(plan), {}
    for folder in flags.models:
        engine = make_engine(load_model(folder), plan)
        traffic = PreparedTraffic(EngineProbe(engine), plan.crowd)
        offers[folder] = Offers(traffic, plan.hot_share, is_known=False)
        results[folder.name] = []
    for turn, folder in enumerate((*flags.models, *reversed(flags.models))):
        if turn >= len(flags.models) and time.perf_counter() - STARTED_S > flags.limit_s:
            say(f"out of time: {folder.name} is measured once")
            continue
        say(folder.name)
        engine = offers[folder].engine
        found = search(engine, offers[folder], plan, flags.steps, lowest=0.9)
        results[folder.name].append({"graphs": engine.report().num_graphs} | found)
        write_measurement(flags.out, results)
    for each in offers.values():
        each.engine.close()


def compare_precisions(flags: Namespace, plan: SearchPlan) -> None:
    """Find the largest rates of one shape in each precision, with reuse and with every user new."""
    parts = MeasuredParts(flags.out, ("set_up", *PRECISIONS))
    parts.put("set_up", described(plan) | {"table_bytes": plan.table_bytes})
    for name in flags.precisions:
        if not parts.part_of_this_commit(name).keys() >= {"with_reuse", "without_reuse"}:
            search_precision(flags, plan, parts, name)
            free_memory()  # pools of two engines do not fit the card
    print_rates({name: parts[name] for name in PRECISIONS if name in parts})


def search_precision(flags: Namespace, plan: SearchPlan, parts: MeasuredParts, name: str) -> None:
    engine, found = make_engine(shape(plan), plan, PRECISIONS[name]), parts.part_of_this_commit(name)
    traffic = PreparedTraffic(EngineProbe(engine), plan.crowd)
    for way, is_known in (("with_reuse", True), ("without_reuse", False)):
        if way in found:
            continue
        if time.perf_counter() - STARTED_S > flags.limit_s:
            say(f"out of time: {name}, {way} is not measured")
            continue
        say(f"{name}, {way}")
        offers = Offers(traffic, plan.hot_share, is_known=is_known)
        found[way] = search(engine, offers, plan, flags.steps, lowest=LOWEST)
        found |= {**PRECISIONS[name]._asdict(), "report": str(engine.report()).splitlines()}
        parts.put(name, found)
    engine.close()


def print_rates(found: dict[str, Any]) -> None:
    """Print the largest valid rate and the saturated one of each precision."""
    ways = ("with_reuse", "without_reuse")
    lines = [[name, *(_rates(part[way]) if way in part else "" for way in ways)] for name, part in found.items()]
    print(markdown_table(["requests/s, valid (saturated)", "with reuse", "every user new"], lines))


def _rates(found: dict[str, Any]) -> str:
    return f"{found['largest_valid_qps'] or 'none'} ({found['saturated_per_s']})"


def described(plan: SearchPlan) -> dict[str, Any]:
    kept = ("latency_ms", "pool_bytes", "alpha", "hot_share")
    sizes = {name: getattr(plan, name) for name in kept}
    return {"scenario": "Server", "seconds_a_point": plan.seconds, **sizes, "crowd": plan.crowd._asdict()}


def make_engine(model: ModelConfig | LoadedModel, plan: SearchPlan, precision: Precision = FULL_PRECISION) -> Engine:
    sizes = {"pool_bytes": plan.pool_bytes, "alpha": plan.alpha, "max_batch_requests": max(plan.batches)}
    engine = serving_engine(model, device=plan.device, **sizes, **precision._asdict())
    say(f"ready\n{engine.report()}")
    return engine


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--limit-s", type=float, default=170, help="begin no further search after so long")
    parser.add_argument("--steps", type=int, default=4, help="points of each search")
    parser.add_argument("--seconds", type=float, help="of each point; by default 5, with --quick 3")
    parser.add_argument("--warm-up", type=int, help="requests before each search; by default 2000, with --quick 4")
    parser.add_argument("--models", type=Path, nargs="*", help="measure these model folders, every user new")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, help="measure these, with reuse and without")
    parser.add_argument("--quick", action="store_true", help="a small shape, on any machine")


def default_out(flags: Namespace) -> str | None:
    return "gpu-loadgen-precision-h200.json" if flags.precisions else None


def main(flags: Namespace) -> None:
    plan = QUICK if flags.quick else FULL
    plan = replace(plan, seconds=flags.seconds or plan.seconds, warm_up=flags.warm_up or plan.warm_up)
    if flags.models:
        compare(flags, replace(plan, pool_bytes=min(plan.pool_bytes, 24 << 30)))  # all engines in one process
        return
    if flags.precisions:
        compare_precisions(flags, plan)
        return
    results = described(plan) | {"table_bytes": plan.table_bytes}
    engine = make_engine(shape(plan), plan)
    traffic = PreparedTraffic(EngineProbe(engine), plan.crowd)
    searches = (
        ("with_reuse", True, True, flags.steps),
        ("without_reuse", False, True, flags.steps - 1),
        ("with_reuse_and_intake", True, False, flags.steps - 1),
    )
    for name, is_known, is_prepared, steps in searches:
        if time.perf_counter() - STARTED_S > flags.limit_s:
            say(f"out of time: {name} is not measured")
            continue
        offers = Offers(traffic, plan.hot_share, is_known=is_known)
        say(name)
        results[name] = search(engine, offers, plan, steps, is_prepared=is_prepared)
        write_measurement(flags.out, results)
    engine.close()
