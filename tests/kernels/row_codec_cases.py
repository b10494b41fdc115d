"""Random rows of every size, and the pairs of forms that they are read from and kept in."""

import torch
from torch import Tensor

from helmrec.kernels.row_codec import Recoding, RowCodec

CODES = ("fp8_e4m3", "int8")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BOTH_WAYS = [
    pair
    for dtype in DTYPES
    for code in CODES
    for plain, coded in [(RowCodec(1, dtype), RowCodec(1, dtype, code))]
    for pair in (Recoding(plain, coded), Recoding(coded, plain))
]


def random_values(num: int, dim: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Rows large, small and zero; the last two hold a value that is not finite."""
    values = torch.randn(num, dim) * 2.0 ** torch.randint(-26, 14, (num, 1))
    values[num // 2] = 0.0
    values = values.clamp(-60_000, 60_000).to(dtype)
    values[-1, 0], values[-2, dim - 1] = torch.nan, -torch.inf
    return values.to(device)


def random_records(num: int, codec: RowCodec, device: str = "cpu") -> Tensor:
    """Random rows as they are stored, all finite."""
    values = random_values(num + 2, codec.dim, codec.dtype)[:-2]
    return codec.encode(values).to(device)
