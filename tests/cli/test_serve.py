"""`helmrec serve`, as a process."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tritonclient.grpc as triton
from typer.testing import CliRunner

from helmrec.cli import serving
from helmrec.cli.main import app
from helmrec.model.profiles import profile
from helmrec.model.weights import init_model
from helmrec.serve.client import Client
from helmrec.serve.settings import resolve
from tests.serve.asgi import wait_for
from tests.serve.cases import as_request, rank_body, tensors_of

BODY = json.dumps(rank_body()).encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("serve") / "model"
    init_model(path, profile("demo", 500), 0)
    return path


class Process:
    """A server in a process of its own, and what it has logged so far."""

    def __init__(self, *arguments: str) -> None:
        self.lines: list[str] = []
        command = [sys.executable, "-m", "helmrec", "serve", *arguments, "--port", "0"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HELMREC_POLL": "1"}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        wait_for(lambda: self.has("event=listening"))
        (address,) = re.findall(r"address=http://127.0.0.1:(\d+)", "".join(self.lines))
        self.port = int(address)
        with Client(f"http://127.0.0.1:{self.port}") as client:
            wait_for(client.is_ready)

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(self.process.stderr)

    def has(self, text: str) -> bool:
        assert self.process.poll() is None or text in "".join(self.lines), "".join(self.lines)
        return text in "".join(self.lines)

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def end(self) -> int:
        code = self.process.wait(timeout=60)
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


@pytest.fixture(params=["engine_process=false", "engine_process=true"])
def server(folder: Path, request: pytest.FixtureRequest) -> Iterator[Process]:
    process = Process(str(folder), "--pool", "8MiB", "--set", request.param, "--grpc-port", "0")
    yield process
    if process.process.poll() is None:
        process.process.kill()
        process.end()


def test_sigterm_lets_running_requests_end_and_the_process_ends_well(server: Process) -> None:
    connection = server.connection()
    connection.putrequest("POST", "/v1/rank")
    connection.putheader("content-length", str(len(BODY)))
    connection.endheaders()
    connection.send(BODY[:10])  # the request is running now: its handler waits for the rest
    slow = server.connection()
    slow.putrequest("POST", "/v1/rank")
    slow.putheader("content-length", str(len(BODY)))
    slow.endheaders()
    slow.send(BODY[:10])  # the rest of it never comes
    idle = server.connection()
    idle.request("GET", "/readyz")
    assert idle.getresponse().read() == b'{"status":"ready"}'
    (grpc_port,) = re.findall(r"address=grpc://127.0.0.1:(\d+)", "".join(server.lines))
    ranked = triton.InferenceServerClient(f"127.0.0.1:{grpc_port}").infer("demo", grpc_inputs())
    assert ranked.as_numpy("SCORES").shape == (2, 2)
    server.process.send_signal(signal.SIGTERM)
    told_s = time.monotonic()
    wait_for(lambda: is_refused(server.port) and is_refused(int(grpc_port)))
    connection.send(BODY[10:])
    answer = connection.getresponse()
    assert answer.status == 200
    assert len(json.loads(answer.read())["scores"]) == 2
    refused = slow.getresponse()
    assert (refused.status, refused.headers["retry-after"]) == (503, "1"), "a body that does not come is not waited for"
    for each in (connection, slow, idle):
        each.close()
    assert server.end() == 0
    assert time.monotonic() - told_s < 20, "before drain_s has passed"
    log = "".join(server.lines)
    assert "event=stopped" in log
    assert 'level=warning logger=helmrec.serve event="not a setting" variable=HELMREC_POLL' in log
    assert "level=error" not in log


def grpc_inputs() -> list[triton.InferInput]:
    """The request of `rank_body` as tensors."""
    made = []
    for name, values in tensors_of([as_request(rank_body())]).items():
        made.append(triton.InferInput(name, list(values.shape), "INT64"))
        made[-1].set_data_from_numpy(values)
    return made


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_an_engine_apart_does_not_outlive_its_front(folder: Path) -> None:
    server = Process(str(folder), "--pool", "8MiB", "--set", "engine_process=true")
    (engine,) = children(server.process.pid)
    server.process.send_signal(signal.SIGKILL)
    server.end()
    wait_for(lambda: not Path(f"/proc/{engine}/cmdline").exists() or not Path(f"/proc/{engine}/cmdline").read_bytes())


def is_refused(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_cluster_refuses_a_port_for_grpc_before_ray_is_started(folder: Path) -> None:
    done = CliRunner().invoke(app, ["serve", str(folder), "--cluster", "--grpc-port", "8001"])
    assert done.exit_code == 2
    assert "grpc_port: a cluster serves HTTP only; leave it unset, got 8001" in done.output.replace("\n", " ")


def test_a_signal_ends_a_cluster_that_has_not_started_yet(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for Ray: the signal comes while replicas start, and Ray is left in order."""
    module = pytest.importorskip("helmrec.cluster.deploy", reason="helmrec[cluster] is not installed")
    told: list[str] = []

    @contextmanager
    def ray_of(_: object) -> Iterator[bool]:
        try:
            yield True
        finally:
            told.append("Ray was shut down")

    def deploy(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
        told.append("the start went on")

    monkeypatch.setattr(serving, "prepare_environment", lambda _: None)
    monkeypatch.setattr(module, "ray_of", ray_of)
    monkeypatch.setattr(module, "deploy", deploy)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with pytest.raises(SystemExit) as ended:
            serving.serve_cluster(folder, resolve({}, {}, None), None, {})
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert (ended.value.code, told) == (0, ["Ray was shut down"])


def test_print_config_shows_where_each_value_came_from(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "serve.toml").write_text("queue_limit = 64\n")
    flags = ["--pool", "24GiB", "--set", "audit_every=100", "--config", str(tmp_path / "serve.toml"), "--print-config"]
    done = CliRunner().invoke(app, ["serve", str(folder), *flags], env={"HELMREC_DRAIN_S": "5"})
    assert done.exit_code == 0, done.output
    for line in (
        "pool_bytes = 25769803776  # flag --pool-bytes",
        "audit_every = 100  # flag --set",
        "drain_s = 5  # environment HELMREC_DRAIN_S",
        f"queue_limit = 64  # file {tmp_path / 'serve.toml'}",
        "port = 8000  # default",
    ):
        assert line in done.output.splitlines()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pool", "much"], "pool_bytes: "),
        (["--set", "alpha"], "--set must be NAME=VALUE, got 'alpha'"),
        (["--set", "shoes=4"], "shoes is not a known setting (flag --set), got '4'"),
        (["--port", "70000"], "port must be at most 65535, got 70000"),
    ],
)
def test_a_wrong_flag_is_one_clear_line(folder: Path, flags: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["serve", str(folder), *flags])
    assert done.exit_code == 2
    assert message in done.output


@pytest.mark.parametrize(
    "address",
    [
        "redis://:hunter2secret@127.0.0.1:1/0",
        "unix:///nowhere/redis.sock?password=hunter2secret",
        "redis://:hunter2/secret@127.0.0.1:1/0",
    ],
)
def test_neither_the_settings_shown_nor_a_failed_start_show_the_password_of_a_redis(folder: Path, address: str) -> None:
    pytest.importorskip("redis", reason="helmrec[cluster] is not installed")
    environment = {"HELMREC_ADMIN_TOKEN": "open-sesame"}
    for history in (["--history", address], ["--set", f"history_path={address}"], ["--set", f"historypath={address}"]):
        shown = CliRunner().invoke(app, ["serve", str(folder), *history, "--print-config"], env=environment)
        failed = CliRunner().invoke(app, ["serve", str(folder), *history, "--port", "0"], env=environment)
        assert failed.exit_code == 2
        for text in (shown.output, failed.output, str(failed.exception), str(shown.exception)):
            assert "hunter2" not in text
            assert "sesame" not in text
        assert "***" in failed.output
