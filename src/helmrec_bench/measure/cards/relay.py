"""What computing prefixes ahead of their ranks is worth on one GPU: a replayed cascade, open loop.

A signal comes when retrieval begins, its rank some tens of milliseconds later. Measured are the largest rate at which
99% of the ranks keep a budget and the longest histories, with and without signals and the host tier; and what five
times as many signals as the GPU could compute do to ranks.

    helmrec bench run relay-card
    helmrec bench run relay-card --quick --out build/relay.json  # a CPU, lengths cut to a fortieth: shows that it runs
"""

import itertools
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from helmrec.collector import PROCESS
from helmrec.config import EngineConfig, RelayConfig
from helmrec.engine.engine import Engine
from helmrec.engine.intake import Prepared
from helmrec.engine.probe import EngineProbe
from helmrec.model.profiles import profile
from helmrec_bench.cascade import CascadeConfig
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.measure.cards.replay import GOAL, CascadeReplay, Event, Replayed, without_candidates
from helmrec_bench.measure.cards.traffic import PreparedTraffic, equal_rows_model, serving_config
from helmrec_bench.measure.requests import NEW_EVENTS, VISITS, Crowd

CASCADE = CascadeConfig()
HOT_SHARE = 0.3  # of the requests come from users who come again and again
TEMPLATES = 96  # different histories of users who come once
OVERLOADED = 0.2  # ranks as a share of capacity, where signals come five times too often


@dataclass(frozen=True)
class Scale:
    """Everything that differs between a GPU and a trial on a CPU."""

    device: str
    divisor: int
    num_candidates: int
    table_bytes: int
    pool_bytes: int
    host_bytes: int
    most_requests: int
    longest_s: float
    most_hot: int

    def events(self, num: int) -> int:
        return num // self.divisor


CARD = Scale("cuda", 1, 2_048, 4 << 30, 8 << 30, 10 << 30, 1_600, 2.5, 128)
QUICK = Scale("cpu", 40, 32, 8 << 20, 32 << 20, 16 << 20, 60, 0.5, 8)


class Way(NamedTuple):
    """How ranks are served."""

    name: str
    signals: bool
    host_tier: bool
    relay: RelayConfig


def ways(scale: Scale, budget_ms: float) -> list[Way]:
    relay = RelayConfig(budget_ms=budget_ms, chunk_tokens=scale.events(8_192), max_held=0.6, max_compute=0.9)
    return [
        Way("inline", signals=False, host_tier=False, relay=relay),
        Way("relay + host_tier", signals=True, host_tier=True, relay=relay),
    ]


def make_engine(scale: Scale, longest: int) -> Engine:
    """The dlrmv3 shape with room for the longest history."""
    window = longest + VISITS * NEW_EVENTS
    update = {"window": window, "normaliser": max(16_384, window), "max_candidates": scale.num_candidates}
    config = serving_config(6, scale.table_bytes) if scale.device == "cuda" else profile("demo", 2_000)
    config = config.model_copy(update={**update, "user_context": (), "request_context": ()})
    most = 8 * (scale.events(6_700) + scale.num_candidates)
    engine = Engine(
        equal_rows_model(config),
        EngineConfig(
            device=scale.device,
            pool_bytes=scale.pool_bytes,
            alpha=0.1,
            host_kv_bytes=scale.host_bytes,
            max_batch_requests=8,
            max_batch_tokens=max(most, window + scale.num_candidates),
            queue_limit=1 << 20,
        ),
    )
    PROCESS.take_over()  # as a server does
    PROCESS.settle()
    return engine


def traffic_of(probe: EngineProbe, scale: Scale, num_events: int) -> PreparedTraffic:
    """Histories of so many events; as many hot users as the host tier holds."""
    length, geometry = scale.events(num_events), probe.pool.geometry
    host_tokens = scale.host_bytes // geometry.page_bytes * geometry.page_tokens
    num_hot = int(np.clip(0.8 * host_tokens / length, 2, scale.most_hot))
    kept = TEMPLATES if scale.device == "cuda" else 8
    return PreparedTraffic(probe, Crowd(num_hot, length, length, scale.num_candidates, kept))


def cascade(
    traffic: PreparedTraffic, rate: float, num: int, *, signals: bool, seed: int, lone_signals: float = 0
) -> list[Event]:
    """Ranks at a Poisson rate, each after its signal; `lone_signals` a second are followed by no rank."""
    rng, visitors = np.random.default_rng(seed), traffic.visitors
    signal_s = np.cumsum(rng.exponential(1 / rate, num))
    rank_s = CASCADE.rank_times(signal_s, rng)
    requests = traffic.take(num, HOT_SHARE)
    events = [
        Event(float(at_s), request, is_rank=True, is_warm_up=bool(came_s < signal_s[num // 10]))
        for came_s, at_s, request in zip(signal_s, rank_s, requests, strict=True)
    ]
    num_lone = int(1.2 * lone_signals * rank_s.max())
    lone_s = rng.exponential(1 / max(1e-9, lone_signals), num_lone).cumsum().tolist()
    lone = traffic.prepare([visitors.new() for _ in lone_s])
    sent = zip([*(signal_s if signals else ()), *lone_s], [*(requests if signals else ()), *lone], strict=True)
    events += [
        Event(float(at_s), without_candidates(request), is_rank=False, is_warm_up=False)
        for at_s, request in sent
        if at_s < rank_s.max()
    ]
    return sorted(events, key=lambda event: event.at_s)


def prepare(probe: EngineProbe, way: Way, traffic: PreparedTraffic) -> None:
    """Empty KV and host tier, then let every hot user come twice: what was learned of costs stays."""
    probe.set_relay(way.relay)
    probe.clear_prefixes(has_tier=way.host_tier)
    save_bytes = probe.engine.config.save_bytes_per_step
    probe.set_limit("save_bytes_per_step", 1 << 40)  # else probes would begin behind a backlog of saves
    for _ in range(2):
        users = [traffic.visitors.hot(user) for user in range(traffic.visitors.crowd.num_hot)]
        for request in traffic.prepare(users):
            probe.submit(request)
        while probe.engine.step():
            pass
    probe.set_limit("save_bytes_per_step", save_bytes)
    probe.engine.check()


class RelayBench:
    """One engine, and how long there is left."""

    def __init__(self, scale: Scale, probe: EngineProbe, deadline_s: float) -> None:
        self.scale, self.probe, self.deadline_s = scale, probe, deadline_s
        self._seed = itertools.count(1)

    @property
    def is_late(self) -> bool:
        return time.perf_counter() > self.deadline_s

    def traffic(self, num_events: int) -> PreparedTraffic:
        return traffic_of(self.probe, self.scale, num_events)

    def capacity(self, traffic: PreparedTraffic) -> float:
        """Requests/s of new users, all queued at once."""
        num = 48 if self.scale.device == "cuda" else 8
        return num / self._seconds(traffic.prepare([traffic.visitors.new() for _ in range(num)]))

    def alone_ms(self, traffic: PreparedTraffic) -> float:
        """P50 of a new user's request that is alone."""
        requests = traffic.prepare([traffic.visitors.new() for _ in range(15)])
        return 1e3 * float(np.median([self._seconds([request]) for request in requests][3:]))

    def _seconds(self, requests: Sequence[Prepared]) -> float:
        start_s = time.perf_counter()
        for request in requests:
            self.probe.submit(request)
        while self.probe.engine.step():
            pass
        return time.perf_counter() - start_s

    def run(
        self, way: Way, traffic: PreparedTraffic, rate: float, budget_ms: float, lone_signals: float = 0
    ) -> Replayed:
        num = int(np.clip(rate * self.scale.longest_s, 20, self.scale.most_requests))
        seed = next(self._seed)
        events = cascade(traffic, rate, num, signals=way.signals, seed=seed, lone_signals=lone_signals)
        return CascadeReplay(self.probe, events).run(budget_ms)

    def largest_rates(self, compared: list[Way], traffic: PreparedTraffic, budget_ms: float) -> dict[str, Any]:
        self.capacity(traffic)
        capacity, alone_ms = self.capacity(traffic), self.alone_ms(traffic)
        found = [self._largest_rate(way, traffic, budget_ms, capacity) for way in compared]
        return {"budget_ms": budget_ms, "alone_ms": alone_ms, "capacity": capacity, "found": found}

    def _largest_rate(self, way: Way, traffic: PreparedTraffic, budget_ms: float, capacity: float) -> dict[str, Any]:
        """By bisection on a scale of ratios; what is not kept at a twentieth of the capacity counts as never."""
        prepare(self.probe, way, traffic)
        low, high, best = 0.04 * capacity, 1.3 * capacity, None
        probes = []
        for _ in range(5):
            if self.is_late:
                break
            rate = float(np.sqrt(low * high))
            seen = self.run(way, traffic, rate, budget_ms)
            probes.append({"rate": round(rate, 1), "keeps": seen.keeps(budget_ms), **seen.describe()})
            if seen.keeps(budget_ms):
                low, best = rate, probes[-1]
            else:
                high = rate
        found = {"way": way.name, "rate": 0.0 if best is None else best["rate"], "at_it": best, "probes": probes}
        print(f"  {way.name}: {found['rate']:.1f}/s, {best and best['p99_ms']} ms", flush=True)
        return found


def measure(bench: RelayBench, wanted: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Named parts of the result, the most wanted first."""
    scale, base = bench.scale, bench.traffic(6_700)
    for _ in range(3):
        bench.capacity(base)
    capacity, alone_ms = bench.capacity(base), bench.alone_ms(base)
    budget_ms = 2 * alone_ms
    yield "base", {"tokens": scale.events(6_700), "alone_ms": alone_ms, "budget_ms": budget_ms, "capacity": capacity}
    compared = ways(scale, budget_ms)

    def over_length(num_events: int) -> dict[str, Any]:
        return {"tokens": num_events, **bench.largest_rates(compared, bench.traffic(num_events), budget_ms)}

    parts: dict[str, Callable[[], Any]] = {
        "over_length_6700": lambda: over_length(6_700),
        "over_length_10000": lambda: over_length(10_000),
        "longest_at_base": lambda: longest(bench, compared, budget_ms, 0.1 * capacity, 6_700),
        "overload": lambda: overload(bench, compared[1], base, budget_ms, capacity),
        "over_length_8200": lambda: over_length(8_200),
        "over_length_13400": lambda: over_length(13_400),
    }
    for name in wanted or parts:
        yield name, parts[name]()


def longest(bench: RelayBench, compared: list[Way], budget_ms: float, rate: float, shortest: int) -> dict[str, Any]:
    """P99 over the length of all histories, at one rate, until no way keeps the budget any more."""
    grid = [round(shortest * 1.22**i, -2) for i in range(9) if shortest * 1.22**i <= 30_500]
    rows, is_alive = [], {way.name: True for way in compared}
    for num_events in grid:
        if bench.is_late or not any(is_alive.values()):
            break
        traffic = bench.traffic(int(num_events))
        for way in compared:
            if not is_alive[way.name]:
                continue
            prepare(bench.probe, way, traffic)
            seen = bench.run(way, traffic, rate, budget_ms)
            is_alive[way.name] = seen.keeps(budget_ms)
            rows.append({"tokens": num_events, "way": way.name, "keeps": is_alive[way.name], **seen.describe()})
            print(f"  {num_events} tokens, {way.name}: p99 {rows[-1]['p99_ms']} ms", flush=True)
    kept = {
        way.name: max([row["tokens"] for row in rows if row["way"] == way.name and row["keeps"]], default=0)
        for way in compared
    }
    return {"rate": round(rate, 1), "budget_ms": round(budget_ms, 3), "longest": kept, "rows": rows}


def overload(
    bench: RelayBench, way: Way, traffic: PreparedTraffic, budget_ms: float, capacity: float
) -> list[dict[str, Any]]:
    """Ranks without signals, with their own, and with five times what could be computed, in turn, thrice.

    By size of a chunk and by the share of compute that is allowed.
    """
    rate = OVERLOADED * capacity
    rows = []
    for chunk, share in ((8_192, 0.3), (8_192, 0.1), (4_096, 0.1)):
        limits = {"chunk_tokens": bench.scale.events(chunk), "max_compute": share, "max_held": 0.3}
        bounded = way._replace(relay=way.relay.model_copy(update=limits))
        kinds = {"none": (False, 0.0), "own": (True, 0.0), "crowded": (True, 5 * capacity)}
        seen: dict[str, list[Replayed]] = {kind: [] for kind in kinds}
        for _ in range(3):
            for kind, (signals, lone) in kinds.items():
                if not bench.is_late:
                    prepare(bench.probe, bounded, traffic)
                    seen[kind].append(bench.run(bounded._replace(signals=signals), traffic, rate, budget_ms, lone))
        if not seen["crowded"]:
            break
        p99 = {
            kind: float(np.percentile(np.concatenate([each.latency_ms for each in runs]), 99))
            for kind, runs in seen.items()
        }
        rows.append(
            {
                "chunk_tokens": chunk,
                "max_compute": share,
                "max_held": 0.3,
                "rate": round(rate, 1),
                "signals_per_s": round(5 * capacity, 1),
                "p99_ms": p99,
                "crowded_over_none": p99["crowded"] / p99["none"],
                "runs": {kind: [each.describe() for each in runs] for kind, runs in seen.items()},
            }
        )
        print(f"  chunks of {chunk}, share {share}: p99 {p99}", flush=True)
    return rows


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="on a CPU, everything small")
    parser.add_argument("--parts", nargs="*", default=[], help="only these; all, in the order of `measure`, if none")
    parser.add_argument("--limit-s", type=float, default=400, help="stop after so long with what there is")


def main(flags: Namespace) -> None:
    started_s = time.perf_counter()
    scale = QUICK if flags.quick else CARD
    engine = make_engine(scale, scale.events(30_000))
    probe = EngineProbe(engine)
    print(f"ready after {time.perf_counter() - started_s:.1f} s\n{engine.report()}", flush=True)
    results: dict[str, Any] = {"cascade": CASCADE.model_dump(), "hot_share": HOT_SHARE, "goal": GOAL}
    bench = RelayBench(scale, probe, started_s + flags.limit_s)
    for name, part in measure(bench, flags.parts):
        results[name] = part
        print(f"{time.perf_counter() - started_s:.0f} s: {name}", flush=True)
        write_measurement(flags.out, results)
        if bench.is_late:
            print("out of time: the rest is not measured", flush=True)
            break
    engine.close()
