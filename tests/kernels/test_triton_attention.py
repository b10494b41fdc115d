"""The portable attention kernel and the append against their twins, in Triton's interpreter.

The interpreter multiplies no bfloat16; that type, and the Hopper kernel, are tested on a card.
"""

import os

import numpy as np
import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("with a GPU, tests/gpu runs the same kernels compiled", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when Triton and each kernel is imported, so before that
pytest.importorskip("triton", reason="Triton is not installed here")

from helmrec.kernels import attention, triton_append, triton_attention
from helmrec.kernels.attention_plan import plan_for
from helmrec.types import AttentionWindow
from tests.kernels.ragged_cases import (
    Heads,
    Lengths,
    coded,
    harmed_by,
    in_double,
    in_window,
    random_case,
    relative_error,
    spoil,
    with_bias,
)

# NaN in unowned rows and pages is the point of these cases; NumPy, under the interpreter, warns of it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

LENGTHS = [
    Lengths(0, 130, 5),
    Lengths(100, 40, 0),
    Lengths(0, 0, 0),
    Lengths(64, 1, 3),
    Lengths(5, 0, 140),
    Lengths(0, 0, 2),
]
BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(
    ("heads", "page_tokens", "num_context"),
    [(Heads(2, 8, 24), 8, 0), (Heads(1, 32, 32), 64, 2), (Heads(2, 16, 16), 128, 0)],
)
def test_attention_matches_the_twin(
    dtype: torch.dtype, heads: Heads, page_tokens: int, num_context: int, rng: np.random.Generator
) -> None:
    case = random_case(rng, LENGTHS, heads, page_tokens, dtype, num_context)
    case.append()
    out = triton_attention.attend(*case, scale=0.3, normaliser=50.0)[: case.num_live]
    assert relative_error(out, case.reference(0.3, 50.0)) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("num_edges", [1, 21])
def test_attention_with_a_relative_bias_matches_the_twin(
    dtype: torch.dtype, num_edges: int, rng: np.random.Generator
) -> None:
    lengths = [Lengths(0, 70, 0), Lengths(100, 40, 0), Lengths(0, 0, 0), Lengths(64, 1, 0), Lengths(0, 1, 0)]
    plain = random_case(rng, lengths, Heads(2, 8, 24), 16, dtype)
    case, bias = with_bias(plain, rng, num_edges)
    case.append()
    out = triton_attention.attend(*case, scale=0.3, normaliser=50.0, bias=bias)[: case.num_live]
    assert relative_error(out, case.reference(0.3, 50.0, bias)) < BOUNDS[dtype]
    assert relative_error(out, case.reference(0.3, 50.0)) > 0.1, "the bias matters"


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(
    "window", [AttentionWindow(1), AttentionWindow(40), AttentionWindow(70, 9), AttentionWindow(1_000)]
)
def test_attention_with_a_window_matches_the_twin(
    dtype: torch.dtype, window: AttentionWindow, rng: np.random.Generator
) -> None:
    case = in_window(random_case(rng, LENGTHS, Heads(2, 8, 24), 8, dtype, num_context=2), window)
    case.append()
    out = triton_attention.attend(*case, scale=0.3, normaliser=50.0)[: case.num_live]
    assert relative_error(out, case.reference(0.3, 50.0)) < BOUNDS[dtype]


def test_new_tokens_need_no_append(rng: np.random.Generator) -> None:
    case = random_case(rng, LENGTHS, Heads(1, 16, 16), 16, torch.float32)
    out = triton_attention.attend(*case, scale=0.3, normaliser=50.0)[: case.num_live]
    case.append()
    assert relative_error(out, case.reference(0.3, 50.0)) < 1e-5


def test_cut_tiles_add_up_and_leave_the_plan_ready_for_the_next_layer(rng: np.random.Generator) -> None:
    case = random_case(rng, [Lengths(700, 40, 9)], Heads(2, 16, 24), 32, torch.float32)
    case.append()
    plan = plan_for(case.q, case.v, case.batch)
    plan.tiling = plan.tiling._replace(num_programs=32)  # more programs than tiles: the tiles must be cut
    batch = case.batch
    plan.load(batch.cu_tokens.numpy(), batch.num_resident.numpy(), batch.num_new.numpy(), 0)
    assert int(plan.work[:, 5].max()) > 1
    first, second = (triton_attention.attend(*case, scale=0.3, normaliser=50.0, plan=plan) for _ in range(2))
    assert torch.equal(first[: case.num_live], second[: case.num_live])
    assert relative_error(first[: case.num_live], case.reference(0.3, 50.0)) < 1e-5
    assert not plan.state.any()
    assert not plan.arrivals.any()


def test_attention_writes_into_a_view_and_nowhere_else(rng: np.random.Generator) -> None:
    case = random_case(rng, LENGTHS[:2], Heads(2, 8, 24), 16, torch.float32)
    case.append()
    joined = torch.full((len(case.v), 3, 2, 24), 7.0)
    triton_attention.attend(*case, scale=0.3, normaliser=50.0, out=joined[:, 1])
    assert relative_error(joined[: case.num_live, 1], case.reference(0.3, 50.0)) < 1e-5
    assert (joined[:, [0, 2]] == 7).all()
    assert (joined[case.num_live :] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [Heads(2, 8, 24), Heads(3, 16, 16)])
def test_append_writes_kept_tokens_and_nothing_else(dtype: torch.dtype, heads: Heads, rng: np.random.Generator) -> None:
    case = random_case(rng, LENGTHS, heads, 16, dtype)
    k_pages, v_pages = case.k_pages.clone(), case.v_pages.clone()
    attention.append_kv(case.k, case.v, k_pages, v_pages, case.batch)
    triton_append.append_kv(*case[1:])
    for pages, expected in ((case.k_pages, k_pages), (case.v_pages, v_pages)):
        assert torch.equal(pages.nan_to_num(9.0), expected.nan_to_num(9.0))


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("wrong", ["key", "value", "both"])
def test_a_token_that_is_not_finite_reaches_those_that_see_it_and_nobody_else(
    dtype: torch.dtype, wrong: str, rng: np.random.Generator
) -> None:
    case, batch = random_case(rng, LENGTHS, Heads(2, 16, 24), 32, dtype, 2), [0, 3, 4]
    tokens = spoil(case, wrong, batch)
    sound = case._replace(**{name: getattr(case, name).clone() for name in ("k", "v", "k_pages", "v_pages")})
    for each in (sound.k, sound.v):
        each[tokens] = 1.0
    sound.append()
    expected, harmed = sound.reference(0.3, 50.0), harmed_by(case, tokens)
    triton_append.append_kv(*case[1:])
    out = triton_attention.attend(*case, scale=0.3, normaliser=50.0)[: case.num_live]
    assert out[harmed].isnan().all()
    assert relative_error(out[~harmed], expected[~harmed]) < BOUNDS[dtype]
    twin = case.reference(0.3, 50.0)
    assert torch.equal(twin.isnan().any(2).any(1), harmed)
    assert relative_error(twin[~harmed], expected[~harmed]) < 1e-9


def test_both_appends_isolate_the_same_tokens(rng: np.random.Generator) -> None:
    case = random_case(rng, LENGTHS, Heads(2, 8, 24), 16, torch.float32)
    spoil(case, "value", [0, 1, 4])
    twin = case._replace(**{name: getattr(case, name).clone() for name in ("k", "v", "k_pages", "v_pages")})
    twin.append()
    triton_append.append_kv(*case[1:])
    for one, other in zip(case[1:5], twin[1:5], strict=True):
        assert torch.equal(one.nan_to_num(9.0), other.nan_to_num(9.0))
    assert case.v.isfinite().all()


CODES = [torch.float8_e4m3fn, torch.int8]


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(
    ("heads", "page_tokens", "num_context"),
    [(Heads(2, 8, 24), 8, 0), (Heads(1, 32, 32), 64, 2), (Heads(2, 16, 16), 128, 0)],
)
def test_attention_over_codes_matches_the_twin(
    codes: torch.dtype, dtype: torch.dtype, heads: Heads, page_tokens: int, num_context: int, rng: np.random.Generator
) -> None:
    case = coded(random_case(rng, LENGTHS, heads, page_tokens, dtype, num_context), codes)
    case.append()
    out = triton_attention.attend(*case, scale=0.3, normaliser=50.0)[: case.num_live]
    assert relative_error(out, case.reference(0.3, 50.0)) < BOUNDS[dtype]


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("wrong", ["key", "value", "both", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [Heads(2, 8, 24), Heads(3, 16, 16)])
def test_both_appends_of_codes_round_isolate_and_keep_the_same(
    codes: torch.dtype, wrong: str, dtype: torch.dtype, heads: Heads, rng: np.random.Generator
) -> None:
    case = coded(random_case(rng, LENGTHS, heads, 16, dtype), codes)
    case.k[3] *= 1e-7  # below the smallest step
    case.v[4] *= 3e4 if dtype != torch.float16 else 1e3
    spoil(case, wrong, [0, 1, 4])
    before = case.k.clone()
    twin = case._replace(**{name: getattr(case, name).clone() for name in ("k", "v", "k_pages", "v_pages")})
    twin.append()
    triton_append.append_kv(*case[1:])
    for one, other in zip(case[1:3], twin[1:3], strict=True):
        assert torch.equal(one[: case.num_live].nan_to_num(9.0), other[: case.num_live].nan_to_num(9.0))
    for one, other in zip(case[3:5], twin[3:5], strict=True):
        assert torch.equal(in_double(one).nan_to_num(9.0), in_double(other).nan_to_num(9.0))
    assert not torch.equal(before[: case.num_live].nan_to_num(9.0), case.k[: case.num_live].nan_to_num(9.0))


@pytest.mark.parametrize("codes", CODES)
def test_a_float16_that_rounds_to_infinity_is_isolated(codes: torch.dtype, rng: np.random.Generator) -> None:
    case = coded(random_case(rng, [Lengths(0, 6, 0)], Heads(2, 8, 8), 16, torch.float16), codes)
    case.v[2, 1, 3] = 65_504.0
    twin = case._replace(**{name: getattr(case, name).clone() for name in ("k", "v", "k_pages", "v_pages")})
    twin.append()
    triton_append.append_kv(*case[1:])
    for each in (case, twin):
        assert each.k[2].isnan().all()
        assert not each.v[2].any()
        assert each.k[1].isfinite().all()
        kept = in_double(each.k_pages)[each.batch.page_table[0, 0], :6]
        assert torch.equal(kept.isnan().flatten(1).any(1).nonzero().flatten(), torch.tensor([2]))
