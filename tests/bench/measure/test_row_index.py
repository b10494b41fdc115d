"""The measurement of the row index fills every form and looks rows up, on the CPU."""

import pytest
import torch

from helmrec.kernels.row_index import IndexForm
from helmrec_bench.measure.cards.row_index import IndexSize, measure


@pytest.mark.parametrize("form", IndexForm)
def test_an_index_is_filled_and_found_again(form: IndexForm) -> None:
    found = measure(IndexSize(1_000_000, 3_000), form, torch.device("cpu"), 256)
    assert 2_950 < found["resident"] <= 3_000
    assert max(found["refused_while_filling"], found["refused_while_full"]) < 0.005
    assert (found["refused_while_full"] > 0) == (form == IndexForm.COMPACT)
    assert found["index_bytes"] == (4 * 1_000_001 if form == IndexForm.DENSE else 64 * 751)
    assert found["ms_hits_80%"] > 0
