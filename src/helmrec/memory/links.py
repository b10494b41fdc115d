"""Doubly linked lists in arrays (items + 1, 2) of previous and next; the last line holds the last and first item."""

import numpy as np
from numpy.typing import NDArray

from helmrec.jit import inner

Links = NDArray[np.int32]


def make_links(num_items: int) -> Links:
    """An empty list."""
    return np.full((num_items + 1, 2), num_items, np.int32)


@inner
def link(links: Links, before: int, item: int, after: int) -> None:
    """Insert an item between two neighbours."""
    links[item, 0] = before
    links[item, 1] = after
    links[before, 1] = item
    links[after, 0] = item


@inner
def unlink(links: Links, item: int) -> None:
    """Join the neighbours of an item, whose own links stay as they are."""
    links[links[item, 0], 1] = links[item, 1]
    links[links[item, 1], 0] = links[item, 0]


@inner
def link_first(links: Links, item: int) -> None:
    """Insert an item at the begin of the list."""
    ends = links.shape[0] - 1
    link(links, ends, item, links[ends, 1])


@inner
def link_last(links: Links, item: int) -> None:
    """Insert an item at the end of the list."""
    ends = links.shape[0] - 1
    link(links, links[ends, 0], item, ends)
