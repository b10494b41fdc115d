"""What computing prefixes ahead of their ranks is worth, simulated: one node and 32, with everything left out in turn.

Cascade, settings of the engine and traffic are those of experiment `relay-card`; costs are those measured on an H200.

    helmrec bench run relay                 # every part; finished ones are kept in docs/measurements/relay.json
    helmrec bench run relay --part nodes    # that part again; --workers N for several processes
    helmrec bench run relay --plot          # draws docs/images/relay.png from that file
"""

import json
import time
from argparse import ArgumentParser, Namespace
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from helmrec.config import EngineConfig, RelayConfig
from helmrec.costs.calibrated import default_cost
from helmrec.model.profiles import profile
from helmrec.sim.node.config import NodeConfig
from helmrec.traffic.generate import generate
from helmrec.traffic.trace import Trace
from helmrec.traffic.workload import Phase, Users, Workload
from helmrec_bench.cascade import CascadeResult, Relaying, simulate_cascade
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.report.files import picture

PLOT = Path("docs/images/relay.png")
GOAL = 0.99
WINDOW = 34_000
POOL, HOST = 8 << 30, 10 << 30
NUM_ITEMS = 2_000_000
TOKEN_BYTES = 10_240
HOT_SHARE, NEW_EVENTS = 0.3, 16
WARM_UP_S, SPAN_S = 4.0, 16.0
NODES_SPAN_S = 4.0  # of each of many nodes
SEEDS = (0, 1)
LENGTHS = (6_700, 8_200, 10_000, 12_200, 14_900, 20_000, 27_100)


SET_UP = {
    "pool_bytes": POOL,
    "host_kv_bytes": HOST,
    "hot_share": HOT_SHARE,
    "warm_up_s": WARM_UP_S,
    "span_s": SPAN_S,
    "nodes_span_s": NODES_SPAN_S,
    "seeds": len(SEEDS),
    "calibration": "h200",
}


class SimulatedWay(NamedTuple):
    """How ranks are served."""

    name: str
    relaying: Relaying
    relay: RelayConfig
    has_expander: bool = True


def ways(budget_ms: float) -> dict[str, SimulatedWay]:
    on, off = Relaying(warm_up_s=WARM_UP_S), Relaying(has_signals=False, warm_up_s=WARM_UP_S)
    relay = RelayConfig(budget_ms=budget_ms, max_held=0.6, max_compute=0.9)
    admit_all = relay.model_copy(update={"risk": 0.0, "max_held": 1.0, "max_compute": 1.0})
    made = [
        SimulatedWay("inline", off, relay, has_expander=False),
        SimulatedWay("relay + host_tier", on, relay),
        SimulatedWay("inline + host_tier", off, relay),
        SimulatedWay("relay, host_tier off", on, relay, has_expander=False),
        SimulatedWay("relay + host_tier, trigger off", on, admit_all),
    ]
    return {way.name: way for way in made}


def apart(way: SimulatedWay) -> SimulatedWay:
    """Signals and ranks go where chance sends them."""
    return way._replace(name=f"{way.name}, affinity off", relaying=replace(way.relaying, has_affinity=False))


class Lengths(NamedTuple):
    """Of histories: all the same, or spread."""

    median: int
    sigma: float = 0.0
    longest: int = 30_000


@cache
def trace_of(lengths: Lengths, rate: float, seed: int, num_nodes: int = 1) -> Trace:
    num_hot = max(2, int(0.8 * HOST / TOKEN_BYTES / lengths.median))
    users = Users(
        hot_exponent=0, history_sigma=lengths.sigma, min_history=2_000, max_history=lengths.longest,
        new_events=NEW_EVENTS, cold_return=0,
    )  # fmt: skip
    phase = Phase(
        name="cascade",
        duration_s=WARM_UP_S + (SPAN_S if num_nodes == 1 else NODES_SPAN_S),
        rate=rate * num_nodes,
        hot_share=HOT_SHARE,
        hot_users=num_hot * num_nodes,
        history=lengths.median,
        item_exponent=1.0,
    )
    return generate(Workload(name="relay", num_items=NUM_ITEMS, users=users, phases=(phase,)), seed)


def node_config(way: SimulatedWay) -> NodeConfig:
    model = profile("dlrmv3", NUM_ITEMS).model_copy(update={"window": WINDOW, "normaliser": WINDOW, "user_context": ()})
    engine = EngineConfig(
        pool_bytes=POOL, alpha=0.1, host_kv_bytes=HOST if way.has_expander else 0, max_batch_requests=8,
        max_batch_tokens=70_016, queue_limit=1 << 20, relay=way.relay,
    )  # fmt: skip
    return NodeConfig(model=model, engine=engine, row_sample=1 / 512)


def run(way: SimulatedWay, lengths: Lengths, rate: float, num_nodes: int = 1, seed: int = 0) -> CascadeResult:
    relaying = replace(way.relaying, num_nodes=num_nodes, seed=seed)
    trace = trace_of(lengths, rate, seed, num_nodes)
    return simulate_cascade(trace, node_config(way), default_cost(), relaying)


def lone_ms(num_events: int) -> float:
    """P50 of a new user's rank that is alone."""
    inline = ways(1.0)["inline"]
    seen = run(inline, Lengths(num_events), 2.0)
    return seen.percentile(75)  # hot users are quicker, and fewer than that


def largest_rate(ask: "Ask") -> dict[str, Any]:
    """Per node, by bisection on a scale of ratios; 0 if the budget is not kept at the lowest rate looked at either."""
    way, lengths, best = ask.way, ask.lengths, None
    low, high = ask.bracket or (5.0, 1_200.0 * 6_700 / max(6_700, lengths.median))
    for _ in range(6 if ask.num_nodes == 1 else 4):
        rate = round(float(np.sqrt(low * high)), 1)
        seen = [run(way, lengths, rate, ask.num_nodes, seed) for seed in (SEEDS if ask.num_nodes == 1 else SEEDS[:1])]
        if np.mean([each.share_within(ask.budget_ms) for each in seen]) >= GOAL:
            low, best = rate, seen[0]
        else:
            high = rate
    trace_of.cache_clear()
    at_it, rate = (None, 0.0) if best is None else (details(best), low)
    print(f"  {lengths.median} tokens, {way.name}: {rate:.0f}/s", flush=True)
    return {"tokens": lengths.median, "num_nodes": ask.num_nodes, "way": way.name, "rate": rate, "at_it": at_it}


def details(seen: CascadeResult) -> dict[str, Any]:
    return {
        "requests": seen.latency_ms.size,
        "p50_ms": round(seen.percentile(50), 3),
        "p99_ms": round(seen.percentile(99), 3),
        "reused": round(seen.token_reuse_rate, 3),
        "busy": round(seen.busy, 3),
        "engine_busy": round(seen.engine_busy, 3),
        "ahead_busy": round(seen.ahead_busy, 3),
        "signals": {name: num for name, num in seen.verdicts.items() if num},
        "leases_used": seen.leases_used,
        "leases_expired": seen.leases_expired,
        "most_held": round(seen.most_held, 3),
        "most_compute": round(seen.most_compute, 3),
        "reloaded_pages": seen.reloaded_pages,
    }


class Ask(NamedTuple):
    """The largest rate of one way."""

    way: SimulatedWay
    lengths: Lengths
    budget_ms: float
    num_nodes: int = 1
    bracket: tuple[float, float] | None = None  # requests/s of a node between which to look


def asks(part: str, budget_ms: float) -> list[Ask]:
    """What a part is made of. Histories of `at_80ms` have 2,000 to 30,000 events, 12,000 in the median."""
    every, slow = ways(budget_ms), ways(80.0)
    inline, ours, *left_out = every.values()
    if part == "nodes":
        brackets = {10_000: ((8, 60), (120, 320), (4, 60)), 6_700: ((80, 250), (220, 560), (40, 250))}
        compared = (inline, ours, apart(ours))
        return [
            Ask(way, Lengths(num), budget_ms, 32, bracket)
            for num, of_ways in brackets.items()
            for way, bracket in zip(compared, of_ways, strict=True)
        ]
    if part == "over_length":
        return [Ask(way, Lengths(num), budget_ms) for num in LENGTHS for way in (inline, ours)]
    if part == "ablation":
        return [Ask(way, Lengths(num), budget_ms) for num in (6_700, 10_000) for way in left_out]
    return [Ask(way, Lengths(12_000, 0.6), 80.0) for way in slow.values()]


class SignalCrowd(NamedTuple):
    """Ranks, and five times the signals that the node could compute beside nothing else."""

    chunk_tokens: int
    max_compute: float
    rate: int


CROWDS = (
    SignalCrowd(8_192, 0.3, 100),
    SignalCrowd(8_192, 0.1, 100),
    SignalCrowd(4_096, 0.1, 100),
    SignalCrowd(1_024, 0.1, 100),
    SignalCrowd(8_192, 0.3, 300),
)
CAPACITY = 800  # requests/s of new users


def overload(crowd: SignalCrowd, budget_ms: float) -> dict[str, Any]:
    """Ranks without signals, with their own, and with the crowd's."""
    bounds = {"chunk_tokens": crowd.chunk_tokens, "max_compute": crowd.max_compute, "max_held": 0.3}
    relay = ways(budget_ms)["relay + host_tier"].relay.model_copy(update=bounds)
    p99_ms, seen = {}, {}
    lone_signals = {"no signals": 0, "own signals": 0, "crowded": 5 * CAPACITY // crowd.rate}
    for name, num in lone_signals.items():
        relaying = Relaying(has_signals=name != "no signals", num_new_users=num, warm_up_s=WARM_UP_S)
        runs = [run(SimulatedWay(name, relaying, relay), Lengths(6_700), float(crowd.rate), 1, seed) for seed in SEEDS]
        seen[name] = details(runs[0])
        p99_ms[name] = float(np.percentile(np.concatenate([each.latency_ms for each in runs]), 99))
    print(f"  {crowd}: {p99_ms}", flush=True)
    return {**crowd._asdict(), "max_held": 0.3, "p99_ms": p99_ms, "seen": seen}


def trigger(rate: float) -> dict[str, Any]:
    """What the trigger spares where nobody is at risk: 80 ms, and a fraction of the load that would break it."""
    seen = {name: details(run(ways(80.0)[name], Lengths(12_000, 0.6), rate)) for name in TRIGGERS}
    print(f"  {rate:.0f}/s: { ({name: each['busy'] for name, each in seen.items()}) }", flush=True)
    return {"rate": rate, "seen": seen}


TRIGGERS = ("inline + host_tier", "relay + host_tier", "relay + host_tier, trigger off")
PARTS = ("nodes", "over_length", "overload", "ablation", "at_80ms", "trigger")  # the longest first


def plot(path: Path) -> None:
    kept = json.loads(path.read_text())
    card = path.parent / "gpu-relay-h200.json"
    parts = json.loads(card.read_text()).items() if card.exists() else ()
    lengths = [part for name, part in parts if name.startswith("over_length_")]
    rows = [{"tokens": part["tokens"], **found} for part in lengths for found in part["found"]]
    with picture(PLOT, (7, 4)) as figure:
        axis = figure.subplots()
        _draw(axis, kept["over_length"], "simulated", {"marker": "o", "linestyle": "-"})
        style = {"marker": "s", "linestyle": ":", "mfc": "none"}
        _draw(axis, sorted(rows, key=lambda row: row["tokens"]), "H200", style)
        label = f"requests/s with 99% within {kept['budget_ms']:.1f} ms"
        axis.set(xlabel="events of every history", ylabel=label, ylim=(0, None))
        axis.legend()


def _draw(axis: Any, rows: list[dict[str, Any]], where: str, style: dict[str, str]) -> None:
    for name, color in (("inline", "tab:gray"), ("relay + host_tier", "tab:blue")):
        mine = [row for row in rows if row["way"] == name]
        lengths, rates = [row["tokens"] for row in mine], [row["rate"] for row in mine]
        axis.plot(lengths, rates, color=color, label=f"{name}, {where}", **style)


def begin(pool: ProcessPoolExecutor, part: str, budget_ms: float) -> list[Future[dict[str, Any]]]:
    if part == "overload":
        return [pool.submit(overload, crowd, budget_ms) for crowd in CROWDS]
    if part == "trigger":
        return [pool.submit(trigger, rate) for rate in (60.0, 120.0, 180.0)]
    return [pool.submit(largest_rate, ask) for ask in asks(part, budget_ms)]


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--part", choices=PARTS, nargs="*", help="only these, even if there are figures")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--plot", action="store_true", help="draw the file there is")


def main(flags: Namespace) -> None:
    if flags.plot:
        return plot(flags.out)
    kept = json.loads(flags.out.read_text()) if flags.out.exists() else {}
    alone_ms = lone_ms(6_700)
    budget_ms = 2 * alone_ms
    results = {name: kept[name] for name in PARTS if name in kept and name not in (flags.part or ())}
    results |= {"alone_ms": alone_ms, "budget_ms": budget_ms, "goal": GOAL, "set_up": SET_UP}
    print(f"a rank alone takes {alone_ms:.2f} ms", flush=True)
    started_s = time.perf_counter()
    with ProcessPoolExecutor(flags.workers) as pool:
        wanted = flags.part or [name for name in PARTS if name not in kept]
        running = {name: begin(pool, name, budget_ms) for name in sorted(wanted, key=PARTS.index)}
        for name in reversed(running):  # those that end first
            results[name] = [future.result() for future in running[name]]
            print(f"{name} after {time.perf_counter() - started_s:.0f} s", flush=True)
            write_measurement(flags.out, results)
    return None
