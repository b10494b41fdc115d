"""Decoding, checking and converting a delta leaves the interpreter to the thread that steps the engine."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from helmrec.deltas.checks import check_delta, compile_checks
from helmrec.deltas.delta import Delta, TablePart, decode
from helmrec.deltas.folder import DeltaFolder
from helmrec.engine.row_values import new_values, pinned_block
from helmrec.memory.row_master import RowMaster
from helmrec.model.config import TableConfig
from tests.helpers import tiny_model

NUM_ROWS, ROW_DIM, TRIES = 20_000, 512, 300


@pytest.fixture
def stages(tmp_path: Path) -> dict[str, Callable[[], object]]:
    """What the reading thread does with a delta of 20 MB once it is in memory, part by part."""
    tables = (TableConfig(name="item", num_rows=NUM_ROWS), TableConfig(name="category", num_rows=20))
    config = tiny_model(features=tables, row_dim=ROW_DIM, row_dtype="float16").config
    ids, values = np.random.default_rng(0).permutation(NUM_ROWS), np.ones((NUM_ROWS, ROW_DIM), np.float16)
    folder = DeltaFolder(tmp_path / "deltas", is_made=True)
    folder.write(Delta("s", 1, 0, 0.0, (TablePart("item", ids, values),)))
    compile_checks()
    data = folder._bytes_of(1)
    assert data is not None
    delta = decode(data, "a delta")
    master = RowMaster({"item": torch.zeros((NUM_ROWS, ROW_DIM), dtype=torch.float16)})
    update = check_delta(config, delta)
    return {
        "decode": lambda: decode(data, "a delta"),
        "check": lambda: check_delta(config, delta),
        "convert and copy": lambda: pinned_block(update.rows, new_values(master, update)),
    }


class Other:
    """Another thread, which notes when it has the interpreter."""

    def __init__(self) -> None:
        self._noted_s: list[float] = []
        self._is_over = False
        self._thread = threading.Thread(target=self._note)
        self._thread.start()

    def _note(self) -> None:
        while not self._is_over:
            self._noted_s.append(time.perf_counter())
            time.sleep(0)

    def is_left_by(self, work: Callable[[], object]) -> bool:
        """Whether this thread gets the interpreter while `work` runs: it never waits for half of that time.

        Once in many tries is enough: a busy machine may not run this thread although the interpreter is free.
        """
        work()
        return any(self._longest_share(work) < 0.5 for _ in range(TRIES))

    def _longest_share(self, work: Callable[[], object]) -> float:
        """Return the longest time without the interpreter, as a share of the time of `work`."""
        time.sleep(0.001)
        first, started_s = len(self._noted_s), time.perf_counter()
        work()
        ended_s = time.perf_counter()
        noted = [started_s, *(each for each in self._noted_s[first:] if started_s < each < ended_s), ended_s]
        return float(np.diff(noted).max() / (ended_s - started_s))

    def close(self) -> None:
        self._is_over = True
        self._thread.join()


@pytest.fixture
def other() -> Iterator[Other]:
    """No thread is made to give the interpreter away meanwhile: another one gets it only from who leaves it."""
    before, made = sys.getswitchinterval(), Other()
    sys.setswitchinterval(50.0)
    yield made
    sys.setswitchinterval(before)
    made.close()


def test_no_part_of_the_work_on_a_delta_keeps_the_interpreter(
    stages: dict[str, Callable[[], object]], other: Other
) -> None:
    assert [name for name, work in stages.items() if not other.is_left_by(work)] == []


def test_python_code_does_keep_it(other: Other) -> None:
    assert not other.is_left_by(lambda: [None for _ in range(100_000)])
