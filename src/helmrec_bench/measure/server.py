"""`helmrec serve` in processes of its own, started, watched and ended from here."""

import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from helmrec.engine.engine import EngineStats
from helmrec.serve.client import Client


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


class ServerProcess:
    """A server at one port, which it keeps when it is started again. Its log is kept as text."""

    def __init__(self, command: Sequence[str], port: int, environment: Mapping[str, str] | None = None) -> None:
        self.port, self.url = port, f"http://127.0.0.1:{port}"
        self._command = list(command)
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        self.ready_s = self.start()

    @classmethod
    def of_model(
        cls, model: Path, settings: Mapping[str, object], environment: Mapping[str, str] | None = None
    ) -> "ServerProcess":
        port = free_port()
        flags = [f"--set={name}={value}" for name, value in settings.items()]
        command = [sys.executable, "-m", "helmrec", "serve", str(model), f"--port={port}", *flags]
        return cls(command, port, environment)

    def start(self) -> float:
        """Seconds until it is ready."""
        started_s = time.perf_counter()
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(self._command, stdout=pipe, stderr=pipe, env=self._environment, text=True)
        self._output: list[str] = []
        self._reader = threading.Thread(target=lambda: self._output.extend(self.process.communicate()), daemon=True)
        self._reader.start()
        with Client(self.url) as client:
            while not client.is_ready():
                assert self.process.poll() is None, f"the server did not start: {self.output}"
                time.sleep(0.02)
        return time.perf_counter() - started_s

    @property
    def output(self) -> str:
        """All it wrote to stdout, then to stderr; once it has ended."""
        self._reader.join(5)
        return "".join(self._output)

    def stats(self) -> EngineStats:
        with urllib.request.urlopen(f"{self.url}/v1/pool", timeout=60) as reply:
            return msgspec.json.decode(reply.read(), type=EngineStats)

    def end(self) -> int:
        """Its exit status."""
        self.process.terminate()
        return self.process.wait(60)
