import itertools

import numpy as np
import pytest
import torch

from helmrec.kernels.kv_rounding import ScaledPages, by_layer
from helmrec.memory.arena import Arena
from helmrec.memory.geometry import PageGeometry
from helmrec.memory.prefix import PageCopy

NUM_PAGES = 3
EVEN = PageGeometry(
    page_tokens=4, num_layers=2, num_heads=2, qk_dim=8, v_dim=8, kv_itemsize=4, row_dim=16, row_itemsize=4
)
ODD = PageGeometry(
    page_tokens=3, num_layers=3, num_heads=3, qk_dim=5, v_dim=7, kv_itemsize=2, row_dim=11, row_itemsize=2
)
MIXED = PageGeometry(
    page_tokens=5, num_layers=1, num_heads=1, qk_dim=3, v_dim=1, kv_itemsize=4, row_dim=9, row_itemsize=2
)
DTYPE = {2: torch.float16, 4: torch.float32}


def make_arena(geometry: PageGeometry) -> Arena:
    return Arena(NUM_PAGES, geometry, DTYPE[geometry.kv_itemsize], DTYPE[geometry.row_itemsize], "cpu")


@pytest.fixture(params=[EVEN, ODD, MIXED], ids=["even", "odd", "mixed"])
def geometry(request: pytest.FixtureRequest) -> PageGeometry:
    assert isinstance(request.param, PageGeometry)
    return request.param


def test_views_have_the_shapes_of_the_geometry(geometry: PageGeometry) -> None:
    arena, g = make_arena(geometry), geometry
    assert arena.k_pages.shape == (g.num_layers, NUM_PAGES, g.page_tokens, g.num_heads, g.qk_dim)
    assert arena.v_pages.shape == (g.num_layers, NUM_PAGES, g.page_tokens, g.num_heads, g.v_dim)
    assert arena.rows.shape == (NUM_PAGES * g.rows_per_page, g.row_dim)


def test_no_two_kv_numbers_share_memory(geometry: PageGeometry) -> None:
    arena = make_arena(geometry)
    size = arena.k_pages.numel()
    arena.k_pages[:] = torch.arange(size).view(arena.k_pages.shape).to(arena.k_pages.dtype)
    arena.v_pages[:] = -torch.arange(1, arena.v_pages.numel() + 1).view(arena.v_pages.shape).to(arena.v_pages.dtype)
    assert torch.equal(arena.k_pages.flatten().float(), torch.arange(size).to(arena.k_pages.dtype).float())
    assert (arena.v_pages < 0).all()


def test_no_two_rows_share_memory(geometry: PageGeometry) -> None:
    arena = make_arena(geometry)
    numbers = torch.arange(arena.rows.numel()).remainder(2_048).view(arena.rows.shape).to(arena.rows.dtype)
    arena.rows[:] = numbers
    assert torch.equal(arena.rows, numbers)


def test_the_kv_of_a_page_covers_no_other_pages_rows(geometry: PageGeometry) -> None:
    for page in range(NUM_PAGES):
        arena = make_arena(geometry)
        arena.k_pages[:, page] = 1
        arena.v_pages[:, page] = 1
        touched = arena.rows.ne(0).any(dim=1).nonzero().flatten() // geometry.rows_per_page
        assert touched.unique().tolist() == [page]


def test_the_rows_of_a_page_cover_no_other_pages_kv(geometry: PageGeometry) -> None:
    for page in range(NUM_PAGES):
        arena = make_arena(geometry)
        arena.rows[page * geometry.rows_per_page : (page + 1) * geometry.rows_per_page] = 1
        others = [other for other in range(NUM_PAGES) if other != page]
        assert not arena.k_pages[:, others].any()
        assert not arena.v_pages[:, others].any()
        assert arena.k_pages[:, page].any()


def test_writing_one_layer_leaves_the_others_alone(geometry: PageGeometry) -> None:
    for layer, side in itertools.product(range(geometry.num_layers), ("k_pages", "v_pages")):
        arena = make_arena(geometry)
        getattr(arena, side)[layer] = 1
        assert arena.k_pages.count_nonzero() + arena.v_pages.count_nonzero() == getattr(arena, side)[layer].numel()


def test_written_rows_are_found_at_their_slots_and_move(geometry: PageGeometry) -> None:
    arena = make_arena(geometry)
    values = torch.arange(1, 1 + 2 * geometry.row_dim).view(2, -1).to(arena.rows.dtype)
    arena.write_rows(np.array([1, 5], np.int32), values)
    assert torch.equal(arena.rows[[1, 5]], values)
    arena.copy_rows(np.array([1, 5], np.int32), np.array([6, 0], np.int32))
    assert torch.equal(arena.rows[[6, 0]], values)


def test_rows_a_step_has_read_are_kept_at_their_slots(geometry: PageGeometry) -> None:
    arena = make_arena(geometry)
    gathered = torch.arange(1, 1 + 4 * geometry.row_dim).view(4, -1).to(arena.rows.dtype)
    arena.keep_rows(np.array([1, 5], np.int32), gathered, np.array([3, 0]))
    assert torch.equal(arena.rows[[1, 5]], gathered[[3, 0]])
    assert not arena.rows[[0, 2, 3, 4]].any()


def test_moving_no_rows_changes_nothing() -> None:
    arena = make_arena(EVEN)
    none = np.empty(0, np.int32)
    arena.copy_rows(none, none)
    arena.write_rows(none, torch.empty((0, EVEN.row_dim)))
    arena.keep_rows(none, torch.empty((0, EVEN.row_dim)), np.empty(0, np.int64))
    assert not arena.rows.any()


def test_copied_tokens_are_those_asked_for_in_every_layer(geometry: PageGeometry) -> None:
    arena = make_arena(geometry)
    for pages in (arena.k_pages, arena.v_pages):
        pages[:, 0] = torch.arange(1, 1 + pages[:, 0].numel()).view(pages[:, 0].shape).to(pages.dtype)
    arena.copy_tokens(PageCopy(source=0, target=2, num_tokens=2))
    for pages in (arena.k_pages, arena.v_pages):
        assert torch.equal(pages[:, 2, :2], pages[:, 0, :2])
        assert not pages[:, 2, 2:].any()
        assert not pages[:, 1].any()


def test_transposed_values_fill_their_part_of_a_page_and_are_copied_in_groups_of_lanes() -> None:
    geometry = PageGeometry(
        page_tokens=32, num_layers=2, num_heads=3, qk_dim=5, v_dim=7, kv_itemsize=1, row_dim=11, row_itemsize=2,
        kv_scale_bytes=1,
    )  # fmt: skip
    arena = Arena(NUM_PAGES, geometry, torch.float8_e4m3fn, torch.float16, "cpu", transposed_values=True)
    assert isinstance(arena.v, ScaledPages)
    codes = arena.v.codes.view(torch.uint8)
    assert codes.shape == (2, NUM_PAGES, 32, 3, 7)
    assert codes.stride()[2:] == (1, 7 * 32, 32)
    for part in (arena.k_pages, arena.v_pages):
        part.view(torch.uint8)[:, 1] = 1
    assert arena.pages[1].count_nonzero() == 2 * 32 * 3 * (5 + 7), "K and V overlap"
    values = torch.randn((2, 3, 7))
    layer = next(iter(by_layer(arena.v)))
    assert isinstance(layer, ScaledPages)
    layer.write(torch.tensor([1, 1]), torch.tensor([9, 17]), values)
    arena.copy_tokens(PageCopy(source=1, target=2, num_tokens=18))
    read = layer.read(torch.tensor([1, 2]), torch.float32)
    assert torch.equal(read[0, [9, 17]], read[1, [9, 17]])
    assert torch.allclose(read[0, [9, 17]], values, rtol=0.07, atol=0.02)


CODED = PageGeometry(
    page_tokens=3, num_layers=2, num_heads=3, qk_dim=5, v_dim=7, kv_itemsize=1, row_dim=11, row_itemsize=2,
    kv_scale_bytes=1,
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_codes_and_exponents_of_a_page_fill_it_without_overlap_and_are_copied_together(dtype: torch.dtype) -> None:
    arena = Arena(NUM_PAGES, CODED, dtype, torch.float16, "cpu")
    assert isinstance(arena.k, ScaledPages)
    assert isinstance(arena.v, ScaledPages)
    parts = [each.view(torch.uint8) for pages in (arena.k, arena.v) for each in (pages.codes, pages.exponents)]
    for number, part in enumerate(parts):
        part[:, 1] = number + 1
    for number, part in enumerate(parts):
        assert (part[:, 1] == number + 1).all(), "a later part overlaps"
    used = CODED.page_tokens * CODED.token_bytes
    assert sum(part[:, 1].numel() for part in parts) == used
    assert arena.pages[1].count_nonzero() == used
    assert not arena.pages[[0, 2]].any()
    arena.copy_tokens(PageCopy(source=1, target=2, num_tokens=2))
    for part in parts:
        assert torch.equal(part[:, 2, :2], part[:, 1, :2])
        assert not part[:, 2, 2:].any()
