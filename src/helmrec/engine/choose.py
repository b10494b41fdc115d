"""Chooses the device and the size of the pool where the settings say `auto`, and says why."""

from typing import NamedTuple

import torch
from pydantic import ByteSize

from helmrec.config import EngineConfig
from helmrec.errors import PoolTooSmall
from helmrec.memory.geometry import PageGeometry
from helmrec.model.config import ModelConfig

CPU_POOL_BYTES = 256 << 20
MARGIN = 0.05  # share of a card's memory that stays free, for peaks and for other libraries
# Activations per token assumed for the graphs of a step. In gpu-h200.json, all that was reserved beside the pool,
# weights and row buffers included, is 17 (nvidia-bench) to 30 (dlrmv3).
_STEP_WIDTHS = 32
_MAX_ROWS = (1 << 31) - 1  # that a pool may hold
_GIB = 1 << 30


class CardMemory(NamedTuple):
    free_bytes: int
    total_bytes: int
    own_bytes: int = 0  # that this process has taken


class Chosen(NamedTuple):
    """Settings without `auto`, and a line that says what was chosen and why."""

    config: EngineConfig
    reason: str


def device_name(device: str) -> str:
    """Return a device in words: the name of a card, or the threads of a CPU."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    num = torch.get_num_threads()
    return f"{device}, {num} thread{'s' * (num != 1)}"


def has_card() -> bool:
    return torch.cuda.is_available()


def card_memory() -> CardMemory:
    return CardMemory(*torch.cuda.mem_get_info(), torch.cuda.memory_reserved())


def choose_device(config: EngineConfig) -> Chosen:
    """Choose the card if there is one."""
    if config.device != "auto":
        return Chosen(config, f"device: {config.device}, as set")
    device, why = ("cuda", "CUDA finds a card") if has_card() else ("cpu", "CUDA finds no card")
    return Chosen(config.model_copy(update={"device": device}), f"device: {device}, chosen since {why}")


def choose_pool(config: EngineConfig, shape: ModelConfig, geometry: PageGeometry) -> Chosen:
    """Choose the size of the pool. On a card, called when the model is on it."""
    if config.pool_bytes != "auto":
        return Chosen(config, f"pool_bytes: {config.pool_bytes / _GIB:.2f} GiB, as set")
    if config.device == "cpu":
        num_bytes, why = CPU_POOL_BYTES, "the default on a CPU"
    else:
        memory = card_memory()
        share, part = (
            config.card_share,
            "the card" if config.card_share == 1 else f"{config.card_share:.0%} of the card",
        )
        step_bytes, margin_bytes = _step_bytes(config, shape, geometry), int(MARGIN * share * memory.total_bytes)
        left_bytes = memory.free_bytes
        if share < 1:
            left_bytes = min(left_bytes, int(share * memory.total_bytes) - memory.own_bytes)
        why = (
            f"of {left_bytes / _GIB:.2f} GiB that the model leaves on {part}, less {step_bytes / _GIB:.2f} "
            f"for graphs and {margin_bytes / _GIB:.2f} margin ({MARGIN:.0%} of {part})"
        )
        num_bytes = left_bytes - step_bytes - margin_bytes
        if num_bytes <= 0:
            raise PoolTooSmall(f"pool_bytes: nothing is left {why}, got 'auto'")
        num_bytes = min(num_bytes, _MAX_ROWS // geometry.rows_per_page * geometry.page_bytes)
    sized = config.model_copy(update={"pool_bytes": ByteSize(num_bytes)})
    return Chosen(sized, f"pool_bytes: {num_bytes / _GIB:.2f} GiB, {why}")


def _step_bytes(config: EngineConfig, shape: ModelConfig, geometry: PageGeometry) -> int:
    """Estimate the memory of the graphs and buffers of the largest step."""
    num_tokens = max(config.max_batch_tokens, shape.max_request_tokens)
    width_bytes = shape.dim * (4 if shape.dtype == "float32" else 2)
    return num_tokens * (_STEP_WIDTHS * width_bytes + len(shape.features) * geometry.row_stride)
