"""The page ledger: the owner of each page, which is free, EMB, KV, or draining until running steps have ended.

Pure bookkeeping over small arrays. It does not know the content of pages or why they move.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np


class Owner(IntEnum):
    """Owners of a page."""

    FREE = 0
    EMB = 1
    KV = 2
    DRAINING = 3


_CACHES = (Owner.EMB, Owner.KV)


@dataclass(frozen=True, slots=True)
class _Drain:
    epoch: int
    pages: tuple[int, ...]


class PageLedger:
    """Owners of a fixed number of pages; always `free + emb + kv + draining == total`."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 1
        self._owner = bytearray(num_pages)  # steps change a handful of pages: cheaper than array indexing
        self._counts = [num_pages, 0, 0, 0]
        self._free = list(range(num_pages - 1, -1, -1))
        self._draining: deque[_Drain] = deque()

    @property
    def num_pages(self) -> int:
        return len(self._owner)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def count(self, owner: Owner) -> int:
        return self._counts[owner]

    def owners(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Return the owner of every page, for displays and checks."""
        return np.array(self._owner, np.uint8)

    def allocate(self, owner: Owner, num: int) -> list[int]:
        """Give `num` free pages to `owner`. The caller has checked `num_free`."""
        assert owner in _CACHES
        split = len(self._free) - num
        assert split >= 0, f"asked for {num} pages, {self.num_free} are free"
        pages = self._free[split:]
        del self._free[split:]
        self._set(pages, Owner.FREE, owner)
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Free KV pages at once; pins guarantee that no running step reads them."""
        self._set(pages, Owner.KV, Owner.FREE)
        self._free.extend(pages)

    def drain(self, pages: Sequence[int], epoch: int) -> None:
        """Free EMB pages once every step up to `epoch` has ended, since its gather may still read them."""
        if not pages:
            return
        assert not self._draining or self._draining[-1].epoch <= epoch
        self._set(pages, Owner.EMB, Owner.DRAINING)
        self._draining.append(_Drain(epoch, tuple(pages)))

    def retire(self, ended_epoch: int) -> None:
        """Free all pages drained at or before `ended_epoch`."""
        while self._draining and self._draining[0].epoch <= ended_epoch:
            pages = self._draining.popleft().pages
            self._set(pages, Owner.DRAINING, Owner.FREE)
            self._free.extend(pages)

    def _set(self, pages: Sequence[int], old: Owner, new: Owner) -> None:
        owner = self._owner
        for page in pages:
            assert owner[page] == old, f"page {page} is {Owner(owner[page]).name}, not {old.name}"
            owner[page] = new
        self._counts[old] -= len(pages)
        self._counts[new] += len(pages)

    def check(self) -> None:
        owners = self.owners()
        counts = np.bincount(owners, minlength=4)
        assert counts.tolist() == self._counts, f"{counts} != {self._counts}"
        assert sorted(self._free) == np.flatnonzero(owners == Owner.FREE).tolist()
        draining = sorted(page for drain in self._draining for page in drain.pages)
        assert draining == np.flatnonzero(owners == Owner.DRAINING).tolist()
