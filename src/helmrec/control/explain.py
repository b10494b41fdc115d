"""What each layer of a decision proposed, and what came of the last move: as a value, a log line, a line of JSON."""

from dataclasses import dataclass

import msgspec

from helmrec.control.layers import Proposal
from helmrec.control.moves import MoveRecord


@dataclass(frozen=True, slots=True)
class Explanation:
    """One window's decision. Splits are EMB shares."""

    time_s: float
    alpha: float  # aimed at so far
    measured_ms: float  # mean latency of the window
    predicted_ms: float | None  # for this window, a window ago; None: nothing was known then
    arrivals_per_s: float
    proposals: list[Proposal]  # in the order of the layers; the last one decides
    last_move: MoveRecord | None

    @property
    def decided(self) -> Proposal:
        return self.proposals[-1]

    def line(self) -> str:
        """For a log."""
        said = " | ".join(f"{one.layer} {one.alpha:.3f}: {one.reason}" for one in self.proposals)
        predicted = "" if self.predicted_ms is None else f", predicted {self.predicted_ms:.2f} ms"
        moved = "" if self.last_move is None else f" | last move {describe_move(self.last_move)}"
        return (
            f"t={self.time_s:.1f} alpha {self.alpha:.3f} -> {self.decided.alpha:.3f} | {said}{moved} | "
            f"measured {self.measured_ms:.2f} ms{predicted} at {self.arrivals_per_s:.0f} requests/s"
        )

    def as_json(self) -> str:
        return msgspec.json.encode(self).decode()


def describe_move(move: MoveRecord) -> str:
    """In words, with its predicted and its realised gain."""
    gained = "not known yet" if move.realised_gain_ms is None else f"{move.realised_gain_ms:+.3f} ms realised"
    return (
        f"{move.start:.3f} -> {move.alpha:.3f} by {move.layer}, "
        f"{move.predicted_gain_ms:+.3f} ms of stage time per request predicted, {gained}"
    )
