"""What HTTP costs without an engine behind it: a server in front of a port that answers at once, beside a bare echo.

Server and client are two processes on one machine and share its cores, so the rates are those of both together.
"""

import asyncio
import json
import multiprocessing
import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import uvloop
from numpy.typing import ArrayLike, NDArray
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helmrec.control.rebalancer import Mode
from helmrec.engine.engine import EngineStats
from helmrec.errors import EngineClosed
from helmrec.model.config import ModelConfig
from helmrec.model.profiles import profile
from helmrec.serve.app import make_app
from helmrec.serve.port import EngineView, Health
from helmrec.serve.server import listen, serve_until_stopped
from helmrec.serve.settings import ServeConfig
from helmrec.types import Ids, PrefillRequest, PrefillResult, RankRequest, RankResult, Timing
from helmrec_bench.lab.provenance import write_measurement

with suppress(ImportError):  # --front-only needs none
    import tritonclient.http as triton

BODY_BYTES = 8_192
CONNECTIONS = 16
ROUNDS = 5
NUM_EVENTS, NUM_CANDIDATES = 6_700, 2_048


class NullPort:
    """Answers every request at once, with as many scores as it has candidates."""

    health = Health.READY
    reason = None
    num_restarts = 0

    def __init__(self, model: ModelConfig) -> None:
        self.model = model

    def start(self) -> None:
        """Nothing to get ready."""

    async def submit(self, requests: Sequence[RankRequest], spent_ms: float = 0.0) -> list[RankResult]:
        return [self._result(len(request.candidates)) for request in requests]

    def _result(self, num_candidates: int) -> RankResult:
        scores = np.full((num_candidates, self.model.num_tasks), 0.25, np.float32)
        return RankResult(scores, 0, 0, 0, 0, 0, 0, Timing(0.0, 0.0, 0.0))

    async def prefill(self, request: PrefillRequest, spent_ms: float = 0.0) -> PrefillResult:
        raise NotImplementedError

    async def stats(self) -> EngineStats:
        raise NotImplementedError

    async def look(self) -> EngineView:
        raise EngineClosed("there is none")

    async def set_mode(self, mode: Mode) -> None:
        raise NotImplementedError

    async def move_alpha(self, alpha: float) -> None:
        raise NotImplementedError

    async def update_rows(self, table: str, ids: Ids, values: ArrayLike) -> None:
        raise NotImplementedError

    async def forget(self, user_id: int) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        """Nothing to close."""


async def _echo(request: Request) -> Response:
    return Response(await request.body(), media_type="application/json")


def _serve(kind: str, ports: "Queue[int]") -> None:
    config = ServeConfig(port=0)
    listener = listen(config)
    ports.put(listener.getsockname()[1])
    routes = [Route("/v1/rank", _echo, methods=["POST"])]
    app = Starlette(routes=routes) if kind == "echo" else make_app(NullPort(profile(kind)), config)
    serve_until_stopped(app, config, listener)


class Server(NamedTuple):
    """A server in a process of its own."""

    port: int
    pid: int

    def cpu_s(self) -> float:
        """Processor time it has used so far: unlike rates, little changed by whatever else the machine does."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def served(kind: str) -> Iterator[Server]:
    spawn = multiprocessing.get_context("spawn")
    ports: Queue[int] = spawn.Queue()
    process = spawn.Process(target=_serve, args=(kind, ports))
    process.start()
    try:
        port = ports.get(timeout=120)
        assert process.pid is not None
        yield Server(port, process.pid)
    finally:
        process.terminate()
        process.join()


class _Connection(asyncio.Protocol):
    """Sends one request after another and notes how long each answer took."""

    def __init__(self, request: bytes, end_s: float) -> None:
        self._request, self._end_s = request, end_s
        self._seen = bytearray()
        self.seconds: list[float] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._send()

    def _send(self) -> None:
        self._sent_s = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._seen += data
        head_bytes = self._seen.find(b"\r\n\r\n") + 4
        if head_bytes < 4:
            return
        head = bytes(self._seen[:head_bytes]).lower()
        assert head.startswith(b"http/1.1 200"), bytes(self._seen[:500])
        body_bytes = int(head.split(b"content-length: ", 1)[1].split(b"\r\n", 1)[0])
        if len(self._seen) < head_bytes + body_bytes:
            return
        self._seen.clear()
        now_s = time.perf_counter()
        self.seconds.append(now_s - self._sent_s)
        if now_s < self._end_s:
            self._send()
        else:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.done.set_result(None)


def drive(server: Server, request: bytes, connections: int, seconds: float) -> dict[str, float]:
    """Requests a second and latency of so many connections, each with one request on its way."""

    async def run() -> list[float]:
        end_s = time.perf_counter() + seconds
        loop = asyncio.get_running_loop()
        made = [
            (await loop.create_connection(lambda: _Connection(request, end_s), "127.0.0.1", server.port))[1]
            for _ in range(connections)
        ]
        await asyncio.gather(*(connection.done for connection in made))
        return [each for connection in made for each in connection.seconds]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        started_s, cpu_s = time.perf_counter(), server.cpu_s()
        took = runner.run(run())
        elapsed_s, cpu_s = time.perf_counter() - started_s, server.cpu_s() - cpu_s
    p50, p99 = np.percentile(took, (50, 99)) * 1e3
    return {
        "per_s": round(len(took) / elapsed_s, 1),
        "p50_ms": round(p50, 4),
        "p99_ms": round(p99, 4),
        "server_cpu_us": round(cpu_s / len(took) * 1e6, 1),
    }


def posted(path: str, body: bytes, **headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: localhost", f"content-length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def request_of_bytes(num_bytes: int) -> bytes:
    """A ranking request of the demo model of about so many bytes; a quarter as many candidates as events."""
    num = 8
    while len(body := json.dumps(rank_body(num)).encode()) < num_bytes:
        num += 8
    return posted("/v1/rank", body)


def rank_body(num_events: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    items, candidates = rng.integers(0, 50_000, num_events).tolist(), rng.integers(0, 50_000, num_events // 4).tolist()
    return {
        "user_id": 7,
        "items": items,
        "actions": [item % 8 for item in items],
        "timestamps": list(range(1_700_000_000, 1_700_000_000 + num_events)),
        "features": {"category": [item % 500 for item in items]},
        "candidates": candidates,
        "candidate_features": {"category": [item % 500 for item in candidates]},
        "context": {"country": 3, "hour": 12},
    }


def measure_front(seconds: float) -> dict[str, Any]:
    """Ours and the echo in turn, so that whatever else the machine does is felt by both; the median round counts."""
    request = request_of_bytes(BODY_BYTES)
    rounds: dict[str, dict[str, list[dict[str, float]]]] = {
        kind: {"many": [], "one": []} for kind in ("helmrec", "starlette_echo")
    }
    with served("demo") as ours, served("echo") as echo:
        for server in (ours, echo):
            drive(server, request, CONNECTIONS, 1.0)  # compiled, cached and connected before it counts
        for _ in range(ROUNDS):
            for kind, server in (("helmrec", ours), ("starlette_echo", echo)):
                rounds[kind]["many"].append(drive(server, request, CONNECTIONS, seconds))
                rounds[kind]["one"].append(drive(server, request, 1, seconds))
    return {
        "request_bytes": len(request),
        **{
            kind: {
                f"{CONNECTIONS}_connections": _middle(each["many"], "per_s"),
                "1_connection": _middle(each["one"], "p50_ms"),
                "rounds_per_s": [one["per_s"] for one in each["many"]],
                "rounds_p50_ms": [one["p50_ms"] for one in each["one"]],
            }
            for kind, each in rounds.items()
        },
    }


def _middle(rounds: list[dict[str, float]], by: str) -> dict[str, float]:
    return sorted(rounds, key=lambda one: one[by])[len(rounds) // 2]


def tensors(model: ModelConfig) -> dict[str, NDArray[np.int64]]:
    """One user with a long history, as the Open Inference Protocol takes it."""
    rng = np.random.default_rng(0)
    item, *extra = model.features
    return {
        "USER_IDS": np.array([7]),
        "LENGTHS": np.array([NUM_EVENTS]),
        "NUM_CANDIDATES": np.array([NUM_CANDIDATES]),
        **{f"context.{table.name}": np.array([1]) for table in (*model.user_context, *model.request_context)},
        "ITEMS": rng.integers(0, item.num_rows, NUM_EVENTS),
        "ACTIONS": rng.integers(0, model.num_actions, NUM_EVENTS),
        "TIMESTAMPS": 1_700_000_000 + np.arange(NUM_EVENTS),
        **{f"features.{table.name}": rng.integers(0, table.num_rows, NUM_EVENTS) for table in extra},
        "CANDIDATES": rng.integers(0, item.num_rows, NUM_CANDIDATES),
        **{f"candidate_features.{table.name}": rng.integers(0, table.num_rows, NUM_CANDIDATES) for table in extra},
    }


def measure_inference(seconds: float) -> dict[str, Any]:
    """One long request in bytes and in JSON, sent by tritonclient; and prepared once, to see the server alone."""
    model = profile("dlrmv3")
    given = tensors(model)
    results: dict[str, Any] = {
        "model": "dlrmv3",
        "events": NUM_EVENTS,
        "candidates": NUM_CANDIDATES,
        "tensors": len(given),
    }
    with served("dlrmv3") as server:
        client = triton.InferenceServerClient(f"127.0.0.1:{server.port}")
        for name, is_binary in (("binary", True), ("json", False)):
            body, length = triton.InferenceServerClient.generate_request_body(
                _inputs(given, is_binary), outputs=_outputs(is_binary)
            )
            headers = {"Inference_Header_Content_Length": str(length)} if length is not None else {}
            request = posted(f"/v2/models/{model.name}/infer", body, **headers)
            results[name] = {
                "request_bytes": len(request),
                "tritonclient": _rounds(lambda b=is_binary: _infer(client, model.name, given, b), seconds),  # type: ignore[misc]
                "prepared_once": _middle([drive(server, request, 1, seconds) for _ in range(ROUNDS)], "per_s"),
            }
        client.close()
    for way in ("tritonclient", "prepared_once"):
        results[f"binary_over_json_{way}"] = round(results["binary"][way]["per_s"] / results["json"][way]["per_s"], 2)
    return results


def _inputs(given: dict[str, NDArray[np.int64]], is_binary: bool) -> list[Any]:
    made = [triton.InferInput(name, list(values.shape), "INT64") for name, values in given.items()]
    for tensor, values in zip(made, given.values(), strict=True):
        tensor.set_data_from_numpy(values, binary_data=is_binary)
    return made


def _outputs(is_binary: bool) -> list[Any]:
    return [triton.InferRequestedOutput("SCORES", binary_data=is_binary)]


def _infer(client: Any, model: str, given: dict[str, NDArray[np.int64]], is_binary: bool) -> None:
    result = client.infer(model, _inputs(given, is_binary), outputs=_outputs(is_binary))
    assert result.as_numpy("SCORES").shape == (NUM_CANDIDATES, 1)


def _rounds(call: Callable[[], None], seconds: float) -> dict[str, float]:
    call()
    rounds = []
    for _ in range(ROUNDS):
        num, started_s = 0, time.perf_counter()
        while (elapsed_s := time.perf_counter() - started_s) < seconds:
            call()
            num += 1
        rounds.append({"per_s": round(num / elapsed_s, 1), "ms": round(elapsed_s / num * 1e3, 3)})
    return _middle(rounds, "per_s")


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=3.0, help="of each of the rounds")
    parser.add_argument("--front-only", action="store_true", help="leave the Open Inference Protocol out")


def main(flags: Namespace) -> None:
    load = os.getloadavg()[0]
    results: dict[str, Any] = {
        "load_average_before": round(load, 2),
        "rounds": ROUNDS,
        "front": measure_front(flags.seconds),
    }
    if not flags.front_only:
        results["open_inference_protocol"] = measure_inference(flags.seconds)
    write_measurement(flags.out, results)
