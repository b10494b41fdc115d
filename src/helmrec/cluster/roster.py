"""Counts replicas that replace another one. Knows names only."""

from collections.abc import Set


class Roster:
    """The replicas that answer one front."""

    def __init__(self) -> None:
        self._present: frozenset[str] = frozenset()
        self._gone: dict[str, None] = {}  # not replaced yet, in the order they disappeared
        self.num_restarts = 0

    def note(self, names: Set[str]) -> None:
        """Set the replicas that answered a call. A new one counts as the restart of one that has disappeared."""
        fresh = names - self._present - self._gone.keys()
        self._gone |= dict.fromkeys(sorted(self._present - names))
        for name in names & self._gone.keys():  # it was slow, not gone
            del self._gone[name]
        for name in list(self._gone)[: len(fresh)]:
            del self._gone[name]
            self.num_restarts += 1
        self._present = frozenset(names)

    def check(self) -> None:
        assert not self._present & self._gone.keys(), "a replica is both present and gone"
