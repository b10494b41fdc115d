"""Measurements in a process of their own, so that one that hangs or breaks the card's context costs no other."""

import json
import subprocess
from collections.abc import Sequence
from typing import Any

_MARK = "found "  # begins a line that the other process reads


def tell(**found: Any) -> None:
    """Hand figures to the process that started this one."""
    print(_MARK + json.dumps(found), flush=True)


def run_apart(command: Sequence[str], limit_s: float) -> list[dict[str, Any]]:
    """What a command told, and last how it failed if it did."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=limit_s)
        output, failure = done.stdout, f"status {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired as stopped:
        told = stopped.stdout or b""
        output = told if isinstance(told, str) else told.decode()
        failure = f"stopped after {limit_s} s"
    found = [json.loads(line.removeprefix(_MARK)) for line in output.splitlines() if line.startswith(_MARK)]
    return [*found, {"failure": failure}] if failure else found
