"""A whole layer through the fused kernels against its plain twin, values scaled by sequence, in the interpreter."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("with a GPU, tests/gpu runs the same kernels compiled", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when Triton and each kernel is imported, so before that
pytest.importorskip("triton", reason="Triton is not installed here")

from helmrec.kernels import fused, plain
from helmrec.kernels.layer import LayerShape, LayerWeights
from tests.kernels.ragged_cases import Lengths, cast, layout

HEADS, DIM_HEAD, DIM, PAGE = 2, 16, 32, 16
LENGTHS = [Lengths(0, 20, 3), Lengths(0, 5, 2), Lengths(0, 0, 4)]


def noise(*shape: int) -> torch.Tensor:
    return 0.3 * torch.randn(shape)


@pytest.mark.parametrize("is_scaled", [False, True])
def test_a_layer_with_values_scaled_by_sequence_matches_the_twin(is_scaled: bool) -> None:
    torch.manual_seed(0)
    width = HEADS * DIM_HEAD
    weights = LayerWeights(
        noise(DIM, 4 * width),
        noise(4 * width),
        1 + noise(DIM),
        noise(DIM),
        noise(3 * width, DIM),
        1 + noise(width),
        noise(width),
        noise(DIM),
    )
    batch = layout(LENGTHS, PAGE, 0, 0, np.random.default_rng(0))
    scale = torch.repeat_interleave(torch.tensor([1 / 23, 1 / 7, 1 / 4]), batch.cu_tokens.diff())[:, None, None]
    x = torch.randn(int(batch.cu_tokens[-1]), DIM)
    shape = LayerShape("concat", HEADS, DIM_HEAD**-0.5, 1.0 if is_scaled else 16.0)
    outs, pages_after = [], []
    for run_layer, dtype in ((fused.run_layer, torch.float32), (plain.run_layer, torch.float64)):
        pages = [torch.zeros(8, PAGE, HEADS, DIM_HEAD, dtype=dtype) for _ in range(2)]
        scaled = replace(batch, v_scale=scale.to(dtype) if is_scaled else None)
        outs.append(run_layer(x.to(dtype).clone(), cast(weights, dtype), shape, pages[0], pages[1], scaled))
        pages_after.append(pages[1])
    assert float((outs[0] - outs[1]).abs().max()) < 1e-4
    assert float((pages_after[0] - pages_after[1]).abs().max()) < 1e-5, "values are kept as they are scaled"
