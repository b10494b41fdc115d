"""The attention plan of a batch: its work list on the device, and the buffers that the kernels share.

It knows lengths and launch settings, not the tensors of a model.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from helmrec.kernels.kv_rounding import Pages, ScaledPages
from helmrec.kernels.ragged import RaggedBatch
from helmrec.kernels.work_list import FIELDS, Lengths, Tiling, max_items, put_work
from helmrec.types import AttentionWindow

HOPPER = 9  # major compute capability
_CODED_PAGE = 128  # a coded page holds a multiple of so many tokens, or half or a quarter of it
_MOST_ROWS = 2**31 - 1
MAX_PARTS = 96  # parts of split tiles at a time; bounds the workspace to 25 MB at 4 heads of 128


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """Tile and launch settings for one pair of head dims."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def padded(dim: int) -> int:
    """Return the power of two to which a tile of this dim is padded; matrix units need at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


# How weights are computed: from q.k, with a bias added, or from products of codes (`multiplies_codes`).
Scores = Literal["plain", "biased", "codes"]


def launch_shape(qk: int, v: int, dtype: torch.dtype, page_tokens: int, scores: Scores = "plain") -> LaunchShape:
    """Return the fastest settings measured on an H200. A block within one page is fetched in one copy.

    With a bias, blocks of 128 keys need 1 KiB more shared memory than the card has, and 17 times the register spills.
    """
    if dtype == torch.float32:  # needs twice the shared memory, and is not tuned
        return LaunchShape(32, 32, 4, 1)
    widest, num_stages = (128, 3) if padded(max(qk, v)) <= 128 else (64, 2)
    if scores == "biased":
        widest = 64
    block_n = next((size for size in (128, 64, 32, 16) if size <= widest and page_tokens % size == 0), widest)
    return LaunchShape(128, block_n, 8, num_stages)


class AttentionInputs(NamedTuple):
    """The tensors that attention reads."""

    q: Tensor  # (tokens, heads, qk)
    k: Tensor
    v: Tensor  # (tokens, heads, v)
    k_pages: Tensor  # (pages, page_tokens, heads, qk)
    v_pages: Tensor


class AttentionPlan:
    """The work list of one batch and the buffers its attention needs, for all layers of a step.

    Addresses never change once graphs are captured: before, `work` may be replaced by a tensor of its shape, which the
    caller fills (`fill`) and copies itself. One plan serves one step at a time: the parts of a split tile are added up
    in its workspace.
    """

    def __init__(
        self,
        q: Tensor,
        v: Tensor,
        page_tokens: int,
        max_sequences: int,
        window: AttentionWindow | None = None,
        scores: Scores = "plain",
    ) -> None:
        """Allocate for tensors like q and v in shape, type and device; their first dimension is the most tokens."""
        max_tokens, num_heads, qk = q.shape
        self.launch = launch_shape(qk, v.shape[2], q.dtype, page_tokens, scores)
        block_m = self.launch.block_m
        local = (0, 0) if window is None else window
        programs = num_programs(q.device)
        self.tiling = Tiling(block_m, self.launch.block_n, num_heads, programs, MAX_PARTS, *local)
        num_items = max_items(max_tokens, max_sequences, self.tiling)
        # Row 0 holds the number of items, the items follow.
        self.work = torch.zeros((1 + num_items, FIELDS), dtype=torch.int32, device=q.device)
        self.state = torch.zeros(2, dtype=torch.int32, device=q.device)  # tickets taken, programs gone
        self.arrivals = torch.zeros(MAX_PARTS * num_heads * 2, dtype=torch.int32, device=q.device)
        self.partials = torch.empty(
            MAX_PARTS * num_heads * block_m * padded(v.shape[2]), dtype=torch.float32, device=q.device
        )

    def fill(
        self, work: Lengths, cu_tokens: Lengths, num_resident: Lengths, num_new: Lengths, num_context: int
    ) -> None:
        """Write the work list of a batch of these lengths to `work`, which has the shape of `self.work`."""
        count = put_work(work, cu_tokens, num_resident, num_new, num_context, self.tiling)
        assert count < len(work), f"{count} items do not fit a plan of {len(work) - 1}"

    def load(self, cu_tokens: Lengths, num_resident: Lengths, num_new: Lengths, num_context: int) -> None:
        """Plan a batch from its lengths, and copy the work list to the device."""
        work = np.zeros(self.work.shape, np.int32)
        self.fill(work, cu_tokens, num_resident, num_new, num_context)
        self.work.copy_(torch.from_numpy(work))


def multiplies_codes(q: Tensor, v: Tensor, k_pages: Pages, v_pages: Pages, depth: int) -> bool:
    """Whether the attention of Hopper on eight-bit floats can read pages like these, for scores without bias or window.

    q, v: (tokens, heads, dim), projected. depth: width of what they are projected from, which must be read by rows too.
    """
    if not (isinstance(k_pages, ScaledPages) and isinstance(v_pages, ScaledPages) and v_pages.in_lane_order):
        return False
    dim, page_tokens = q.shape[2], k_pages.shape[-3]
    if not (q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == HOPPER and dim in {64, 128, 256}):
        return False
    is_fp8 = q.dtype == torch.bfloat16 and k_pages.dtype == v_pages.dtype == torch.float8_e4m3fn and depth % 16 == 0
    whole_blocks = page_tokens in {_CODED_PAGE // 4, _CODED_PAGE // 2} or page_tokens % _CODED_PAGE == 0
    return is_fp8 and v.shape[2] == dim and whole_blocks and q.numel() > 0 and _are_readable(k_pages, v_pages)


def _are_readable(k_pages: ScaledPages, v_pages: ScaledPages) -> bool:
    """Whether the copy engine can read blocks of these pages: whole rows of 16 bytes each, counted in 32 bits."""
    dim, page_tokens = k_pages.shape[-1], k_pages.shape[-3]
    page, token, *key = k_pages.codes.stride()[-4:]
    v_page, *value = v_pages.codes.stride()[-4:]
    whole_rows = page % token == 0 and v_page % page_tokens == 0 and token % 16 == 0
    aligned = all(pages.codes.data_ptr() % 16 == 0 and pages.codes.numel() > 0 for pages in (k_pages, v_pages))
    packed = key == [dim, 1] and value == [1, dim * page_tokens, page_tokens]
    num_pages, rows_of_page = k_pages.shape[-4], max(page // token, v_page // page_tokens)
    is_counted = num_pages * rows_of_page <= _MOST_ROWS
    return whole_rows and aligned and packed and is_counted and k_pages.exponents.stride() == v_pages.exponents.stride()


def plan_for(q: Tensor, v: Tensor, batch: RaggedBatch, scores: Scores | None = None) -> AttentionPlan:
    """Make a plan for one batch. It reads the lengths from the device, so it is for tests and single calls."""
    if scores is None:
        scores = "plain" if batch.times is None else "biased"
    plan = AttentionPlan(q, v, batch.page_tokens, batch.num_sequences, batch.window, scores)
    cu_tokens, num_resident, num_new = (
        np.ascontiguousarray(t.cpu().numpy(), np.int32) for t in (batch.cu_tokens, batch.num_resident, batch.num_new)
    )
    plan.load(cu_tokens, num_resident, num_new, batch.num_context)
    return plan


def num_programs(device: torch.device) -> int:
    """Return one program per multiprocessor; two in the interpreter, so that tests cover several programs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
