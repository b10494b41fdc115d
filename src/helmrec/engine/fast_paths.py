"""Reports the fast paths of a card that an engine cannot take, and the reason for each."""

import torch

from helmrec.config import EngineConfig
from helmrec.kernels.attention_plan import HOPPER, AttentionInputs, launch_shape, multiplies_codes
from helmrec.kernels.kv_rounding import Pages, ScaledPages, by_layer
from helmrec.memory.arena import Arena
from helmrec.memory.geometry import PageGeometry
from helmrec.model.config import ModelConfig

_HEADS = (64, 128, 256)  # values of a head that Hopper's kernels are written for
_UNIT = 16  # bytes; the copy engine (TMA) reads multiples of it
DEVICE = "cuda"


def slower_paths(shape: ModelConfig, config: EngineConfig, geometry: PageGeometry, arena: Arena) -> tuple[str, ...]:
    """Return a line for each fast path that an engine on this card does not take; none if plain kernels are set."""
    if config.device != "cuda" or config.kernels == "torch":
        return ()
    generation = torch.cuda.get_device_capability(arena.rows.device)[0]
    layers = zip(by_layer(arena.k), by_layer(arena.v), strict=True)
    if all(_is_read_fast(shape, config, *pages) for pages in layers):
        return other_slower_paths(shape, config, generation)
    why = why_portable(shape, config, geometry, generation)
    return (f"attention: the portable kernel, since {why}", *other_slower_paths(shape, config, generation))


def _is_read_fast(shape: ModelConfig, config: EngineConfig, k_pages: Pages, v_pages: Pages) -> bool:
    """Whether Hopper's attention can read these pages of a layer, by the conditions that the layers test."""
    if shape.attention_bias is not None or shape.attention_window is not None:
        return False
    dtype = getattr(torch, shape.dtype)
    q, v = (torch.empty((1, shape.num_heads, dim), dtype=dtype, device=DEVICE) for dim in (shape.qk_dim, shape.v_dim))
    if isinstance(k_pages, ScaledPages) or isinstance(v_pages, ScaledPages):
        return config.compute_dtype == "fp8_e4m3" and multiplies_codes(q, v, k_pages, v_pages, shape.dim)
    from helmrec.kernels import hopper_attention  # noqa: PLC0415 - Triton is not everywhere

    block = launch_shape(shape.qk_dim, shape.v_dim, dtype, k_pages.shape[1]).block_n
    return hopper_attention.supports(AttentionInputs(q, q, v, k_pages, v_pages), block)


def why_portable(shape: ModelConfig, config: EngineConfig, geometry: PageGeometry, generation: int) -> str:
    """Return why attention takes the portable kernel, given that it does. generation: of the card."""
    heads, types = f"{shape.qk_dim} and {shape.v_dim}", ("bfloat16",) if _in_codes(config) else ("bfloat16", "float16")
    reasons = (
        (shape.attention_bias is not None, "this model has an attention bias"),
        (shape.attention_window is not None, "this model has local attention (max_attn_len)"),
        (config.kv_dtype == "int8", "the fast one cannot read kv_dtype int8"),
        (
            config.kv_dtype == "fp8_e4m3" and not _in_codes(config),
            "the fast one reads kv_dtype fp8_e4m3 only with compute_dtype fp8_e4m3",
        ),
        (generation != HOPPER, f"the fast one is for compute capability {HOPPER}, this card has {generation}"),
        (shape.dtype not in types, f"the fast one needs {' or '.join(types)}, this model has {shape.dtype}"),
        (
            shape.qk_dim != shape.v_dim or shape.qk_dim not in _HEADS,
            f"the fast one needs equal heads of 64, 128 or 256 values, this model has {heads}",
        ),
        (
            _in_codes(config) and shape.dim % _UNIT > 0,
            f"the fast one needs a dim that is a multiple of {_UNIT}, got {shape.dim}",
        ),
        (not geometry.is_tma_aligned, f"the size of a page of {geometry.page_tokens} tokens is no multiple of a key's"),
    )
    fallback = f"the fast one cannot read pages of {geometry.page_tokens} tokens in a pool of this size"
    return next((text for is_given, text in reasons if is_given), fallback)


def other_slower_paths(shape: ModelConfig, config: EngineConfig, generation: int) -> tuple[str, ...]:
    """Return the lines that follow from settings alone."""
    lines = []
    if config.compute_dtype == "fp8_e4m3" and (shape.dtype != "bfloat16" or generation < HOPPER):
        needs = f"a bfloat16 model and compute capability {HOPPER}"
        lines.append(f"products: compute_dtype fp8_e4m3 needs {needs}; it is slower than model here")
    if config.row_index == "host":
        lines.append("steps: operation by operation, without graphs, since row_index is host")
    return tuple(lines)


def _in_codes(config: EngineConfig) -> bool:
    return config.kv_dtype == config.compute_dtype == "fp8_e4m3"
