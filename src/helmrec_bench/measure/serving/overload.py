"""Three times the load a server can take, for a minute: who is served, who is refused, and how soon it is over.

`helmrec bench run overload` writes docs/measurements/overload-cpu.json. Driver and server share the machine.
"""

import itertools
import os
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from helmrec.load import LoadSnapshot, arrival_times
from helmrec.model.profiles import profile
from helmrec.model.weights import init_model
from helmrec.serve.load import HttpLoad, HttpOutcome
from helmrec.types import RankRequest
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.measure.requests import Crowd, Visitors
from helmrec_bench.measure.server import MemoryWatch, ServerProcess

NUM_ROWS = 60_000
DEADLINE_MS = 1_000.0
NUM_EVENTS, NUM_CANDIDATES = 500, 64
BATCH = 4  # requests in a step: it should take well under the deadline
FLOOD_PER_S = 120.0
CALM = 0.5  # share of capacity before and after


class Offered(NamedTuple):
    """A run of the driver."""

    end: LoadSnapshot
    statuses: list[HttpOutcome]  # when each was due, how it ended, milliseconds


def offer(url: str, requests: list[RankRequest], rate: float, seconds: float, seed: int) -> Offered:
    load = HttpLoad(url, DEADLINE_MS)
    num = int(rate * seconds)
    end = load.run(itertools.cycle(requests), load.model(), arrival_times(np.zeros(num), rate, seed))
    return Offered(end, load.outcomes)


def capacity_of(url: str, requests: list[RankRequest]) -> float:
    """How many are answered in a second when far more are offered."""
    end = offer(url, requests, FLOOD_PER_S, 10, seed=1).end
    return end.answered / end.elapsed_s


def last_refused_s(after: Offered) -> float | None:
    """When the last request came that was not answered; None: all were."""
    return round(max(due_s for due_s, status, _ in after.statuses if status != 200), 2) if after.end.refused else None


def recovered_after_s(calm: Offered, after: Offered) -> float | None:
    """Seconds until the median of every second after it is within twice that of a calm time; None: it never is."""
    usual_ms = 2 * float(np.median([ms for _, status, ms in calm.statuses if status == 200]))
    seconds = range(int(max(due_s for due_s, _, _ in after.statuses)) + 1)
    medians = [
        float(
            np.median([ms if status == 200 else np.inf for due_s, status, ms in after.statuses if int(due_s) == each])
        )
        for each in seconds
        if any(int(due_s) == each for due_s, _, _ in after.statuses)
    ]
    slow = [second for second, median in enumerate(medians) if not median <= usual_ms]
    return None if slow and slow[-1] == len(medians) - 1 else float(slow[-1] + 1 if slow else 0)


def _median(offered: Offered) -> float:
    """Milliseconds that a refusal takes."""
    return float(np.median([ms for _, status, ms in offered.statuses if status != 200] or [np.nan]))


def run(folder: Path, seconds: float, *, is_apart: bool) -> dict[str, Any]:
    visitors = Visitors(profile("demo", NUM_ROWS), Crowd(0, NUM_EVENTS, NUM_EVENTS, NUM_CANDIDATES))
    requests = [visitors.next(hot_share=0.0) for _ in range(800)]
    settings = {"pool_bytes": "64MiB", "engine_process": is_apart, "max_batch_requests": BATCH, "log_level": "error"}
    server = ServerProcess.of_model(folder / "model", settings)
    try:
        offer(server.url, requests, FLOOD_PER_S, 20, seed=0)  # fills caches and buffers
        capacity = capacity_of(server.url, requests)
        calm = offer(server.url, requests, CALM * capacity, 8, seed=2)
        watch = MemoryWatch(server)
        offered = offer(server.url, requests, 3 * capacity, seconds, seed=3)
        rss = watch.end()["VmRSS"]
        after = offer(server.url, requests, CALM * capacity, 10, seed=4)
    finally:
        server.end()
    over, tenth = offered.end, max(1, len(rss) // 10)
    return {
        "engine_process": is_apart,
        "capacity_per_s": round(capacity, 1),
        "offered_per_s": round(over.offered / over.elapsed_s, 1),
        "seconds": round(over.elapsed_s, 1),
        "answered_per_s": round(over.answered / over.elapsed_s, 1),
        "answered": over.answered,
        "refused": over.refused,
        "failed": over.failed,
        "deadline_ms": DEADLINE_MS,
        "answered_p50_ms": round(over.p50_ms, 1),
        "answered_p99_ms": round(over.p99_ms, 1),
        "refused_p50_ms": round(_median(offered), 1),
        "refused_p99_ms": round(over.refused_p99_ms, 1),
        "refused_within_100_ms": round(
            float(np.mean([ms <= 100 for _, status, ms in offered.statuses if status != 200])), 4
        ),
        "driver_late_p99_ms": round(over.lag_p99_ms, 1),
        "rss_mib_first_tenth": round(float(np.mean(rss[:tenth])), 1),
        "rss_mib_last_tenth": round(float(np.mean(rss[-tenth:])), 1),
        "rss_mib": [round(each, 1) for each in rss[::tenth]],
        "answered_late": sum(status == 200 and ms > DEADLINE_MS for _, status, ms in offered.statuses),
        "calm_p99_ms_before": round(calm.end.p99_ms, 1),
        "calm_p99_ms_after": round(after.end.p99_ms, 1),
        "median_within_twice_calm_after_s": recovered_after_s(calm, after),
        "refused_after": after.end.refused,
        "last_refused_after_s": last_refused_s(after),
    }


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=60.0)


def main(flags: Namespace) -> None:
    load = [round(average, 1) for average in os.getloadavg()]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        init_model(folder / "model", profile("demo", NUM_ROWS), 0)
        runs = [run(folder, flags.seconds, is_apart=apart) for apart in (False, True)]
    for each in runs:
        print(each)
    write_measurement(flags.out, {"load_average_before": load, "runs": runs})
