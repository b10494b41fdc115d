"""A process that serves takes memory from the system once, not for every request."""

import os
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import numpy as np
from helmrec.serve.allocator import keep_freed_memory
if "keep" in sys.argv:
    assert keep_freed_memory()
def use():
    return [np.ones(60_000) for _ in range(8)]
for _ in range(5):
    use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    use()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 50)
"""


def faults(*arguments: str) -> float:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", FAULTS, *arguments]
    return float(subprocess.run(command, env=plain, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc")
def test_freed_memory_is_used_again_without_page_faults() -> None:
    assert faults() > 500, "without it, blocks are given back"
    assert faults("keep") < 20
