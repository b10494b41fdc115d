from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from helmrec.memory.geometry import PageGeometry

PAPER = PageGeometry(
    page_tokens=64, num_layers=6, num_heads=4, qk_dim=64, v_dim=192, kv_itemsize=2, row_dim=512, row_itemsize=2
)
geometries = st.builds(
    PageGeometry,
    page_tokens=st.integers(1, 64),
    num_layers=st.integers(1, 6),
    num_heads=st.integers(1, 4),
    qk_dim=st.integers(1, 70),
    v_dim=st.integers(1, 70),
    kv_itemsize=st.sampled_from([1, 2, 4]),
    kv_scale_bytes=st.sampled_from([0, 1]),
    row_dim=st.integers(1, 200),
    row_itemsize=st.sampled_from([2, 4]),
)


def test_the_papers_token_takes_12_kib() -> None:
    assert PAPER.token_bytes == 12 * 1024
    assert PAPER.page_bytes == 64 * 12 * 1024
    assert PAPER.rows_per_page == 768
    assert PAPER.kv_waste == 0


@given(geometries)
def test_rows_fill_a_page_exactly_and_tokens_fit(geometry: PageGeometry) -> None:
    assert geometry.rows_per_page * geometry.row_stride == geometry.page_bytes
    assert geometry.row_stride >= geometry.row_dim * geometry.row_itemsize
    assert geometry.row_stride % 16 == 0
    assert geometry.page_bytes % 256 == 0
    assert geometry.page_tokens * geometry.token_bytes <= geometry.page_bytes
    assert 0 <= geometry.kv_waste < 1


@given(geometries, st.integers(0, 1_000))
def test_pages_for_tokens_is_the_smallest_number_that_holds_them(geometry: PageGeometry, num_tokens: int) -> None:
    pages = geometry.pages_for(num_tokens)
    assert (pages - 1) * geometry.page_tokens < num_tokens <= pages * geometry.page_tokens or pages == num_tokens == 0


def test_rounding_declares_its_waste() -> None:
    odd = replace(PAPER, page_tokens=1, num_layers=1, num_heads=1, qk_dim=3, v_dim=5, row_dim=3)
    assert (odd.token_bytes, odd.page_bytes) == (16, 256)
    assert odd.kv_waste == 1 - 16 / 256
