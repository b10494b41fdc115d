"""The largest rate that LoadGen finds valid with the engine in its own process: with intake in the fronts, and without.

    helmrec bench run loadgen-fronts             # on a card: the DLRMv3 shape with reuse
    helmrec bench run loadgen-fronts --quick     # anywhere, a small model: does the measurement work

LoadGen says in this process when requests come. Fronts in processes of their own join the engine through its Unix
socket and send one request for each query, in turn; they have made the requests before. With intake they check and hash
a request when its query comes, as servers do; without, they have done so before. One run searches both.
"""

import asyncio
import itertools
import subprocess
import sys
import tempfile
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from helmrec.engine.intake import Prepared
from helmrec.engine.warm_up import make_request
from helmrec.model.config import ModelConfig
from helmrec.model.folder import read_manifest
from helmrec.model.profiles import profile
from helmrec.model.weights import init_model
from helmrec.serve.joined_port import JoinedPort
from helmrec.serve.port import Health
from helmrec.serve.prepared_wire import pack_prepared
from helmrec.serve.wire import FrameKind
from helmrec.types import RankRequest, RankResult
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.loadgen import LoadGenConfig, LoadGenVerdict, ServerScenario, largest_valid
from helmrec_bench.measure.cards.traffic import serving_config
from helmrec_bench.measure.requests import Crowd, Visitors, in_threads
from helmrec_bench.measure.server import ServerProcess

HOT_SHARE, LATENCY_MS, SPARE = 0.85, 80.0, 1.15
RING_BYTES, MAX_HISTORY, QUERY_BYTES = 256 << 20, 16_384, 8
WAYS = {"without intake": True, "with intake": False}  # whether requests are prepared before
_NEXT_FRONT = 1 << 50  # users of one front are nobody else's


class LoadCase(NamedTuple):
    """What is served and asked, and how long."""

    model: ModelConfig
    crowd: Crowd  # of each front
    engine: dict[str, object]
    num_fronts: int
    seconds: float  # of a point
    steps: int  # points of a search
    num_saturated: int  # queries, so many in flight, to see what can be served at most
    in_flight: int


def full_case() -> LoadCase:
    engine = {
        "device": "cuda",
        "pool_bytes": "24GiB",
        "alpha": 0.2,
        "max_batch_requests": 8,
        "max_batch_tokens": 70_016,
    }
    return LoadCase(serving_config(6, 1 << 30), Crowd(50, 2_000, 11_399, 2_048), engine, 4, 4.0, 4, 2_400, 32)


def quick_case() -> LoadCase:
    engine: dict[str, object] = {"device": "cpu", "pool_bytes": "16MiB"}
    return LoadCase(profile("demo", 2_000), Crowd(4, 40, 60, 10), engine, 2, 0.5, 2, 40, 4)


class FrontPort(JoinedPort):
    """A front that can also send requests which it has prepared before."""

    async def submit_prepared(self, prepared: Prepared) -> RankResult:
        packed = pack_prepared(self.intake.tag, [prepared], time.monotonic())
        (result,) = await self._ask(self._need_link(), FrameKind.RANK, *packed)
        return result


class Front:
    """Makes requests ahead, then sends one to the engine for each query; runs in a process of its own."""

    def __init__(self, pipe: Connection, port: FrontPort, crowd: Crowd, number: int) -> None:
        self._pipe, self._port, self._number = pipe, port, number
        self._visitors = Visitors(port.model, crowd, seed=number)
        self._sending: Callable[[], Awaitable[object]]
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_over = asyncio.Event()

    async def run(self) -> None:
        """Answer until the pipe is closed. A message is the number of a query, or what to get ready."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pipe.fileno(), self._receive)
        self._pipe.send_bytes(b"joined")
        await self._is_over.wait()

    def _receive(self) -> None:
        try:
            message = self._pipe.recv_bytes()
        except EOFError:
            self._is_over.set()
            return
        if len(message) == QUERY_BYTES:
            task = asyncio.get_running_loop().create_task(self._answer(message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        num, is_prepared = map(int, message.decode().split(",")[:2])
        self._make(num, is_prepared=bool(is_prepared))
        self._pipe.send_bytes(b"ready ")

    def _make(self, num: int, *, is_prepared: bool) -> None:
        parts = [self._visitors.next_parts(HOT_SHARE) for _ in range(num)]
        parts = [(user + self._number * _NEXT_FRONT, items, candidates) for user, items, candidates in parts]
        requests: list[RankRequest] = in_threads(partial(make_request, self._port.model), parts)
        if is_prepared:
            ready = iter(self._port.intake.prepare_all(requests))
            self._sending = lambda: self._port.submit_prepared(next(ready))
        else:
            plain = iter(requests)
            self._sending = lambda: self._port.submit([next(plain)])

    async def _answer(self, query: bytes) -> None:
        """Say the number of the query when it is answered; with a mark behind it if it was refused or failed."""
        try:
            await self._sending()
        except Exception as error:
            print(f"a query failed: {error}", file=sys.stderr, flush=True)
            self._pipe.send_bytes(query + b"!")
            return
        self._pipe.send_bytes(query)


async def run_front(address: str, number: int, *, is_quick: bool) -> None:
    """Join the engine, then serve the process that LoadGen runs in."""
    case, folder = quick_case() if is_quick else full_case(), Path(address).parent
    port = FrontPort(str(folder / "engine"), RING_BYTES, read_manifest(folder / "model").model, MAX_HISTORY)
    port.start()
    while port.health is not Health.READY:
        await asyncio.sleep(0.05)
    with Client(address) as pipe:
        await Front(pipe, port, case.crowd, number).run()
    await port.close()


class Fronts:
    """Processes that send queries to one engine, in turn."""

    def __init__(self, folder: Path, num: int, *, is_quick: bool) -> None:
        address, quick = str(folder / "queries"), ["--quick"] if is_quick else []
        self._calls: dict[int, Future[Any]] = {}
        with Listener(address) as listener:
            command = [sys.executable, "-m", __name__, address]
            self._processes = [subprocess.Popen([*command, str(number), *quick]) for number in range(num)]
            self._pipes = [listener.accept() for _ in range(num)]
        for pipe in self._pipes:
            assert pipe.recv_bytes() == b"joined"
        self._turn, self._numbers = itertools.cycle(self._pipes), itertools.count()

    def make(self, num: int, *, is_prepared: bool) -> None:
        """Let every front make its share of so many requests."""
        share = -(-num // len(self._pipes))
        for pipe in self._pipes:
            pipe.send_bytes(f"{share:06},{int(is_prepared)}".ljust(QUERY_BYTES + 1, ",").encode())
        for pipe in self._pipes:
            assert pipe.recv_bytes() == b"ready "

    def listen(self) -> "Listening":
        return Listening(self._pipes, self._calls)

    def submit(self) -> "Future[RankResult]":
        """Send the next query; called by one thread at a time."""
        call: Future[Any] = Future()
        number = next(self._numbers)
        self._calls[number] = call
        next(self._turn).send_bytes(number.to_bytes(QUERY_BYTES))
        return call

    def end(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.wait(30)


class Listening:
    """While it lasts, a thread for each front settles the queries that it answers."""

    def __init__(self, pipes: Sequence[Connection], calls: "dict[int, Future[Any]]") -> None:
        self._calls, self._is_over = calls, False
        self._threads = [threading.Thread(target=self._listen, args=(pipe,)) for pipe in pipes]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        for thread in self._threads:
            thread.join()

    def _listen(self, pipe: Connection) -> None:
        while not self._is_over:
            while pipe.poll(0.05):
                answer = pipe.recv_bytes()
                call = self._calls.pop(int.from_bytes(answer[:QUERY_BYTES]))
                if len(answer) > QUERY_BYTES:
                    call.set_exception(RuntimeError("a front could not send it"))
                else:
                    call.set_result(None)


def saturate(fronts: Fronts, case: LoadCase, *, is_prepared: bool) -> float:
    """Queries a second with a fixed number in flight."""
    fronts.make(case.num_saturated, is_prepared=is_prepared)
    room, calls = threading.Semaphore(case.in_flight), []
    with fronts.listen():
        started_s = time.perf_counter()
        for _ in range(case.num_saturated):
            room.acquire()
            calls.append(fronts.submit())
            calls[-1].add_done_callback(lambda _: room.release())
        for call in calls:
            call.result(60)
        return case.num_saturated / (time.perf_counter() - started_s)


def judge(fronts: Fronts, case: LoadCase, qps: float, *, is_prepared: bool) -> LoadGenVerdict:
    """One point, with requests that were made before."""
    fronts.make(int(SPARE * qps * case.seconds) + 64 * case.num_fronts, is_prepared=is_prepared)
    config = LoadGenConfig(target_qps=qps, seconds=case.seconds, latency_ms=LATENCY_MS)
    with fronts.listen():
        verdict = ServerScenario(None, fronts.submit, config).run()
    found = "VALID" if verdict.is_valid else f"INVALID, {'; '.join(verdict.problems)}"
    way, p99_ms = "without" if is_prepared else "with", verdict.percentiles_ms["99"]
    print(f"{way} intake, {qps:.1f}/s: {found}, P99 {p99_ms:.1f} ms, {verdict.num_queries} queries", flush=True)
    return verdict


def search(fronts: Fronts, case: LoadCase, limit: float, *, is_prepared: bool) -> dict[str, Any]:
    """The largest valid rate below what the engine serves at most, and the points that were judged."""
    verdicts = largest_valid(
        partial(judge, fronts, case, is_prepared=is_prepared), 0.7 * limit, 1.05 * limit, case.steps
    )
    valid = [each.target_qps for each in verdicts if each.is_valid]
    kept = ("is_valid", "problems", "target_qps", "completed_per_s", "num_queries", "percentiles_ms")
    return {
        "largest_valid_qps": round(max(valid), 1) if valid else None,
        "points": [{name: getattr(each, name) for name in kept} for each in verdicts],
    }


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="a small model and small requests, on any machine")


def main(flags: Namespace) -> None:
    case = quick_case() if flags.quick else full_case()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        init_model(folder / "model", case.model)
        own = {"engine_process": "true", "engine_socket": folder / "engine", "ring_bytes": RING_BYTES, "policy": "none"}
        server = ServerProcess.of_model(folder / "model", case.engine | own | {"max_history": MAX_HISTORY})
        try:
            fronts = Fronts(folder, case.num_fronts, is_quick=flags.quick)
            saturate(fronts, case, is_prepared=True)  # brings the hot users in
            limits = {way: round(saturate(fronts, case, is_prepared=is_), 1) for way, is_ in WAYS.items()}
            print(f"saturated: {limits}", flush=True)
            limit = max(limits.values())
            found = {way: search(fronts, case, limit, is_prepared=is_) for way, is_ in WAYS.items()}
            fronts.end()
        finally:
            server.end()
    about = {
        "fronts": case.num_fronts,
        "seconds_a_point": case.seconds,
        "latency_ms": LATENCY_MS,
        "crowd_of_a_front": case.crowd._asdict(),
    }
    write_measurement(flags.out, about | {way: {"saturated_per_s": limits[way], **found[way]} for way in WAYS})
    for way in WAYS:
        print(f"{way}: {found[way]['largest_valid_qps']} requests/s valid, {limits[way]} at most")


if __name__ == "__main__":
    uvloop.run(run_front(sys.argv[1], int(sys.argv[2]), is_quick="--quick" in sys.argv))
