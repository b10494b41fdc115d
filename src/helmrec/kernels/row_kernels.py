"""The kernels of the caches on a device, plain or compiled."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from helmrec.kernels import page_copy, row_gather, row_lookup, row_table, row_write
from helmrec.kernels.row_codec import Recoding


@dataclass(frozen=True, slots=True)
class RowKernels:
    """Operations on a row table, gathers and writes of rows, loads of pages. The modules document the arguments."""

    find: Callable[..., None]
    count_by_sequence: Callable[..., None]
    claim: Callable[..., None]
    window: Callable[..., None]
    publish: Callable[..., None]
    gather_rows: Callable[..., None]
    gather_host: Callable[..., None]  # the same for rows that come over the bus, which needs part of the card
    gather_few: Callable[..., None]  # the same with few programs, beside the compute of another step
    write_rows: Callable[..., None]
    load_pages: Callable[..., None]


def row_kernels(name: str, recoding: Recoding | None = None) -> RowKernels:
    """Return the kernels named "torch", which run anywhere, or "triton", which need a card or Triton's interpreter.

    recoding: from the master's form of rows to the pool's, if they differ.
    """
    from_host: Callable[..., None]
    write: Callable[..., None]
    if name == "torch":
        table, gather = row_table, row_gather.gather_rows
        find, load_pages = row_lookup.find, page_copy.load_pages
        from_host, write = partial(gather, recoding=recoding), partial(row_write.write_rows, recoding=recoding)
        slots = (table.claim, table.window, table.publish)
        moves = (gather, from_host, from_host, write, load_pages)
        return RowKernels(find, row_lookup.count_by_sequence, *slots, *moves)
    # Triton is not everywhere.
    from helmrec.kernels import (  # noqa: PLC0415
        triton_page_copy,
        triton_row_gather,
        triton_row_lookup,
        triton_row_recode,
        triton_row_table,
        triton_row_write,
    )

    from_host, write = triton_row_gather.gather_rows, triton_row_write.write_rows
    if recoding is not None:
        from_host = partial(triton_row_recode.gather_rows, recoding=recoding)
        write = partial(triton_row_recode.write_rows, recoding=recoding)
    return RowKernels(
        triton_row_lookup.find,
        triton_row_lookup.count_by_sequence,
        triton_row_table.claim,
        triton_row_table.window,
        triton_row_table.publish,
        triton_row_gather.gather_rows,
        partial(from_host, launch=triton_row_gather.BUS_ALONE),
        partial(from_host, launch=triton_row_gather.BESIDE_COMPUTE),
        write,
        triton_page_copy.load_pages,
    )
