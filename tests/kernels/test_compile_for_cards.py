"""Kernels compile for cards that are not here, and fit their shared memory."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED_BYTES = {90: 232_448, 80: 166_912}  # that a program may use: Hopper, Ampere


def compile_for_cards(argument: str) -> str:
    """In a process of its own: others interpret the kernels."""
    pytest.importorskip("triton", reason="Triton is not installed here")
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.compile_for_cards", argument]
    compiled = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=compiled, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-2_000:]
    return done.stdout


@pytest.mark.slow
def test_batches_of_all_sizes_share_one_compilation() -> None:
    """A serving process compiles before it is ready, so a size of its own for each batch would be a pause."""
    assert compile_for_cards("variants").splitlines()[-1] == "3 variants"  # attention, of codes too, and projection


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "products"), [(90, "wgmma"), (80, "mma.sync")])
def test_kernels_compile_for(capability: int, products: str) -> None:
    printed = compile_for_cards(str(capability))
    lines = [line for line in printed.splitlines() if "bytes" in line]
    portable = 2 + 2 + 2  # of each width: append and attention in three types
    for_hopper = 3 * 3 * 3  # bf16, fp8 and projection, of three widths and three page sizes
    assert len(lines) == (2 * portable + for_hopper if capability == 90 else portable), printed
    for line in lines:
        found = re.search(r": (\d+) bytes", line)
        assert found is not None
        assert int(found[1]) <= SHARED_BYTES[capability], line
        assert products in line or "append" in line, line
