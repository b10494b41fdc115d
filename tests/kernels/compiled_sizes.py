"""Compiles the portable attention kernel for a Hopper card, on a machine without one, and prints its shared memory.

A process of its own: in those of tests, kernels are interpreted.
"""

import sys
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from helmrec.kernels import triton_attention
from helmrec.types import AttentionWindow
from tests.kernels.ragged_cases import Heads, Lengths, in_window, random_case, with_bias


class HopperTarget:
    """What the compiler asks of a driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0


class Compiled:
    """Stands in for the kernel; compiles instead of launching."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int]) -> Any:
        def compile_it(*arguments: Any, **constants: Any) -> None:
            made = self._kernel.warmup(*arguments, grid=grid, **constants | {"FAST_TANH": True})
            print(made.metadata.shared)  # noqa: T201 - the result

        return compile_it


def main(option: str, dim: int) -> None:
    driver.set_active(HopperTarget())
    triton_attention._attention_kernel = Compiled(triton_attention._attention_kernel)
    rng = np.random.default_rng(0)
    case = random_case(rng, [Lengths(0, 70, 0), Lengths(100, 4, 0)], Heads(2, dim, dim), 128, torch.bfloat16)
    bias = None
    if option == "bias":
        case, bias = with_bias(case, rng, 128)
    else:
        case = in_window(case, AttentionWindow(100, 40))
    triton_attention.attend(*case, scale=0.1, normaliser=10.0, bias=bias)


main(sys.argv[1], int(sys.argv[2]))
