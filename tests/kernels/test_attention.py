"""The plain attention against outputs of Meta's own code (see tests/data/window-golden.json)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helmrec.kernels.attention import attend
from helmrec.kernels.ragged import RaggedBatch
from helmrec.types import AttentionWindow

GOLDEN = json.loads((Path(__file__).parent.parent / "data" / "window-golden.json").read_text())["cases"]


@pytest.mark.parametrize("case", GOLDEN, ids=[f"{case['window']}-{case['tail']}" for case in GOLDEN])
@pytest.mark.parametrize("num_resident", [0, 4])
def test_local_attention_with_a_tail_is_metas(case: dict[str, Any], num_resident: int) -> None:
    """All tokens at once, and with the first of them in pages."""
    num, candidates, tail = case["num_tokens"], case["num_candidates"], case["tail"]
    generator = torch.Generator().manual_seed(num)
    q, k, v = (torch.randn(num, 2, dim, generator=generator).double() for dim in (6, 6, 3))
    pages = [torch.zeros(1, 8, *each.shape[1:], dtype=torch.float64) for each in (k, v)]
    for page, values in zip(pages, (k, v), strict=True):
        page[0, :num_resident] = values[:num_resident]
    lengths = torch.tensor([num_resident], dtype=torch.int32), torch.tensor([num - candidates - num_resident])
    batch = RaggedBatch(
        cu_tokens=torch.tensor([0, num - num_resident]),
        num_resident=lengths[0],
        num_new=lengths[1],
        page_table=torch.zeros((1, 1), dtype=torch.int32),
        write_slots=torch.full((num - num_resident,), -1),
        num_context=0,
        page_tokens=8,
        window=AttentionWindow(case["window"], tail),
        num_full=torch.tensor([tail]) if tail else None,
    )
    q, k, v = (each[num_resident:] for each in (q, k, v))
    out = attend(q, k, v, pages[0], pages[1], batch, scale=0.4, normaliser=float(num))
    expected = torch.tensor(case["out"], dtype=torch.float64).reshape(num, 2, 3)
    assert float((out - expected[num_resident:]).abs().max()) <= 1e-8
