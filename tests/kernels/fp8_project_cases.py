"""Products that end in codes, and product and encoding apart: one comparison for cards and interpreter."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from helmrec.kernels.coded_tokens import CodedTokens, encode_tokens, places_of
from helmrec.kernels.kv_rounding import ScaledPages, empty_pages
from helmrec.kernels.layer import CodedWeight, Form, split_projection
from helmrec.kernels.ragged import RaggedBatch
from helmrec.kernels.triton_fp8_layer import CodedRows
from helmrec.kernels.triton_fp8_project import ProjectedCodes, encode_product
from helmrec.kernels.triton_layer import silu_in_place
from tests.kernels.ragged_cases import Lengths, layout, on

FP8 = torch.float8_e4m3fn
LENGTHS = [Lengths(0, 150, 20), Lengths(0, 0, 0), Lengths(128, 128, 3), Lengths(9, 130, 0), Lengths(0, 5, 1)]


class Product:
    """Small whole numbers, so that sums are exact in bfloat16 whatever their order."""

    def __init__(
        self,
        dim: int,
        page_tokens: int,
        heads: int = 2,
        depth: int = 128,
        device: str = "cpu",
        lengths: Sequence[Lengths] = LENGTHS,
    ) -> None:
        """dim: of a head. depth: of the product."""
        generator = torch.Generator(device).manual_seed(0)
        self._heads, self._device = heads, torch.device(device)

        def whole(most: int, *shape: int) -> Tensor:
            return torch.randint(-most, most + 1, shape, generator=generator, device=device).float()

        self.batch = on(device, layout(list(lengths), page_tokens, 0, 3, np.random.default_rng(0)))
        num_tokens = len(self.batch.write_slots)
        values, weight = whole(2, num_tokens, depth), whole(1, 4 * heads * dim, depth)
        weight *= torch.rand(weight.shape, generator=generator, device=device) < 6.4 / depth
        self.scale = 2.0 ** torch.randint(0, 3, (num_tokens, 1), generator=generator, device=device)
        self.rows = CodedRows(values.to(FP8).view(torch.uint8), self.scale)
        self.weight = CodedWeight(weight.to(FP8), torch.ones((1, len(weight)), device=device))
        self.bias = whole(8, len(weight)).to(torch.bfloat16)
        self._shape = (1 + sum(-(-(n.resident + n.new) // page_tokens) for n in lengths), page_tokens, heads, dim)

    def pages(self) -> tuple[ScaledPages, ScaledPages]:
        made = [empty_pages(self._shape, FP8, self._device, transposed=each) for each in (False, True)]
        for each in made:
            assert isinstance(each, ScaledPages)
            each.codes.view(torch.uint8).zero_()
            each.exponents.zero_()
        return made[0], made[1]  # type: ignore[return-value]

    def together(self, form: Form, pages: tuple[ScaledPages, ScaledPages]) -> ProjectedCodes:
        return encode_product(self.rows, self.weight, self.bias, form, pages, self.batch)

    def apart(self, form: Form, pages: tuple[ScaledPages, ScaledPages]) -> ProjectedCodes:
        decoded = self.rows.codes.view(FP8).float() * self.scale
        uvqk = (decoded @ self.weight.codes.float().T + self.bias.float()).to(torch.bfloat16)
        width = uvqk.shape[1] // 4
        if form == "gated":
            silu_in_place(uvqk[:, width:])
        u, v, q, k = split_projection(uvqk, width, self._heads)
        return ProjectedCodes(u, encode_tokens(q, k, v, *pages, self.batch))


def own_values(tokens: CodedTokens, batch: RaggedBatch) -> Tensor:  # (live tokens, heads, dim)
    """Codes of values token by token."""
    blocks, places = places_of(batch)
    return tokens.v.codes.view(torch.uint8)[blocks, :, :, places].view(FP8)


def live_values(found: ProjectedCodes, batch: RaggedBatch) -> list[Tensor]:
    live = int(batch.cu_tokens[-1])
    tokens = found.tokens
    codes = [each[:live].float() for each in (tokens.q.codes, tokens.k.codes)]
    exponents = [each.exponents[:, :live] for each in tokens]
    return [found.u[:live].float(), *codes, own_values(tokens, batch).float(), *exponents]
