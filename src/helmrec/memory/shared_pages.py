"""Reference counts of KV pages, which several prefixes may share: a page is freed with its last reference."""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from helmrec.memory.ledger import Owner, PageLedger


class SharedPages:
    """Reference counts of the KV pages of a ledger."""

    def __init__(self, ledger: PageLedger) -> None:
        self._ledger = ledger
        self._refs = [0] * ledger.num_pages

    def take(self, num: int) -> list[int]:
        """Allocate free pages with one reference each."""
        pages = self._ledger.allocate(Owner.KV, num)
        refs = self._refs
        for page in pages:
            refs[page] = 1
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        """Add a reference to each page."""
        for page in pages:
            self._refs[page] += 1

    def release(self, pages: Sequence[int]) -> int:
        """Remove a reference from each page; free those without any, and return how many."""
        refs, unused = self._refs, list[int]()
        for page in pages:
            refs[page] = left = refs[page] - 1
            if not left:
                unused.append(page)
        self._ledger.free(unused)
        return len(unused)

    def is_shared(self, page: int) -> bool:
        return self._refs[page] > 1

    def would_free(self, holdings: Iterable[Sequence[int]], num: int) -> bool:
        """Whether releasing these holdings would free `num` pages; changes nothing."""
        seen: Counter[int] = Counter()
        freeable = 0
        for pages in holdings:
            seen.update(pages)
            freeable += sum(seen[page] == self._refs[page] for page in pages)
            if freeable >= num:
                return True
        return False

    def check(self, holdings: Iterable[Sequence[int]]) -> None:
        refs = np.zeros(len(self._refs), np.int64)
        for pages in holdings:
            np.add.at(refs, pages, 1)
        assert refs.tolist() == self._refs, "page reference counts are wrong"
        assert np.array_equal(refs > 0, self._ledger.owners() == Owner.KV), "a KV page is lost, or also EMB's"
