"""Times of attention alone: in bfloat16, and over codes of eight bits."""

import statistics
from typing import Any

import torch
from torch import Tensor

from helmrec.kernels.attention_plan import plan_for
from helmrec.kernels.coded_tokens import encode_tokens
from helmrec.kernels.kv_rounding import ScaledPages, empty_pages
from helmrec.kernels.ragged import RaggedBatch
from helmrec_bench.measure.cards.kernels import times_ms

HEADS = 4


def attention_times() -> list[dict[str, Any]]:
    """Time attention alone, nothing cached: in bfloat16, and over codes."""
    rows = []
    for dim, tokens, candidates in ((128, 6_700, 2_048), (256, 4_096, 256)):
        plain = AttentionRun.random(dim, tokens, candidates)
        pairs = 8 * (tokens * (tokens + 1) // 2 + candidates * (tokens + 1))
        operations = 4 * HEADS * dim * pairs
        timed = {"bf16": plain.in_bf16, "fp8": plain.in_fp8}
        found = {name: statistics.median(times_ms(run)) for name, run in timed.items()}
        rates = {f"{name} tflops": round(operations / ms / 1e9) for name, ms in found.items()}
        rows.append({"dim": dim, **{f"{name} ms": round(ms, 4) for name, ms in found.items()}, **rates})
    return rows


class AttentionRun:
    """Attention over one random batch of eight sequences in two precisions."""

    def __init__(self, projected: Tensor, pages: list[ScaledPages], batch: RaggedBatch) -> None:
        """projected: (tokens, 3, heads, dim)."""
        self._q, self._k, self._v = projected.unbind(1)
        self._pages, self._batch, self._plan = (pages[0], pages[1]), batch, plan_for(self._q, self._v, batch)
        self._codes_plan = plan_for(self._q, self._v, batch, "codes")
        self._tokens = encode_tokens(self._q, self._k, self._v, *self._pages, batch)
        self._out = torch.empty_like(self._v)

    @classmethod
    def random(cls, dim: int, tokens: int, candidates: int) -> "AttentionRun":
        length, page = tokens + candidates, 128
        num_pages = -(-tokens // page)
        table = torch.arange(8 * num_pages, dtype=torch.int32, device="cuda").view(8, num_pages)
        slots = torch.full((8, length), -1, dtype=torch.int64, device="cuda")
        slots[:, :tokens] = torch.arange(tokens, device="cuda") + torch.arange(8, device="cuda")[:, None] * (
            num_pages * page
        )
        counts = [torch.full((8,), n, dtype=torch.int32, device="cuda") for n in (0, tokens)]
        starts = torch.arange(9, dtype=torch.int32, device="cuda") * length
        batch = RaggedBatch(starts, counts[0], counts[1], table, slots.flatten(), num_context=0, page_tokens=page)
        projected = torch.randn((8 * length, 3, HEADS, dim), device="cuda").to(torch.bfloat16)
        shape = (8 * num_pages, page, HEADS, dim)
        fp8, device = torch.float8_e4m3fn, projected.device
        pages = [empty_pages(shape, fp8, device, transposed=transposed) for transposed in (False, True)]
        return cls(projected, [each for each in pages if isinstance(each, ScaledPages)], batch)

    def in_fp8(self) -> None:
        from helmrec.kernels import hopper_fp8_attention  # noqa: PLC0415 - triton is not on every machine

        hopper_fp8_attention.launch(self._tokens, self._pages, self._batch, self._out, self._codes_plan, (0.1, 4_096.0))

    def in_bf16(self) -> None:
        from helmrec.kernels.triton_attention import attend  # noqa: PLC0415 - triton is not on every machine

        none = self._v.new_empty((1, 128, *self._v.shape[1:]))  # no token is resident
        settings: dict[str, Any] = {"scale": 0.1, "normaliser": 4_096.0, "plan": self._plan, "out": self._out}
        attend(self._q, self._k, self._v, none, none, self._batch, **settings)
