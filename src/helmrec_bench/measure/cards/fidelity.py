"""One recorded trace through the real engine and through the simulator, at three alphas.

Both serve the same warm-up as fast as they can until both caches evict, then the scored requests at the same times.

    helmrec bench run fidelity --calibration FILE --out FILE          # on a card
    helmrec bench run fidelity --small --calibration FILE --out FILE  # the demo's shape on a CPU
    helmrec bench run fidelity --again FILE --calibration FILE --out FILE   # only the simulator, against that file
"""

import json
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from helmrec.calibrate.measure import make_model, sized_profile
from helmrec.config import EngineConfig
from helmrec.costs.calibrated import CostModel, default_cost, load_cost
from helmrec.engine.engine import Engine
from helmrec.load import EngineLoad
from helmrec.memory.stats import PoolStats
from helmrec.model.config import ModelConfig
from helmrec.sim.node.config import NodeConfig, prepare_requests
from helmrec.sim.node.node import Node
from helmrec.sim.node.state import make_outcomes
from helmrec.traffic.families import Shape, family
from helmrec.traffic.generate import generate
from helmrec.traffic.requests import rank_requests
from helmrec.traffic.trace import Trace
from helmrec.types import RankRequest
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.measure.cards.traffic import hit_rates
from helmrec_bench.report.files import markdown_table

_OTHER_USERS = 1 << 32  # between the ids of two runs: what one leaves behind is of no use to the next


@dataclass(frozen=True)
class FidelitySetting:
    """What is served, and how much of it."""

    profile: str
    device: str
    table_bytes: int
    pool_bytes: int
    warm_up: int  # requests
    scored: int
    hot_users: int
    history: int
    alphas: tuple[float, ...] = (0.15, 0.4, 0.7)
    hot_share: float = 0.9
    item_exponent: float = 0.8
    item_shift: float = 1_000
    host_kv_bytes: int = 0
    share: float = 0.7  # of the capacity at the worst alpha
    row_sample: float = 0.1
    seed: int = 0

    def model(self) -> ModelConfig:
        return sized_profile(self.profile, self.table_bytes)

    def trace(self) -> Trace:
        model, num = self.model(), self.warm_up + self.scored
        shape = Shape(
            num_items=model.features[0].num_rows,
            item_exponent=self.item_exponent,
            item_shift=self.item_shift,
            num_candidates=model.max_candidates,
            history=self.history,
            min_history=self.history // 3,
            max_history=min(model.window, 2 * self.history),
            hot_share=self.hot_share,
            hot_users=self.hot_users,
            duration_s=num * 1.1 / 100 + 1,
        )
        return generate(family("steady", shape), self.seed)

    def engine_config(self, alpha: float, pool_bytes: int | None = None) -> EngineConfig:
        return EngineConfig(
            pool_bytes=self.pool_bytes if pool_bytes is None else pool_bytes,
            alpha=alpha,
            device=self.device,
            page_tokens=128 if self.device == "cuda" else 32,
            overlap=self.device == "cuda",
            max_batch_requests=8,
            host_kv_bytes=self.host_kv_bytes,
            queue_limit=1 << 16,
        )

    def times_s(self, trace: Trace, rate: float) -> np.ndarray:
        """When the scored requests are due: as in the trace, at another rate, from 0 on."""
        times_s = trace.time_s[self.warm_up : self.warm_up + self.scored]
        return (times_s - times_s[0]) * ((self.scored - 1) / rate / (times_s[-1] - times_s[0]))


CARD = FidelitySetting("dlrmv3", "cuda", 16 << 30, 4 << 30, warm_up=1_600, scored=5_000, hot_users=48, history=6_700)
SMALL = FidelitySetting(
    "demo", "cpu", 64 << 20, 12 << 20, warm_up=800, scored=800, hot_users=60, history=200, item_shift=50
)


@dataclass(frozen=True)
class Seen:
    """What a run of the scored requests came to."""

    emb_hit_rate: float
    kv_hit_rate: float
    p50_ms: float
    p99_ms: float
    capacity: float  # requests/s with all of them queued, before the scored ones
    reloaded_pages: int
    driver_late_p99_ms: float = 0.0


def seen(before: PoolStats, after: PoolStats, **others: float) -> Seen:
    rates = hit_rates(before, after)
    return Seen(
        emb_hit_rate=rates["row_hit_rate"],
        kv_hit_rate=rates["token_reuse_rate"],
        reloaded_pages=after.host_reloaded_pages - before.host_reloaded_pages,
        **others,
    )


def must_evict(before: PoolStats | None, after: PoolStats) -> None:
    """Both caches were short of room since `before`."""
    rows, pages = (0, 0) if before is None else (before.row_evictions, before.kv_evicted_pages)
    assert after.kv_evicted_pages > pages, "KV has evicted nothing: a longer warm-up is needed"
    assert after.row_evictions > rows, "EMB has evicted nothing: a longer warm-up is needed"


# The real engine.


class Recorded:
    """The requests of a trace, ready to be sent as often as needed, by other users each time."""

    def __init__(self, setting: FidelitySetting, trace: Trace, model: ModelConfig) -> None:
        num = setting.warm_up + setting.scored
        self._requests = [_kept(request) for request in islice(rank_requests(trace, model), num)]
        self._num_runs = 0

    def next_run(self) -> list[RankRequest]:
        self._num_runs += 1
        shift = self._num_runs * _OTHER_USERS
        return [replace(request, user_id=int(request.user_id) + shift) for request in self._requests]


def _kept(request: RankRequest) -> RankRequest:
    """With arrays of its own: those of a replay are valid until the user's next request."""
    return replace(
        request,
        items=np.array(request.items),
        actions=np.array(request.actions),
        timestamps=np.array(request.timestamps),
        candidates=np.array(request.candidates),
        features={name: np.array(ids) for name, ids in request.features.items()},
        candidate_features={name: np.array(ids) for name, ids in request.candidate_features.items()},
    )


def serve_at_once(engine: Engine, requests: list[RankRequest]) -> float:
    """Everything queued, as fast as it goes; returns requests a second."""
    futures = [engine.submit(request) for request in requests]
    begin_s = time.perf_counter()
    while engine.step():
        pass
    took_s = time.perf_counter() - begin_s
    assert all(future.done() for future in futures)
    return len(requests) / took_s


def set_boundary(engine: Engine, alpha: float) -> PoolStats:
    """Without any row: those of the warm-up come."""
    for place in (0.0, alpha):
        engine.move_alpha(place)
        engine.settle()
    return engine.stats().pool


def warm_up(engine: Engine, setting: FidelitySetting, requests: list[RankRequest]) -> float:
    """Bring the engine where the scored part begins; returns the requests a second of the last third."""
    third = setting.warm_up // 3
    serve_at_once(engine, requests[: setting.warm_up - third])
    return serve_at_once(engine, requests[setting.warm_up - third : setting.warm_up])


def run_engine(setting: FidelitySetting, trace: Trace) -> Iterator[dict[str, Any]]:
    """After each alpha: everything seen so far."""
    model = setting.model()
    begin_s = time.perf_counter()
    recorded = Recorded(setting, trace, model)
    print(f"requests made after {time.perf_counter() - begin_s:.1f} s", flush=True)
    with Engine(make_model(model, setting.device), setting.engine_config(setting.alphas[0])) as engine:
        report = engine.report()
        print(f"ready after {time.perf_counter() - begin_s:.1f} s\n{report}", flush=True)
        capacities = {}
        for alpha in setting.alphas:
            set_boundary(engine, alpha)
            capacities[alpha] = warm_up(engine, setting, recorded.next_run())
        rate = setting.share * min(capacities.values())
        shown = ", ".join(f"{alpha}: {capacity:.1f}" for alpha, capacity in capacities.items())
        print(f"capacities {shown}; {rate:.1f} requests/s after {time.perf_counter() - begin_s:.1f} s", flush=True)
        found: dict[str, Any] = {"rate": rate, "pool_bytes": report.num_pages * report.page_bytes, "engine": {}}
        for alpha in setting.alphas:
            requests = recorded.next_run()
            start = set_boundary(engine, alpha)
            capacity = warm_up(engine, setting, requests)
            before = engine.stats().pool
            must_evict(start, before)
            end = EngineLoad(engine).run(iter(requests[setting.warm_up :]), setting.times_s(trace, rate))
            assert not end.refused, end.refused
            assert not end.failed, end.failed
            found["engine"][str(alpha)] = asdict(
                seen(
                    before,
                    end.pool,
                    p50_ms=end.p50_ms,
                    p99_ms=end.p99_ms,
                    capacity=capacity,
                    driver_late_p99_ms=end.lag_p99_ms,
                )
            )
            print(f"engine {alpha}: {found['engine'][str(alpha)]}", flush=True)
            yield found
        engine.check()
        assert engine.stats().background_failures == 0


# The simulator.


def simulate(setting: FidelitySetting, trace: Trace, cost: CostModel, measured: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for alpha in setting.alphas:
        engine = setting.engine_config(alpha, measured["pool_bytes"])
        config = NodeConfig(model=setting.model(), engine=engine, row_sample=setting.row_sample)
        outcomes = make_outcomes(trace.num_requests)
        node = Node(config, cost, prepare_requests(trace, config), outcomes)
        third = setting.warm_up // 3
        send(node, np.arange(setting.warm_up - third), np.zeros(setting.warm_up - third))
        begin_s = node.now_s
        send(node, np.arange(setting.warm_up - third, setting.warm_up), np.full(third, begin_s))
        took_s = outcomes.latency_ms[setting.warm_up - third : setting.warm_up].max() / 1e3
        before = node.stats()
        must_evict(None, before)
        chosen = np.arange(setting.warm_up, setting.warm_up + setting.scored)
        send(node, chosen, node.now_s + setting.times_s(trace, measured["rate"]))
        p50_ms, p99_ms = np.percentile(outcomes.latency_ms[chosen], (50, 99)).tolist()
        capacity = float(third / took_s)
        found[str(alpha)] = asdict(seen(before, node.stats(), p50_ms=p50_ms, p99_ms=p99_ms, capacity=capacity))
        print(f"simulator {alpha}: {found[str(alpha)]}", flush=True)
    return found


def send(node: Node, requests: np.ndarray, times_s: np.ndarray) -> None:
    """Send them and let the node answer them all."""
    node.send(requests, times_s)
    while node.num_unanswered:
        node.run_until(node.now_s + 0.01)


# Side by side.


def compare(measured: dict[str, Any], simulated: dict[str, Any]) -> dict[str, Any]:
    """Hit rates in points, the rest as shares of the engine's figure; and the alphas, best first, by either."""
    real, rows = measured["engine"], {}
    for alpha, ours in simulated.items():
        points = {name: 100 * (ours[name] - real[alpha][name]) for name in ("emb_hit_rate", "kv_hit_rate")}
        shares = {name: ours[name] / real[alpha][name] - 1 for name in ("p50_ms", "p99_ms", "capacity")}
        rows[alpha] = {name: round(value, 4) for name, value in (points | shares).items()}
    orders = {
        name: {
            who: sorted(figures, key=lambda a: figures[a][name])
            for who, figures in (("engine", real), ("simulator", simulated))
        }
        for name in ("p50_ms", "p99_ms")
    }
    return {"differences": rows, "orders": orders}


def table(measured: dict[str, Any], simulated: dict[str, Any], compared: dict[str, Any]) -> str:
    """Engine / simulator (difference)."""
    rows = []
    for alpha, ours in simulated.items():
        real, difference = measured["engine"][alpha], compared["differences"][alpha]
        rows.append([alpha, *(f"{real[name]:.4g} / {ours[name]:.4g} ({difference[name]:+.3g})" for name in difference)])
    return markdown_table(["alpha", *next(iter(compared["differences"].values()))], rows)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--calibration", type=Path, help="default: the committed one")
    parser.add_argument("--small", action="store_true", help="the demo's shape on a CPU")
    parser.add_argument("--engine-only", action="store_true", help="simulate later, with --again")
    parser.add_argument("--again", type=Path, help="measure nothing: simulate what that file measured")


def default_out(flags: Namespace) -> str:
    if flags.small:
        return "fidelity-cpu.json"
    return "fidelity-engine-h200.json" if flags.engine_only else "fidelity-h200.json"


def main(flags: Namespace) -> None:
    setting = SMALL if flags.small else CARD
    cost = default_cost() if flags.calibration is None else load_cost(flags.calibration)
    results: dict[str, Any] = {}
    if flags.again:
        kept = json.loads(flags.again.read_text())
        setting = FidelitySetting(**kept["setting"] | {"alphas": tuple(kept["setting"]["alphas"])})
        results["measured"] = kept["measured"] | {"command": kept.get("command"), "commit": kept.get("commit")}
    results["setting"] = asdict(setting)
    trace = setting.trace()
    if not flags.again:
        for measured in run_engine(setting, trace):
            results["measured"] = measured
            write_measurement(flags.out, results)
    if flags.engine_only:
        return
    results["calibration"] = {"name": cost.name, "device": cost.device, **cost.terms()._asdict()}
    results["simulator"] = simulate(setting, trace, cost, results["measured"])
    results |= compare(results["measured"], results["simulator"])
    print(table(results["measured"], results["simulator"], results))
    write_measurement(flags.out, results)
