"""How rows become tokens: the compiled passes against their twins, in Triton's interpreter."""

import os

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("with a GPU, tests/gpu runs the same kernels compiled", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when Triton and each kernel is imported, so before that
pytest.importorskip("triton", reason="Triton is not installed here")

from tests.kernels.embed_cases import BOUNDS, check_gate, check_pool, check_sum


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("features", [[0], [3, 1], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("width", [16, 40])
def test_pooled_rows_match_the_twin(features: list[int], width: int, dtype: torch.dtype) -> None:
    check_pool(features, 37, width, dtype, "cpu")


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("width", [16, 40])
def test_the_gate_matches_the_twin(width: int, dtype: torch.dtype) -> None:
    check_gate(37, width, dtype, "cpu")


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("num_encoders", [1, 2, 3])
def test_tokens_match_the_twin_and_no_other_row_is_touched(num_encoders: int, dtype: torch.dtype) -> None:
    check_sum(num_encoders, 37, 40, dtype, "cpu")
