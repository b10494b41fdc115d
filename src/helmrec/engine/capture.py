"""Capture work as CUDA graphs that share their temporary memory, and sizes that keep them few."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

_GROWTH = 1.125  # at most an eighth of a step is padding
_SMALLEST = 128
MULTIPLE = 16


def bucket_sizes(largest: int) -> list[int]:
    """Sizes that grow by an eighth, up to `largest`."""
    sizes: list[int] = []
    size = float(_SMALLEST)
    while not sizes or sizes[-1] < largest:
        sizes.append(-(-int(size) // MULTIPLE) * MULTIPLE)
        size *= _GROWTH
    return sizes


def fitting(sizes: Sequence[int], num: int) -> int:
    """The smallest of the ascending sizes that holds `num`."""
    return sizes[bisect_left(sizes, num)]


class GraphMaker:
    """Graphs of one maker must run one after the other: their temporaries lie in the same memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        with torch.inference_mode():
            work()  # compiles, and lets libraries make their workspaces
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                work()
        return graph
