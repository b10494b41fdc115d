"""Requests per second over HTTP with the engine in its own process, for one, two and four fronts of one engine.

    helmrec bench run joined-fronts             # on a card: requests of 6,700 events and 2,048 candidates, with reuse
    helmrec bench run joined-fronts --quick     # anywhere, small requests: does the measurement work

The first front runs the engine; the others join it through its Unix socket. Each front has a client in a process of its
own, which keeps eight calls with binary tensors running. Its users return, the first seven times with 16 new events.
"""

import asyncio
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from helmrec.engine.warm_up import make_request
from helmrec.model.config import ModelConfig
from helmrec.model.profiles import profile
from helmrec.model.weights import init_model
from helmrec.serve.load import Connection
from helmrec.serve.tensors import TensorNames, encode_request
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.measure.cards.traffic import serving_config
from helmrec_bench.measure.requests import Crowd, Visitors
from helmrec_bench.measure.server import ServerProcess
from helmrec_bench.measure.serving.fronts import cpu_of

IN_FLIGHT, WARM_S, TURN_S = 8, 4.0, 8.0
NUM_FRONTS = (1, 2, 4)
USERS, VISITS = 12, 8  # of each client: requests are encoded before they are sent


class FrontCase(NamedTuple):
    """What is served and asked."""

    model: ModelConfig
    num_events: int
    num_candidates: int
    engine: dict[str, object]


def full_case() -> FrontCase:
    engine = {"device": "cuda", "pool_bytes": "24GiB", "max_batch_requests": 8, "max_batch_tokens": 70_016}
    return FrontCase(serving_config(6, 1 << 30), 6_700, 2_048, engine)


def quick_case() -> FrontCase:
    return FrontCase(profile("demo", 2_000), 100, 16, {"device": "cpu", "pool_bytes": "16MiB"})


def bodies(case: FrontCase, seed: int) -> list[bytes]:
    """Calls over HTTP of some users, visit by visit."""
    crowd = Crowd(USERS, case.num_events, case.num_events, case.num_candidates)
    visitors, names = Visitors(case.model, crowd, seed), TensorNames(case.model)
    found = []
    for visit in range(VISITS):
        for user in range(USERS):
            _, items, candidates = visitors.hot(user, visit)
            sent = encode_request(make_request(case.model, seed * USERS + user, items, candidates), names)
            head = (
                f"POST /v2/models/{case.model.name}/infer HTTP/1.1\r\nhost: x\r\ncontent-length: {len(sent.body)}\r\n"
            )
            found.append(f"{head}inference-header-content-length: {sent.json_bytes}\r\n\r\n".encode() + sent.body)
    return found


async def drive(port: int, calls: list[bytes], seconds: float) -> int:
    """Keep calls running for a while; return how many were answered."""
    num, started_s, in_turn = 0, time.perf_counter(), itertools.cycle(calls)

    async def repeat() -> None:
        nonlocal num
        connection = Connection(*await asyncio.open_connection("127.0.0.1", port))
        while time.perf_counter() - started_s < seconds:
            reply = await connection.send(next(in_turn))
            assert reply.status == 200, reply
            num += 1

    await asyncio.gather(*(repeat() for _ in range(IN_FLIGHT)))
    return num


def client(port: int, seed: int, *, is_quick: bool) -> None:
    """Encode requests, then for each line of the standard input drive the front for so many seconds."""
    calls = bodies(quick_case() if is_quick else full_case(), seed)
    print("ready", flush=True)
    for line in sys.stdin:
        print(uvloop.run(drive(port, calls, float(line))), flush=True)


class Clients:
    """A client process for each front."""

    def __init__(self, ports: list[int], *, is_quick: bool) -> None:
        quick = ["--quick"] if is_quick else []
        commands = [[sys.executable, "-m", __name__, str(port), str(i), *quick] for i, port in enumerate(ports)]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._processes = [subprocess.Popen(each, **pipes) for each in commands]
        assert all(self._line(each) == "ready" for each in self._processes)

    def drive(self, num: int, seconds: float) -> list[int]:
        """Answers that each of the first `num` clients got."""
        for each in self._processes[:num]:
            assert each.stdin is not None
            print(seconds, file=each.stdin, flush=True)
        return [int(self._line(each)) for each in self._processes[:num]]

    @staticmethod
    def _line(process: "subprocess.Popen[str]") -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    def end(self) -> None:
        for each in self._processes:
            assert each.stdin is not None
            each.stdin.close()
            each.wait(30)


def engine_pid(front: int) -> int:
    """The process that a front has started."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == front:
                return int(folder.name)
        except OSError:  # it has ended since
            continue
    raise AssertionError(f"process {front} has started no other")


def turn(clients: Clients, servers: list[ServerProcess], num: int, seconds: float) -> dict[str, Any]:
    """What so many fronts answer, and the CPU time that it took the fronts and the engine."""
    fronts, engine = [server.process.pid for server in servers[:num]], engine_pid(servers[0].process.pid)
    before_s = [sum(map(cpu_of, fronts)), cpu_of(engine)]
    busy_s, started_s = servers[0].stats().busy_s, time.perf_counter()
    answered = clients.drive(num, seconds)
    took_s = time.perf_counter() - started_s
    after_s = [sum(map(cpu_of, fronts)), cpu_of(engine)]
    front_ms, engine_ms = ((b - a) * 1e3 / sum(answered) for a, b in zip(before_s, after_s, strict=True))
    return {
        "fronts": num,
        "requests_per_s": round(sum(answered) / took_s, 1),
        "by_front": [round(each / took_s, 1) for each in answered],
        "front_cpu_ms": round(front_ms, 3),
        "engine_cpu_ms": round(engine_ms, 3),
        "engine_busy_share": round((servers[0].stats().busy_s - busy_s) / took_s, 3),
    }


def start(case: FrontCase, folder: Path, num: int) -> list[ServerProcess]:
    """The front that runs the engine, and those that join it."""
    socket, common = folder / "engine", {"max_body_bytes": "64MiB", "max_bodies_bytes": "1GiB", "policy": "none"}
    own = {"engine_process": "true", "engine_socket": socket, "ring_bytes": "256MiB", "queue_limit": 4_096}
    model = folder / "model"
    first = ServerProcess.of_model(model, case.engine | common | own)
    joined = {"joined_engine": socket, "ring_bytes": "256MiB"}
    return [first, *(ServerProcess.of_model(model, common | joined) for _ in range(num - 1))]


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="a small model and small requests, on any machine")


def main(flags: Namespace) -> None:
    case = quick_case() if flags.quick else full_case()
    warm_s, turn_s = (0.5, 1.0) if flags.quick else (WARM_S, TURN_S)
    servers: list[ServerProcess] = []
    with tempfile.TemporaryDirectory() as name:
        init_model(Path(name) / "model", case.model)
        try:
            servers = start(case, Path(name), NUM_FRONTS[-1])
            clients = Clients([server.port for server in servers], is_quick=flags.quick)
            clients.drive(NUM_FRONTS[-1], warm_s)
            turns = [turn(clients, servers, num, turn_s) for num in NUM_FRONTS]
            clients.end()
        finally:
            for server in reversed(servers):
                server.end()
    best = max(each["requests_per_s"] for each in turns)
    feeding = next(each["fronts"] for each in turns if each["requests_per_s"] >= 0.95 * best)
    sent = {"events": case.num_events, "candidates": case.num_candidates, "in_flight_per_front": IN_FLIGHT}
    body_bytes = len(bodies(case, 0)[0])
    found = {"cores": os.cpu_count(), **sent, "body_bytes": body_bytes, "turns": turns, "fronts_that_feed_it": feeding}
    print(json.dumps(found), flush=True)
    write_measurement(flags.out, found)
    for each in turns:
        of_each = f"front {each['front_cpu_ms']} ms, engine {each['engine_cpu_ms']} ms of CPU a request"
        print(
            f"{each['fronts']} fronts: {each['requests_per_s']} requests/s; {of_each}; busy {each['engine_busy_share']}"
        )
    print(f"{feeding} fronts feed the engine")


if __name__ == "__main__":
    client(int(sys.argv[1]), int(sys.argv[2]), is_quick="--quick" in sys.argv)
