"""HSTU attention over paged K/V: SiLU(scale * q.k) / N, no softmax.

Every visible key contributes to the output independently, so history, request context and the candidate itself are
three separate sums. This module does not know layers, weights or owners.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from helmrec.kernels.kv_rounding import Pages, round_in_place
from helmrec.kernels.layer import RelativeBias
from helmrec.kernels.ragged import RaggedBatch


def append_kv(k: Tensor, v: Tensor, k_pages: Pages, v_pages: Pages, batch: RaggedBatch) -> None:
    """Isolate non-finite tokens in k and v, then write the K/V of kept tokens to their pages.

    k: (tokens, heads, qk), v: (tokens, heads, v); pages: (pages, page_tokens, heads, dim), any strides. If pages hold
    codes, k and v are rounded in place first: attention sees what it would read from the pages.
    """
    for values, pages in ((k, k_pages), (v, v_pages)):
        if not isinstance(pages, Tensor):
            round_in_place(values, pages.dtype)
    isolate_non_finite(k, v)  # a large float16 may have been rounded to infinity
    kept = batch.write_slots >= 0
    slots = batch.write_slots[kept]
    page, offset = slots // batch.page_tokens, slots % batch.page_tokens
    for values, pages in ((k[kept], k_pages), (v[kept], v_pages)):
        if isinstance(pages, Tensor):
            pages[page, offset] = values.to(pages.dtype)
        else:
            pages.write(page, offset, values)


def isolate_non_finite(k: Tensor, v: Tensor) -> None:
    """Limit the effect of a token with a non-finite key or value to the queries that see it.

    Its whole key becomes NaN and its whole value zero. A query that sees the key gets a weight of NaN, so its output
    is NaN. For a query that does not, the mask replaces the weight by zero, and zero times the value is zero; zero
    times a value of NaN would be NaN.
    """
    is_wrong = ~(k.isfinite().flatten(1).all(1) & v.isfinite().flatten(1).all(1))
    k[is_wrong], v[is_wrong] = torch.nan, 0.0


def attend(  # noqa: PLR0913 - six tensors and two scalars are the operation
    q: Tensor,  # (tokens, heads, qk)
    k: Tensor,  # (tokens, heads, qk)
    v: Tensor,  # (tokens, heads, v)
    k_pages: Pages,  # (pages, page_tokens, heads, qk)
    v_pages: Pages,  # (pages, page_tokens, heads, v)
    batch: RaggedBatch,
    *,
    scale: float,
    normaliser: float,
    bias: RelativeBias | None = None,
) -> Tensor:  # (tokens, heads, v)
    """Compute the attention of every new token, context token and candidate of the batch.

    A history token sees the history up to itself; a context token all history and the context up
    to itself; a candidate all history, all context and itself, never another candidate. k and v are as `append_kv`
    leaves them: values are finite. With a bias there are neither context tokens nor candidates. The batch's window
    narrows what a token sees.
    """
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    bounds = batch.cu_tokens.tolist()
    resident, new = batch.num_resident.tolist(), batch.num_new.tolist()
    for i in range(batch.num_sequences):
        span = slice(bounds[i], bounds[i + 1])
        own = Own(*(t[span].transpose(0, 1) for t in (q, k, v)))
        k_history, v_history = (
            _history(pages, batch.page_table[i], resident[i], v.dtype) for pages in (k_pages, v_pages)
        )
        added = _relative_bias(bias, batch, i, resident[i], new[i])
        before, after = (None, None) if added is None else (added[:, : resident[i]], added[:, resident[i] :])
        near = _in_window(batch, i, resident[i], new[i] + batch.num_context)
        far, close = (None, None) if near is None else (near[:, : resident[i]], near[:, resident[i] :])
        seen = _from_history(own, k_history, v_history, _Scores(scale, before, far))
        seen += _from_own_tokens(own, new[i] + batch.num_context, _Scores(scale, after, close))
        out[span] = seen.transpose(0, 1)
    return out / normaliser


class Own(NamedTuple):
    """One sequence's flat tokens, heads first: (heads, tokens, dim)."""

    q: Tensor
    k: Tensor
    v: Tensor


def _history(pages: Pages, table: Tensor, num_tokens: int, dtype: torch.dtype) -> Tensor:  # (heads, num_tokens, dim)
    used = table[: -(-num_tokens // pages.shape[1])].long()
    taken = pages[used].to(dtype) if isinstance(pages, Tensor) else pages.read(used, dtype)
    return taken.flatten(0, 1)[:num_tokens].transpose(0, 1)


def _relative_bias(
    bias: RelativeBias | None, batch: RaggedBatch, i: int, resident: int, num_new: int
) -> Tensor | None:  # (num_new, resident + num_new)
    """Compute the bias of each new token of a sequence for each key up to itself."""
    if bias is None:
        return None
    assert batch.times is not None, "a bias by time needs times"
    assert batch.cu_times is not None
    times = batch.times[int(batch.cu_times[i]) : int(batch.cu_times[i + 1])]
    keys = torch.arange(resident + num_new, device=times.device)
    distance = keys[resident:, None] - keys
    waits = times[resident + 1 :, None] - times[:-1]
    return bias.position[distance.clamp(min=0)] + bias.time[torch.bucketize(waits, bias.edges, right=True)]


def _in_window(batch: RaggedBatch, i: int, resident: int, num_shared: int) -> Tensor | None:
    """Return which keys before the candidates lie in the window of each own token, (own tokens, all keys)."""
    if batch.window is None:
        return None
    num_own = int(batch.cu_tokens[i + 1] - batch.cu_tokens[i])
    end, device = resident + min(num_shared, num_own), batch.cu_tokens.device  # a padded sequence has no token at all
    rows = (resident + torch.arange(num_own, device=device)).clamp(max=end)
    keys = torch.arange(end, device=device)
    num_full = 0 if batch.num_full is None else int(batch.num_full[i])
    sees_all = rows >= end - num_full if num_full else torch.zeros_like(rows, dtype=torch.bool)
    return (rows[:, None] - keys <= batch.window.length) | sees_all[:, None]


class _Scores(NamedTuple):
    """How q.k becomes a weight."""

    scale: float
    bias: Tensor | None  # (rows, keys)
    near: Tensor | None  # (rows, keys) whether a key is in the window of a row

    def weights(self, q: Tensor, k: Tensor) -> Tensor:  # (heads, rows, keys)
        scores = self.scale * (q @ k.transpose(1, 2))
        weights = F.silu(scores if self.bias is None else scores + self.bias.to(scores.dtype))
        return weights if self.near is None else weights.masked_fill(~self.near, 0.0)


def _from_history(own: Own, k_history: Tensor, v_history: Tensor, scores: _Scores) -> Tensor:
    """Sum over the resident keys, which every token sees that is near enough."""
    return scores.weights(own.q, k_history) @ v_history


def _from_own_tokens(own: Own, num_shared: int, scores: _Scores) -> Tensor:
    """Sum over the keys of the new and context tokens up to each token, and over its own key for each candidate."""
    weights = scores.weights(own.q, own.k[:, :num_shared]).tril_()
    seen = weights @ own.v[:, :num_shared]
    itself = F.silu(scores.scale * (own.q * own.k).sum(-1, keepdim=True)) * own.v
    seen[:, num_shared:] += itself[:, num_shared:]
    return seen
