"""KV pages that several prefixes may share: a page is free again once nobody holds it."""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from helmrec.memory.ledger import Owner, PageLedger


class SharedPages:
    """Counts who holds each KV page of a ledger."""

    def __init__(self, ledger: PageLedger) -> None:
        self._ledger = ledger
        self._refs = [0] * ledger.num_pages

    @property
    def num_free(self) -> int:
        return self._ledger.num_free

    def take(self, num: int) -> list[int]:
        """Free pages, held once."""
        pages = self._ledger.allocate(Owner.KV, num)
        for page in pages:
            self._refs[page] = 1
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        """Once more."""
        for page in pages:
            self._refs[page] += 1

    def let_go(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._refs[page] -= 1
        self._ledger.free([page for page in pages if self._refs[page] == 0])

    def is_shared(self, page: int) -> bool:
        return self._refs[page] > 1

    def would_free(self, holdings: Iterable[Sequence[int]], num: int) -> bool:
        """Whether `num` pages would be free if these holdings were let go; asked before any is."""
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
        assert refs.tolist() == self._refs, "page references are off"
        assert np.array_equal(refs > 0, self._ledger.owners() == Owner.KV), "a KV page is lost, or also EMB's"
