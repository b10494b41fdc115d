"""What computing prefixes ahead of their ranks is worth on one card: a replayed cascade, open loop.

A signal comes when retrieval begins, its rank some tens of milliseconds later. Measured are the largest rate at which
99% of the ranks keep a budget and the longest histories, with and without signals and the host tier; and what five
times as many signals as the card could compute do to ranks.

    helmrec bench run relay-card              # on a card; writes docs/measurements/gpu-relay-h200.json
    helmrec bench run relay-card --quick --out /tmp/x.json  # a CPU, lengths cut to a fortieth: only to see that it runs
"""

import itertools
import time
from argparse import ArgumentParser, Namespace
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from helmrec.collector import PROCESS
from helmrec.config import EngineConfig, RelayConfig
from helmrec.engine.engine import Engine
from helmrec.engine.intake import Prepared
from helmrec.engine.pipeline import Pipeline
from helmrec.engine.relay.pre_inference import Relay, _first_tokens
from helmrec.memory.expander import ReloadCosts, StepCosts
from helmrec.model.config import ModelConfig
from helmrec.model.profiles import profile
from helmrec.model.weights import LoadedModel, random_dense
from helmrec.types import IntArray, PrefillRequest, RankRequest, RankResult
from helmrec_bench.cascade import CascadeConfig
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.measure.cards.traffic import serving_config

CASCADE = CascadeConfig()
HOT_SHARE = 0.3  # of the requests come from users who come again and again
NEW_EVENTS = 16  # of a hot user between two visits
TEMPLATES = 96  # different histories; each time somebody else's
GOAL = 0.99  # of the ranks keep the budget
OVERLOADED = 0.2  # ranks as a share of capacity, where signals come five times too often


@dataclass(frozen=True)
class Scale:
    """Everything that differs between a card and a trial on a CPU."""

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
    expander: bool
    relay: RelayConfig
    is_stacked: bool = False  # a chunk may be launched while another is on its way


def ways(scale: Scale, budget_ms: float) -> list[Way]:
    """First what is compared, then what is left out of it one by one."""
    relay = RelayConfig(budget_ms=budget_ms, chunk_tokens=scale.events(8_192), max_held=0.6, max_compute=0.9)
    admit_all = relay.model_copy(update={"risk": 0.0, "max_held": 1.0, "max_compute": 1.0})
    return [
        Way("inline", signals=False, expander=False, relay=relay),
        Way("relay + expander", signals=True, expander=True, relay=relay),
        Way("inline + expander", signals=False, expander=True, relay=relay),
        Way("relay, expander off", signals=True, expander=False, relay=relay),
        Way("relay + expander, trigger off", signals=True, expander=True, relay=admit_all),
    ]


def make_engine(scale: Scale, longest: int) -> Engine:
    """The dlrmv3 shape with room for the longest history; all rows of a table are equal, as in `gpu_traffic`."""
    window = longest + 200 * NEW_EVENTS
    update = {"window": window, "normaliser": max(16_384, window), "max_candidates": scale.num_candidates}
    on_card = scale.device == "cuda"
    config = serving_config(6, scale.table_bytes) if on_card else profile("demo", 2_000)
    config = config.model_copy(update={**update, "user_context": (), "request_context": ()})
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(config.row_dim, generator=generator).to(getattr(torch, config.row_dtype))
    tables = {table.name: row.expand(table.num_rows, config.row_dim) for table in config.tables}
    model = LoadedModel(config, 1, random_dense(config, generator), tables)
    most = 8 * (scale.events(6_700) + scale.num_candidates)
    engine = Engine(
        model,
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


class Histories:
    """Made-up users. A few different histories stand for all: under another name nothing of them is known."""

    def __init__(self, engine: Engine, scale: Scale, lengths: IntArray, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._engine, self._scale = engine, scale
        with ThreadPoolExecutor(8) as threads:
            made = list(threads.map(lambda n: self._make(int(n) + 200 * NEW_EVENTS), lengths))
        self._templates, self._lengths = made, lengths
        host_tokens = scale.host_bytes // engine._pool.geometry.page_bytes * engine._pool.geometry.page_tokens
        self.num_hot = int(np.clip(0.8 * host_tokens / lengths.mean(), 2, scale.most_hot))  # that the host tier holds
        self._visits = np.zeros(self.num_hot, np.int64)
        self._next_user = 1 << 40

    def _make(self, num_events: int) -> Prepared:
        config: ModelConfig = self._engine.model_config
        rng = np.random.default_rng(self._rng.integers(1 << 60))
        items, candidates = _zipf(rng, num_events, config), _zipf(rng, self._scale.num_candidates, config)
        others = config.features[1:]
        request = RankRequest(
            user_id=0,
            items=items,
            actions=items % config.num_actions,
            timestamps=np.arange(num_events) * 60,
            candidates=candidates,
            features={t.name: (items * (2 * i + 3)) % t.num_rows for i, t in enumerate(others)},
            candidate_features={t.name: (candidates * (2 * i + 3)) % t.num_rows for i, t in enumerate(others)},
        )
        return self._engine._intake.prepare(request)

    def stranger(self) -> Prepared:
        self._next_user += 1
        return self._as(self._next_user, int(self._rng.integers(len(self._templates))), 0)

    def hot(self, user: int) -> Prepared:
        self._visits[user] += 1
        return self._as(user, user % len(self._templates), int(self._visits[user]) % 200 * NEW_EVENTS)

    def next(self) -> Prepared:
        is_hot = self._rng.random() < HOT_SHARE
        return self.hot(int(self._rng.integers(self.num_hot))) if is_hot else self.stranger()

    def _as(self, user: int, template: int, num_new: int) -> Prepared:
        """The template's history as this user's: the same rows, but no state of the chain is the same."""
        cut = _first_tokens(self._templates[template], int(self._lengths[template]) + num_new)
        salt = np.uint64((user + 1) * 0x9E3779B97F4A7C15 & (1 << 64) - 1)
        return replace(cut, history=replace(cut.history, user_id=user, states=cut.history.states ^ salt))


def _zipf(rng: np.random.Generator, num: int, config: ModelConfig) -> IntArray:
    num_items = config.features[0].num_rows
    ranks = np.exp(rng.random(num) * np.log(num_items)).astype(np.int64) - 1
    return ranks * 2_654_435_761 % num_items


class Event(NamedTuple):
    at_s: float
    request: Prepared
    is_rank: bool
    is_warm_up: bool


def cascade(
    histories: Histories, rate: float, num: int, *, signals: bool, seed: int, strangers: float = 0
) -> list[Event]:
    """Ranks at a Poisson rate, each after its signal; `strangers` are signals per second that no rank follows."""
    rng = np.random.default_rng(seed)
    signal_s = np.cumsum(rng.exponential(1 / rate, num))
    rank_s = CASCADE.rank_times(signal_s, rng)
    warm_s = signal_s[num // 10]
    events = []
    for came_s, asked_s in zip(signal_s, rank_s, strict=True):
        request = histories.next()
        events.append(Event(float(asked_s), request, is_rank=True, is_warm_up=bool(came_s < warm_s)))
        if signals:
            events.append(Event(float(came_s), _without_candidates(request), is_rank=False, is_warm_up=False))
    at_s = 0.0
    while strangers and (at_s := at_s + float(rng.exponential(1 / strangers))) < rank_s.max():
        events.append(Event(at_s, _without_candidates(histories.stranger()), is_rank=False, is_warm_up=False))
    return sorted(events, key=lambda event: event.at_s)


def _without_candidates(request: Prepared) -> Prepared:
    return replace(request, candidate_rows=request.candidate_rows[:, :0], candidate_gap=0)


class Replayed(NamedTuple):
    """What became of the ranks."""

    latency_ms: IntArray  # of those that count, in order of their end; infinite if given up
    reused: float  # share of their history tokens
    busy: float  # share of the time that steps took
    seconds: float
    relay: dict[str, Any]
    reloaded_pages: int
    saved_pages: int

    def keeps(self, budget_ms: float) -> bool:
        return bool(np.mean(self.latency_ms <= budget_ms) >= GOAL)

    def describe(self) -> dict[str, Any]:
        p50, p99 = np.percentile(self.latency_ms, (50, 99), method="higher")
        return {
            "requests": self.latency_ms.size,
            "p50_ms": round(float(p50), 3),
            "p99_ms": round(float(p99), 3) if np.isfinite(p99) else None,
            "reused": round(self.reused, 3),
            "busy": round(self.busy, 3),
            "reloaded_pages": self.reloaded_pages,
            "saved_pages": self.saved_pages,
            **self.relay,
        }


def replay(engine: Engine, events: list[Event], budget_ms: float) -> Replayed:
    """Submit each event in its time and step the engine; a queue that only grows is given up."""
    PROCESS.settle()
    before = engine.stats()
    running: set[Future[RankResult]] = set()
    latencies_s, reused, total = array("d"), 0, 0
    signal = PrefillRequest(0, (), (), (), num_candidates=0)
    num_candidates = max(event.request.num_candidates for event in events)
    start_s, next_event = time.perf_counter(), 0

    def note(event: Event, future: "Future[RankResult]") -> None:
        """Keep numbers only: objects of all requests would make collections long."""
        nonlocal reused, total
        running.discard(future)
        if not future.cancelled() and not event.is_warm_up:
            latencies_s.append(time.perf_counter() - start_s - event.at_s)
            reused += future.result().reused_tokens
            total += event.request.history.num_tokens

    give_up_s = events[-1].at_s + 20 * budget_ms / 1e3
    while next_event < len(events) or running:
        now_s = time.perf_counter() - start_s
        if now_s > give_up_s or engine._scheduler.queue_length > 2_000:
            break
        while next_event < len(events) and events[next_event].at_s <= now_s:
            event = events[next_event]
            next_event += 1
            if event.is_rank:
                future = engine._scheduler.submit(event.request, engine._clock.now())
                running.add(future)
                future.add_done_callback(partial(note, event))
            else:
                who = replace(signal, user_id=event.request.history.user_id, num_candidates=num_candidates)
                engine._relay.submit(who, event.request)
        if not engine.step() and next_event < len(events):
            time.sleep(min(1e-4, max(0.0, events[next_event].at_s - (time.perf_counter() - start_s))))
    seconds = time.perf_counter() - start_s
    engine._scheduler.withdraw([future for future in running if not future.done()])
    num_lost = sum(event.is_rank and not event.is_warm_up for event in events) - len(latencies_s)
    engine.check()
    latency_ms = [took_s * 1e3 for took_s in latencies_s] + [np.inf] * num_lost
    after = engine.stats()
    relay = {name: num - before.relay.verdicts[name] for name, num in after.relay.verdicts.items()}
    return Replayed(
        np.array(latency_ms),
        reused / max(1, total),
        (after.busy_s - before.busy_s) / seconds,
        seconds,
        {
            "signals": {name: num for name, num in relay.items() if num},
            "leases_used": after.relay.used - before.relay.used,
            "leases_expired": after.relay.expired - before.relay.expired,
            "ahead_share": round((after.relay.busy_s - before.relay.busy_s) / seconds, 3),
            "failed": after.relay.failed - before.relay.failed,
        },
        after.pool.host_reloaded_pages - before.pool.host_reloaded_pages,
        after.pool.host_saved_pages - before.pool.host_saved_pages,
    )


class StackedPipeline(Pipeline):
    """Tells the engine of no chunk that is on its way."""

    is_ahead = False


def prepare(engine: Engine, way: Way, histories: Histories) -> None:
    """Empty KV and host tier, then let every hot user come twice: what was learned of costs stays."""
    engine.check()
    pool = engine._pool
    engine._relay = Relay(way.relay, engine._scheduler, pool.kv, pool.expander.costs.steps)
    engine._pipeline.__class__ = StackedPipeline if way.is_stacked else Pipeline
    pool.kv.evict(1 << 40)
    pool.kv._visits = type(pool.kv._visits)()
    expander = pool.expander
    expander.clear(expander.slots if way.expander else 0)  # type: ignore[attr-defined]
    for _ in range(2):
        for user in range(histories.num_hot):
            engine._scheduler.submit(histories.hot(user), engine._clock.now())
        while engine.step():
            pass
    while pool.kv._unsaved:  # else probes would begin behind a backlog
        engine._runner.save_pages(engine.config.save_bytes_per_step)
    engine.check()


class Bench:
    """One engine, and how long there is left."""

    def __init__(self, scale: Scale, engine: Engine, deadline_s: float) -> None:
        self.scale, self.engine, self.deadline_s = scale, engine, deadline_s
        self._seed = itertools.count(1)

    @property
    def is_late(self) -> bool:
        return time.perf_counter() > self.deadline_s

    def num_requests(self, rate: float) -> int:
        return int(np.clip(rate * self.scale.longest_s, 20, self.scale.most_requests))

    def capacity(self, histories: Histories) -> float:
        """Requests/s of strangers, all queued at once."""
        num = 48 if self.scale.device == "cuda" else 8
        for request in [histories.stranger() for _ in range(num)]:
            self.engine._scheduler.submit(request, self.engine._clock.now())
        start_s = time.perf_counter()
        while self.engine.step():
            pass
        return num / (time.perf_counter() - start_s)

    def lone_ms(self, histories: Histories) -> float:
        """P50 of a stranger's request that is alone."""
        took = [self._alone(histories.stranger()) for _ in range(15)]
        return float(np.median(took[3:]))

    def _alone(self, request: Prepared) -> float:
        start_s = time.perf_counter()
        self.engine._scheduler.submit(request, self.engine._clock.now())
        while self.engine.step():
            pass
        return (time.perf_counter() - start_s) * 1e3

    def run(self, way: Way, histories: Histories, rate: float, budget_ms: float, strangers: float = 0) -> Replayed:
        num = self.num_requests(rate)
        events = cascade(histories, rate, num, signals=way.signals, seed=next(self._seed), strangers=strangers)
        return replay(self.engine, events, budget_ms)

    def largest_rate(self, way: Way, histories: Histories, budget_ms: float, capacity: float) -> dict[str, Any]:
        """By bisection on a scale of ratios; what is not kept at a twentieth of the capacity counts as never."""
        prepare(self.engine, way, histories)
        low, high, best = 0.04 * capacity, 1.3 * capacity, None
        probes = []
        for _ in range(5):
            if self.is_late:
                break
            rate = float(np.sqrt(low * high))
            seen = self.run(way, histories, rate, budget_ms)
            probes.append({"rate": round(rate, 1), "keeps": seen.keeps(budget_ms), **seen.describe()})
            if seen.keeps(budget_ms):
                low, best = rate, probes[-1]
            else:
                high = rate
        found = {"way": way.name, "rate": 0.0 if best is None else best["rate"], "at_it": best, "probes": probes}
        print(
            f"  {way.name}: {found['rate']:.1f}/s, {best and best['p99_ms']} ms, busy {best and best['busy']}",
            flush=True,
        )
        return found


def lengths_of(scale: Scale, low: int, high: int) -> IntArray:
    return np.linspace(scale.events(low), scale.events(high), TEMPLATES if scale.device == "cuda" else 8).astype(int)


def measure(bench: Bench, wanted: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Named parts of the result, the most wanted first."""
    scale = bench.scale
    base = Histories(bench.engine, scale, lengths_of(scale, 6_700, 6_700))
    for _ in range(3):
        bench.capacity(base)
    capacity, alone_ms = bench.capacity(base), bench.lone_ms(base)
    budget_ms = 2 * alone_ms
    yield "base", {"tokens": scale.events(6_700), "alone_ms": alone_ms, "budget_ms": budget_ms, "capacity": capacity}
    mixed = Histories(bench.engine, scale, lengths_of(scale, 2_000, 30_000))
    every, slow = ways(scale, budget_ms), ways(scale, 80.0)

    def rates(compared: list[Way], histories: Histories, budget_ms: float) -> dict[str, Any]:
        bench.capacity(histories)
        capacity = bench.capacity(histories)
        found = [bench.largest_rate(way, histories, budget_ms, capacity) for way in compared]
        return {"budget_ms": budget_ms, "capacity": capacity, "found": found}

    parts: dict[str, Callable[[], Any]] = {
        "over_length_6700": lambda: over_length(bench, every[:2], budget_ms, 6_700, base),
        "chunks_at_base": lambda: rates(chunked(scale, every[1]), base, budget_ms),
        "over_length_10000": lambda: over_length(bench, every[:2], budget_ms, 10_000),
        "longest_at_base": lambda: longest(bench, every[:2], budget_ms, 0.1 * capacity, 6_700),
        "overload": lambda: overload(bench, every[1], base, budget_ms, capacity),
        "over_length_8200": lambda: over_length(bench, every[:2], budget_ms, 8_200),
        "over_length_13400": lambda: over_length(bench, every[:2], budget_ms, 13_400),
        "throughput_to_30k": lambda: rates(slow[:2], mixed, 80.0),
        "ablation_at_base": lambda: rates(every[2:], base, budget_ms),
        "ablation_at_10000": lambda: over_length(bench, every[2:], budget_ms, 10_000),
        "ablation_to_30k": lambda: rates(slow[2:], mixed, 80.0),
    }
    for name in wanted or parts:
        yield name, parts[name]()


def chunked(scale: Scale, way: Way) -> list[Way]:
    """Smaller and larger chunks, and one launched on top of another."""
    made = []
    for chunk, is_stacked in ((4_096, False), (16_384, False), (4_096, True)):
        relay = way.relay.model_copy(update={"chunk_tokens": scale.events(chunk)})
        name = f"chunks of {chunk}{', one on top of another' if is_stacked else ''}"
        made.append(way._replace(name=name, relay=relay, is_stacked=is_stacked))
    return made


def over_length(
    bench: Bench, compared: list[Way], budget_ms: float, num_events: int, histories: Histories | None = None
) -> dict[str, Any]:
    """The largest rate of each way where all histories are so long."""
    print(f"{num_events} tokens", flush=True)
    histories = histories or Histories(bench.engine, bench.scale, lengths_of(bench.scale, num_events, num_events))
    bench.capacity(histories)
    capacity, alone_ms = bench.capacity(histories), bench.lone_ms(histories)
    found = [bench.largest_rate(way, histories, budget_ms, capacity) for way in compared]
    return {"tokens": num_events, "alone_ms": alone_ms, "capacity": capacity, "found": found}


def longest(bench: Bench, compared: list[Way], budget_ms: float, rate: float, shortest: int) -> dict[str, Any]:
    """P99 over the length of all histories, at one rate, until no way keeps the budget any more."""
    grid = [round(shortest * 1.22**i, -2) for i in range(9) if shortest * 1.22**i <= 30_500]
    rows, is_alive = [], {way.name: True for way in compared}
    for num_events in grid:
        if bench.is_late or not any(is_alive.values()):
            break
        histories = Histories(bench.engine, bench.scale, lengths_of(bench.scale, int(num_events), int(num_events)))
        for way in compared:
            if not is_alive[way.name]:
                continue
            prepare(bench.engine, way, histories)
            seen = bench.run(way, histories, rate, budget_ms)
            is_alive[way.name] = seen.keeps(budget_ms)
            rows.append({"tokens": num_events, "way": way.name, "keeps": is_alive[way.name], **seen.describe()})
            print(f"  {num_events} tokens, {way.name}: p99 {rows[-1]['p99_ms']} ms", flush=True)
    kept = {
        way.name: max([row["tokens"] for row in rows if row["way"] == way.name and row["keeps"]], default=0)
        for way in compared
    }
    return {"rate": round(rate, 1), "budget_ms": round(budget_ms, 3), "longest": kept, "rows": rows}


def overload(bench: Bench, way: Way, histories: Histories, budget_ms: float, capacity: float) -> list[dict[str, Any]]:
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
            for kind, (signals, strangers) in kinds.items():
                if not bench.is_late:
                    prepare(bench.engine, bounded, histories)
                    seen[kind].append(
                        bench.run(bounded._replace(signals=signals), histories, rate, budget_ms, strangers)
                    )
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
    expander = engine._pool.expander
    expander.slots = expander.num_slots  # type: ignore[attr-defined]  # what `prepare` goes back to
    expander.costs = ReloadCosts(StepCosts(), expander.costs.page_s)
    engine._relay = Relay(engine.config.relay, engine._scheduler, engine._pool.kv, expander.costs.steps)
    print(f"ready after {time.perf_counter() - started_s:.1f} s\n{engine.report()}", flush=True)
    results: dict[str, Any] = {"cascade": CASCADE.model_dump(), "hot_share": HOT_SHARE, "goal": GOAL}
    bench = Bench(scale, engine, started_s + flags.limit_s)
    for name, part in measure(bench, flags.parts):
        results[name] = part
        print(f"{time.perf_counter() - started_s:.0f} s: {name}", flush=True)
        write_measurement(flags.out, results)
        if bench.is_late:
            print("out of time: the rest is not measured", flush=True)
            break
    engine.close()
