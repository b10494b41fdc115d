"""A late replica: two servers answer under a stream of new rows, and a third starts from the newest snapshot.

    helmrec bench run replicas                       # this machine's CPU, the demo shape; about a minute and a half
    helmrec bench run replicas --device cuda         # three servers on one card

Measured: how long the third takes until it is ready and has all rows that there are; the latencies of the other two
before, meanwhile and afterwards; and whether answers of different replicas at the same position have the same scores.
"""

import tempfile
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from helmrec.deltas.schedule import SnapshotPlan, make_snapshot
from helmrec.deltas.source import open_source
from helmrec.model.config import ModelConfig
from helmrec.model.profiles import profile
from helmrec.model.weights import init_model
from helmrec.serve.client import Client
from helmrec.types import RankRequest
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.measure.requests import Crowd, Visitors
from helmrec_bench.measure.server import ServerProcess
from helmrec_bench.measure.training import UpdateRate, pushing

NUM_REQUESTS = 24  # different ones, asked in turn
ROWS_PER_S, DELTA_ROWS = 2_000.0, 100
KEPT = 1 << 20  # deltas: all of them
TOLERANCE = 1e-4  # of scores: replicas put requests into steps in other ways


class Asker:
    """Asks one replica at a constant rate, in a thread of its own."""

    def __init__(self, url: str, requests: list[RankRequest], every_s: float) -> None:
        self._url, self._requests, self._every_s = url, requests, every_s
        self._is_over = threading.Event()
        self.ended_s: list[float] = []
        self.latency_ms: list[float] = []
        self.scores: dict[tuple[int, int], NDArray[np.float32]] = {}  # by position and request
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        with Client(self._url) as client:
            while not self._is_over.wait(self._every_s):
                number = len(self.latency_ms) % len(self._requests)
                started_s = time.monotonic()
                answer = client.rank(self._requests[number])
                self.ended_s.append(time.monotonic())
                self.latency_ms.append((self.ended_s[-1] - started_s) * 1e3)
                if answer.row_position.offset == 0:
                    self.scores[answer.row_position.sequence, number] = answer.scores

    def between(self, start_s: float, end_s: float) -> dict[str, float]:
        ended = np.array(self.ended_s)
        found = np.array(self.latency_ms)[(ended >= start_s) & (ended < end_s)]
        return {
            "answers": found.size,
            "p50_ms": round(float(np.median(found)), 2),
            "p90_ms": round(float(np.percentile(found, 90)), 2),
        }

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()


def compare(askers: list[Asker]) -> dict[str, Any]:
    """Scores of different replicas at the same position and of the same request."""
    num, worst = 0, 0.0
    for i, one in enumerate(askers):
        for other in askers[i + 1 :]:
            for key in one.scores.keys() & other.scores.keys():
                num, worst = num + 1, max(worst, float(np.abs(one.scores[key] - other.scores[key]).max()))
    assert num and worst <= TOLERANCE, (num, worst)
    return {"compared_answers": num, "largest_score_difference": worst}


class ReplicaStand:
    """A model, its stream, and servers of it."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder, self.model = folder, profile("demo")
        init_model(folder / "model", self.model)
        (folder / "deltas").mkdir()
        (folder / "snapshots").mkdir()
        self._settings = {
            "device": device,
            "pool_bytes": "64MiB",
            "policy": "none",
            "row_deltas": folder / "deltas",
            "row_snapshots": folder / "snapshots",
        }
        self.requests = _requests(self.model)

    @contextmanager
    def server(self) -> Iterator[ServerProcess]:
        server = ServerProcess.of_model(self.folder / "model", self._settings)
        try:
            yield server
        finally:
            server.end()

    def newest(self) -> int:
        return open_source(str(self.folder / "deltas")).newest()

    def write_snapshot(self) -> None:
        make_snapshot(
            SnapshotPlan(
                model=self.folder / "model", deltas=str(self.folder / "deltas"), folder=self.folder / "snapshots"
            )
        )


def _requests(model: ModelConfig) -> list[RankRequest]:
    visitors = Visitors(model, Crowd.around(NUM_REQUESTS, 200, 64))
    return [visitors.next(1.0) for _ in range(NUM_REQUESTS)]


def measure(stand: ReplicaStand, seconds: float, every_s: float) -> dict[str, Any]:
    rate = UpdateRate(ROWS_PER_S, DELTA_ROWS)
    with ExitStack() as stack:
        stack.enter_context(pushing(str(stand.folder / "deltas"), stand.model, rate, KEPT))
        first = [stack.enter_context(stand.server()) for _ in range(2)]
        askers = [Asker(server.url, stand.requests, every_s) for server in first]
        stack.callback(_close, askers)
        time.sleep(2.0)  # the first answers fill caches
        times_s = [time.monotonic()]
        time.sleep(seconds)
        stand.write_snapshot()
        time.sleep(seconds)
        times_s.append(time.monotonic())
        third = stack.enter_context(stand.server())
        head = stand.newest()
        while (stats := third.stats().row_stream) is None or stats.position < head:
            time.sleep(0.01)
        times_s.append(time.monotonic())
        askers.append(Asker(third.url, stand.requests, every_s))
        time.sleep(seconds)
        times_s.append(time.monotonic())
        streams = [server.stats().row_stream for server in (*first, third)]
        _close(askers)
    assert all(stream is not None and stream.stop is None for stream in streams), streams
    parts = dict(zip(("before", "meanwhile", "afterwards"), pairwise(times_s), strict=True))
    return {
        "rows_per_s": ROWS_PER_S,
        "late_replica": {
            "ready_after_s": round(third.ready_s, 2),
            "at_the_head_after_s": round(times_s[2] - times_s[1], 2),
            "replayed_deltas": stats.deltas,
        },
        "other_replicas": {name: [each.between(*part) for each in askers[:2]] for name, part in parts.items()},
        "lag_s": [round(stream.lag_s, 3) for stream in streams if stream is not None],
        **compare(askers),
    }


def _close(askers: list[Asker]) -> None:
    for each in askers:
        each.close()


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each part")
    parser.add_argument("--every", type=float, default=0.1, help="seconds between an answer and the next request")


def default_out(flags: Namespace) -> str:
    return "replicas-h200.json" if flags.device == "cuda" else "replicas-cpu.json"


def main(flags: Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        found = measure(ReplicaStand(Path(name), flags.device), flags.seconds, flags.every)
    for part, value in found.items():
        print(f"{part}: {value}", flush=True)
    write_measurement(flags.out, {"device": flags.device, "seconds": flags.seconds, **found})
