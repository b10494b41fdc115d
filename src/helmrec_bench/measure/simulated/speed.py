"""How fast the simulator is, how that grows, and what sampling rows does to its figures.

Writes docs/measurements/sim-speed.json. Best of three runs each, on whatever else the machine does: so CPU time stands
beside wall time. `--headline` leaves out runs with all rows and how speed grows, and writes sim-speed-headline.json.
"""

import time
from argparse import ArgumentParser, Namespace
from typing import Any, NamedTuple

from helmrec.config import EngineConfig
from helmrec.control.static import Static, StaticSettings
from helmrec.model.profiles import profile
from helmrec.sim.cluster import ByHash, ClusterSimConfig, Fleet, simulate_cluster
from helmrec.sim.cost import default_cost
from helmrec.sim.node.config import NodeConfig
from helmrec.sim.simulate import Options, SimResult, simulate
from helmrec.traffic.families import Shape, family
from helmrec.traffic.generate import generate
from helmrec.traffic.trace import Trace
from helmrec_bench.lab.provenance import write_measurement

NUM_ITEMS = 1 << 22
ALPHA = 0.2


def node(name: str, lanes: int, pool: str = "8GB") -> NodeConfig:
    engine = EngineConfig(pool_bytes=pool, alpha=ALPHA, max_batch_requests=8, max_batch_tokens=70_016)
    return NodeConfig(model=profile(name, NUM_ITEMS), engine=engine, row_sample=lanes / 256)


def traffic(duration_s: float, rate: float = 150, hot_users: int = 2_000) -> Trace:
    shape = Shape(duration_s=duration_s, rate=rate, num_items=NUM_ITEMS, hot_users=hot_users)
    return generate(family("steady", shape), 0)


def static(index: int = 0) -> Static:
    return Static(StaticSettings(alpha=ALPHA))


class Timed(NamedTuple):
    run: SimResult
    cpu_s: float


def best(trace: Trace, config: NodeConfig, times: int, options: Options | None = None) -> Timed:
    """The run that took least CPU time."""
    timed = []
    for _ in range(times):
        start_s = time.process_time()
        run = simulate(trace, config, default_cost(), static(), options=options)
        timed.append(Timed(run, time.process_time() - start_s))
    return min(timed, key=lambda one: one.cpu_s)


def described(trace: Trace, timed: Timed) -> dict[str, Any]:
    run, found = timed.run, timed.run.summary()
    assert run.pool.row_evictions > 0, "the row cache must have been short"
    assert run.pool.kv_evicted_pages > 0, "KV must have been short"
    return {
        "requests": trace.num_requests,
        "seconds": round(run.wall_s, 3),
        "requests_per_s": round(trace.num_requests / run.wall_s),
        "requests_per_cpu_s": round(trace.num_requests / timed.cpu_s),
        "row_hit_rate": round(run.pool.row_hit_rate, 4),
        "token_reuse_rate": round(run.pool.token_reuse_rate, 4),
        "p50_ms": round(found.p50_ms, 3),
        "p99_ms": round(found.p99_ms, 3),
    }


def sampled(name: str, trace: Trace, lanes: int, times: int) -> dict[str, Any]:
    return {"profile": name, "row_sample": lanes / 256, **described(trace, best(trace, node(name, lanes), times))}


def one_node() -> list[dict[str, Any]]:
    rows = []
    for name in ("dlrmv3", "wide"):
        trace = traffic(400)
        rows += [sampled(name, trace, lanes, 3) for lanes in (1, 2, 5)]
        short = traffic(60)
        rows += [{**sampled(name, short, lanes, 1), "short": True} for lanes in (1, 2, 5, 256)]
        for row in rows:
            print(row, flush=True)
    return rows


def growth() -> list[dict[str, Any]]:
    rows = []
    for duration_s in (100, 400, 1_600):
        trace = traffic(duration_s)
        rows.append({"nodes": 1, **described(trace, best(trace, node("dlrmv3", 1), 2))})
        print(rows[-1], flush=True)
    return rows


def cluster(num_nodes: int, duration_s: float) -> dict[str, Any]:
    """100 requests a second and node, ticks included."""
    trace = traffic(duration_s, 100 * num_nodes, 2_000 * num_nodes)
    start, cpu_start = time.perf_counter(), time.process_time()
    fleet = Fleet(node("dlrmv3", 1), default_cost(), static)
    run = simulate_cluster(trace, fleet, ByHash(), ClusterSimConfig(num_nodes=num_nodes))
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    found = {
        "nodes": num_nodes,
        "simulated_s": duration_s,
        "requests": trace.num_requests,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu_s, 2),
        "requests_per_s": round(trace.num_requests / seconds),
        "p99_ms": round(run.summary().p99_ms, 3),
    }
    print(found, flush=True)
    return found


def with_curves() -> dict[str, Any]:
    trace = traffic(60)
    return described(trace, best(trace, node("dlrmv3", 1), 2, Options(has_curves=True)))


def headline() -> dict[str, Any]:
    """One node with one lane of 256, with miss curves, and a minute of 32 nodes."""
    trace = traffic(400)
    return {
        "one_node": [sampled(name, trace, 1, 3) for name in ("dlrmv3", "wide")],
        "with_miss_curves": with_curves(),
        "a_minute_of_32_nodes": cluster(32, 60),
    }


def whole() -> dict[str, Any]:
    return {
        "one_node": one_node(),
        "with_miss_curves": with_curves(),
        "growth_with_requests": growth(),
        "growth_with_nodes": [cluster(n, 60) for n in (1, 4, 16, 32)],
        "ten_minutes_of_32_nodes": cluster(32, 600),
    }


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--headline", action="store_true", help="the most asked for figures alone")


def default_out(flags: Namespace) -> str:
    return "sim-speed-headline.json" if flags.headline else "sim-speed.json"


def main(flags: Namespace) -> None:
    simulate(traffic(5), node("dlrmv3", 1), default_cost(), static())  # compile
    write_measurement(flags.out, {"calibration": default_cost().name, **(headline() if flags.headline else whole())})
