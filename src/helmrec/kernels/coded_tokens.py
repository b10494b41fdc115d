"""Queries, keys and values of a step in codes of eight bits, as attention on eight-bit floats reads them.

`encode_tokens` is the plain form. On a card the product of `triton_fp8_project.py` ends in these codes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from helmrec.kernels.kv_rounding import Codes, ScaledPages, encode, lane_order, query_lift
from helmrec.kernels.ragged import RaggedBatch

OWN_TOKENS = 128  # tokens of a block of own values, which lie as pages of so many tokens would


class CodedTokens(NamedTuple):
    """Queries, keys and values of a step's own tokens in eight-bit floats; biased exponents (heads, tokens)."""

    q: Codes  # codes (tokens, heads, dim)
    k: Codes
    v: Codes  # codes (blocks, heads, dim, OWN_TOKENS): each sequence begins a block, its tokens are in lane order


def num_blocks(num_tokens: int, num_sequences: int) -> int:
    """Most blocks of own values: a sequence begins at most one block later than the tokens before it fill."""
    return -(-num_tokens // OWN_TOKENS) + num_sequences


def places_of(batch: RaggedBatch) -> tuple[Tensor, Tensor]:
    """Block and place of the value of each token that belongs to a sequence."""
    starts = batch.cu_tokens.long()
    lengths = starts.diff()
    sequences = torch.arange(batch.num_sequences, device=starts.device).repeat_interleave(lengths)
    own = torch.arange(len(sequences), device=starts.device) - starts[sequences]
    first_blocks = (starts[:-1] + OWN_TOKENS - 1) // OWN_TOKENS + torch.arange(len(lengths), device=starts.device)
    return first_blocks[sequences] + own // OWN_TOKENS, lane_order(own % OWN_TOKENS)


def encode_tokens(
    q: Tensor, k: Tensor, v: Tensor, k_pages: ScaledPages, v_pages: ScaledPages, batch: RaggedBatch
) -> CodedTokens:
    """Round q, k and v, (tokens, heads, dim) of one dim, to codes, and write K/V of kept tokens to their pages.

    Values are multiplied by the batch's `v_scale` first. A query, key or value that is not finite has codes of zero
    and the exponent of NaN, in its own head alone.
    """
    if batch.v_scale is not None:
        v = v * batch.v_scale
    fp8, kept = torch.float8_e4m3fn, batch.write_slots >= 0
    slots = batch.write_slots[kept]
    for pages, written in ((k_pages, k), (v_pages, v)):
        pages.write(slots // batch.page_tokens, slots % batch.page_tokens, written[kept])
    queries, keys, values = encode(q, fp8, query_lift(q.shape[2])), encode(k, fp8), encode(v, fp8)
    blocks, places = places_of(batch)
    num_heads, dim = v.shape[1:]
    shape = (num_blocks(len(v), batch.num_sequences), num_heads, dim, OWN_TOKENS)
    by_place = torch.zeros(shape, dtype=torch.uint8, device=v.device)
    by_place[blocks, :, :, places] = values.codes.view(torch.uint8)[: len(blocks)]
    own = Codes(by_place.view(fp8), values.exponents)
    found = (queries, keys, own)
    return CodedTokens(*(Codes(each.codes, each.exponents.T.contiguous()) for each in found))
