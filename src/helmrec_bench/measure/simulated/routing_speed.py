"""How long a routing decision takes: 32 nodes with full sketches, known and new users, reports coming in.

Writes docs/measurements/router-speed.json. A decision is all between a described request and its node: looking at
the state and choosing. What comes before (sampling a request's rows) and after (noting the send, taking a report) is
timed apart. Times are of the wall clock, on whatever else the machine does (its load is in the file); `decision_cpu` is
the same in a second run by this thread's own time, whose clock is slow to read.
"""

import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from helmrec.router.cost import RouterCost, TokenShape
from helmrec.router.nodes import RouteRequest
from helmrec.router.policy import RoutingPolicy
from helmrec.router.sketch import RowSketch, build_sketch, sample_rows
from helmrec.router.state import ClusterState, NodeReport, Sent
from helmrec.sim.cost import default_cost
from helmrec_bench.baselines.routers import policies
from helmrec_bench.lab.provenance import write_measurement

ROWS_PER_TOKEN, NUM_TOKENS, NUM_CANDIDATES = 6, 6_700, 2_048
NUM_ROWS, RESIDENT_ROWS = 20_000_000, 2_000_000
NUM_USERS, NUM_SHAPES = 40_000, 64
RATE = 3_200.0  # requests a second, 100 a node
BIN_EDGES_US = [0, 10, 15, 20, 25, 30, 35, 40, 50, 60, 80, 100, 150, 200, 500, 1_000, 5_000, 10**9]


class Bench:
    """One cluster under one policy; every phase of every request timed."""

    def __init__(self, policy: RoutingPolicy, sketches: list[RowSketch], requests: list[RouteRequest]) -> None:
        self.policy, self.sketches, self.requests = policy, sketches, requests
        self.state, self.open = ClusterState(), list[Sent]()
        self.rng = np.random.default_rng(1)
        self.num_reports = 0
        for node in range(len(sketches)):
            self.state.join(node)
            self.report(node, 0.0)

    def report(self, node: int, now_s: float) -> None:
        waiting = sum(sent.node == node for sent in self.open)
        self.num_reports += 1
        load = (1.5 * waiting, waiting, 6_700 * waiting)
        report = NodeReport(node, self.num_reports, now_s, *load, 0.4, 4_000_000, 0.7, self.sketches[node])
        self.state.report(report, now_s)

    def run(self, count: int, clock: Callable[[], int]) -> dict[str, NDArray[np.int64]]:
        """Nanoseconds of every decision, of noting it, and of every report."""
        taken = {name: np.empty(count, np.int64) for name in ("decision", "note")}
        reports = []
        users = (self.rng.zipf(1.2, count) % NUM_USERS).tolist()
        for i in range(count):
            now_s = i / RATE
            request = self.requests[i % NUM_SHAPES]._replace(user=users[i])
            start = clock()
            choice = self.policy.choose(request, self.state.look(request.user, now_s), now_s)
            end = clock()
            assert choice is not None
            self.open.append(self.state.sent(request, choice.node, choice.service_ms, now_s))
            taken["decision"][i], taken["note"][i] = end - start, clock() - end
            if len(self.open) > 3 * len(self.sketches):
                self.state.finished(self.open.pop(0))
            if i % 16 == 0:  # every node reports about six times a second
                start = clock()
                self.report(i // 16 % len(self.sketches), now_s)
                reports.append(clock() - start)
        return {**taken, "report": np.array(reports)}


def spread(times_ns: NDArray[np.int64]) -> dict[str, float]:
    points = {"p50": 50, "p90": 90, "p99": 99, "p99_9": 99.9, "max": 100}
    return {f"{name}_us": round(float(np.percentile(times_ns, q)) / 1e3, 1) for name, q in points.items()}


def histogram(times_ns: NDArray[np.int64]) -> dict[str, int]:
    counts, _ = np.histogram(times_ns / 1e3, BIN_EDGES_US)
    names = [f"{low}-{high}" for low, high in pairwise(BIN_EDGES_US)]
    return dict(zip(names, counts.tolist(), strict=True))


def describe(rng: np.random.Generator) -> tuple[list[RouteRequest], NDArray[np.int64]]:
    """Requests to route, and how long it took to sample the rows of each."""
    requests, taken = [], []
    for _ in range(NUM_SHAPES + 2):
        history, candidates = (
            rng.integers(0, NUM_ROWS, (count, ROWS_PER_TOKEN)) for count in (NUM_TOKENS, NUM_CANDIDATES)
        )
        start = time.perf_counter_ns()
        sample = sample_rows(history, candidates)
        taken.append(time.perf_counter_ns() - start)
        requests.append(RouteRequest(0, NUM_TOKENS, NUM_CANDIDATES, ROWS_PER_TOKEN, sample))
    return requests[2:], np.array(taken[2:])


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--decisions", type=int, default=100_000)


def main(flags: Namespace) -> None:
    load_before = round(os.getloadavg()[0], 2)
    rng = np.random.default_rng(0)
    shape = TokenShape(rows_per_token=ROWS_PER_TOKEN, row_bytes=1_024, kv_bytes=10_240)
    cost = RouterCost.from_calibration(default_cost().model_dump(), shape)
    sketches = [build_sketch(rng.integers(0, NUM_ROWS, RESIDENT_ROWS)) for _ in range(flags.nodes)]
    requests, sampling_ns = describe(rng)
    results: dict[str, Any] = {}
    for name, make in policies(cost, np.random.default_rng(2)).items():
        Bench(make(), sketches, requests).run(200, time.perf_counter_ns)  # compile
        count = flags.decisions if name == "emb-kv-aware" else flags.decisions // 10
        taken = Bench(make(), sketches, requests).run(count, time.perf_counter_ns)
        own_work = Bench(make(), sketches, requests).run(count // 4, time.thread_time_ns)
        results[name] = {"decisions": count, **{phase: spread(times) for phase, times in taken.items()}}
        results[name]["decision_cpu"] = spread(own_work["decision"])
        if name == "emb-kv-aware":
            results[name]["histogram_us"] = histogram(taken["decision"])
        print(name, results[name]["decision"], results[name]["decision_cpu"], flush=True)
    write_measurement(
        flags.out,
        {
            "nodes": flags.nodes,
            "sketch_bytes": sketches[0].num_bytes,
            "rows_of_a_request": (NUM_TOKENS + NUM_CANDIDATES) * ROWS_PER_TOKEN,
            "samples_of_a_request": round(float(np.mean([r.sample.hashes.size for r in requests]))),
            "sampling_a_request": spread(sampling_ns),
            "runnable_threads_before_and_after": [load_before, round(os.getloadavg()[0], 2)],
            "policies": results,
        },
    )
