from pathlib import Path

import numpy as np
import torch

from helmrec.memory.host_tier import RowMaster
from helmrec.model.weights import init_model, load_model, table_file
from tests.helpers import tiny_config


def make_master() -> RowMaster:
    return RowMaster({"a": torch.arange(6.0).view(3, 2), "b": torch.arange(100.0, 104.0).view(2, 2)})


def test_rows_of_all_tables_share_one_id_space() -> None:
    master = make_master()
    assert (master.num_rows, master.row_dim, master.num_bytes) == (5, 2, 40)
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
