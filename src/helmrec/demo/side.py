"""One side of the demonstration: a real server in its own process, under open-loop load over HTTP."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from helmrec.demo.plan import PARTS, DemoPlan, PartFigures
from helmrec.engine.engine import EngineStats
from helmrec.errors import ServerError
from helmrec.load import LoadSnapshot, arrival_times
from helmrec.serve.client import Client
from helmrec.serve.live import LiveAnswer
from helmrec.serve.load import HttpLoad, HttpOutcome
from helmrec.serve.samples import Sample
from helmrec.traffic.requests import rank_requests
from helmrec.traffic.trace import Trace

_AUDIT_EVERY = 20
_START_S = 300.0  # on a busy machine a policy may compile for a minute or two, once


@dataclass(frozen=True, slots=True)
class Side:
    """Results of serving the traffic under one split."""

    name: str
    end: LoadSnapshot
    parts: dict[str, PartFigures]
    samples: list[Sample]  # about one a second
    stats: EngineStats
    in_slo: float  # share of requests that were answered in time
    cpu_ms: float  # processor time of the server per request: nearly independent of other load

    @property
    def mean_ms(self) -> float:
        answered = sum(part.requests - part.refused for part in self.parts.values())
        whole = sum(part.mean_ms * (part.requests - part.refused) for part in self.parts.values() if part.requests)
        return whole / max(1, answered)


@dataclass(frozen=True, slots=True)
class Split:
    """A policy, and the alpha it starts from."""

    name: str
    policy: str
    alpha: float


def serve_side(
    plan: DemoPlan, model: Path, split: Split, trace: Trace, watch: Callable[[str, LoadSnapshot], None]
) -> Side:
    """Start a server, send it the trace, and stop it. `watch` is called with its address and the progress."""
    with _served(plan, model, split) as (url, pid):
        load, cpu_s = HttpLoad(url), _cpu_s(pid)
        shape = load.model()
        end = load.run(
            rank_requests(trace, shape), shape, arrival_times(trace.time_s, None, 0), lambda seen: watch(url, seen)
        )
        cpu_s = _cpu_s(pid) - cpu_s
        live = msgspec.json.decode(_get(f"{url}/v1/live?after=0"), type=LiveAnswer)
        stats = msgspec.json.decode(_get(f"{url}/v1/pool"), type=EngineStats)
    in_time = sum(each.status == 200 and each.latency_ms <= plan.slo_ms for each in load.outcomes)
    return Side(
        name=split.name,
        end=end,
        parts={part: _figures(plan, part, load.outcomes) for part in PARTS},
        samples=live.samples,
        stats=stats,
        in_slo=in_time / max(1, len(load.outcomes)),
        cpu_ms=1e3 * cpu_s / max(1, len(load.outcomes)),
    )


def _figures(plan: DemoPlan, part: str, outcomes: list[HttpOutcome]) -> PartFigures:
    of_part = [each for each in outcomes if plan.part_at(each.due_s) == part]
    answered = [each.latency_ms for each in of_part if each.status == 200]
    return PartFigures(
        requests=len(of_part),
        mean_ms=float(np.mean(answered)) if answered else float("nan"),
        p99_ms=float(np.percentile(answered, 99)) if answered else float("nan"),
        refused=len(of_part) - len(answered),
    )


@contextmanager
def _served(plan: DemoPlan, model: Path, split: Split) -> Iterator[tuple[str, int]]:
    """Run a server; yields its address and process id."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = {"slo_ms": plan.slo_ms, "audit_every": _AUDIT_EVERY, "log_level": "error", "tick_s": 0.5}
    options = {"pool-bytes": plan.pool, "alpha": split.alpha, "policy": split.policy, "port": port, "device": "cpu"}
    flags = [f"--{name}={value}" for name, value in options.items()]
    flags += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    process = subprocess.Popen([sys.executable, "-m", "helmrec", "serve", str(model), *flags], env=environment)
    try:
        _wait_until_ready(process, f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait(60)


def _wait_until_ready(process: "subprocess.Popen[bytes]", url: str) -> None:
    end_s = time.monotonic() + _START_S
    with Client(url) as client:
        while not client.is_ready():
            if process.poll() is not None or time.monotonic() > end_s:
                raise ServerError(f"the server at {url} did not start")
            time.sleep(0.05)


def _cpu_s(pid: int) -> float:
    """Return the processor time of a process so far; 0 where `/proc` is not available."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as reply:
        body: bytes = reply.read()
    return body
