"""The embedding stage in plain torch: pooled rows, the gate of an MLP, the sum of a token's parts.

The twin of `triton_embed.py`. torch computes the matrix products between them. Nothing here knows tables or requests.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from helmrec.kernels.row_codec import RowCodec

NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Lookups:
    """Lookups of tokens in three small tables, each (entries, dim), by indices of (tokens,), int32 or int64."""

    action_table: Tensor
    actions: Tensor
    position_table: Tensor
    positions: Tensor
    time_table: Tensor
    gaps: Tensor


def pool_rows(
    rows: Tensor, features: Tensor, dtype: torch.dtype, codec: RowCodec | None = None
) -> Tensor:  # (n, row_dim) of dtype
    """Sum the rows of some features, in float32 or wider.

    rows: (all features, n, width), features: (chosen,) int64. codec: of the rows, if they are not stored as they are.
    """
    wide = torch.promote_types(dtype, torch.float32)

    def values_of(feature: Tensor) -> Tensor:
        return rows[feature].to(wide) if codec is None else codec.decode(rows[feature], codec.dtype).to(wide)

    total = values_of(features[0])
    for feature in features[1:]:
        total = total + values_of(feature)
    return total.to(dtype)


def gate_hidden(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # (n, width)
    """hidden * sigmoid(norm(hidden)); hidden may be overwritten."""
    return hidden * F.layer_norm(hidden, hidden.shape[-1:], weight, bias, NORM_EPS).sigmoid()


def sum_parts(x: Tensor, at: Tensor, lookups: Lookups, encoded: Tensor, weight: Tensor, bias: Tensor) -> None:
    """x[at[i]] = the token's three lookups + norm(encoded[0, i]) + norm(encoded[1, i]) + ...

    x: (tokens, dim), at: (n,) int32 or int64, encoded: (encoders, n, dim), weight and bias: (encoders, dim).
    """
    total = F.embedding(lookups.actions, lookups.action_table)
    total = total + F.embedding(lookups.positions, lookups.position_table)
    total = total + F.embedding(lookups.gaps, lookups.time_table)
    for y, w, b in zip(encoded, weight, bias, strict=True):
        total = total + F.layer_norm(y, y.shape[-1:], w, b, NORM_EPS)
    x[at] = total
