"""Real Ray on this machine: what routing, losing and scaling replicas does; writes docs/measurements/cluster-ray.json.

    helmrec bench run ray          all parts, about ten minutes on two quiet cores
    helmrec bench run ray kill     one part; what other parts measured before is kept

Small CPU replicas of a small model on shared cores: latencies are those of this machine and of whatever else it does.
Arrivals and return times of `trace` are real (MovieTweetings); histories are lengthened by synthetic events, since real
ones have a few events each. Needs helmrec[cluster,bench].
"""

import asyncio
import http.client
import json
import os
import statistics
import tempfile
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from helmrec.cluster.config import ClusterConfig, cluster_config
from helmrec.cluster.environment import prepare_environment
from helmrec.config import EngineConfig
from helmrec.engine.engine import Engine, EngineStats
from helmrec.model.config import ITEM, EncoderConfig, ModelConfig, TableConfig
from helmrec.model.weights import init_model
from helmrec.serve.settings import Given, Settings, resolve
from helmrec.serve.wire import pack_call
from helmrec.traffic.imported import ImportConfig, trace_of_log
from helmrec.traffic.importers import read_log
from helmrec.traffic.requests import rank_requests
from helmrec.types import RankRequest
from helmrec_bench.lab.provenance import write_measurement

PORT = 8_799
NUM_ITEMS, WINDOW, CANDIDATES, SYNTHETIC_EVENTS = 12_611, 128, 16, 96
HERE: dict[str, Any] = {
    "cpus_per_replica": 0.1,
    "cpus_per_ingress": 0.1,
    "object_store_bytes": "100MB",
    "report_every_s": 0.5,
}
Part = Callable[[Path], dict[str, Any]]


def model_config() -> ModelConfig:
    """Two small layers over the trace's items; histories of up to 128 events."""
    return ModelConfig(
        name="small",
        form="concat",
        num_layers=2,
        num_heads=2,
        qk_dim=16,
        v_dim=16,
        dim=32,
        hidden_dim=32,
        normaliser=WINDOW,
        window=WINDOW,
        max_candidates=CANDIDATES,
        num_actions=16,
        num_tasks=1,
        time_buckets=16,
        row_dim=32,
        features=(TableConfig(name=ITEM, num_rows=NUM_ITEMS),),
        user_context=(),
        request_context=(),
        encoders=(EncoderConfig(name="item", tables=(ITEM,)),),
        candidate_encoder=EncoderConfig(name="candidate", tables=(ITEM,)),
    )


def settings(**overrides: Any) -> Settings:
    """A pool for about a third of the users of a trace."""
    values = {"pool_bytes": "3MiB", "page_tokens": 16, "port": PORT, "log_level": "error", "alpha": 0.2} | overrides
    return resolve({name: Given(value, "the script") for name, value in values.items()}, {}, None)


@contextmanager
def deployed(folder: Path, **changes: Any) -> Iterator[ClusterConfig]:
    """An application of its own on the Ray that runs: cold caches, a router that knows nobody."""
    from ray import serve  # noqa: PLC0415 - after its environment

    from helmrec.cluster.deploy import deploy  # noqa: PLC0415

    cluster = cluster_config(HERE | changes)
    deploy(folder, settings(), cluster)
    wait_ready(len(asyncio.run(replica_stats())), cluster.replicas)
    try:
        yield cluster
    finally:
        serve.delete(cluster.app)


def wait_ready(_: int, wanted: int, seconds: float = 240.0) -> float:
    started_s = time.monotonic()
    while time.monotonic() - started_s < seconds:
        if call("GET", "/readyz")[0] == 200 and len(asyncio.run(replica_stats())) == wanted:
            return time.monotonic() - started_s
        time.sleep(0.1)
    raise TimeoutError(f"{wanted} replicas are not there after {seconds} s")


def call(method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
    try:
        connection.request(method, path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    except OSError:
        return 0, b""
    finally:
        connection.close()


async def replica_stats() -> dict[str, EngineStats]:
    """Every replica's own figures, by its name."""
    import msgspec  # noqa: PLC0415
    from ray import serve  # noqa: PLC0415

    from helmrec.cluster.fleet import RayFleet  # noqa: PLC0415
    from helmrec.cluster.remote_clock import Stamp  # noqa: PLC0415

    handle = serve.get_deployment_handle("engines", "helmrec")
    stamp = Stamp("script", time.monotonic(), time.monotonic())
    replies = await RayFleet(handle).call_all(stamp, b"".join(pack_call("stats", {})))
    return {reply.replica: msgspec.msgpack.decode(reply.payload, type=EngineStats) for reply in replies}


def bodies(requests: list[RankRequest], deadline_ms: float | None = None) -> list[bytes]:
    made = []
    for request in requests:
        names = ("items", "actions", "timestamps", "candidates")
        body: dict[str, Any] = {name: np.asarray(getattr(request, name)).tolist() for name in names}
        made.append(json.dumps({"user_id": request.user_id, "first_event": request.first_event, **body}).encode())
    return made


def trace_requests(count: int, seed: int = 0) -> list[RankRequest]:
    """The busiest stretch of the log, in its order; each history starts with synthetic events of the same user."""
    log = read_log(
        "movietweetings", Path(os.environ.get("HELMREC_DATA", "../shared/data")) / "movietweetings/ratings.dat"
    )
    trace = trace_of_log(log, ImportConfig(history_share=0.5, num_candidates=CANDIDATES, seed=seed))
    return [longer(request) for request, _ in zip(rank_requests(trace, model_config()), range(count), strict=False)]


def longer(request: RankRequest) -> RankRequest:
    rng = np.random.default_rng(request.user_id)
    first = int(np.asarray(request.timestamps)[0]) if len(request.items) else 1_000_000
    keep = WINDOW - SYNTHETIC_EVENTS
    times = np.sort(rng.integers(0, max(1, first), SYNTHETIC_EVENTS))
    return RankRequest(
        user_id=request.user_id,
        items=np.concatenate([rng.integers(0, NUM_ITEMS, SYNTHETIC_EVENTS), np.asarray(request.items)[:keep]]),
        actions=np.concatenate([rng.integers(0, 11, SYNTHETIC_EVENTS), np.asarray(request.actions)[:keep]]),
        timestamps=np.concatenate([times, np.asarray(request.timestamps)[:keep]]),
        candidates=request.candidates,
    )


@dataclass
class Load:
    """Clients in threads that ask as fast as they are answered, until they are stopped."""

    payloads: list[bytes]
    num_clients: int = 4
    statuses: list[tuple[float, int, float]] = field(default_factory=list)  # when it ended, status, milliseconds
    _is_over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Load":
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(self.num_clients)]
        for thread in self._threads:
            thread.start()
        return self

    def _ask(self, number: int) -> None:
        place = number * 101
        while not self._is_over.is_set():
            place = (place + 1) % len(self.payloads)
            started_s = time.monotonic()
            status, _ = call("POST", "/v1/rank", self.payloads[place])
            ended_s = time.monotonic()
            self.statuses.append((ended_s, status, (ended_s - started_s) * 1e3))

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def summary(self) -> dict[str, Any]:
        times = [took for _, _, took in self.statuses]
        counts: dict[str, int] = {}
        for _, status, _ in self.statuses:
            counts[str(status)] = counts.get(str(status), 0) + 1
        return {"requests": len(times), "statuses": counts, **spread(times)}


def spread(times_ms: list[float]) -> dict[str, float]:
    return {f"p{q}_ms": round(float(np.percentile(times_ms, q)), 2) for q in (50, 99)}


def scores(folder: Path) -> dict[str, Any]:
    """Routed scores beside a single engine's, and what each hop adds."""
    requests = trace_requests(150)
    engine = Engine.from_model(folder, EngineConfig(pool_bytes="64MiB", page_tokens=16))
    alone_ms, largest = [], 0.0
    with deployed(folder, replicas=3):
        hop_ms, http_ms = asyncio.run(_through_handle(requests)), []
        for request, body in zip(requests, bodies(requests), strict=True):
            started_s = time.perf_counter()
            (alone,) = engine.rank([request])
            middle_s = time.perf_counter()
            status, answer = call("POST", "/v1/rank", body)
            http_ms.append((time.perf_counter() - middle_s) * 1e3)
            alone_ms.append((middle_s - started_s) * 1e3)
            assert status == 200, answer
            largest = max(largest, float(np.abs(np.array(json.loads(answer)["scores"]) - alone.scores).max()))
        used = {name: stats.served for name, stats in asyncio.run(replica_stats()).items()}
    engine.close()
    medians = {"engine alone": alone_ms, "handle": hop_ms, "http": http_ms}
    return {
        "requests": len(requests),
        "replicas_used": len([num for num in used.values() if num > 3]),
        "largest_score_difference": largest,
        "latency": {name: spread(times) for name, times in medians.items()},
        "added_ms_p50": {
            "handle hop": round(statistics.median(hop_ms) - statistics.median(alone_ms), 2),
            "proxy and ingress": round(statistics.median(http_ms) - statistics.median(hop_ms), 2),
        },
    }


async def _through_handle(requests: list[RankRequest]) -> list[float]:
    from ray import serve  # noqa: PLC0415

    from helmrec.cluster.fleet import RayFleet  # noqa: PLC0415
    from helmrec.cluster.port import ClusterPort  # noqa: PLC0415

    handle = serve.get_deployment_handle("engines", "helmrec")
    port = ClusterPort(RayFleet(handle), model_config(), 1_000, 60.0)
    times = []
    for request in requests:
        started_s = time.perf_counter()
        await port.submit([request])
        times.append((time.perf_counter() - started_s) * 1e3)
    return times


def trace(folder: Path) -> dict[str, Any]:
    """KV hit rate of the real trace by router; the same requests in the same order, cold caches each time."""
    requests = trace_requests(1_200)
    users = np.array([request.user_id for request in requests])
    found: dict[str, Any] = {
        "requests": len(requests),
        "users": int(np.unique(users).size),
        "synthetic_events_of_a_history": SYNTHETIC_EVENTS,
    }
    for router in ("emb-kv-aware", "session-hash", "random"):
        with deployed(folder, replicas=3, router=router):
            statuses, reused, tokens, times = [], 0, 0, []
            for request, body in zip(requests, bodies(requests), strict=True):
                started_s = time.perf_counter()
                status, answer = call("POST", "/v1/rank", body)
                times.append((time.perf_counter() - started_s) * 1e3)
                statuses.append(status)
                if status == 200:
                    reused += json.loads(answer)["reused_tokens"]
                    tokens += len(request.items)
            served = [stats.served for stats in asyncio.run(replica_stats()).values()]
            found[router] = {
                "kv_hit": round(reused / tokens, 4),
                "errors": len([s for s in statuses if s != 200]),
                "served_by_replica": sorted(served),
                **spread(times),
            }
            print(router, found[router], flush=True)
    return found


def kill(folder: Path) -> dict[str, Any]:
    """One of three replicas is killed under load."""
    payloads = bodies(trace_requests(600))
    with deployed(folder, replicas=3):
        with Load(payloads) as load:
            time.sleep(6)
            before = asyncio.run(replica_stats())
            victim = _replica_processes()[0]
            killed_s = time.monotonic()
            victim.kill()
            recovered_s = wait_ready(0, 3)
            fresh = _wait_for_traffic(set(before), killed_s)
            time.sleep(8)
            middle = {name: stats.served for name, stats in asyncio.run(replica_stats()).items()}
            time.sleep(6)
            after = {name: stats.served for name, stats in asyncio.run(replica_stats()).items()}
        late = {name: after[name] - middle.get(name, 0) for name in after}
        stalled = [took for ended_s, _, took in load.statuses if killed_s <= ended_s <= killed_s + 30]
        return {
            **load.summary(),
            "recovered_after_s": round(recovered_s, 1),
            "fresh_replica_served_after_s": fresh,
            "slowest_after_the_kill_ms": round(max(stalled), 1),
            "served_in_the_last_6_s_by_replica": sorted(late.values()),
            "busiest_over_mean": round(max(late.values()) / (sum(late.values()) / len(late)), 2),
        }


def _replica_processes() -> list[psutil.Process]:
    """Engines among our own children."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "ServeReplica:helmrec:engines" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def _wait_for_traffic(known: set[str], killed_s: float) -> float | None:
    """Until a replica that was not there before has answered something beyond its own warming up."""
    while time.monotonic() - killed_s < 120:
        for name, stats in asyncio.run(replica_stats()).items():
            if name not in known and stats.served > 3:
                return round(time.monotonic() - killed_s, 1)
        time.sleep(0.1)
    return None


def scale(folder: Path) -> dict[str, Any]:
    """Two replicas, then four, then two, under load all the time."""
    from helmrec.cluster.deploy import deploy  # noqa: PLC0415

    payloads = bodies(trace_requests(600))
    steps: dict[str, Any] = {}
    with deployed(folder, replicas=2):
        with Load(payloads) as load:
            time.sleep(4)
            for num in (4, 2):
                started_s = time.monotonic()
                deploy(folder, settings(), cluster_config(HERE | {"replicas": num}))
                wait_ready(0, num)
                steps[f"to {num} replicas after_s"] = round(time.monotonic() - started_s, 1)
                time.sleep(6)
                served = {name: stats.served for name, stats in asyncio.run(replica_stats()).items()}
                steps[f"served at {num}"] = sorted(served.values())
        return {**load.summary(), **steps}


def stale(folder: Path) -> dict[str, Any]:
    """No report ever comes in: every request must still be answered, and users still find their replica."""
    requests = trace_requests(400)
    with deployed(folder, replicas=3, report_every_s=3_600.0):
        statuses, reused, tokens = [], 0, 0
        for request, body in zip(requests, bodies(requests), strict=True):
            status, answer = call("POST", "/v1/rank", body)
            statuses.append(status)
            if status == 200:
                reused += json.loads(answer)["reused_tokens"]
                tokens += len(request.items)
    return {
        "requests": len(statuses),
        "errors": len([s for s in statuses if s != 200]),
        "kv_hit": round(reused / tokens, 4),
    }


def update(folder: Path) -> dict[str, Any]:
    """Another model under load, replica by replica: every answer is of one of the two."""
    from helmrec.cluster.deploy import deploy  # noqa: PLC0415

    other = folder.parent / "other"
    init_model(other, model_config(), seed=1)
    (request,) = trace_requests(1)
    (body,) = bodies([request])
    engine_settings = EngineConfig(pool_bytes="64MiB", page_tokens=16)
    wanted = [Engine.from_model(each, engine_settings).rank([request])[0].scores for each in (folder, other)]
    seen: list[int] = []
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            status, answer = call("POST", "/v1/rank", body)
            got = np.array(json.loads(answer)["scores"]) if status == 200 else None
            near = [got is not None and bool(np.allclose(got, each, atol=1e-4)) for each in wanted]
            seen.append(near.index(True) if any(near) else -1 if status == 200 else -status)

    with deployed(folder, replicas=2):
        thread = threading.Thread(target=ask)
        thread.start()
        time.sleep(2)
        deploy(other, settings(), cluster_config(HERE | {"replicas": 2}))
        time.sleep(4)
        is_over.set()
        thread.join()
    return {
        "answers": len(seen),
        "of_the_old": seen.count(0),
        "of_the_new": seen.count(1),
        "others": [s for s in seen if s < 0][:5],
    }


PARTS: dict[str, Part] = {
    "scores": scores,
    "trace": trace,
    "kill": kill,
    "scale": scale,
    "stale": stale,
    "update": update,
}


def options(parser: ArgumentParser) -> None:
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"of {', '.join(PARTS)}")


def main(flags: Namespace) -> None:
    kept = json.loads(flags.out.read_text()).get("parts", {}) if flags.out.exists() else {}
    here = cluster_config(HERE | {"replicas": 4})
    prepare_environment(here)
    from helmrec.cluster.deploy import ray_of  # noqa: PLC0415 - after its environment

    with tempfile.TemporaryDirectory(prefix="cluster-") as place, ray_of(here):
        folder = Path(place) / "small"
        init_model(folder, model_config())
        for name in flags.parts:
            started_s, load_before = time.monotonic(), round(os.getloadavg()[0], 1)
            measured = PARTS[name](folder)
            kept[name] = {**measured, "runnable_threads_before_and_after": [load_before, round(os.getloadavg()[0], 1)]}
            print(name, json.dumps(kept[name]), f"{time.monotonic() - started_s:.0f} s", flush=True)
            write_measurement(flags.out, {"replicas_of": "CPU, small model, all on one machine", "parts": kept})
