"""Scales of attention on eight-bit floats for Hopper, in Gluon: the role of one warp, ahead of those that compute.

Beside each block of keys it lays out factors of scores and of weights, and the ceilings that they are below.
"""

# ruff: noqa: N803, PLR0913, PLR0917 - Triton's constants are in capitals, and a kernel's arguments are its interface
# Triton gives kernel arguments their types.
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from helmrec.kernels.hopper_tiles import locate, next_slot, read_tile, take
from helmrec.kernels.hopper_weights import power_of_two

# One argument a line would bury the kernels.
# fmt: off


@gluon.jit
def _load_exponents(flat, flat_stride, pages, strides, start, length, table, layout, block, head,
                    PAGE_TOKENS: gl.constexpr, BLOCK_N: gl.constexpr):
    """Biased exponents of the scales of a block; of tokens that it does not hold, 0."""
    threads: gl.constexpr = gl.BlockedLayout([BLOCK_N // 32], [32], [1], [0])
    columns = gl.arange(0, BLOCK_N, threads)
    is_resident, token = locate(block, layout, BLOCK_N)
    if is_resident:
        page = gl.load(table + token // PAGE_TOKENS).to(gl.int64)
        at = pages + page * strides[0] + head * strides[2] + (token % PAGE_TOKENS + columns) * strides[1]
        found = gl.load(at, mask=token + columns < layout[0], other=0)
    else:
        at = flat + head.to(gl.int64) * flat_stride + start + token + columns
        found = gl.load(at, mask=token + columns < length, other=0)
    return found.to(gl.int32)


@gluon.jit
def _next_ceiling(ceiling, exponents):
    """The largest exponent so far, and a little more, so that it seldom grows."""
    largest = gl.max(exponents, axis=0)
    return gl.where(largest > ceiling, largest + 1, ceiling)


@gluon.jit
def _below(exponents, ceiling):
    """Powers of two in float32: 1 for an exponent at the ceiling, and less for lower ones."""
    return power_of_two(gl.maximum(exponents - ceiling + 127, 0))


@gluon.jit
def lay_out_scales(inputs, exponents, k_pipe, scales, tickets, barriers, FIELDS: gl.constexpr, NUM_HEADS: gl.constexpr,
            DIM: gl.constexpr, PAGE_TOKENS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
            K_SLOTS: gl.constexpr, BOUND: gl.constexpr):
    """Lay out the scales of scores and of weights beside each block of keys, tile after tile."""
    work, batch, num_context, table_stride = inputs
    k_flat, v_flat, flat_stride, k_pages, v_pages, strides = exponents
    k_full, k_empty = k_pipe[1], k_pipe[2]
    of_scores, of_weights, ceilings = scales
    ticket_full, ticket_empty = barriers[2], barriers[3]
    pair: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    num_tickets = gl.load(work) * NUM_HEADS
    number, slot, phase = 0, 0, 0
    ticket = take(number, tickets, ticket_full, ticket_empty, 1)
    while ticket < num_tickets:
        item = work + FIELDS * (1 + ticket // NUM_HEADS)
        head = ticket % NUM_HEADS
        _, start, end, _, table, layout = read_tile(item, batch, num_context, table_stride, BLOCK_M, BLOCK_N)
        lo, hi = gl.load(item + 2), gl.load(item + 3)
        length = end - start
        of_keys = _load_exponents(k_flat, flat_stride, k_pages, strides, start, length, table, layout, lo, head,
                                  PAGE_TOKENS, BLOCK_N)
        of_values = _load_exponents(v_flat, flat_stride, v_pages, strides, start, length, table, layout, lo, head,
                                    PAGE_TOKENS, BLOCK_N)
        k_ceiling, ceiling = 0, 0
        for block in range(lo, hi):
            # Those of the next turn, so that nothing waits for them.
            following = gl.minimum(block + 1, hi - 1)
            next_keys = _load_exponents(k_flat, flat_stride, k_pages, strides, start, length, table, layout, following,
                                        head, PAGE_TOKENS, BLOCK_N)
            next_values = _load_exponents(v_flat, flat_stride, v_pages, strides, start, length, table, layout,
                                          following, head, PAGE_TOKENS, BLOCK_N)
            is_wrong = (of_keys == 255) | (of_values == 255)  # of a key or value that is not finite; its codes are 0
            finite = gl.where(is_wrong, 0, of_keys)
            of_both = gl.where(is_wrong, 0, of_keys + of_values)
            k_ceiling, ceiling = _next_ceiling(k_ceiling, finite), _next_ceiling(ceiling, of_both)
            of_score = gl.where(is_wrong, float("nan"), _below(of_keys, k_ceiling))
            mbarrier.wait(k_empty.index(slot), phase ^ 1)
            of_scores.index(slot).store(of_score.to(of_scores.dtype))
            of_weights.index(slot).store(_below(of_both, ceiling + BOUND).to(of_weights.dtype))
            which = gl.arange(0, 2, pair)
            ceilings.index(slot).store(gl.where(which == 0, k_ceiling, ceiling))
            mbarrier.arrive(k_full.index(slot), count=1)
            slot, phase = next_slot(slot, phase, K_SLOTS)
            of_keys, of_values = next_keys, next_values
        number += 1
        ticket = take(number, tickets, ticket_full, ticket_empty, 1)
