"""Real Ray on this machine: three replicas behind the command line, in processes of their own; about a minute."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.cases import plain_settings, write_model
from tests.helpers import tiny_engine
from tests.history.places import redis_process
from tests.serve.asgi import wait_for
from tests.serve.cases import as_request, events_body, rank_body, rank_requests, stored_body

psutil = pytest.importorskip("psutil", reason="helmrec[cluster] is not installed")
pytest.importorskip("ray.serve", reason="helmrec[cluster] is not installed")
TOKEN = "open sesame"
PASSWORD = "hunter2secret"
REPLICAS = 3


class Answer(NamedTuple):
    status: int
    body: Any
    retry_after: str | None = None


class Cluster:
    """A served cluster, and the processes that are its replicas."""

    def __init__(self, process: "subprocess.Popen[bytes]", port: int, redis: "subprocess.Popen[bytes]") -> None:
        self.process, self.port, self.redis = process, port, redis

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"content-type": "application/json", **headers})
            answer = connection.getresponse()
            return Answer(answer.status, json.loads(answer.read()), answer.headers["retry-after"])
        finally:
            connection.close()

    def metrics(self) -> dict[str, list[tuple[dict[str, str], float]]]:
        """Labels and values of every metric."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        found: dict[str, list[tuple[dict[str, str], float]]] = {}
        for sample in (sample for family in families for sample in family.samples):
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
        return found

    def rank(self, body: Any) -> Answer:
        return self.call("POST", "/v1/rank", body)

    def replicas(self) -> list[Any]:
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [each for each in found if "ServeReplica:helmrec:engines" in " ".join(_command(each))]

    def num_pages(self) -> int:
        answer = self.call("GET", "/v1/pool")
        return int(answer.body["pool"]["num_pages"]) if answer.status == 200 else 0

    def wait_for(self, wanted: int, seconds: float) -> float:
        """Until so many replicas answer; returns how long that took."""
        started_s = time.monotonic()
        while time.monotonic() - started_s < seconds:
            if self._is_ready() and self.num_pages() == 30 * wanted:
                return time.monotonic() - started_s
            assert self.process.poll() is None, "the cluster ended"
            time.sleep(0.1)
        raise AssertionError(f"{wanted} replicas were not there after {seconds} s")

    def _is_ready(self) -> bool:
        try:
            return self.call("GET", "/readyz").status == 200
        except (OSError, http.client.HTTPException, json.JSONDecodeError):
            return False


def _command(process: Any) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("ray")
    model = write_model(folder / "tiny")
    config = folder / "cluster.toml"
    config.write_text('cpus_per_replica = 0.1\ncpus_per_ingress = 0.1\nobject_store_bytes = "80MB"\n')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    folder_of_redis = tempfile.TemporaryDirectory(prefix="redis-")
    with folder_of_redis as place, redis_process(Path(place), "--requirepass", PASSWORD) as redis:
        settings = plain_settings(port=port)
        others = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
        command = [
            *(sys.executable, "-m", "helmrec", "serve", str(model), "--cluster", "--replicas", str(REPLICAS)),
            *("--cluster-config", str(config), *others),
        ]
        address = f"unix://{place}/redis.sock?password={PASSWORD}"
        secrets = {"HELMREC_ADMIN_TOKEN": TOKEN, "HELMREC_HISTORY_PATH": address}
        environment = {**os.environ, **secrets, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            try:
                served = Cluster(process, port, redis)
                served.wait_for(REPLICAS, 240)  # a quarter of a minute where nothing else runs
                yield served
            finally:
                process.terminate()
                assert process.wait(60) == 0, "it ends when told to"


def test_routed_scores_are_those_of_one_engine(cluster: Cluster) -> None:
    requests = rank_requests(30)
    wanted = tiny_engine().rank(requests)
    for request, alone in zip(requests * 2, wanted * 2, strict=True):
        body = {name: _plain(getattr(request, name)) for name in rank_body()}
        answer = cluster.rank(body)
        assert answer.status == 200, answer
        np.testing.assert_allclose(answer.body["scores"], alone.scores, atol=1e-5)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [int(each) for each in value] if not isinstance(value, int) else value


def test_clients_see_the_single_nodes_api(cluster: Cluster) -> None:
    assert cluster.call("GET", "/v1/model").body["name"] == "tiny"
    wrong = cluster.rank(rank_body(items=[9_999, 2, 3]))
    assert (wrong.status, wrong.body["title"]) == (400, "Bad Request")
    moved = cluster.call("POST", "/v1/admin/alpha", {"alpha": 0.3}, authorization=f"Bearer {TOKEN}")
    assert (moved.status, moved.body["alpha_target"]) == (200, pytest.approx(0.3))
    assert cluster.call("POST", "/v1/admin/alpha", {"alpha": 0.3}).status == 401


def test_a_stored_history_is_served_right_wherever_its_user_goes(cluster: Cluster) -> None:
    assert cluster.call("POST", "/v1/events", events_body(0)).status == 200
    assert cluster.call("POST", "/v1/events", events_body(0, items=[9, 9, 9])).status == 409
    (wanted,) = tiny_engine().rank([as_request(rank_body())])
    answer = cluster.rank(stored_body())
    assert (answer.status, answer.body["history_version"]) == (200, 3)
    np.testing.assert_allclose(answer.body["scores"], wanted.scores, atol=1e-5)
    assert cluster.call("DELETE", "/v1/users/7").body["had_events"]
    assert cluster.call("GET", "/v1/users/7").status == 404


def test_a_killed_replica_costs_no_client_an_error_and_another_takes_its_place(cluster: Cluster) -> None:
    statuses: list[int] = []
    is_over = threading.Event()

    def load(first_user: int) -> None:
        user = first_user
        while not is_over.is_set():
            user += 1
            statuses.append(cluster.rank(rank_body(user_id=user % 40)).status)

    threads = [threading.Thread(target=load, args=(10 * i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(1.0)
        victims = cluster.replicas()
        assert len(victims) == REPLICAS
        victims[0].kill()
        num_before = len(statuses)
        cluster.wait_for(REPLICAS, 120)
        time.sleep(0.5)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert len(statuses) > num_before + 10
    assert set(statuses) == {200}
    assert victims[0].pid not in {each.pid for each in cluster.replicas()}
    metrics = cluster.metrics()
    assert metrics["helmrec_engine_restarts_total"] == [({}, 1.0)]
    assert len({labels["replica"] for labels, _ in metrics["helmrec_pool_alpha"]}) == REPLICAS


def test_a_redis_that_hangs_makes_fronts_not_ready_and_requests_that_carry_their_history_are_served(
    cluster: Cluster,
) -> None:
    assert cluster.call("POST", "/v1/events", events_body(0)).status == 200
    cluster.redis.send_signal(signal.SIGSTOP)
    try:
        refused = cluster.rank(stored_body())
        assert (refused.status, refused.body["type"]) == (503, "urn:helmrec:error:HistoryUnavailable")
        wait_for(lambda: cluster.call("GET", "/readyz").status == 503, 30)
        assert "the history store does not answer" in cluster.call("GET", "/readyz").body["histories"]
        assert cluster.rank(rank_body()).status == 200
    finally:
        cluster.redis.send_signal(signal.SIGCONT)
    wait_for(lambda: cluster.call("GET", "/readyz").status == 200, 30)
    assert cluster.rank(stored_body()).body["history_version"] == 3
    assert cluster.call("DELETE", "/v1/users/7").body["had_events"]


def test_rank_and_readiness_report_a_lost_redis_until_it_is_back(cluster: Cluster) -> None:
    assert cluster.call("POST", "/v1/events", events_body(0)).status == 200
    folder = Path(psutil.Process(cluster.redis.pid).cwd())
    cluster.redis.kill()
    wait_for(lambda: cluster.rank(stored_body()).status == 503, 10)
    wait_for(lambda: cluster.call("GET", "/readyz").status == 503, 10)
    appended = cluster.call("POST", "/v1/events", events_body(3))
    assert (appended.status, appended.retry_after) == (503, "1")
    assert cluster.rank(rank_body()).status == 200, "a request that carries its history needs no store"
    with redis_process(folder, "--requirepass", PASSWORD):
        wait_for(lambda: cluster.call("GET", "/readyz").status == 200, 30)
        assert cluster.rank(stored_body()).body["history_version"] == 0, "this Redis keeps nothing on disk"


def test_no_log_and_no_command_line_of_the_cluster_shows_a_secret(cluster: Cluster) -> None:
    """After all that was asked and refused above, in everything Ray wrote for this cluster."""
    commands = [" ".join(_command(each)) for each in psutil.Process(cluster.process.pid).children(recursive=True)]
    assert len(commands) > REPLICAS
    (session,) = Path("/tmp/ray").glob(f"session_*_{cluster.process.pid}")
    logs = [file for file in (session / "logs").rglob("*") if file.is_file()]
    assert any("replica_helmrec_ingress" in file.name for file in logs)
    for secret in (PASSWORD, TOKEN):
        assert not [command for command in commands if secret in command]
        assert not [file for file in logs if secret.encode() in file.read_bytes()]
