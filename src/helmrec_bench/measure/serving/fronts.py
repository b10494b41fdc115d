"""Requests per second of a front over HTTP with binary tensors and over gRPC, in turns; its engine answers at once.

`helmrec bench run fronts`. The server is a process of its own; the client keeps eight calls running. Where both share
few cores, CPU time of the server is the steadier figure. What an engine does with ids (checks, hashes) is not in it.
"""

import asyncio
import os
import sys
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import uvloop

from helmrec.engine.warm_up import make_request
from helmrec.errors import EngineClosed
from helmrec.model.profiles import profile
from helmrec.serve.app import make_app
from helmrec.serve.front import GRPC_RANK
from helmrec.serve.grpc_messages import MESSAGES
from helmrec.serve.load import Connection
from helmrec.serve.port import Health
from helmrec.serve.server import listen, serve_until_stopped
from helmrec.serve.settings import ServeConfig
from helmrec.serve.tensors import TensorNames, encode_request, read_inference
from helmrec.types import RankRequest, RankResult, Timing
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.measure.server import ServerProcess, free_port

NUM_EVENTS, NUM_CANDIDATES, IN_FLIGHT, REPEATS, TURN_S = 6_700, 2_048, 8, 3, 8.0
MODEL = profile("dlrmv3", 10_000)
Call = Callable[[], Awaitable[object]]


class InstantPort:
    """An engine that answers at once."""

    model, health, reason, num_restarts = MODEL, Health.READY, None, 0
    result = RankResult(np.zeros((NUM_CANDIDATES, MODEL.num_tasks), np.float32), 0, 0, 0, 0, 0, 0, Timing(0, 0, 0))

    def start(self) -> None:
        pass

    async def submit(self, requests: Sequence[RankRequest], _: float = 0.0) -> list[RankResult]:
        return [self.result] * len(requests)

    async def look(self) -> Any:
        raise EngineClosed("there is no engine")

    async def close(self) -> None:
        pass


async def turn(connect: Callable[[], Awaitable[Call]], pid: int) -> dict[str, float]:
    """Keep calls running for a while; return their rate, and the server's CPU time per call."""
    num, started_s, cpu_s = 0, time.perf_counter(), cpu_of(pid)

    async def repeat() -> None:
        nonlocal num
        call = await connect()
        while time.perf_counter() - started_s < TURN_S:
            assert getattr(await call(), "status", 200) == 200
            num += 1

    await asyncio.gather(*(repeat() for _ in range(IN_FLIGHT)))
    rate = num / (time.perf_counter() - started_s)
    return {"requests_per_s": round(rate, 1), "server_cpu_ms": round((cpu_of(pid) - cpu_s) / num * 1e3, 3)}


def cpu_of(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(port: int, grpc_port: int, pid: int) -> dict[str, Any]:
    sent = encode_request(make_request(MODEL, 7, np.arange(NUM_EVENTS), np.arange(NUM_CANDIDATES)), TensorNames(MODEL))
    head = f"POST /v2/models/{MODEL.name}/infer HTTP/1.1\r\nhost: x\r\ncontent-length: {len(sent.body)}\r\n"
    over_http = f"{head}inference-header-content-length: {sent.json_bytes}\r\n\r\n".encode() + sent.body
    message = MESSAGES["ModelInferRequest"](model_name=MODEL.name)
    for name, values in read_inference(sent.body, str(sent.json_bytes)).tensors.items():
        message.inputs.add(name=name, datatype="INT64", shape=values.shape)
        message.raw_input_contents.append(values.tobytes())
    over_grpc = message.SerializeToString()
    infer = (channel := grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}")).unary_unary(GRPC_RANK)

    async def http() -> Call:
        connection = Connection(*await asyncio.open_connection("127.0.0.1", port))
        return lambda: connection.send(over_http)

    async def grpc_() -> Call:
        return lambda: infer(over_grpc)

    fronts = {"http_binary": http, "grpc": grpc_}
    turns = [{name: await turn(front, pid) for name, front in fronts.items()} for _ in range(1 + REPEATS)]
    await channel.close()
    return {"body_bytes": {"http_binary": len(sent.body), "grpc": len(over_grpc)}, "turns": turns[1:]}


def main(flags: Namespace) -> None:
    load, ports = [round(average, 1) for average in os.getloadavg()], (free_port(), free_port())
    server = ServerProcess([sys.executable, "-m", __name__, *map(str, ports)], ports[0])
    try:
        results = uvloop.run(measure(*ports, server.process.pid))
    finally:
        server.end()
    sent = {"model": MODEL.name, "events": NUM_EVENTS, "candidates": NUM_CANDIDATES, "in_flight": IN_FLIGHT}
    write_measurement(flags.out, {"load_average_before": load, **sent, **results})


if __name__ == "__main__":
    CONFIG = ServeConfig(port=int(sys.argv[1]), grpc_port=int(sys.argv[2]))
    serve_until_stopped(make_app(InstantPort(), CONFIG), CONFIG, listen(CONFIG))  # type: ignore[arg-type]
