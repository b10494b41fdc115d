"""The compiled kernels against their twins in float64 on a card: fresh inputs each run, poisoned outputs."""

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    # Before the imports: elsewhere Triton must first be imported by the tests that interpret it.
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.kernels.ragged_cases import (
    Case,
    Heads,
    Lengths,
    cast,
    coded,
    in_double,
    in_window,
    on,
    random_case,
    relative_error,
    with_bias,
)
from tests.kernels.ragged_cases import layout as ragged_layout

from helmrec.kernels import hopper_attention, layer, triton_append, triton_attention, triton_layer
from helmrec.kernels.attention_plan import AttentionPlan, plan_for
from helmrec.kernels.layer import Form, LayerWeights
from helmrec.types import AttentionWindow

pytestmark = pytest.mark.gpu

BOUND = 1e-2
HALF = [torch.bfloat16, torch.float16]
MIXED = [Lengths(513, 300, 5), Lengths(0, 0, 0), Lengths(3000, 7, 400), Lengths(128, 128, 0), Lengths(0, 1, 2)]


@pytest.fixture
def fresh() -> np.random.Generator:
    """New numbers every run; the seed is printed with a failure."""
    seed = np.random.SeedSequence().entropy
    print(f"seed {seed}")  # noqa: T201
    return np.random.default_rng(seed)


def poisoned(case: Case) -> torch.Tensor:
    return torch.full(case.v.shape, torch.nan, dtype=case.v.dtype, device="cuda")


def check(case: Case, scale: float, bound: float = BOUND) -> None:
    """Twice with one plan, so that counters left behind would show."""
    expected = case.reference(scale, 1000.0)
    plan = plan_for(case.q, case.v, case.batch)
    for _ in range(2):
        out = triton_attention.attend(*case, scale=scale, normaliser=1000.0, plan=plan, out=poisoned(case))
        assert relative_error(out[: case.num_live], expected) < bound


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("page_tokens", [64, 128])
@pytest.mark.parametrize(
    "heads", [Heads(4, 128, 128), Heads(4, 256, 256), Heads(2, 64, 64), Heads(2, 64, 192), Heads(2, 8, 24)]
)
def test_attention_matches_float64(
    heads: Heads, page_tokens: int, dtype: torch.dtype, fresh: np.random.Generator
) -> None:
    lengths = [*MIXED, Lengths(int(fresh.integers(0, 2000)), int(fresh.integers(0, 2000)), int(fresh.integers(0, 500)))]
    case = random_case(fresh, lengths, heads, page_tokens, dtype, num_context=3, device="cuda")
    triton_append.append_kv(*case[1:])
    check(case, heads.qk**-0.5)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("dim", [128, 256])
def test_long_histories_match_float64(dim: int, dtype: torch.dtype, fresh: np.random.Generator) -> None:
    lengths = [Lengths(0, 14_000, 100), Lengths(13_968, 32, 256), Lengths(0, 200, 16)]
    case = random_case(fresh, lengths, Heads(2, dim, dim), 128, dtype, device="cuda")
    triton_append.append_kv(*case[1:])
    check(case, dim**-0.5)


def test_float32_is_not_rounded_to_tf32(fresh: np.random.Generator) -> None:
    case = random_case(fresh, MIXED, Heads(2, 32, 48), 32, torch.float32, num_context=1, device="cuda")
    triton_append.append_kv(*case[1:])
    check(case, 0.2, bound=1e-5)


def test_the_portable_kernel_agrees_with_the_one_for_hopper(
    fresh: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = random_case(fresh, MIXED, Heads(4, 128, 128), 128, torch.bfloat16, device="cuda")
    triton_append.append_kv(*case[1:])
    monkeypatch.setattr(hopper_attention, "supports", lambda *_: False)
    check(case, 128**-0.5)


def test_append_copies_kept_tokens_bit_for_bit(fresh: np.random.Generator) -> None:
    case = random_case(fresh, MIXED, Heads(4, 128, 128), 64, torch.bfloat16, device="cuda")
    k_pages, v_pages = case.k_pages.clone(), case.v_pages.clone()
    case._replace(k_pages=k_pages, v_pages=v_pages).append()
    triton_append.append_kv(*case[1:])
    assert torch.equal(case.k_pages.nan_to_num(9.0), k_pages.nan_to_num(9.0))
    assert torch.equal(case.v_pages.nan_to_num(9.0), v_pages.nan_to_num(9.0))


def test_resident_tokens_give_what_new_ones_would(fresh: np.random.Generator) -> None:
    whole = random_case(fresh, [Lengths(0, 1000, 77)], Heads(4, 128, 128), 128, torch.bfloat16, device="cuda")
    whole.append()
    batch = on("cuda", ragged_layout([Lengths(968, 32, 77)], 128, 0, 0, fresh))
    batch.page_table.copy_(whole.batch.page_table)
    own = slice(968, whole.num_live)
    rest = Case(whole.q[own], whole.k[own], whole.v[own], whole.k_pages, whole.v_pages, batch)
    uncached = triton_attention.attend(*whole, scale=0.1, normaliser=1000.0)[own]
    cached = triton_attention.attend(*rest, scale=0.1, normaliser=1000.0)
    assert relative_error(cached, uncached.double()) < BOUND


CODES = [torch.float8_e4m3fn, torch.int8]


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("page_tokens", [64, 128])
@pytest.mark.parametrize(
    "heads", [Heads(4, 128, 128), Heads(4, 256, 256), Heads(2, 64, 64), Heads(2, 64, 192), Heads(2, 8, 24)]
)
def test_attention_over_codes_matches_float64(
    heads: Heads, page_tokens: int, dtype: torch.dtype, codes: torch.dtype, fresh: np.random.Generator
) -> None:
    case = coded(random_case(fresh, MIXED, heads, page_tokens, dtype, num_context=3, device="cuda"), codes)
    twin = case._replace(**{name: getattr(case, name).clone() for name in ("k", "v", "k_pages", "v_pages")})
    twin.append()
    triton_append.append_kv(*case[1:])
    for one, other in zip(case[1:3], twin[1:3], strict=True):
        assert torch.equal(one[: case.num_live], other[: case.num_live]), "rounded in place"
    for one, other in zip(case[3:5], twin[3:5], strict=True):
        assert torch.equal(in_double(one).nan_to_num(9.0), in_double(other).nan_to_num(9.0)), "kept"
    check(case, heads.qk**-0.5)


@pytest.mark.parametrize("codes", CODES)
def test_resident_codes_give_what_new_tokens_would(codes: torch.dtype, fresh: np.random.Generator) -> None:
    plain = random_case(fresh, [Lengths(0, 1000, 77)], Heads(4, 128, 128), 128, torch.bfloat16, device="cuda")
    whole = coded(plain, codes)
    triton_append.append_kv(*whole[1:])
    batch = on("cuda", ragged_layout([Lengths(968, 32, 77)], 128, 0, 0, fresh))
    batch.page_table.copy_(whole.batch.page_table)
    own = slice(968, whole.num_live)
    rest = Case(whole.q[own], whole.k[own], whole.v[own], whole.k_pages, whole.v_pages, batch)
    uncached = triton_attention.attend(*whole, scale=0.1, normaliser=1000.0)[own]
    cached = triton_attention.attend(*rest, scale=0.1, normaliser=1000.0)
    assert relative_error(cached, uncached.double()) < BOUND


def test_a_captured_graph_serves_the_next_batch(fresh: np.random.Generator) -> None:
    heads = Heads(4, 128, 128)
    static = random_case(fresh, [Lengths(0, 1500, 0), Lengths(0, 500, 0)], heads, 128, torch.bfloat16, device="cuda")
    plan = AttentionPlan(static.q, static.v, 128, 2)
    out = poisoned(static)
    triton_attention.attend(*static, scale=0.1, normaliser=1000.0, plan=plan, out=out)  # compiles, with no work
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        triton_attention.attend(*static, scale=0.1, normaliser=1000.0, plan=plan, out=out)
    for lengths in ([Lengths(300, 200, 30), Lengths(0, 50, 0)], [Lengths(0, 0, 0), Lengths(700, 100, 120)]):
        case = random_case(fresh, lengths, heads, 128, torch.bfloat16, device="cuda")
        case.append()
        _copy_into(static, case)
        batch = on("cpu", case.batch)
        plan.load(batch.cu_tokens.numpy(), batch.num_resident.numpy(), batch.num_new.numpy(), 0)
        graph.replay()
        assert relative_error(out[: case.num_live], case.reference(0.1, 1000.0)) < BOUND


def _copy_into(static: Case, case: Case) -> None:
    for target, source in zip(static[:5], case[:5], strict=True):
        target[: len(source)] = source
    for name in ("cu_tokens", "num_resident", "num_new"):
        getattr(static.batch, name).copy_(getattr(case.batch, name))
    static.batch.page_table[:, : case.batch.page_table.shape[1]] = case.batch.page_table


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("window", [AttentionWindow(100), AttentionWindow(1_000, 40)])
@pytest.mark.parametrize("heads", [Heads(4, 128, 128), Heads(3, 8, 24)])
def test_attention_with_a_window_matches_float64(
    heads: Heads, window: AttentionWindow, dtype: torch.dtype, fresh: np.random.Generator
) -> None:
    case = in_window(random_case(fresh, MIXED, heads, 128, dtype, num_context=2, device="cuda"), window)
    triton_append.append_kv(*case[1:])
    out = triton_attention.attend(*case, scale=heads.qk**-0.5, normaliser=1000.0)[: case.num_live]
    assert relative_error(out, case.reference(heads.qk**-0.5, 1000.0)) < BOUND


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize(("heads", "page_tokens"), [(Heads(4, 128, 128), 128), (Heads(2, 25, 25), 64)])
def test_attention_with_a_relative_bias_matches_float64(
    heads: Heads, page_tokens: int, dtype: torch.dtype, fresh: np.random.Generator
) -> None:
    lengths = [Lengths(0, 700, 0), Lengths(1000, 40, 0), Lengths(0, 0, 0), Lengths(640, 1, 0), Lengths(0, 1, 0)]
    plain = random_case(fresh, lengths, heads, page_tokens, dtype, device="cuda")
    case, bias = with_bias(plain, fresh, 128)
    triton_append.append_kv(*case[1:])
    out = triton_attention.attend(*case, scale=heads.qk**-0.5, normaliser=1000.0, bias=bias)[: case.num_live]
    assert relative_error(out, case.reference(heads.qk**-0.5, 1000.0, bias)) < BOUND


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("form", ["gated", "concat"])
@pytest.mark.parametrize(
    ("dim", "heads"), [(512, Heads(4, 128, 128)), (1024, Heads(4, 256, 256)), (96, Heads(3, 8, 24))]
)
def test_dense_halves_match_float64(dim: int, heads: Heads, form: Form, dtype: torch.dtype) -> None:
    def noise(*shape: int) -> torch.Tensor:
        return (0.05 * torch.randn(shape, device="cuda")).to(dtype)

    width, projected = heads.num * heads.v, 2 * heads.num * (heads.v + heads.qk)
    out_rows = width * (3 if form == "concat" else 1)
    weights = LayerWeights(
        noise(dim, projected), noise(projected), 1 + noise(dim), noise(dim), noise(out_rows, dim), 1 + noise(width),
        noise(width), noise(dim),
    )  # fmt: skip
    exact = cast(weights, torch.float64)
    x, o = torch.randn(1001, dim, device="cuda").to(dtype), torch.randn(1001, width, device="cuda").to(dtype)
    ours = triton_layer.project(x, weights, form, heads.num)
    twin = layer.project(x.double(), exact, form, heads.num)
    for name in ("q", "k", "v"):
        assert relative_error(getattr(ours, name), getattr(twin, name)) < BOUND
    expected = layer.gate_output(x.double(), twin.u, o.double(), exact, form)
    assert relative_error(triton_layer.gate_output(x, ours.u, o, weights, form), expected) < BOUND
