"""The wheel, installed with its core dependencies alone, used in an empty folder as a new user would."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.installed import Installed, adopt_compiled, install_wheel
from tests.test_docs import blocks, free_port

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
MISSING = {  # command -> the extra it needs
    "serve demo --cluster": "cluster",
    "serve demo --grpc-port 0": "grpc",
    "serve demo --history redis://127.0.0.1:1": "cluster",
    "trace make --preset amazon-video-games --duration 5 --out trace.parquet": "parquet",
    "trace import parquet log.parquet --out trace.safetensors": "parquet",
    "histories load histories.parquet": "parquet",
    "loadgen demo --trace trace.safetensors --qps 1 --seconds 1": "bench",
    "train --out networks": "train",
    "bench all --smoke": "bench",
    "bench run fronts": "grpc",
    "bench run ppo": "train",
}
RUNS_ALL = """
import json, sys
from typer.testing import CliRunner
from helmrec.cli.main import app
for command in json.loads(sys.argv[1]):
    done = CliRunner().invoke(app, command.split())
    print(json.dumps({"command": command, "status": done.exit_code, "output": done.output}))
"""
HELP = """
import typer
from typer.testing import CliRunner
from helmrec.cli.main import app
group = typer.main.get_group(app)
for name in group.list_commands(group.make_context("helmrec", ["none"])):
    done = CliRunner().invoke(app, [name, "--help"])
    print(name, done.exit_code, done.exception)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel, and the model that the quickstart makes."""
    installed = install_wheel(tmp_path_factory.mktemp("wheel"))
    adopt_compiled(installed)
    quickstart(installed)
    return installed


def quickstart(installed: Installed) -> None:
    """Run the README's samples: make a model, serve it, rank; then rank in Python.

    What has to be compiled is compiled before: on a busy machine that may take longer than `curl` tries.
    """
    assert installed.run("helmrec", "compile", timeout_s=600).returncode == 0
    serve, python = [block.text for block in blocks("README.md") if not block.mark]
    script = f"set -e\n{serve.replace('8000', str(free_port()))}\nwait\n"
    served = installed.run("bash", "-c", script)
    assert served.returncode == 0, served.stderr
    assert '"scores":[[' in served.stdout
    ranked = installed.run("python", "-c", python)
    assert ranked.stdout.splitlines()[-1] == "4", ranked.stderr


def test_the_package_in_use_is_the_installed_one_and_no_extra_is_there(installed: Installed) -> None:
    looks = "import helmrec, importlib.util as u; print(helmrec.__file__)\nprint([n for n in %r if u.find_spec(n)])"
    extras = ["pyarrow", "matplotlib", "ray", "redis", "grpc", "scipy", "gymnasium", "tritonclient", "pytest"]
    file, found = installed.run("python", "-c", looks % extras).stdout.splitlines()
    assert Path(file).is_relative_to(installed.bin.parent)
    assert found == "[]"


def test_every_command_shows_its_help(installed: Installed) -> None:
    lines = installed.run("python", "-c", HELP).stdout.splitlines()
    assert len(lines) > 10
    assert [line for line in lines if not line.endswith(" 0 None")] == []


def test_requests_of_a_file_are_ranked(installed: Installed) -> None:
    (sample,) = [each.text for each in blocks("docs/quickstart.md") if "helmrec rank" in each.text]
    done = installed.run("bash", "-c", f"set -e\n{sample}")
    assert done.returncode == 0, done.stderr
    lines = (installed.folder / "scores.jsonl").read_text().splitlines()
    assert ['"scores"' in line for line in lines] == [True, True]


def test_loads_are_planned_and_scenarios_are_simulated(installed: Installed) -> None:
    planned = installed.run("helmrec", "plan", "--rate", "500")
    assert planned.returncode == 0, planned.stderr
    assert "total memory" in planned.stdout
    simulated = installed.run("helmrec", "simulate", "main-trend", "--policy", "static:0.5")
    assert simulated.returncode == 0, simulated.stderr
    assert "static:0.5" in simulated.stdout


def test_the_short_demo_runs_and_writes_its_report(installed: Installed) -> None:
    shown = installed.run("helmrec", "demo", "--quick")
    assert shown.returncode == 0, shown.stderr
    assert "On this machine" in shown.stdout
    assert "<html" in (installed.folder / "helmrec-demo.html").read_text()


def test_a_missing_extra_is_named(installed: Installed) -> None:
    for name in ("log.parquet", "histories.parquet"):
        (installed.folder / name).write_bytes(b"PAR1")
    done = installed.run("python", "-c", RUNS_ALL, json.dumps(list(MISSING)))
    shown = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"command"')]
    named = {each["command"]: re.findall(r"pip install 'helmrec\[(\w+)\]'", each["output"]) for each in shown}
    assert named == {command: [extra] for command, extra in MISSING.items()}, done.stderr
    assert {each["status"] for each in shown} == {2}


@pytest.mark.slow
def test_everything_compiles_in_a_fresh_installation(tmp_path: Path) -> None:
    fresh = install_wheel(tmp_path)
    quickstart(fresh)
    for command in ("plan --rate 500", "simulate main-trend --policy static:0.5", "demo --quick --out demo.html"):
        done = fresh.run("helmrec", *command.split(), timeout_s=600)
        assert done.returncode == 0, done.stderr
    assert "<html" in (fresh.folder / "demo.html").read_text()
    (index, *_) = fresh.bin.parent.glob("lib/python*/site-packages/helmrec/memory/**/*.nbi")
    version = index.read_bytes().partition(b"\x94.")[0] + b"\x94."
    index.write_bytes(version + b"chelmrec.gone\nThing\n.")  # as an older version of the package may leave it
    assert fresh.run("helmrec", "plan", "--rate", "500").returncode == 0
