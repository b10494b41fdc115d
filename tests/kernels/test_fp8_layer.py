"""Layers with products of eight-bit floats against their plain twins, in the interpreter."""

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("with a GPU, tests/gpu runs the same kernels compiled", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when Triton and each kernel is imported, so before that
pytest.importorskip("triton", reason="Triton is not installed here")

from helmrec.kernels import attention, fused, plain, triton_fp8_layer
from helmrec.kernels.coded_tokens import encode_tokens
from helmrec.kernels.kv_rounding import ScaledPages, decode, empty_pages, query_lift, round_in_place
from helmrec.kernels.layer import Form, LayerShape, LayerWeights
from helmrec.kernels.triton_fp8_layer import CodedRows, multiply
from tests.kernels.coded_layer_cases import LayerCase
from tests.kernels.fp8_project_cases import own_values
from tests.kernels.ragged_cases import Heads, Lengths, coded, in_double, layout, random_case

HEADS, DIM_HEAD, DIM, PAGE = 2, 16, 32, 16
LENGTHS = [Lengths(0, 20, 3), Lengths(0, 5, 2), Lengths(0, 0, 4)]
FP8 = torch.float8_e4m3fn


def noise(*shape: int) -> torch.Tensor:
    return 0.3 * torch.randn(shape)


def weights_of(form: Form) -> LayerWeights:
    width = HEADS * DIM_HEAD
    return LayerWeights(
        noise(DIM, 4 * width),
        noise(4 * width),
        1 + noise(DIM),
        noise(DIM),
        noise((3 if form == "concat" else 1) * width, DIM),
        1 + noise(width),
        noise(width),
        noise(DIM),
    ).in_fp8()


@pytest.mark.parametrize("kv_dtype", [torch.float32, FP8])
@pytest.mark.parametrize("form", ["gated", "concat"])
def test_coded_layers_match_the_twin(form: Form, kv_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layers = [weights_of(form) for _ in range(2)]
    batch = layout(LENGTHS, PAGE, 0, 0, np.random.default_rng(0))
    x, shape = torch.randn(int(batch.cu_tokens[-1]), DIM), LayerShape(form, HEADS, DIM_HEAD**-0.5, 16.0)
    outs = []
    for run_layers in (fused.run_layers, plain.run_layers):
        pages = [empty_pages((2, 8, PAGE, HEADS, DIM_HEAD), kv_dtype, x.device) for _ in range(2)]
        outs.append(run_layers(x.clone(), layers, shape, pages[0], pages[1], batch))
    # A value at the edge between two codes may go to either side; a wrong scale would change everything.
    difference = (outs[0] - outs[1]).norm() / (outs[1] - x).norm()
    assert difference < 0.01


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize("form", ["gated", "concat"])
def test_layers_in_bfloat16_match_the_twin(form: Form, kv_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a card, with products of codes; attention alone is plain, as the interpreter cannot multiply bfloat16."""
    products = []

    def attend(*inputs: Any, plan: object, **settings: Any) -> torch.Tensor:
        doubles: list[Any] = [in_double(each) for each in inputs[:5]]
        return attention.attend(*doubles, *inputs[5:], **settings).to(torch.bfloat16)

    def can_multiply(weight: torch.Tensor, dtype: torch.dtype) -> bool:
        products.append(weight.shape)
        return dtype == torch.bfloat16

    monkeypatch.setattr(fused, "attend", attend)
    monkeypatch.setattr(fused, "append_kv", attention.append_kv)
    monkeypatch.setattr(triton_fp8_layer, "can_multiply_codes", can_multiply)
    torch.manual_seed(0)
    case = LayerCase(128, Heads(2, 64, 64), form, [Lengths(0, 100, 30), Lengths(0, 29, 5)], 128, 100.0)
    assert case.error(torch.bfloat16, kv_dtype) < 0.05
    assert products == [(512, 128), (128, 384 if form == "concat" else 128)]


@pytest.mark.parametrize("form", ["gated", "concat"])
def test_a_layer_adds_what_the_one_before_leaves(form: Form) -> None:
    case = LayerCase(DIM, Heads(HEADS, DIM_HEAD, DIM_HEAD), form, LENGTHS, PAGE, 16.0)
    together, apart = case.together_and_apart(torch.float32, FP8)
    assert torch.equal(together, apart)


def test_products_of_codes_are_those_of_rounded_values() -> None:
    torch.manual_seed(0)
    weights = weights_of("gated")
    assert weights.coded is not None
    values, bias = torch.randn(5, DIM), noise(4 * HEADS * DIM_HEAD)
    round_in_place(values, FP8)
    rows = CodedRows((values * 64).to(FP8).view(torch.uint8), torch.full((5, 1), 1 / 64))
    expected = values.double() @ weights.uvqk_weight.double() + bias.double()
    found = multiply(rows, weights.coded.uvqk, weights.uvqk_weight, bias)
    assert float((found - expected).abs().max()) < 1e-5


@pytest.mark.parametrize("is_scaled", [False, True])
def test_codes_of_tokens_stand_for_what_the_twin_rounds(is_scaled: bool) -> None:
    rng = np.random.default_rng(3)
    lengths = [Lengths(9, 20, 3), Lengths(0, 0, 0), Lengths(64, 150, 2), Lengths(0, 70, 9)]
    case = random_case(rng, lengths, Heads(3, 24, 24), 32, torch.bfloat16)
    case = coded(case, FP8, transposed=True)
    batch = case.batch
    if is_scaled:
        powers = 2.0 ** torch.randint(-4, 2, (len(case.v), 1, 1))  # exact: the interpreter cuts bfloat16 off
        batch = replace(batch, v_scale=powers.to(torch.bfloat16))
    twin = case._replace(**{name: getattr(case, name).clone() for name in ("q", "k", "v", "k_pages", "v_pages")})
    tokens = encode_tokens(*case[:5], batch)
    round_in_place(twin.q, FP8, query_lift(twin.q.shape[2]))
    if batch.v_scale is not None:
        twin.v.mul_(batch.v_scale)
    twin.append()
    codes = tokens.q.codes, tokens.k.codes, own_values(tokens, batch)
    for mine, exponents, theirs in zip(codes, (each.exponents for each in tokens), twin[:3], strict=True):
        live = slice(case.num_live)
        assert torch.equal(decode(mine[live], exponents.T[live], torch.bfloat16), theirs[live])
    for ours, theirs in zip(case[3:5], twin[3:5], strict=True):
        assert isinstance(ours, ScaledPages)
        assert torch.equal(in_double(ours).nan_to_num(9.0), in_double(theirs).nan_to_num(9.0))  # empty places
