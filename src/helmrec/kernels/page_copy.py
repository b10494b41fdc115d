"""Loads of whole pages from the host in plain torch. Twin: `triton_page_copy.py`."""

from torch import Tensor


def load_pages(host: Tensor, arena: Tensor, loads: Tensor) -> None:
    """arena[page] = host[slot] for each (slot, page) that `loads` names.

    host: (slots, page_bytes) on the host, arena: (pages, page_bytes) on the device, both uint8, page_bytes a multiple
    of four. loads: (1 + most, 2) int32 on the host: first the number of pairs and an unused number, then the pairs.
    """
    slots, pages = loads[1 : 1 + int(loads[0, 0])].long().T
    arena[pages.to(arena.device)] = host[slots].to(arena.device)
