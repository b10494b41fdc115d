"""The kernels of the caches on a device, plain or compiled."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from helmrec.kernels import page_copy, row_gather, row_table


@dataclass(frozen=True, slots=True)
class RowKernels:
    """The operations on a row table, the gather of rows, and loads of pages. The modules document the arguments."""

    find: Callable[..., None]
    claim: Callable[..., None]
    publish: Callable[..., None]
    gather_rows: Callable[..., None]
    gather_few: Callable[..., None]  # the same with few programs, for rows that come over the bus
    load_pages: Callable[..., None]


def row_kernels(name: str) -> RowKernels:
    """Return the kernels named "torch", which run anywhere, or "triton", which need a card or Triton's interpreter."""
    if name == "torch":
        table, gather = row_table, row_gather.gather_rows
        return RowKernels(table.find, table.claim, table.publish, gather, gather, page_copy.load_pages)
    from helmrec.kernels import triton_page_copy, triton_row_gather, triton_row_table  # noqa: PLC0415 - triton is not everywhere

    compiled, gather = triton_row_table, triton_row_gather.gather_rows
    few = partial(gather, launch=triton_row_gather.BESIDE_COMPUTE)
    return RowKernels(compiled.find, compiled.claim, compiled.publish, gather, few, triton_page_copy.load_pages)
