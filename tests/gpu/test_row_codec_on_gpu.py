"""Rows that are rounded or decoded as a card reads and writes them: bit for bit as the twins do it."""

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    # Before the imports: elsewhere Triton must first be imported by the tests that interpret it.
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.kernels.row_codec_cases import BOTH_WAYS, CODES, random_records
from tests.kernels.row_write_cases import ROWS, SLOTS, random_targets

from helmrec.kernels import embed, row_gather, row_write, triton_embed, triton_row_recode
from helmrec.kernels.row_codec import Recoding, RowCodec
from helmrec.kernels.row_gather import SKIP
from helmrec.kernels.row_write import RowTargets
from helmrec.kernels.triton_row_gather import ALONE, BESIDE_COMPUTE, BUS_ALONE, Launch
from helmrec.memory.row_master import LockedBuffer

pytestmark = pytest.mark.gpu


def locked(rows: Tensor, codec: RowCodec) -> LockedBuffer:
    buffer = LockedBuffer(len(rows) * codec.stride)
    buffer.rows(codec).copy_(rows)
    buffer.lock()
    return buffer


def same(ours: Tensor, twin: Tensor, codec: RowCodec) -> bool:
    used = codec.dim + (codec.code is not None)  # the padding of a record is of no account
    return torch.equal(ours.cpu()[:, :used], twin.cpu()[:, :used])


@pytest.mark.parametrize("launch", [ALONE, BUS_ALONE, BESIDE_COMPUTE], ids=["alone", "bus alone", "beside"])
@pytest.mark.parametrize("recoding", BOTH_WAYS, ids=str)
@pytest.mark.parametrize("dim", [11, 512])
def test_reads_of_a_master_of_another_form_match_the_twin(dim: int, recoding: Recoding, launch: Launch) -> None:
    recoding = Recoding(*(RowCodec(dim, each.dtype, each.code) for each in recoding))
    rows = random_records(3_001, recoding.source)
    buffer = locked(rows, recoding.source)
    sources = torch.where(torch.rand(20_003) < 0.3, SKIP, ~torch.randint(len(rows), (20_003,))).int()
    places, count = torch.randperm(20_003), torch.tensor([17_000], dtype=torch.int32)
    ours, twin = (torch.full((20_003, recoding.target.width), 7).to(recoding.target.stored_dtype) for _ in range(2))
    ours, on_card = ours.cuda(), {"places": places.cuda(), "count": count.cuda()}
    master = buffer.rows(recoding.source)
    triton_row_recode.gather_rows(ours, master, sources.cuda(), ours, launch=launch, recoding=recoding, **on_card)
    row_gather.gather_rows(twin, rows, sources, twin, places=places, count=count, recoding=recoding)
    assert same(ours, twin, recoding.target)
    buffer.close()


@pytest.mark.parametrize("recoding", BOTH_WAYS, ids=str)
@pytest.mark.parametrize("dim", [11, 512])
def test_writes_to_a_master_of_another_form_match_the_twin(dim: int, recoding: Recoding) -> None:
    recoding = Recoding(*(RowCodec(dim, each.dtype, each.code) for each in recoding))
    index = random_targets(4, torch.float32, has_master=False).index
    new, rows = random_records(50, recoding.source), torch.randperm(ROWS)[:50]
    twin = RowTargets(index, random_records(SLOTS, recoding.target), random_records(ROWS, recoding.source))
    assert twin.master is not None
    buffer, arena = locked(twin.master, recoding.source), twin.arena_rows.cuda()
    ours = RowTargets(type(index)(index.data.cuda()), arena, buffer.rows(recoding.source))
    for first, num in ((0, 0), (0, 7), (7, 1), (8, 42)):
        triton_row_recode.write_rows(new.cuda(), rows.cuda(), first, num, ours, recoding=recoding)
        row_write.write_rows(new, rows, first, num, twin, recoding)
        torch.cuda.synchronize()
        assert same(arena, twin.arena_rows, recoding.target)
        assert same(buffer.rows(recoding.source), twin.master, recoding.source)
    buffer.close()


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [24, 512])
def test_the_embedding_stage_decodes_rows_as_its_twin_does(dim: int, dtype: torch.dtype, code: str) -> None:
    codec, chosen = RowCodec(dim, torch.float16, code), torch.tensor([2])
    rows = random_records(5 * 1_000, codec).view(5, 1_000, -1)
    ours = triton_embed.pool_rows(rows.cuda(), chosen.cuda(), dtype, codec)
    assert torch.equal(ours.cpu(), embed.pool_rows(rows, chosen, dtype, codec))
