"""Arrays that one process lends another: the reader uses them where they lie and gives them back once it dropped them.

They lie in shared memory in which the writer alone chooses places; they come back in any order. Places cross the
socket, as those of frames do. A writer that ends changes nothing for the reader, which has mapped the memory too.
"""

import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from helmrec.types import IntArray

_ALIGNMENT = 64


class Loan(NamedTuple):
    """Bytes that are lent."""

    start: int
    length: int


class Lender:
    """The writer's side. Takes the lowest free place that is large enough, so that few pages of memory are touched."""

    def __init__(self, memory: memoryview) -> None:
        self._view = memory
        self._free = [Loan(0, len(memory))]  # ascending, no two of them side by side
        self._lent: dict[int, int] = {}  # start -> length

    @property
    def num_lent(self) -> int:
        return len(self._lent)

    def lend(self, parts: Sequence[bytes | memoryview]) -> Loan | None:
        """Write the parts one after another; None if no free place is large enough."""
        length = sum(len(part) for part in parts)
        taken = -(-length // _ALIGNMENT) * _ALIGNMENT
        i = next((i for i, free in enumerate(self._free) if free.length >= taken), None)
        if i is None:
            return None
        at, room = self._free[i]
        self._free[i : i + 1] = [Loan(at + taken, room - taken)] if room > taken else []
        self._lent[at] = length
        loan = Loan(at, length)
        for part in parts:
            self._view[at : at + len(part)] = part
            at += len(part)
        return loan

    def take_back(self, loan: Loan) -> None:
        """Use a place again, of which the reader has dropped all arrays; ValueError if it is not lent."""
        if self._lent.get(loan.start) != loan.length:
            raise ValueError(f"{loan} came back, which was not lent")
        del self._lent[loan.start]
        start, end = loan.start, loan.start + -(-loan.length // _ALIGNMENT) * _ALIGNMENT
        i = bisect_left(self._free, loan)
        j = i
        if i and sum(self._free[i - 1]) == start:
            i, start = i - 1, self._free[i - 1].start
        if j < len(self._free) and self._free[j].start == end:
            j, end = j + 1, sum(self._free[j])
        self._free[i:j] = [Loan(start, end - start)]

    def release(self) -> None:
        self._view.release()

    def check(self) -> None:
        lent = [Loan(start, -(-length // _ALIGNMENT) * _ALIGNMENT) for start, length in self._lent.items()]
        end = 0
        for place in sorted([*self._free, *lent]):
            assert place.start == end, "a place is lost, or used twice"
            end = sum(place)
        assert end == len(self._view), "the last place is lost"
        assert all(sum(a) < b.start for a, b in zip(self._free, self._free[1:], strict=False)), "free places touch"


class Borrower:
    """The reader's side."""

    def __init__(self, memory: memoryview) -> None:
        self._view = memory
        self._returned: deque[Loan] = deque()  # filled by whichever thread drops the last array of a loan

    def use(self, loan: Loan) -> IntArray:
        """Return what is lent as numbers. It comes back when neither this array nor any view of it is left."""
        start, length = loan
        if start + length > len(self._view) or length % 8:
            raise ValueError(f"{loan} is no place of {len(self._view)} bytes")
        values = np.frombuffer(self._view[start : start + length], np.int64)
        weakref.finalize(values, self._returned.append, loan).atexit = False
        return values

    def take_returned(self) -> list[Loan]:
        """Return the loans whose arrays have been dropped since the last call."""
        found = []
        while self._returned:
            found.append(self._returned.popleft())
        return found

    def release(self) -> None:
        """Use no further loan. Arrays in use keep the memory."""
        self._view.release()
