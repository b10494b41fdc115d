"""Which early signals are worth computing ahead: those whose rank would otherwise risk its budget, within bounds.

Pure: everything it decides on comes in as a value. It knows no engine, no clock and no pages.
"""

from enum import StrEnum
from typing import NamedTuple

from helmrec.config import RelayConfig

SHARE_S = 1.0  # over which the share of time that goes into computing ahead is taken


class Verdict(StrEnum):
    """What became of a signal, and why."""

    ADMITTED = "admitted"
    RESIDENT = "resident"  # nothing is left to compute, so it is only held
    NOT_AT_RISK = "not at risk"
    HELD_ALREADY = "held already"
    NO_ROOM = "no room"
    TOO_BUSY = "too busy"
    FORGOTTEN = "forgotten"  # its user was, while the signal waited


class Signal(NamedTuple):
    """What is known when a signal comes."""

    inline_ms: float  # that a rank would take now, with nothing computed ahead: its wait and its step
    budget_ms: float
    ahead_s: float  # that computing ahead would take
    num_missing: int  # tokens that would be computed ahead
    num_pages: int  # of the whole prefix
    is_held: bool  # its user has a lease


class Load(NamedTuple):
    """How far the bounds are used up."""

    held_pages: int
    kv_pages: int
    num_leases: int
    compute_share: float  # of late time that went, or is about to go, into computing ahead


def decide(config: RelayConfig, signal: Signal, load: Load) -> Verdict:
    """Cheap refusals first; bounds are never exceeded, whoever asks."""
    if signal.is_held:
        return Verdict.HELD_ALREADY
    if signal.inline_ms < config.risk * signal.budget_ms:
        return Verdict.NOT_AT_RISK
    if load.num_leases >= config.max_leases or load.held_pages + signal.num_pages > config.max_held * load.kv_pages:
        return Verdict.NO_ROOM
    if not signal.num_missing:
        return Verdict.RESIDENT
    share = load.compute_share + signal.ahead_s / SHARE_S
    return Verdict.TOO_BUSY if share > config.max_compute else Verdict.ADMITTED
