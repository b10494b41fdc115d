"""The product that ends in codes against product and encoding apart, in the interpreter."""

import os
from dataclasses import replace

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("with a GPU, tests/gpu runs the same kernels compiled", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when Triton and each kernel is imported, so before that
pytest.importorskip("triton", reason="Triton is not installed here")

from tests.kernels.fp8_project_cases import Product, live_values, own_values


@pytest.mark.parametrize(("dim", "page_tokens"), [(64, 128), (128, 128), (128, 64), (256, 128)])
def test_codes_are_those_of_product_and_encoding_apart(dim: int, page_tokens: int) -> None:
    product = Product(dim, page_tokens)
    ours, theirs = product.pages(), product.pages()
    found, expected = product.together("concat", ours), product.apart("concat", theirs)
    for mine, other in zip(live_values(found, product.batch), live_values(expected, product.batch), strict=True):
        assert torch.equal(mine, other)
    for mine_pages, their_pages in zip(ours, theirs, strict=True):
        assert torch.equal(mine_pages.codes.float(), their_pages.codes.float())
        assert torch.equal(mine_pages.exponents, their_pages.exponents)
    assert any(each.codes.float().any() for each in ours)


def test_values_are_scaled_before_they_are_kept() -> None:
    product = Product(64, 128)
    scales = 2.0 ** torch.randint(-4, 2, (len(product.batch.write_slots), 1, 1))
    product.batch = replace(product.batch, v_scale=scales.to(torch.bfloat16))
    ours, theirs = product.pages(), product.pages()
    found, expected = product.together("concat", ours), product.apart("concat", theirs)
    for mine, other in zip(live_values(found, product.batch), live_values(expected, product.batch), strict=True):
        assert torch.equal(mine, other)
    assert torch.equal(ours[1].exponents, theirs[1].exponents)


def test_the_gated_form_activates_all_but_u() -> None:
    product = Product(64, 128)
    found, expected = product.together("gated", product.pages()), product.apart("gated", product.pages())
    for mine, other in zip(live_values(found, product.batch), live_values(expected, product.batch), strict=True):
        # The interpreter cuts sums off after 8 digits, and torch rounds them.
        assert (mine.float() != other.float()).float().mean() < 0.2
    assert torch.equal(found.u[:150], expected.u[:150])


def test_a_token_that_is_not_finite_has_the_exponents_of_nan_and_no_codes() -> None:
    product = Product(64, 128)
    product.scale[7] = torch.nan
    pages = product.pages()
    tokens = product.together("concat", pages).tokens
    assert all((each.exponents[:, 7] == 255).all() for each in tokens)
    assert not any(
        each[7].float().any() for each in (tokens.q.codes, tokens.k.codes, own_values(tokens, product.batch))
    )
    others = [each.exponents[:, [6, 8]] for each in tokens]
    assert all((each < 255).all() for each in others)
