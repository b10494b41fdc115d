"""What an engine is made of, where a mistake in the numbers would not show on a CPU."""

import pytest
import torch

from helmrec.config import EngineConfig
from helmrec.engine.setup import without_row_index
from helmrec.errors import PoolTooSmall
from helmrec.kernels.row_table import Admission, RowTable
from tests.helpers import tiny_config, tiny_geometry

GEOMETRY = tiny_geometry(tiny_config())


@pytest.mark.parametrize("admission", Admission)
@pytest.mark.parametrize(("num_rows", "num_slots"), [(1, 0), (300, 64), (5_000, 70_000)])
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
