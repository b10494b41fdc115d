"""Staging memory: the small arrays of a step in one pinned block, sent to the device in one copy.

It knows names, shapes and types of the arrays, not their meaning. Host blocks are used in turn, so that a step is laid
out while the step before may still be on its way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from helmrec.engine.timeline import STEPS_IN_FLIGHT

_ALIGN = 256
HostArrays = dict[str, NDArray[Any]]


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
    """Memory shared by layouts of many sizes: on the device for one step, on the host for each step in flight."""

    hosts: tuple[Tensor, ...]  # (bytes,) each, pinned where the device is a card
    device: Tensor

    @classmethod
    def allocate(cls, num_bytes: int, device: torch.device) -> "Blocks":
        is_card = device.type == "cuda"
        hosts = tuple(torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_card) for _ in range(STEPS_IN_FLIGHT))
        return cls(hosts, torch.zeros(num_bytes, dtype=torch.uint8, device=device))

    def part(self, start: int, end: int) -> "BlockPart":
        return BlockPart(tuple(host[start:end] for host in self.hosts), self.device[start:end])


class BlockPart(NamedTuple):
    """Bytes of the blocks that are copied at once."""

    hosts: tuple[Tensor, ...]
    device: Tensor

    def send(self, turn: int) -> None:
        """Start the copy; the host block may be written again once it has ended."""
        self.device.copy_(self.hosts[turn], non_blocking=True)

    def receive(self, turn: int) -> None:
        """Start the copy from the device."""
        self.hosts[turn].copy_(self.device, non_blocking=True)


class Staging:
    """Arrays over shared blocks from byte `start` on: in each host block, and on the device at fixed addresses."""

    def __init__(self, fields: Sequence[StagedField], blocks: Blocks, start: int = 0) -> None:
        self.start, self.end = start, start + block_bytes(fields)
        self.hosts: tuple[HostArrays, ...] = tuple({} for _ in blocks.hosts)
        self.device: dict[str, Tensor] = {}
        for field in fields:
            part = slice(start, start + field.nbytes)
            for arrays, host in zip(self.hosts, blocks.hosts, strict=True):
                arrays[field.name] = host[part].view(field.dtype).view(field.shape).numpy()
            self.device[field.name] = blocks.device[part].view(field.dtype).view(field.shape)
            start += -(-field.nbytes // _ALIGN) * _ALIGN
