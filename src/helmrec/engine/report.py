"""The memory report of an engine, for its first log line and for sizing a pool."""

from dataclasses import dataclass

import torch

from helmrec.kernels.row_index import CompactIndex, DenseIndex
from helmrec.memory.device_rows import DeviceRows
from helmrec.memory.pool import Pool

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class EngineReport:
    """Memory of one engine, in bytes."""

    num_pages: int
    page_bytes: int
    page_tokens: int
    rows_per_page: int
    kv_waste: float
    emb_pages: int
    index_bytes: int  # of resident rows
    is_index_on_card: bool
    master_bytes: int  # on the host
    num_graphs: int
    graph_buffer_bytes: int
    reserved_bytes: int  # by this process in all; 0 on a CPU
    free_bytes: int  # left on the card; 0 on a CPU
    index_form: str = ""  # of an index on a device, and why
    keeps_kv: bool = True  # after the request it was computed for
    choices: tuple[str, ...] = ()  # device and size of the pool, and why

    def __str__(self) -> str:
        kv_pages = self.num_pages - self.emb_pages
        lines = [
            *self.choices,
            f"pool: {self.num_pages:,} pages of {self.page_bytes:,} bytes "
            f"({self.page_tokens} tokens or {self.rows_per_page} rows; {self.kv_waste:.1%} of a KV page is padding)",
            f"  EMB {self.emb_pages:,} pages: {self.emb_pages * self.rows_per_page:,} rows",
            f"  KV  {kv_pages:,} pages: {kv_pages * self.page_tokens:,} tokens",
            f"tables: {self.master_bytes / _MIB:,.0f} MiB on the host; index of resident rows: "
            f"{self.index_bytes / _MIB:,.0f} MiB on the {'card' if self.is_index_on_card else 'host'}"
            f"{self.index_form and ', ' + self.index_form}",
        ]
        if not self.keeps_kv:
            lines.append("K/V of this model depend on the query: history is computed once per request and not kept")
        if self.reserved_bytes:
            lines.append(
                f"card: {self.num_graphs} graphs over {self.graph_buffer_bytes / _MIB:,.0f} MiB of buffers, "
                f"{self.reserved_bytes / _MIB:,.0f} MiB reserved in all, {self.free_bytes / _MIB:,.0f} MiB left"
            )
        return "\n".join(lines)


def make_report(
    pool: Pool, master_bytes: int, num_graphs: int, graph_buffer_bytes: int, *, keeps_kv: bool
) -> EngineReport:
    stats, on_card = pool.stats(), torch.cuda.is_available() and torch.cuda.is_initialized()
    return EngineReport(
        num_pages=stats.num_pages,
        page_bytes=stats.page_bytes,
        page_tokens=pool.geometry.page_tokens,
        rows_per_page=pool.geometry.rows_per_page,
        kv_waste=pool.geometry.kv_waste,
        emb_pages=stats.emb_pages,
        index_bytes=pool.rows.index_bytes,
        is_index_on_card=on_card and isinstance(pool.rows, DeviceRows),
        index_form=_index_form(pool.rows) if isinstance(pool.rows, DeviceRows) else "",
        master_bytes=master_bytes,
        num_graphs=num_graphs,
        graph_buffer_bytes=graph_buffer_bytes,
        reserved_bytes=torch.cuda.memory_reserved() if on_card else 0,
        free_bytes=torch.cuda.mem_get_info()[0] if on_card else 0,
        keeps_kv=keeps_kv,
    )


def _index_form(rows: DeviceRows) -> str:
    index, num_rows = rows.table.index, rows.table.num_rows
    dense_bytes = DenseIndex.bytes_for(num_rows, 0)
    if isinstance(index, CompactIndex):
        return (
            f"compact: {index.data.nbytes / _MIB:,.0f} MiB for the slots of the pool, where {num_rows:,} rows would "
            f"take {dense_bytes / _MIB:,.0f}"
        )
    return f"dense: {dense_bytes / _MIB:,.0f} MiB for {num_rows:,} rows"
