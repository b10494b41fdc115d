"""Captures work as CUDA graphs that share temporary memory, and chooses the few sizes that are captured."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

_GROWTH = 1.125  # at most an eighth of a step is padding
_SMALLEST = 128
MULTIPLE = 16


def bucket_sizes(largest: int) -> list[int]:
    """Return sizes that grow by an eighth; the last is at least `largest`."""
    sizes: list[int] = []
    size = float(_SMALLEST)
    while not sizes or sizes[-1] < largest:
        sizes.append(-(-int(size) // MULTIPLE) * MULTIPLE)
        size *= _GROWTH
    return sizes


def fitting(sizes: Sequence[int], num: int) -> int:
    """Return the smallest of the ascending sizes that is at least `num`."""
    return sizes[bisect_left(sizes, num)]


class GraphMaker:
    """Captures graphs that share temporary memory; graphs of one maker must therefore run one after the other."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        with torch.inference_mode():
            work()  # compile kernels and let libraries allocate their workspaces
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                work()
        return graph
