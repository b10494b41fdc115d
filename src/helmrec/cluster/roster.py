"""Which replicas answer, and how often one came in place of another. Knows names only."""

from collections.abc import Set


class Roster:
    """Replicas as one front sees them, call by call."""

    def __init__(self) -> None:
        self._present: frozenset[str] = frozenset()
        self._gone: dict[str, None] = {}  # not replaced yet, in the order they went
        self.num_restarts = 0

    def note(self, names: Set[str]) -> None:
        """These answered a call to all. One that is new counts as a restart for each that went away before it."""
        fresh = names - self._present - self._gone.keys()
        self._gone |= dict.fromkeys(sorted(self._present - names))
        for name in names & self._gone.keys():  # it had only not answered
            del self._gone[name]
        for name in list(self._gone)[: len(fresh)]:
            del self._gone[name]
            self.num_restarts += 1
        self._present = frozenset(names)

    def check(self) -> None:
        assert not self._present & self._gone.keys(), "a replica answers, or is gone"
