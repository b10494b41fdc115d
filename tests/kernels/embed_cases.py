"""The passes that make tokens out of rows, each against its twin in float64. Import it after Triton's mode is set."""

import torch

from helmrec.kernels import embed, triton_embed
from helmrec.kernels.embed import Lookups
from tests.kernels.ragged_cases import relative_error

BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def check_pool(features: list[int], num: int, width: int, dtype: torch.dtype, device: str) -> None:
    """Rows are half precision whatever the model's type, and lie at a stride of their own."""
    rows = torch.randn((5, num + 3, width), device=device).half()[:, :num]
    chosen = torch.tensor(features, device=device)
    ours = triton_embed.pool_rows(rows, chosen, dtype)
    assert ours.dtype == dtype
    assert relative_error(ours, embed.pool_rows(rows, chosen, torch.float64)) < BOUNDS[dtype]


def check_gate(num: int, width: int, dtype: torch.dtype, device: str) -> None:
    hidden, weight, bias = (torch.randn(shape, device=device).to(dtype) for shape in ((num, width), (width,), (width,)))
    twin = embed.gate_hidden(hidden.double(), weight.double(), bias.double())
    assert relative_error(triton_embed.gate_hidden(hidden, weight, bias), twin) < BOUNDS[dtype]


def check_sum(num_encoders: int, num: int, width: int, dtype: torch.dtype, device: str) -> None:
    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    def index(most: int) -> torch.Tensor:
        return torch.randint(most, (num,), device=device)

    tables = noise(9, width), noise(50, width), noise(7, width)
    action, position, time = tables
    indices = index(9), index(50), index(7)
    encoded, weight, bias = noise(num_encoders, num, width), noise(num_encoders, width), noise(num_encoders, width)
    at = torch.randperm(num + 11, device=device)[:num]
    ours = noise(num + 11, width)
    twin, of_32_bits = ours.double(), ours.clone()
    lookups = Lookups(action, indices[0], position, indices[1], time, indices[2])
    exact = [table.double() for table in tables]
    triton_embed.sum_parts(ours, at, lookups, encoded, weight, bias)
    short = Lookups(action, indices[0].int(), position, indices[1].int(), time, indices[2].int())
    triton_embed.sum_parts(of_32_bits, at.int(), short, encoded, weight, bias)
    assert torch.equal(of_32_bits, ours)
    in_float64 = Lookups(exact[0], indices[0], exact[1], indices[1], exact[2], indices[2])
    embed.sum_parts(twin, at, in_float64, encoded.double(), weight.double(), bias.double())
    others = torch.ones(len(ours), dtype=torch.bool, device=device)
    others[at] = False
    assert torch.equal(ours[others].double(), twin[others])
    assert relative_error(ours, twin) < BOUNDS[dtype]
