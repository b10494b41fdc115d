"""A split that never moves: the baseline of everything else."""

from pydantic import Field

from helmrec.config import Frozen
from helmrec.control.policy import Move, WindowStats

UNTUNED_ALPHA = 1 / 2  # what someone sets who has not measured


class StaticSettings(Frozen):
    """Where to stay."""

    alpha: float = Field(UNTUNED_ALPHA, ge=0, le=1, description="EMB share of the pool's pages")


class Static:
    """Goes to its alpha and stays."""

    def __init__(self, settings: StaticSettings | None = None) -> None:
        self.settings = settings or StaticSettings()

    def decide(self, stats: WindowStats) -> Move | None:
        if stats.alpha_target == self.settings.alpha:
            return None
        return Move(self.settings.alpha, "static")

    def reset(self) -> None:
        """There is nothing to forget."""
