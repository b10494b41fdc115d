"""Where a figure comes from: command, commit, hardware, versions."""

import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch

import helmrec
from helmrec.cli.console import err

_PRODUCT, _BENCH = Path(helmrec.__file__).parent, Path(__file__).parents[1]
_DECIDING = ("control", "engine/relay", "memory", "model", "router", "sim", "traffic")  # parts of the product
_DECIDING_HERE = (  # parts of the evaluation
    *("baselines", "judging", "map", "cascade.py", "lab/policies.py", "lab/runs.py", "lab/tiers.py"),
    "experiments/routing.py",
)

_COMMANDS = {"helmrec.__main__": ["helmrec"], "helmrec_bench.__main__": ["helmrec", "bench"]}


def provenance(command: str) -> dict[str, Any]:
    cpu = next(
        (line.split(":")[1].strip() for line in _cpu_info() if line.startswith("model name")), platform.machine()
    )
    hardware: dict[str, Any] = {"cpu": cpu, "cores": os.cpu_count(), "torch_threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        hardware["gpu"] = torch.cuda.get_device_name()
    return {
        "command": command,
        "commit": _commit(),
        "hardware": hardware,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def write_measurement(path: Path, results: dict[str, Any]) -> None:
    """Write results as JSON, with the command, commit, hardware and versions they come from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**provenance(this_command()), **results}, indent=2) + "\n")
    err.print(f"wrote {path}", highlight=False, soft_wrap=True)


def this_command() -> str:
    """The command line of this process, as a reader would type it."""
    program, spec = Path(sys.argv[0]), sys.modules["__main__"].__spec__
    if program.name == "helmrec":
        start = ["helmrec"]
    elif spec is None:
        start = ["python", str(program)]
    else:
        start = _COMMANDS.get(spec.name) or ["python", "-m", spec.name]
    return shlex.join([*start, *sys.argv[1:]])


@cache
def code_digest() -> str:
    """Of all code that decides what a simulated run gives: results of other code are not its results."""
    parts = [_PRODUCT / part for part in _DECIDING] + [_BENCH / part for part in _DECIDING_HERE]
    paths = [path for part in parts for path in ([part] if part.is_file() else part.rglob("*.py"))]
    return digest_of_files(sorted(paths))


def digest_of_files(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _cpu_info() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def _commit() -> str:
    """Named by the environment where the tree is a copy without its history."""
    if named := os.environ.get("HELMREC_COMMIT"):
        return named
    try:
        done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
