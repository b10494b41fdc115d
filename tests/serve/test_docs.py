"""Every example of docs/serving.md, run as it stands there."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from helmrec.clock import MonotonicClock
from helmrec.config import EngineConfig
from helmrec.engine.engine import Engine
from helmrec.history.config import HistoryConfig
from helmrec.model.profiles import profile
from helmrec.model.weights import init_model
from helmrec.serve.app import make_app
from helmrec.serve.client import Client
from helmrec.serve.histories import StoredHistories
from helmrec.serve.port import InProcessPort
from helmrec.serve.settings import ServeConfig
from helmrec.serve.swap import SwappingPort
from tests.serve.asgi import on_loopback, wait_for

TEXT = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
ADDRESS = "http://127.0.0.1:8000"
GRPC_ADDRESS = "127.0.0.1:8001"
SHELL = re.findall(r"```sh\n(.*?)```\n```json\n(.*?)```", TEXT, re.DOTALL)
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


class Addresses(NamedTuple):
    """Of the server that the examples are run against."""

    http: str
    grpc: str

    def put_into(self, example: str) -> str:
        return example.replace(ADDRESS, self.http).replace(GRPC_ADDRESS, self.grpc)


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    models = tmp_path_factory.mktemp("docs")
    for seed, name in enumerate(("demo-model", "fresh")):
        init_model(models / name, profile("demo", 500), seed)
    settings: dict[str, Any] = {"pool_bytes": "64MiB"}

    def engine_of(folder: Path) -> InProcessPort:
        return InProcessPort(Engine.from_model(folder, EngineConfig(**settings), MonotonicClock()))

    engine = SwappingPort(engine_of(models / "demo-model"), lambda folder, _: engine_of(folder))
    histories = StoredHistories.open(models / "histories", engine.model, HistoryConfig())
    config = ServeConfig(admin_token="open-sesame", models_path=str(models), grpc_port=0)
    app = make_app(engine, config, histories)
    with on_loopback(app) as port:
        url = f"http://127.0.0.1:{port}"
        with Client(url) as client:
            wait_for(client.is_ready)
        yield Addresses(url, f"127.0.0.1:{app.state.grpc.port}")


def test_every_shell_example_has_its_answer_beside_it() -> None:
    assert len(SHELL) == TEXT.count("```sh") == 14
    assert len(PYTHON) == 2


def test_the_example_of_a_bulk_load_runs(addresses: Addresses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sample,) = [block for block in re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL) if "histories load" in block]
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    script = addresses.put_into(sample)
    done = subprocess.run(["bash", "-ec", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, "2 / 4" in done.stdout) == (0, True), done.stderr
    with Client(addresses.http) as client:
        assert client.user(20) is not None


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize(("command", "shown"), SHELL)
def test_a_curl_example_answers_in_the_shape_shown(addresses: Addresses, command: str, shown: str) -> None:
    done = subprocess.run(["bash", "-c", addresses.put_into(command)], capture_output=True, check=True, timeout=60)
    assert shape(json.loads(done.stdout)) == shape(json.loads(shown))


def test_the_python_example_runs(addresses: Addresses, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(addresses.put_into(PYTHON[0]), "docs/serving.md", "exec"), {})
    shown = capsys.readouterr().out
    assert shown.startswith("[[")
    assert shown.endswith(" 2 True\n")


def test_the_example_of_grpc_runs(addresses: Addresses, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(addresses.put_into(PYTHON[1]), "docs/serving.md", "exec"), {})
    assert re.fullmatch(r"\[\[.* .*\]\] \d+\n", capsys.readouterr().out)


def shape(value: Any) -> Any:
    """Names and kinds of a JSON value; what says which problem or version it is counts word by word."""
    exact = {"status", "field", "detail", "version", "current_version", "history_version", "had_events", "is_repeat"}
    if isinstance(value, dict):
        return {name: value[name] if name in exact else shape(value[name]) for name in value}
    if isinstance(value, list):
        return [shape(each) for each in value]
    return float if isinstance(value, int | float) else type(value)
