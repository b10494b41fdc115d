"""Where a figure comes from: command, commit, hardware, versions."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


def provenance() -> dict[str, Any]:
    cpu = next(
        (line.split(":")[1].strip() for line in _cpu_info() if line.startswith("model name")), platform.machine()
    )
    hardware: dict[str, Any] = {"cpu": cpu, "cores": os.cpu_count(), "torch_threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        hardware["gpu"] = torch.cuda.get_device_name()
    return {
        "command": f"python -m scripts.{Path(sys.argv[0]).stem} {' '.join(sys.argv[1:])}".strip(),
        "commit": _commit(),
        "hardware": hardware,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


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


def write_measurement(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**provenance(), **results}, indent=2) + "\n")
    print(f"wrote {path}")
