"""How rows become tokens, compiled on a card, against the twins in float64."""

import pytest
import torch

if not torch.cuda.is_available():
    # Before the imports: elsewhere Triton must first be imported by the tests that interpret it.
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.kernels.embed_cases import BOUNDS, check_gate, check_pool, check_sum

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("num", "width"), [(1, 64), (1_000, 512), (333, 200)])
def test_every_pass_matches_its_twin(num: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for features in ([2], [3, 1, 4]):
        check_pool(features, num, width, dtype, "cuda")
    check_gate(num, width, dtype, "cuda")
    for num_encoders in (1, 2):
        check_sum(num_encoders, num, width, dtype, "cuda")
