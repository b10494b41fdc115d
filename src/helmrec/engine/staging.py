"""Staging memory: the small arrays of a step in one pinned block, sent to the device in one copy.

It knows names, shapes and types of the arrays, not their meaning.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGN = 256


class StagedField(NamedTuple):
    """Name, shape and type of one array in a block."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def block_bytes(fields: Sequence[StagedField]) -> int:
    return sum(-(-field.nbytes // _ALIGN) * _ALIGN for field in fields)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Host and device memory shared by layouts of many sizes; one step at a time uses it."""

    host: Tensor  # (bytes,) pinned where the device is a card
    device: Tensor

    @classmethod
    def allocate(cls, num_bytes: int, device: torch.device) -> "Blocks":
        host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        return cls(host, torch.zeros(num_bytes, dtype=torch.uint8, device=device))


class Staging:
    """One layout over shared blocks: write the `host` arrays, `send`, read the `device` tensors at fixed addresses."""

    def __init__(self, fields: Sequence[StagedField], blocks: Blocks) -> None:
        num_bytes = block_bytes(fields)
        self._source, self._target = blocks.host[:num_bytes], blocks.device[:num_bytes]
        self.host: dict[str, NDArray[Any]] = {}
        self.device: dict[str, Tensor] = {}
        start = 0
        for field in fields:
            part = slice(start, start + field.nbytes)
            self.host[field.name] = blocks.host[part].view(field.dtype).view(field.shape).numpy()
            self.device[field.name] = blocks.device[part].view(field.dtype).view(field.shape)
            start += -(-field.nbytes // _ALIGN) * _ALIGN

    def send(self) -> None:
        """Start the copy; the host block may be written again once it has ended."""
        self._target.copy_(self._source, non_blocking=True)
