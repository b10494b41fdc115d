"""The kernels of the caches on a device, plain or compiled."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from helmrec.kernels import page_copy, row_gather, row_lookup, row_table, row_write


@dataclass(frozen=True, slots=True)
class RowKernels:
    """Operations on a row table, gathers and writes of rows, loads of pages. The modules document the arguments."""

    find: Callable[..., None]
    claim: Callable[..., None]
    publish: Callable[..., None]
    gather_rows: Callable[..., None]
    gather_host: Callable[..., None]  # the same for rows that come over the bus, which needs part of the card
    gather_few: Callable[..., None]  # the same with few programs, beside the compute of another step
    write_rows: Callable[..., None]
    load_pages: Callable[..., None]


def row_kernels(name: str) -> RowKernels:
    """Return the kernels named "torch", which run anywhere, or "triton", which need a card or Triton's interpreter."""
    if name == "torch":
        table, gather = row_table, row_gather.gather_rows
        find, load_pages = row_lookup.find, page_copy.load_pages
        return RowKernels(find, table.claim, table.publish, gather, gather, gather, row_write.write_rows, load_pages)
    # Triton is not everywhere.
    from helmrec.kernels import (  # noqa: PLC0415
        triton_page_copy,
        triton_row_gather,
        triton_row_lookup,
        triton_row_table,
        triton_row_write,
    )

    compiled, gather = triton_row_table, triton_row_gather.gather_rows
    return RowKernels(
        triton_row_lookup.find,
        compiled.claim,
        compiled.publish,
        gather,
        partial(gather, launch=triton_row_gather.BUS_ALONE),
        partial(gather, launch=triton_row_gather.BESIDE_COMPUTE),
        triton_row_write.write_rows,
        triton_page_copy.load_pages,
    )
