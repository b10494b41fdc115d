"""Where a figure comes from: command, commit, hardware, versions."""

import hashlib
import os
import platform
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch

_PACKAGE = Path(__file__).parents[1]
_DECIDING = ("bench", "control", "memory", "model", "relay", "router", "sim")  # parts of the package
_DECIDING_HERE = ("entrants", "relaying", "routing", "runs", "tiers")  # modules of this one


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


@cache
def code_digest() -> str:
    """Of all code that decides what a simulated run gives: results of other code are not its results."""
    paths = [path for part in _DECIDING for path in (_PACKAGE / part).rglob("*.py")]
    paths += [Path(__file__).with_name(f"{name}.py") for name in _DECIDING_HERE]
    return digest_of_files(sorted(paths))


def digest_of_files(paths: Iterable[Path]) -> str:
    told = hashlib.sha256()
    for path in paths:
        told.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return told.hexdigest()[:12]


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
