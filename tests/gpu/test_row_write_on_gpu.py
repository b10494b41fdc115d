"""The compiled write of rows on a card, to the arena and to locked host memory: bit for bit as its twin."""

import pytest
import torch

if not torch.cuda.is_available():
    # Before the imports: elsewhere Triton must first be imported by the tests that interpret it.
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.kernels.row_write_cases import ROWS, random_targets, random_update

from helmrec.kernels import row_write
from helmrec.kernels.row_codec import RowCodec
from helmrec.kernels.row_index import INDEXES, IndexForm
from helmrec.kernels.row_write import RowTargets
from helmrec.kernels.triton_row_write import write_rows
from helmrec.memory.row_master import LockedBuffer

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("form", IndexForm)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("row_dim", [1, 11, 16, 100, 512])
def test_rows_of_every_size_and_type_match_the_twin(row_dim: int, dtype: torch.dtype, form: IndexForm) -> None:
    twin = random_targets(row_dim, dtype, has_master=True, form=form)
    assert twin.master is not None
    stride = twin.master.stride(0) * dtype.itemsize
    buffer = LockedBuffer(ROWS * stride)
    buffer.lock()
    master = buffer.rows(RowCodec(row_dim, dtype))
    master.copy_(twin.master)
    arena = torch.empty((len(twin.arena_rows), twin.arena_rows.stride(0)), dtype=dtype, device="cuda")[:, :row_dim]
    arena.copy_(twin.arena_rows)
    ours = RowTargets(type(twin.index)(twin.index.data.cuda()), arena, master)
    values, rows = random_update(50, row_dim, dtype)
    for first, num in ((0, 0), (0, 7), (7, 1), (8, 42)):
        row_write.write_rows(values, rows, first, num, twin)
        write_rows(values.cuda(), rows.cuda(), first, num, ours)
        torch.cuda.synchronize()
        assert torch.equal(arena.cpu(), twin.arena_rows), (first, num)
        assert torch.equal(master, twin.master), (first, num)
    buffer.close()


@pytest.mark.parametrize("form", IndexForm)
def test_rows_beyond_31_bits_are_written_in_their_place(form: IndexForm) -> None:
    stride = 1_024
    num_rows = ((2 << 30) + (64 << 20)) // stride
    buffer = LockedBuffer(num_rows * stride)
    buffer.lock()
    master = buffer.rows(RowCodec(512, torch.float16))
    arena = torch.zeros((num_rows, 512), dtype=torch.float16, device="cuda")
    index = INDEXES[form].allocate(num_rows, num_rows, torch.device("cuda"))
    index.insert(*(torch.tensor([num_rows - 1, 0], device="cuda") for _ in range(2)))
    rows = torch.tensor([num_rows - 1, 5, 0])
    values = torch.randn(3, 512).half()
    write_rows(values.cuda(), rows.cuda(), 0, 3, RowTargets(index, arena, master))
    torch.cuda.synchronize()
    assert torch.equal(master[rows], values)
    assert torch.equal(arena[[num_rows - 1, 0]].cpu(), values[[0, 2]])
    assert not arena[5].any()
    assert int((master != 0).any(1).sum()) == 3
    buffer.close()
