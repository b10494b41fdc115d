"""The dense halves of a layer against their twins, in Triton's interpreter."""

import os

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("with a GPU, tests/gpu runs the same kernels compiled", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when Triton and each kernel is imported, so before that
pytest.importorskip("triton", reason="Triton is not installed here")

from helmrec.kernels import layer, triton_layer
from helmrec.kernels.layer import Form, LayerWeights
from tests.kernels.ragged_cases import cast, relative_error

HEADS, QK, V, DIM, TOKENS = 2, 8, 24, 40, 37
BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def random_weights(form: Form, dtype: torch.dtype, *, has_bias: bool = False) -> LayerWeights:
    def noise(*shape: int) -> torch.Tensor:
        return (0.3 * torch.randn(shape)).to(dtype)

    width, projected = HEADS * V, HEADS * 2 * (V + QK)
    return LayerWeights(
        uvqk_weight=noise(DIM, projected),
        uvqk_beta=noise(projected),
        input_norm_weight=1 + noise(DIM),
        input_norm_bias=noise(DIM),
        output_weight=noise(width * (3 if form == "concat" else 1), DIM),
        output_norm_weight=1 + noise(width),
        output_norm_bias=noise(width),
        output_bias=noise(DIM) if has_bias else None,
    )


def in_float64(weights: LayerWeights) -> LayerWeights:
    return cast(weights, torch.float64)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("form", ["gated", "concat"])
def test_projection_matches_the_twin_but_for_the_activation_of_u(form: Form, dtype: torch.dtype) -> None:
    weights = random_weights(form, dtype)
    x = torch.randn(TOKENS, DIM).to(dtype)
    ours = triton_layer.project(x, weights, form, HEADS)
    twin = layer.project(x.double(), in_float64(weights), form, HEADS)
    assert relative_error(torch.nn.functional.silu(ours.u.double()), twin.u) < BOUNDS[dtype]
    for name in ("v", "q", "k"):
        assert relative_error(getattr(ours, name), getattr(twin, name)) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("form", ["gated", "concat"])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_gate_and_output_match_the_twin(form: Form, dtype: torch.dtype, joined: bool, has_bias: bool) -> None:
    if joined and form == "gated":
        pytest.skip("the gated form joins nothing")
    weights = random_weights(form, dtype, has_bias=has_bias)
    x, o, u = (torch.randn(TOKENS, width).to(dtype) for width in (DIM, HEADS * V, HEADS * V))
    twin_u = torch.nn.functional.silu(u.double())
    twin = layer.gate_output(x.double(), twin_u, o.double(), in_float64(weights), form)
    buffer = None
    if joined:
        buffer = triton_layer.joined_buffer(x, weights)
        buffer[:, HEADS * V : 2 * HEADS * V] = o
        o = buffer[:, HEADS * V : 2 * HEADS * V]
    out = triton_layer.gate_output(x, u, o, weights, form, buffer)
    assert out.data_ptr() == x.data_ptr()
    assert relative_error(out, twin) < BOUNDS[dtype]
