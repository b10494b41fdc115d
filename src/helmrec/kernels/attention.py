"""HSTU attention over paged K/V: SiLU(scale * q.k) / N, no softmax.

Every visible key adds its share to the output independently, so history, request context and the
candidate itself are three plain sums. This module knows nothing of layers, weights or owners.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from helmrec.kernels.ragged import RaggedBatch


def append_kv(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, batch: RaggedBatch) -> None:
    """Write the K/V of tokens that are kept into their pages.

    k: (tokens, heads, qk), v: (tokens, heads, v); pages: (pages, page_tokens, heads, dim), any strides.
    """
    kept = batch.write_slots >= 0
    slots = batch.write_slots[kept]
    page, offset = slots // batch.page_tokens, slots % batch.page_tokens
    k_pages[page, offset] = k[kept].to(k_pages.dtype)
    v_pages[page, offset] = v[kept].to(v_pages.dtype)


def attend(  # noqa: PLR0913 - six tensors and two scalars are the operation
    q: Tensor,  # (tokens, heads, qk)
    k: Tensor,  # (tokens, heads, qk)
    v: Tensor,  # (tokens, heads, v)
    k_pages: Tensor,  # (pages, page_tokens, heads, qk)
    v_pages: Tensor,  # (pages, page_tokens, heads, v)
    batch: RaggedBatch,
    *,
    scale: float,
    normaliser: float,
) -> Tensor:  # (tokens, heads, v)
    """Attention of every new token, context token and candidate of the batch.

    A history token sees the history up to itself; a context token all history and the context up
    to itself; a candidate all history, all context and itself, never another candidate.
    """
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    bounds = batch.cu_tokens.tolist()
    resident, new = batch.num_resident.tolist(), batch.num_new.tolist()
    for i in range(batch.num_sequences):
        span = slice(bounds[i], bounds[i + 1])
        pages = batch.page_table[i].long()
        out[span] = _attend_sequence(
            (q[span], k[span], v[span]),
            _history(k_pages, pages, resident[i] + new[i]),
            _history(v_pages, pages, resident[i] + new[i]),
            _visible(resident[i], new[i], batch.num_context, span.stop - span.start, q.device),
            scale,
        )
    return out / normaliser


def _history(pages: Tensor, table: Tensor, num_tokens: int) -> Tensor:  # (num_tokens, heads, dim)
    used = -(-num_tokens // pages.shape[1])
    return pages[table[:used]].flatten(0, 1)[:num_tokens]


def _visible(resident: int, new: int, context: int, length: int, device: torch.device) -> Tensor:
    """Which of the history keys, then of the sequence's own flat keys, each query sees."""
    query = torch.arange(length, device=device)[:, None]
    own = torch.arange(length, device=device)[None, :]
    history = torch.arange(resident + new, device=device)[None, :]
    seen_history = (query >= new) | (history <= resident + query)
    in_context = (own >= new) & (own < new + context) & (own <= query)
    itself = (own == query) & (own >= new)
    return torch.cat([seen_history, in_context | itself], dim=1)  # (length, history + length)


def _attend_sequence(
    own: tuple[Tensor, Tensor, Tensor], k_history: Tensor, v_history: Tensor, mask: Tensor, scale: float
) -> Tensor:
    q, k, v = (t.transpose(0, 1) for t in own)  # (heads, length, dim)
    keys = torch.cat([k_history.transpose(0, 1).to(k.dtype), k], dim=1)
    values = torch.cat([v_history.transpose(0, 1).to(v.dtype), v], dim=1)
    weights = F.silu(scale * (q @ keys.transpose(1, 2))) * mask
    return (weights @ values).transpose(0, 1)
