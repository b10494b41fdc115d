"""Bring whole pages from the host, in plain torch: the twin of `triton_page_copy.py`."""

from torch import Tensor


def load_pages(host: Tensor, arena: Tensor, loads: Tensor) -> None:
    """arena[page] = host[slot] for each (slot, page) of `loads`.

    host: (slots, page_bytes) and loads: (loads, 2) int32 on the host, arena: (pages, page_bytes) on the device.
    """
    slots, pages = loads.long().T
    arena[pages.to(arena.device)] = host[slots].to(arena.device)
