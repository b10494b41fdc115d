"""Rows in eight bits: torch, the host's compiled code and Triton's interpreter agree bit for bit; rounding is final."""

import os

import numpy as np
import pytest
import torch
from torch import Tensor

if torch.cuda.is_available():
    pytest.skip("with a GPU, tests/gpu runs the same kernels compiled", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when Triton and each kernel is imported, so before that
pytest.importorskip("triton", reason="Triton is not installed here")

from helmrec.codes import CODE_FORMATS
from helmrec.kernels import embed, row_gather, row_write, triton_embed, triton_row_recode
from helmrec.kernels.row_codec import Recoding, RowCodec
from helmrec.kernels.row_gather import SKIP
from helmrec.kernels.row_index import IndexForm
from helmrec.kernels.row_write import RowTargets
from helmrec.kernels.triton_row_gather import ALONE, Launch
from helmrec.memory.geometry import PageGeometry
from helmrec.memory.row_master import encoded_on_host
from tests.kernels.row_codec_cases import BOTH_WAYS, CODES, DTYPES, random_records, random_values
from tests.kernels.row_write_cases import ROWS, SLOTS, random_targets

FEW = Launch(programs=3, tile_bytes=1 << 9, num_warps=4)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 15, 16, 100])
def test_the_host_rounds_as_torch_does(dim: int, dtype: torch.dtype, code: str) -> None:
    codec, values = RowCodec(dim, dtype, code), random_values(300, dim, dtype)
    assert torch.equal(encoded_on_host(values, codec), codec.encode(values))


@pytest.mark.parametrize("code", CODES)
def test_the_host_rounds_every_float16_as_torch_does(code: str) -> None:
    every = torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(torch.float16)
    codec = RowCodec(1, torch.float16, code)
    assert torch.equal(encoded_on_host(every[:, None], codec), codec.encode(every[:, None]))
    scaled = torch.stack([every, torch.full_like(every, 500.0)], dim=1)  # with a scale that does not depend on it
    codec = RowCodec(2, torch.float16, code)
    assert torch.equal(encoded_on_host(scaled, codec), codec.encode(scaled))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_is_final_and_the_dtype_of_the_model_holds_its_values(dtype: torch.dtype, code: str) -> None:
    """So that a row has the same values wherever it is rounded, and however often."""
    codec, values = RowCodec(64, dtype, code), random_values(500, 64, dtype)
    finite = values[values.isfinite().all(1)]
    once = codec.decode(codec.encode(finite), torch.float64)
    kept = codec.decode(codec.encode(finite), dtype)
    assert torch.equal(kept.double(), once)
    assert torch.equal(codec.decode(codec.encode(kept), torch.float64), once)


@pytest.mark.parametrize("code", CODES)
def test_a_value_is_rounded_to_the_nearest_code(code: str) -> None:
    codec, values = RowCodec(32, torch.float32, code), torch.randn(200, 32)
    error = (codec.decode(codec.encode(values), torch.float32) - values).abs()
    peak = values.abs().amax(1, keepdim=True)
    bound = peak / 127 if code == "int8" else (values.abs() / 16).clamp_min(0) + peak * 2**-16
    assert (error <= bound).all()


def test_a_row_that_is_not_finite_is_not_finite_in_eight_bits() -> None:
    values = torch.ones(3, 8)
    values[0, 3], values[2, 7] = torch.nan, torch.inf
    for code in CODES:
        codec = RowCodec(8, torch.float32, code)
        decoded = codec.decode(codec.encode(values), torch.float32)
        assert decoded[[0, 2]].isnan().all()
        assert (decoded[1] == 1).all()


@pytest.mark.parametrize("dim", [1, 7, 15, 16, 128, 512])
def test_pages_have_room_for_the_records_of_a_codec(dim: int) -> None:
    shape = {"page_tokens": 4, "num_layers": 2, "num_heads": 2, "qk_dim": 8, "v_dim": 8, "kv_itemsize": 2}
    for code in CODES:
        codec = RowCodec(dim, torch.float16, code)
        geometry = PageGeometry(**shape, row_dim=dim, row_itemsize=1, row_scale_bytes=1)
        assert codec.stride == codec.width == geometry.row_stride
        assert codec.stride % 16 == 0
    plain = RowCodec(dim, torch.float16)
    assert plain.stride == PageGeometry(**shape, row_dim=dim, row_itemsize=2).row_stride
    assert (plain.width, plain.stored_dtype) == (dim, torch.float16)


def test_a_row_of_512_halves_takes_about_half() -> None:
    assert RowCodec(512, torch.float16, "int8").stride == 528
    assert set(CODE_FORMATS) == set(CODES)


@pytest.mark.parametrize("launch", [ALONE, FEW], ids=["alone", "few"])
@pytest.mark.parametrize("recoding", BOTH_WAYS, ids=str)
@pytest.mark.parametrize("dim", [1, 11, 64])
def test_reads_of_a_master_of_another_form_match_the_twin(dim: int, recoding: Recoding, launch: Launch) -> None:
    recoding = Recoding(*(RowCodec(dim, each.dtype, each.code) for each in recoding))
    master = random_records(ROWS, recoding.source)
    sources = torch.where(torch.rand(53) < 0.3, SKIP, ~torch.randint(ROWS, (53,))).int()
    places, count = torch.randperm(53), torch.tensor([41], dtype=torch.int32)
    arena = random_records(SLOTS, recoding.target)
    for more in ({}, {"places": places}, {"places": places, "count": count}):
        ours, twin = (torch.full((53, recoding.target.width), 7, dtype=arena.dtype) for _ in range(2))
        triton_row_recode.gather_rows(arena, master, sources, ours, launch=launch, recoding=recoding, **more)
        row_gather.gather_rows(arena, master, sources, twin, recoding=recoding, **more)
        assert same(ours, twin, recoding.target)


@pytest.mark.parametrize("has_master", [True, False], ids=["own master", "shared master"])
@pytest.mark.parametrize("recoding", BOTH_WAYS, ids=str)
@pytest.mark.parametrize("dim", [1, 11, 64])
def test_writes_to_a_master_of_another_form_match_the_twin(dim: int, recoding: Recoding, has_master: bool) -> None:
    recoding = Recoding(*(RowCodec(dim, each.dtype, each.code) for each in recoding))
    index = random_targets(4, torch.float32, has_master=False, form=IndexForm.DENSE).index
    new, rows = random_records(50, recoding.source), torch.randperm(ROWS)[:50]
    arena, master = random_records(SLOTS, recoding.target), random_records(ROWS, recoding.source)
    ours, twin = (RowTargets(index, arena.clone(), master.clone() if has_master else None) for _ in range(2))
    for first, num in ((0, 0), (0, 7), (7, 1), (8, 42)):
        triton_row_recode.write_rows(new, rows, first, num, ours, FEW, recoding=recoding)
        row_write.write_rows(new, rows, first, num, twin, recoding)
        assert same(ours.arena_rows, twin.arena_rows, recoding.target)
        if ours.master is not None:
            assert twin.master is not None
            assert same(ours.master, twin.master, recoding.source)
    assert not same(ours.arena_rows, arena, recoding.target)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("features", [[2], [0, 3, 4]])
def test_the_embedding_stage_decodes_rows_as_its_twin_does(features: list[int], code: str) -> None:
    codec, chosen = RowCodec(24, torch.float16, code), torch.tensor(features)
    rows = random_records(5 * 20, codec).view(5, 20, -1)
    rows[2:4, 7] = codec.encode(torch.full((24,), 65_504.0))  # rounded to more than float16 holds
    with np.errstate(over="ignore"):  # the interpreter computes with NumPy
        ours = triton_embed.pool_rows(rows, chosen, torch.float32, codec)
    assert torch.equal(ours, embed.pool_rows(rows, chosen, torch.float32, codec))
    values = codec.decode(rows, torch.float16)  # as a pool that keeps decoded rows has them
    assert torch.equal(ours, embed.pool_rows(values, chosen, torch.float32))
    assert ours.isinf().any(1).nonzero().tolist() == [[7]]


def same(ours: Tensor, twin: Tensor, codec: RowCodec) -> bool:
    """Whether stored rows are equal, bit for bit; the padding of a record is of no account."""
    used = codec.dim if codec.code is None else codec.dim + 1
    return np.array_equal(ours[:, :used].view(torch.uint8).numpy(), twin[:, :used].view(torch.uint8).numpy())
