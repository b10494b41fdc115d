"""What an engine is made of, where a mistake in the numbers would not show on a CPU."""

from pathlib import Path

import numpy as np
import pytest
import torch

from helmrec.config import EngineConfig
from helmrec.engine.setup import without_row_index
from helmrec.errors import ConfigError, PoolTooSmall
from helmrec.kernels import row_table
from helmrec.kernels.row_index import IndexForm
from helmrec.kernels.row_table import Admission, RowTable
from helmrec.model.weights import load_model, save_model
from tests.helpers import random_request, tiny_config, tiny_engine, tiny_geometry, tiny_model

GEOMETRY = tiny_geometry(tiny_config())


@pytest.mark.parametrize("admission", Admission)
@pytest.mark.parametrize(("num_rows", "num_slots"), [(1, 0), (300, 64), (5_000, 70_000), (70_000_000, 1_000)])
def test_an_index_takes_the_bytes_it_says(num_rows: int, num_slots: int, admission: Admission) -> None:
    table = RowTable.allocate(num_rows, num_slots, torch.device("cpu"), admission)
    assert RowTable.bytes_for(num_rows, num_slots, admission) == table.num_bytes


def test_an_index_on_the_card_is_paid_for_by_the_pool() -> None:
    config = EngineConfig(pool_bytes="64MiB", device="cuda")
    paged = without_row_index(config, GEOMETRY, num_rows=1_000_000)
    num_slots = paged.sized_pool_bytes // GEOMETRY.row_stride
    assert (
        paged.sized_pool_bytes + RowTable.bytes_for(1_000_000, num_slots, Admission.SECOND_TOUCH)
        <= config.sized_pool_bytes
    )
    assert paged.sized_pool_bytes > 0.6 * config.sized_pool_bytes


def test_an_index_on_the_host_is_not() -> None:
    for settings in ({"device": "cpu"}, {"device": "cuda", "row_index": "host"}):
        config = EngineConfig(pool_bytes="64MiB", **settings)
        assert without_row_index(config, GEOMETRY, 1_000_000) is config


def test_a_pool_smaller_than_its_index_is_refused_with_both_sizes() -> None:
    with pytest.raises(PoolTooSmall, match=r"more than \d+, the index of 1000000 rows, got 1048576"):
        without_row_index(EngineConfig(pool_bytes="1MiB", device="cuda"), GEOMETRY, 1_000_000)


def test_a_host_tier_larger_than_the_host_is_refused_before_its_index_is_made() -> None:
    with pytest.raises(ConfigError, match=f"no room in host memory for {1 << 60} bytes"):
        tiny_engine(host_kv_bytes=1 << 60)


def test_the_report_says_which_form_the_index_has_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny_engine(row_index="device") as engine:
        assert "on the host, dense: 0 MiB for 349 rows" in str(engine.report())
    monkeypatch.setattr(row_table, "index_form", lambda num_rows, num_slots: IndexForm.COMPACT)
    with tiny_engine(row_index="device") as engine:
        assert "compact: 0 MiB for the slots of the pool, where 349 rows would take 0" in str(engine.report())
    with tiny_engine(row_index="host") as engine:
        assert not engine.report().index_form


def test_an_index_of_a_billion_rows_takes_what_its_pool_needs() -> None:
    config = EngineConfig(pool_bytes="1GiB", device="cuda")
    paged = without_row_index(config, GEOMETRY, num_rows=10**9)
    assert paged.sized_pool_bytes > 0.49 * config.sized_pool_bytes, "a dense one would take four times the pool"


def test_one_buffer_is_read_from_the_files_of_a_model(tmp_path: Path) -> None:
    made, rng = tiny_model(), np.random.default_rng(0)
    requests = [random_request(rng, made.config, user) for user in range(4)]
    save_model(tmp_path / "model", made.config, made.dense, made.tables)
    expected = [result.scores for result in tiny_engine(made).rank(requests)]
    with tiny_engine(load_model(tmp_path / "model"), row_index="device") as engine:
        for result, wanted in zip(engine.rank(requests), expected, strict=True):
            np.testing.assert_allclose(result.scores, wanted, atol=1e-5)
        engine.update_rows("item", [1], np.ones((1, made.config.row_dim)))
    again = load_model(tmp_path / "model")
    for name, table in made.tables.items():
        torch.testing.assert_close(again.tables[name], table)
