"""Decides which early signals to compute ahead: those whose rank would otherwise risk its budget, within bounds.

A pure function of its arguments; it knows no engine, no clock and no pages.
"""

from enum import StrEnum
from typing import NamedTuple

from helmrec.config import RelayConfig

LEAST_IDLE = 0.05  # share of time; the expected latency of a busier node exceeds any budget
SHARE_S = 1.0  # period over which the share of time for computing ahead is averaged


class Verdict(StrEnum):
    """The decision about a signal."""

    ADMITTED = "admitted"
    RESIDENT = "resident"  # nothing is left to compute, so the prefix is only held
    NOT_AT_RISK = "not at risk"
    HELD_ALREADY = "held already"
    NO_ROOM = "no room"
    TOO_BUSY = "too busy"
    FORGOTTEN = "forgotten"  # its user was forgotten while the signal waited


class PrefillSignal(NamedTuple):
    """A signal with the costs of its prefix."""

    inline_ms: float  # expected latency of its rank without computing ahead: wait and step
    budget_ms: float
    ahead_s: float  # expected time for computing ahead
    num_missing: int  # tokens to compute ahead
    num_pages: int  # of the whole prefix
    is_held: bool  # whether its user has a lease


class RelayLoad(NamedTuple):
    """How much of the bounds is used."""

    held_pages: int
    kv_pages: int
    num_leases: int
    compute_share: float  # share of time spent recently on, or promised to, computing ahead


def decide(config: RelayConfig, signal: PrefillSignal, load: RelayLoad) -> Verdict:
    """Return the verdict on a signal. The bounds are never exceeded."""
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
