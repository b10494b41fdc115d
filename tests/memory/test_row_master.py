import gc
from pathlib import Path

import numpy as np
import pytest
import torch

from helmrec.errors import ConfigError, ModelError
from helmrec.memory import row_master
from helmrec.memory.row_master import LockedBuffer, RowMaster
from helmrec.model.folder import table_file
from helmrec.model.weights import init_model, load_model
from tests.helpers import tiny_config


def make_master() -> RowMaster:
    return RowMaster({"a": torch.arange(6.0).view(3, 2), "b": torch.arange(100.0, 104.0).view(2, 2)})


def test_rows_of_all_tables_share_one_id_space() -> None:
    master = make_master()
    assert (master.codec.dim, master.num_bytes) == (2, 40)
    assert master.gather(np.array([4, 0, 3, 2])).tolist() == [[102, 103], [0, 1], [100, 101], [4, 5]]


def test_the_same_row_may_be_asked_for_twice() -> None:
    assert make_master().gather(np.array([1, 1])).tolist() == [[2, 3], [2, 3]]


def test_no_rows_are_an_empty_answer() -> None:
    assert make_master().gather(np.empty(0, np.int64)).shape == (0, 2)


def test_an_update_changes_its_rows_in_every_table_and_no_other() -> None:
    master = make_master()
    master.update(np.array([3, 1]), torch.tensor([[7.0, 8.0], [9.0, 10.0]]))
    assert master.gather(np.arange(5)).tolist() == [[0, 1], [9, 10], [4, 5], [7, 8], [102, 103]]


def test_an_update_never_reaches_the_file_of_a_memory_mapped_table(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    init_model(folder, tiny_config())
    path = folder / table_file("item")
    before = path.read_bytes()
    model = load_model(folder)
    master = RowMaster(model.tables)
    original = master.gather(np.array([5]))
    master.update(np.array([5]), torch.full((1, model.config.row_dim), 42.0))
    assert (master.gather(np.array([5])) == 42).all()
    assert path.read_bytes() == before
    assert torch.equal(RowMaster(load_model(folder).tables).gather(np.array([5])), original)


class FakeRuntime:
    """A CUDA runtime that remembers what is locked, and answers with `error`."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert flags == 2, "kernels must see the memory"
        if not self.error:
            self.locked[address] = num_bytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()
    monkeypatch.setattr(row_master, "_cuda_runtime", lambda: fake)
    return fake


def odd_tables() -> dict[str, torch.Tensor]:
    """Rows of 22 bytes, which a card would rather have at a stride of 32."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn((num, 11), generator=generator).half() for name, num in (("a", 300), ("b", 7))}


def test_a_locked_master_answers_as_a_plain_one(runtime: FakeRuntime) -> None:
    plain, locked = RowMaster(odd_tables()), RowMaster.locked(odd_tables())
    rows = np.array([306, 0, 299, 300, 5, 5])
    assert (locked.codec, locked.num_bytes) == (plain.codec, plain.num_bytes)
    assert torch.equal(locked.gather(rows), plain.gather(rows))


def test_a_locked_master_is_one_buffer_of_aligned_rows(runtime: FakeRuntime) -> None:
    master = RowMaster.locked(odd_tables())
    assert master.rows.shape == (307, 11)
    assert master.rows.stride(0) * 2 == 32
    assert master.rows.data_ptr() % (2 << 20) == 0, "huge pages start at multiples of their size"
    assert runtime.locked == {master.rows.data_ptr(): 307 * 32}
    assert torch.equal(master.rows, torch.cat(list(odd_tables().values())))


def test_an_update_of_a_locked_master_is_seen_in_the_buffer_and_not_in_the_tables(runtime: FakeRuntime) -> None:
    tables = odd_tables()
    master = RowMaster.locked(tables)
    master.update(np.array([301, 2]), torch.tensor([[7.0] * 11, [9.0] * 11]).half())
    assert (master.rows[301] == 7).all()
    assert (master.rows[2] == 9).all()
    assert torch.equal(master.gather(np.array([2])), master.rows[2:3])
    assert torch.equal(tables["a"], odd_tables()["a"])


def test_loading_tells_how_far_it_is(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_master, "_CHUNK_BYTES", 22 * 128)
    seen: list[tuple[int, int]] = []
    RowMaster.locked(odd_tables(), lambda done, total: seen.append((done, total)))
    assert [done // 22 for done, _ in seen] == [128, 256, 300, 307]
    assert {total for _, total in seen} == {307 * 22}


def test_closing_unlocks_once_and_keeps_the_rows_readable(runtime: FakeRuntime) -> None:
    master = RowMaster.locked(odd_tables())
    rows = master.gather(np.arange(307))
    master.close()
    master.close()
    assert not runtime.locked
    assert torch.equal(master.gather(np.arange(307)), rows)


def test_a_forgotten_master_is_unlocked_too(runtime: FakeRuntime) -> None:
    rows = RowMaster.locked(odd_tables()).rows
    gc.collect()
    assert not runtime.locked
    assert torch.equal(rows, torch.cat(list(odd_tables().values()))), "memory lives as long as its last view"


def test_closing_a_plain_master_does_nothing() -> None:
    master = make_master()
    master.close()
    assert master.gather(np.array([0])).tolist() == [[0, 1]]


def test_memory_that_cannot_be_locked_is_named(runtime: FakeRuntime) -> None:
    runtime.error = 2
    with pytest.raises(ConfigError, match=r"9824 bytes cannot be locked .*CUDA error 2.*ulimit -l"):
        RowMaster.locked(odd_tables())


def test_memory_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match=f"no room in host memory for {1 << 60} bytes"):
        LockedBuffer(1 << 60)


def test_more_rows_than_a_card_can_name_are_refused(runtime: FakeRuntime) -> None:
    with pytest.raises(ConfigError, match="at most 2147483647 rows"):
        RowMaster.locked({"a": torch.empty((1, 2)).expand(1 << 31, 2)})


@pytest.mark.parametrize("row", [0, 1, 4, 5])
def test_a_table_that_is_not_finite_is_not_copied_for_a_card(monkeypatch: pytest.MonkeyPatch, row: int) -> None:
    monkeypatch.setattr(row_master, "_CHUNK_BYTES", 16)  # two rows at a time
    table = torch.zeros(6, 2)
    table[row, 1] = torch.nan
    with pytest.raises(ModelError, match=f"table 'b': row {row} holds values that are not finite"):
        RowMaster.copied({"a": torch.ones(3, 2), "b": table})
