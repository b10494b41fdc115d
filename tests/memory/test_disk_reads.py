"""Rows read from files in blocks, against the file's bytes; faults are answers, never wrong rows."""

import threading
from pathlib import Path

import numpy as np
import pytest

from helmrec.errors import ConfigError
from helmrec.memory.disk_reads import BLOCK, DiskReads, FileReader, ReadEnd, plan_reads

ROW_BYTES = 48
NUM_ROWS = 1_000


@pytest.fixture(name="files")
def _files(tmp_path: Path) -> list[tuple[Path, int]]:
    """Files with rows that begin somewhere, and end where no block does."""
    rng, found = np.random.default_rng(0), []
    for number, start in enumerate((88, BLOCK)):
        path = tmp_path / str(number)
        path.write_bytes(bytes(start) + rng.bytes(NUM_ROWS * ROW_BYTES))
        found.append((path, start))
    return found


def read(disk: DiskReads, numbers: np.ndarray, offsets: np.ndarray, memory: np.ndarray) -> ReadEnd:
    ended, found = threading.Event(), list[ReadEnd]()

    def on_end(end: ReadEnd) -> None:
        found.append(end)
        ended.set()

    disk.start(numbers, offsets, np.arange(numbers.size), memory, on_end)
    assert ended.wait(10)
    return found[0]


@pytest.mark.parametrize("mode", ["direct", "cached"])
@pytest.mark.parametrize("num", [1, 7, 600])
def test_rows_are_those_of_the_files(files: list[tuple[Path, int]], mode: str, num: int) -> None:
    rng = np.random.default_rng(num)
    disk = DiskReads(FileReader(mode), ROW_BYTES, num_threads=3)  # type: ignore[arg-type]
    numbers = np.array([disk.add(path) for path, _ in files])[rng.integers(0, 2, num)]
    rows = rng.integers(0, NUM_ROWS, num)
    rows[0] = NUM_ROWS - 1  # in the block that the file does not fill
    offsets = np.array([files[i][1] for i in numbers]) + rows * ROW_BYTES
    memory = np.zeros((num, 64), np.uint8)
    end = read(disk, numbers, offsets, memory)
    disk.close()
    assert end.is_read.all()
    assert end.problem is None
    for i in range(num):
        data = files[numbers[i]][0].read_bytes()
        assert memory[i, :ROW_BYTES].tobytes() == data[offsets[i] : offsets[i] + ROW_BYTES]


def test_neighbouring_rows_are_read_together() -> None:
    offsets = np.array([5 * BLOCK, 100, 0, BLOCK + 3, BLOCK - 10])
    plan = plan_reads(np.zeros(5, np.int64), offsets, ROW_BYTES)
    assert plan.runs.offsets.tolist() == [0, 5 * BLOCK]
    assert plan.runs.lengths.tolist() == [2 * BLOCK, BLOCK]
    assert (plan.runs.offsets[plan.run_of] + plan.at == offsets[plan.order]).all()
    assert plan_reads(np.array([0, 1]), np.zeros(2, np.int64), ROW_BYTES).runs.files.tolist() == [0, 1]


def test_a_row_past_the_end_of_its_file_is_not_read_and_others_are(files: list[tuple[Path, int]]) -> None:
    disk = DiskReads(FileReader("direct"), ROW_BYTES, num_threads=2)
    disk.add(files[0][0])
    offsets = np.array([88, 88 + (NUM_ROWS + 200) * ROW_BYTES])
    end = read(disk, np.zeros(2, np.int64), offsets, np.zeros((2, 64), np.uint8))
    disk.close()
    assert end.is_read.tolist() == [True, False]
    assert end.problem is not None
    assert str(files[0][0]) in end.problem


def test_an_error_of_the_system_is_named(files: list[tuple[Path, int]]) -> None:
    reader = FileReader("cached")
    disk = DiskReads(reader, ROW_BYTES, num_threads=2)
    disk.add(files[0][0])
    broken = DiskReads(reader, ROW_BYTES, num_threads=1)
    broken._names = disk._names
    reader._descriptors[:] = -1
    end = read(broken, np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros((1, 64), np.uint8))
    reader._descriptors = reader._descriptors[:0]
    assert not end.is_read.any()
    assert end.problem is not None
    assert end.problem.endswith("Bad file descriptor")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere cannot be read"):
        FileReader("direct").add(tmp_path / "nowhere")
