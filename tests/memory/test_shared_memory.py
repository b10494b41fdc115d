"""Shared memory without a name: seen by whoever maps it, and gone with its last user."""

import errno
import os
from pathlib import Path

import pytest

from helmrec.errors import ConfigError
from helmrec.memory.shared_memory import create_shared, interleave, map_shared, memory_nodes


def test_two_mappings_are_one_memory_and_the_descriptor_is_not_needed() -> None:
    descriptor = create_shared("test", 10_000)
    first, second = map_shared(descriptor), map_shared(descriptor)
    os.close(descriptor)
    first[9_999] = 7
    assert second[9_999] == 7
    assert len(second) == 10_000


def test_it_has_no_name_in_any_folder() -> None:
    before = set(Path("/dev/shm").iterdir())
    descriptor = create_shared("test", 4_096)
    memory = map_shared(descriptor)
    assert set(Path("/dev/shm").iterdir()) == before
    assert "memfd:helmrec-test (deleted)" in Path("/proc/self/maps").read_text()
    os.close(descriptor)
    memory.close()
    assert "memfd:helmrec-test" not in Path("/proc/self/maps").read_text()


def test_pages_are_taken_when_used() -> None:
    descriptor = create_shared("test", 1 << 40)
    assert os.fstat(descriptor).st_blocks == 0
    os.close(descriptor)


def num_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_memory_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    num_before = num_open()
    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(ConfigError, match="no room in host memory for 5000 bytes of test"):
        create_shared("test", 5_000)
    assert num_open() == num_before


@pytest.mark.parametrize(
    ("text", "nodes"), [("0\n", [0]), ("0-1\n", [0, 1]), ("0,2-4,7\n", [0, 2, 3, 4, 7]), ("", [0])]
)
def test_nodes_with_memory_are_listed(tmp_path: Path, text: str, nodes: list[int]) -> None:
    (tmp_path / "nodes").write_text(text)
    assert memory_nodes(tmp_path / "nodes") == nodes
    assert memory_nodes(tmp_path / "absent") == [0]


def test_every_mapping_of_interleaved_memory_is_interleaved(caplog: pytest.LogCaptureFixture) -> None:
    descriptor = create_shared("spread", 1 << 20)
    first = map_shared(descriptor)
    if not interleave(first, [0]):
        pytest.skip("the system does not allow it")
    second = map_shared(descriptor)
    os.close(descriptor)
    second[0] = 1
    maps = [line for line in Path("/proc/self/numa_maps").read_text().splitlines() if "helmrec-spread" in line]
    assert len(maps) == 2
    assert all("interleave" in line for line in maps)
    assert not interleave(first, [1_000]), "there is no such node"
    assert "not spread over NUMA nodes [1000]: Invalid argument" in caplog.text
