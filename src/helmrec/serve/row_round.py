"""One update of shared rows over several engines: who is asked, when the keeper may write, who is cut off.

First every engine is asked whether it lives and has the update (ASK). Then all are asked to let the rows rest (HOLD);
those that do read none until the rows are written or they are released. So an engine that hangs stops no other: if it
hung before, no engine is held; if it hangs in between, the others go on after `hold_s` and the round begins again.
Pure: the caller sends messages, writes rows and reads the clock.
"""

import struct
from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from helmrec.config import Frozen

_CALL = struct.Struct("<BQQ")  # kind, number of the update, turn
CALL_BYTES = _CALL.size


class RowMessage(IntEnum):
    """A message between the keeper and an engine."""

    WELCOME = 1  # to a new engine: from now on every update waits for it
    ASK = 2  # to the engine: an update is in the journal
    HAS = 3  # from the engine: it lives, and has a copy of the update
    HOLD = 4  # to the engine: let the rows rest
    HELD = 5  # from the engine: it reads none
    WRITTEN = 6  # to the engine: the rows are written
    RELEASED = 7  # to the engine: they are not, and it may go on


class RowCall(NamedTuple):
    """A message between keeper and engine."""

    message: RowMessage
    number: int = 0
    turn: int = 0

    def packed(self) -> bytes:
        return _CALL.pack(*self)


def read_call(data: bytes) -> RowCall:
    kind, number, turn = _CALL.unpack(data)
    return RowCall(RowMessage(kind), number, turn)


class RoundLimits(Frozen):
    """Bounds of a round, in seconds."""

    hold_s: float = 0.5  # longest time that engines are held for one that does not answer; doubles with every turn
    cut_off_s: float = 20.0  # after which an engine that does not answer is ended


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to engines."""

    message: RowMessage
    engines: frozenset[str]


@dataclass(frozen=True, slots=True)
class Write:
    """Write the rows: no engine reads any."""


@dataclass(frozen=True, slots=True)
class CutOff:
    """End engines that have not answered for too long."""

    engines: frozenset[str]


Action = Send | Write | CutOff


class RowRound:
    """Decides the course of one update. Engines that come later take part in the next one."""

    def __init__(self, engines: Collection[str], limits: RoundLimits, now_s: float) -> None:
        self._engines = set(engines)
        self._limits = limits
        self._phase: RowMessage | None = None  # ASK or HOLD: what was sent last
        self.turn = 0  # number of the attempt; answers to earlier ones do not count
        self._waiting = set[str]()
        self._since_s = now_s  # of the phase
        self._silent_s = dict.fromkeys(engines, now_s)  # since when each has not answered, if it is waited for
        self._lagging = set[str]()  # engines that did not hold in time
        self._cut_off = set[str]()
        self.is_over = False

    def answer(self, engine: str, message: RowMessage, turn: int) -> None:
        """Take the answer of an engine; one that was not asked for, or comes too late, is ignored."""
        wanted = {RowMessage.ASK: RowMessage.HAS, RowMessage.HOLD: RowMessage.HELD}
        if turn == self.turn and self._phase is not None and wanted[self._phase] is message:
            self._waiting.discard(engine)
            if message is RowMessage.HELD:
                self._lagging.discard(engine)

    def leave(self, engine: str) -> None:
        """An engine has ended."""
        self._engines.discard(engine)
        self._waiting.discard(engine)

    def decide(self, now_s: float) -> Action | None:
        """Return what to do next; None: wait for answers, but not beyond `next_s`. After Write the round is over."""
        if late := self._late(now_s):
            self._cut_off |= late
            return CutOff(frozenset(late))
        if self._phase is None:
            return self._send(RowMessage.ASK, now_s)
        if not self._waiting:
            if self._phase is RowMessage.ASK:
                return self._send(RowMessage.HOLD, now_s)
            self.is_over = True
            return Write()
        if self._phase is RowMessage.HOLD and now_s - self._since_s >= self._hold_s:
            self._phase = None
            self._lagging |= self._waiting
            return Send(RowMessage.RELEASED, frozenset(self._engines))
        return None

    def next_s(self) -> float:
        """Return when to decide again if no answer comes."""
        late = [self._silent_s[engine] + self._limits.cut_off_s for engine in self._waiting - self._cut_off]
        held = [self._since_s + self._hold_s] if self._phase is RowMessage.HOLD else []
        return min([*late, *held], default=self._since_s + self._limits.cut_off_s)

    @property
    def _hold_s(self) -> float:
        return min(self._limits.hold_s * 2.0 ** (self.turn - 1), self._limits.cut_off_s)

    def _late(self, now_s: float) -> set[str]:
        silent = {engine for engine in self._waiting if now_s - self._silent_s[engine] >= self._limits.cut_off_s}
        return silent - self._cut_off

    def _send(self, message: RowMessage, now_s: float) -> Send:
        self.turn += message is RowMessage.ASK
        self._phase, self._since_s, self._waiting = message, now_s, set(self._engines)
        self._silent_s |= dict.fromkeys(self._engines - self._lagging, now_s)
        return Send(message, frozenset(self._engines))

    def check(self) -> None:
        assert self._waiting <= self._engines, "an engine that has ended is waited for"
        assert not self.is_over or not self._waiting, "rows were written while an engine had not answered"
