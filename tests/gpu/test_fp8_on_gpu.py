"""Products and attention on eight-bit floats against their twins in float64 on a card: fresh inputs each run.

Most of the time goes to the compiler, so cases of one head size share their number of heads and their pages.
"""

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    # Before the imports: elsewhere Triton must first be imported by the tests that interpret it.
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.kernels.coded_layer_cases import LayerCase
from tests.kernels.fp8_project_cases import Product, live_values
from tests.kernels.ragged_cases import Case, Heads, Lengths, coded, on, random_case, relative_error
from tests.kernels.ragged_cases import layout as ragged_layout

from helmrec.kernels import hopper_fp8_attention, triton_fp8_layer
from helmrec.kernels.attention_plan import multiplies_codes, plan_for
from helmrec.kernels.coded_tokens import encode_tokens
from helmrec.kernels.kv_rounding import query_lift, round_in_place
from helmrec.kernels.layer import Form, LayerWeights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.get_device_capability()[0] != 9, reason="the kernels are for Hopper"),
]

FP8 = torch.float8_e4m3fn
BOUND = 1e-2  # of bfloat16 operands
ROUNDED_WEIGHTS = 0.035  # weights of attention are rounded to eight-bit floats, which the twin does not: 2.7%
MIXED = [Lengths(513, 300, 5), Lengths(0, 0, 0), Lengths(3000, 7, 400), Lengths(128, 128, 0), Lengths(0, 1, 2)]


@pytest.fixture
def fresh() -> np.random.Generator:
    """New numbers every run; the seed is printed with a failure."""
    seed = np.random.SeedSequence().entropy
    print(f"seed {seed}")  # noqa: T201
    return np.random.default_rng(seed)


def attend(case: Case, repeats: int = 1) -> torch.Tensor:
    """Encode and attend, with one plan for all repeats, so that counters left behind would show."""
    assert multiplies_codes(case.q, case.v, case.k_pages, case.v_pages, 16)
    plan = plan_for(case.q, case.v, case.batch, "codes")
    tokens = encode_tokens(*case)
    for _ in range(repeats):
        out = torch.full(case.v.shape, torch.nan, dtype=case.v.dtype, device="cuda")
        scores = case.q.shape[2] ** -0.5, 1000.0
        hopper_fp8_attention.launch(tokens, (case.k_pages, case.v_pages), case.batch, out, plan, scores)
    return out[: case.num_live]


def expected(case: Case) -> torch.Tensor:
    twin = case._replace(**{name: getattr(case, name).clone() for name in ("q", "k", "v", "k_pages", "v_pages")})
    round_in_place(twin.q, FP8, query_lift(twin.q.shape[2]))
    twin.append()
    return twin.reference(case.q.shape[2] ** -0.5, 1000.0)


def assert_close(out: torch.Tensor, reference: torch.Tensor) -> None:
    error = relative_error(out, reference)
    print(f"error {error:.4f}")  # noqa: T201
    assert error < ROUNDED_WEIGHTS


@pytest.mark.parametrize(
    ("heads", "page_tokens"), [(Heads(4, 128, 128), 128), (Heads(4, 256, 256), 128), (Heads(2, 64, 64), 64)]
)
def test_attention_matches_float64(heads: Heads, page_tokens: int, fresh: np.random.Generator) -> None:
    lengths = [*MIXED, Lengths(int(fresh.integers(0, 2000)), int(fresh.integers(0, 2000)), int(fresh.integers(0, 500)))]
    plain_case = random_case(fresh, lengths, heads, page_tokens, torch.bfloat16, num_context=3, device="cuda")
    case = coded(plain_case, FP8, transposed=True)
    reference = expected(case)
    assert_close(attend(case, 2), reference)


@pytest.mark.parametrize("dim", [128, 256])
def test_long_histories_match_float64(dim: int, fresh: np.random.Generator) -> None:
    lengths = [Lengths(0, 14_000, 100), Lengths(13_968, 32, 256), Lengths(0, 200, 16)]
    case = coded(
        random_case(fresh, lengths, Heads(4, dim, dim), 128, torch.bfloat16, device="cuda"), FP8, transposed=True
    )
    reference = expected(case)
    assert_close(attend(case), reference)


def test_scales_of_any_size_are_applied(fresh: np.random.Generator) -> None:
    """Tokens whose sizes differ by 2**20: a scale that is left out or of another token would show."""
    case = coded(
        random_case(fresh, MIXED, Heads(4, 128, 128), 128, torch.bfloat16, device="cuda"), FP8, transposed=True
    )
    for each in (case.q, case.k, case.v):
        each.mul_(2.0 ** torch.randint(-10, 3, (len(each), each.shape[1], 1), device="cuda"))
    reference = expected(case)
    assert_close(attend(case), reference)


def test_a_token_that_is_not_finite_harms_only_rows_that_see_it(fresh: np.random.Generator) -> None:
    lengths = [Lengths(0, 300, 40), Lengths(0, 300, 40)]
    case = coded(
        random_case(fresh, lengths, Heads(4, 128, 128), 128, torch.bfloat16, device="cuda"), FP8, transposed=True
    )
    case.k[150, 1, 3] = torch.inf
    out = attend(case)
    assert out[:150].isfinite().all()
    assert out[150:340, 1].isnan().all()
    assert out[340:].isfinite().all()


@pytest.mark.parametrize("dim", [128, 256])
def test_scores_are_the_same_resident_or_not_and_alone_or_in_a_batch(dim: int, fresh: np.random.Generator) -> None:
    lengths = [Lengths(0, 1000, 77)]
    whole = random_case(fresh, lengths, Heads(4, dim, dim), 128, torch.bfloat16, device="cuda")
    whole = coded(whole, FP8, transposed=True)
    uncached = attend(whole)
    batch = on("cuda", ragged_layout([Lengths(968, 32, 77), Lengths(0, 500, 9)], 128, 0, 0, fresh))
    batch.page_table[:1] = 0
    batch.page_table[:1, : whole.batch.page_table.shape[1]] = whole.batch.page_table
    batch.write_slots.fill_(-1)  # these pages hold it already, and the mate keeps nothing
    own = slice(968, whole.num_live)
    mates = [torch.randn((509, 4, dim), device="cuda").to(torch.bfloat16) for _ in range(3)]
    q, k, v = (torch.cat([each[own], mate]) for each, mate in zip(whole[:3], mates, strict=True))
    cached = attend(Case(q, k, v, whole.k_pages, whole.v_pages, batch))[:109]
    error = relative_error(cached, uncached[own].double())
    print(f"error {error:.5f}")  # noqa: T201
    assert error < 1e-2  # partial sums in another order, which matrix units cut off after 14 digits


@pytest.mark.parametrize(("dim", "depth", "page_tokens"), [(128, 512, 128), (256, 1024, 128), (64, 256, 64)])
def test_a_product_ends_in_the_codes_of_the_twin(dim: int, depth: int, page_tokens: int) -> None:
    product = Product(dim, page_tokens, 4, depth, "cuda")
    ours, theirs = product.pages(), product.pages()
    found, expected = product.together("concat", ours), product.apart("concat", theirs)
    for mine, other in zip(live_values(found, product.batch), live_values(expected, product.batch), strict=True):
        assert torch.equal(mine, other)
    for mine_pages, their_pages in zip(ours, theirs, strict=True):
        assert torch.equal(mine_pages.codes.float(), their_pages.codes.float())
        assert torch.equal(mine_pages.exponents, their_pages.exponents)


@pytest.mark.parametrize("wrong", ["key", "value"])
def test_codes_of_a_head_that_is_not_finite_harm_only_rows_that_see_it(wrong: str) -> None:
    """As a product leaves them: no codes, and the exponent of NaN."""
    plain_case = random_case(np.random.default_rng(0), [Lengths(0, 300, 40)], Heads(4, 128, 128), 128, torch.bfloat16,
                             device="cuda")  # fmt: skip
    case = coded(plain_case, FP8, transposed=True)
    tokens, plan = encode_tokens(*case), plan_for(case.q, case.v, case.batch, "codes")
    (tokens.k if wrong == "key" else tokens.v).exponents[1, 150] = 255
    out = torch.empty_like(case.v)
    hopper_fp8_attention.launch(tokens, (case.k_pages, case.v_pages), case.batch, out, plan, (0.1, 1000.0))
    assert out[:150].isfinite().all()
    assert out[150:340, 1].isnan().all()
    assert out[150:340, [0, 2, 3]].isfinite().all()


def layers_of(dim: int, form: Form) -> LayerCase:
    lengths = [Lengths(0, 700, 30), Lengths(0, 129, 5)]
    return LayerCase(dim, Heads(4, dim // 4, dim // 4), form, lengths, 128, 1000.0, "cuda")


@pytest.mark.parametrize(
    ("dim", "form", "kv_dtype"),
    [(512, "concat", FP8), (1024, "concat", FP8), (1024, "gated", FP8), (512, "gated", torch.bfloat16)],
)
def test_a_layer_matches_the_twin(dim: int, form: Form, kv_dtype: torch.dtype) -> None:
    error = layers_of(dim, form).error(torch.bfloat16, kv_dtype)
    print(f"error {error:.4f}")  # noqa: T201
    assert error < 0.05


def test_a_layer_adds_what_the_one_before_leaves() -> None:
    together, apart = layers_of(512, "concat").together_and_apart(torch.bfloat16, FP8)
    assert together.isfinite().all()
    assert torch.equal(together, apart)


def test_products_of_codes_match_float64() -> None:
    rows = triton_fp8_layer.CodedRows(
        torch.randn((1001, 512), device="cuda").to(FP8).view(torch.uint8), 2.0 ** torch.randn((1001, 1), device="cuda")
    )
    weight = LayerWeights(*(torch.randn((512, 256), device="cuda").to(torch.bfloat16),) * 7).in_fp8()
    bias = torch.randn(256, device="cuda").to(torch.bfloat16)
    assert weight.coded is not None
    assert triton_fp8_layer.can_multiply_codes(weight.coded.uvqk.codes, torch.bfloat16)
    values = rows.codes.view(FP8).double() * rows.scale.double()
    exact = values @ weight.uvqk_weight.double() + bias.double()
    found = triton_fp8_layer.multiply(rows, weight.coded.uvqk, weight.uvqk_weight, bias)
    assert relative_error(found, exact) < BOUND
