"""The portable kernel fits a Hopper card in every form; a launch that does not fit fails only on the card."""

import os
import subprocess
import sys

import pytest

SHARED_BYTES = 232_448  # that a program may have on an H100 or H200


@pytest.mark.slow  # the compiler takes up to a minute each
@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("option", ["bias", "window"])
def test_shared_memory_of_half_types_fits_a_hopper_card(option: str, dim: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compiled_sizes", option, str(dim)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 0 < int(done.stdout) <= SHARED_BYTES
