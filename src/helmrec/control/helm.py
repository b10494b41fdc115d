"""The controller: four layers over a model of latency that is learned from the node's own steps."""

from collections.abc import Mapping
from typing import NamedTuple

from pydantic import Field

from helmrec.config import Frozen
from helmrec.control.explain import Explanation
from helmrec.control.latency import Bias, Fading, LatencyModel, Prediction
from helmrec.control.layers import CHOICE_HALF_LIFE_S, Bursts, Chooser, Payback, Proposal, Residual, Rule, View, propose
from helmrec.control.moves import MoveLog
from helmrec.control.policy import Move, WindowStats


class HelmSettings(Frozen):
    """Which layers take part."""

    has_residual: bool = Field(True, description="correct predictions by what was measured at the present split")
    has_bursts: bool = Field(True, description="weigh bursts of the last minutes in calm")
    has_payback: bool = Field(True, description="limit a move to what the cost of staying has paid for")


class _Asked(NamedTuple):
    """A move that was asked for."""

    window: WindowStats
    layer: str
    prediction: Prediction


class Helm:
    """Held to `Limits` from outside, as every policy."""

    def __init__(self, settings: HelmSettings | None = None, chooser: Chooser | None = None) -> None:
        """`chooser` is the frozen base; None: the plain rule."""
        self.settings = settings or HelmSettings()
        self._chooser = chooser or Rule()
        self.reset()

    def reset(self) -> None:
        self.model = LatencyModel()
        self.residual, self.bursts, self.payback = Residual(), Bursts(), Payback()
        self.moves = MoveLog()
        self.prediction: Prediction | None = None  # of the window after the last one
        self.explanation: Explanation | None = None
        self._asked: _Asked | None = None  # in the last window
        self._raw, self._corrected = Fading(CHOICE_HALF_LIFE_S), Fading(CHOICE_HALF_LIFE_S)

    def decide(self, window: WindowStats) -> Move | None:
        predicted_ms = None if self.prediction is None else self.prediction.at(window.alpha)
        self._note_move(window)
        if not self.model.update(window):
            self.prediction = self.explanation = None
            return None
        proposals = self._propose(window, predicted_ms)
        winner = proposals[-1]
        self.explanation = Explanation(
            time_s=window.traffic.end_s,
            alpha=window.alpha_target,
            measured_ms=window.traffic.mean_ms,
            predicted_ms=predicted_ms,
            arrivals_per_s=window.traffic.arrival_rate,
            proposals=proposals,
            last_move=self.moves.last,
        )
        if winner.alpha == window.alpha_target:
            return None
        assert self.prediction is not None
        self._asked = _Asked(window, winner.layer, self.prediction)
        return Move(winner.alpha, f"{winner.layer}: {winner.reason}", winner.gain_ms)

    def _note_move(self, window: WindowStats) -> None:
        """Keep what became of the last move: limits or an operator may have changed or forbidden it."""
        asked, self._asked = self._asked, None
        if asked is not None and window.alpha_target != asked.window.alpha_target:
            self.moves.begin(asked.window, window.alpha_target, asked.layer, asked.prediction)
        self.moves.note(window)

    def _propose(self, window: WindowStats, predicted_ms: float | None) -> list[Proposal]:
        """What each layer says; the last one decides."""
        settings, traffic = self.settings, window.traffic
        num, dt_s = traffic.num_served, traffic.end_s - traffic.start_s
        if settings.has_bursts and self.bursts.note(window, self.model.offered_ms(window), predicted_ms):
            self.model.start_over()
        bias = self.residual.bias(window, self.model, predicted_ms) if settings.has_residual else Bias()
        self.prediction = newest = self.model.predict(bias)
        mean_ms = self._raw.add(newest.mean_ms if bias == Bias() else self.model.uncorrected_ms(), num, dt_s)
        idle_s = traffic.end_s - self.moves.idle_since_s
        view = View(window, newest, idle_s, predicted_ms, self.moves.realised_share, self.bursts.is_burst)
        proposals = [propose("base", self._chooser, mean_ms, view)]
        if settings.has_residual:
            mean_ms = self._corrected.add(newest.mean_ms, num, dt_s)
            proposals.append(propose("residual", self._chooser, mean_ms, view))
        if settings.has_bursts:
            mixed_ms = self.bursts.mix(window, newest, mean_ms)
            if mixed_ms is not mean_ms:
                proposals.append(propose("burst recovery", self._chooser, mixed_ms, view))
        if settings.has_payback and (paid := self.payback.propose(view, proposals[-1], self.model)) is not None:
            proposals.append(paid)
        return proposals

    @property
    def learned(self) -> dict[str, list[float]]:
        """What was learned while serving, to be kept over a restart."""
        return {
            "costs": self.model.estimator.learned,
            "residual": self.residual.learned,
            "bursts": self.bursts.learned,
        }

    def relearn(self, learned: Mapping[str, list[float]]) -> None:
        """Go on from what a controller of the same model, pool and device had learned."""
        self.model.estimator.relearn(learned["costs"])
        self.residual.relearn(learned["residual"])
        self.bursts.relearn(learned["bursts"])
