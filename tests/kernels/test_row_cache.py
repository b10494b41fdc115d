"""The whole cache with its Triton kernels, in the interpreter: exact rows, sound books, both forms of the index."""

import os

import numpy as np
import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("with a GPU, tests/gpu runs the same kernels compiled", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when Triton and each kernel is imported, so before that
pytest.importorskip("triton", reason="Triton is not installed here")

from helmrec.kernels.row_index import IndexForm
from helmrec.kernels.row_kernels import row_kernels
from helmrec.kernels.row_table import RowTally
from helmrec.memory.device_rows import RowPolicy
from tests.memory.test_device_rows import PAGES, PER_PAGE, POLICIES, Driven, zipf_steps


@pytest.mark.parametrize("form", IndexForm)
@pytest.mark.parametrize("policy", POLICIES)
def test_random_reads_moves_and_refills_give_what_the_plain_kernels_give(
    policy: RowPolicy, form: IndexForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    plain, compiled = Driven(8, policy), Driven(8, policy, form)
    monkeypatch.setattr(compiled.rows, "_kernels", row_kernels("triton"))
    free, hits = list(range(8, PAGES)), np.zeros(2)
    for i, wanted in enumerate(zipf_steps(24, 60)):
        hits += plain.read(wanted), compiled.read(wanted)
        num = int(rng.integers(1, 4))
        if i % 4 == 1:
            pages = [free.pop() for _ in range(num)]
            for driven in (plain, compiled):
                driven.rows.add_pages(pages)
                driven.refill(20)
        elif i % 4 == 3 and num * PER_PAGE < plain.rows.capacity:
            plain.rows.give_up_pages(num)
            free += compiled.rows.give_up_pages(num)
        compiled.check()
    assert abs(hits[0] - hits[1]) < 0.01 * 24 * 60
    assert compiled.rows.table.tally[RowTally.REFILLED] > 0
