"""The OpenAPI document against the server that gives it: thousands of calls made up from it, valid and not."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from helmrec.clock import MonotonicClock
from helmrec.serve.app import make_app
from helmrec.serve.control import Steering
from helmrec.serve.histories import StoredHistories
from helmrec.serve.port import InProcessPort
from helmrec.serve.settings import ServeConfig
from tests.helpers import tiny_engine
from tests.serve.asgi import on_loopback
from tests.serve.conftest import TOKEN
from tests.serve.test_load import ready

COMMAND = Path(sys.executable).parent / "schemathesis"


@pytest.mark.slow
@pytest.mark.skipif(not COMMAND.exists(), reason="needs pip install 'helmrec[web]'")
def test_the_server_does_what_its_document_says(histories: StoredHistories, tmp_path: Path) -> None:
    """Left out: that whatever fits the schema is accepted. Which ids there are depends on the model."""
    engine = tiny_engine(clock=MonotonicClock(), audit_every=1)
    port = InProcessPort(engine, Steering("static:0.4", slo_ms=80))
    with on_loopback(make_app(port, ServeConfig(admin_token=TOKEN), histories)) as number:
        done = subprocess.run(
            [
                *(str(COMMAND), "run", f"{ready(number)}/openapi.json", "--checks", "all", "--max-examples", "100"),
                *("--exclude-checks", "positive_data_acceptance", "--seed", "1"),
                *("-H", f"Authorization: Bearer {TOKEN}", "--phases", "coverage,fuzzing"),
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            cwd=tmp_path,  # it keeps notes where it runs
        )
        assert done.returncode == 0, done.stdout[-5_000:]
        (num,) = re.findall(r"(\d+) generated", done.stdout)
        assert int(num) > 1_000
        assert engine.stats().audit_mismatches == 0
