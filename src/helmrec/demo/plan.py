"""Sizes and traffic of the demonstration, and when each part of the traffic begins."""

from dataclasses import dataclass

from pydantic import Field

from helmrec.config import Frozen
from helmrec.traffic.families import Shape, family
from helmrec.traffic.workload import Workload

PARTS = ("steady", "trend", "burst")
NUM_SIDES = 3  # an untuned split, the best constant one, and the policy
_BURSTS = 2  # in the last part


class DemoPlan(Frozen):
    """Settings of the demonstration. By default, hot prefixes and rows together do not fit the pool."""

    seconds: float = Field(75.0, gt=0, description="of traffic, a third under each split")
    seed: int = Field(0, ge=0)
    num_items: int = Field(50_000, ge=1)
    pool: str = "24MiB"
    hot_users: int = Field(60, ge=1)
    history: float = Field(250.0, gt=0, description="median events")
    num_candidates: int = Field(64, ge=1)
    trial_requests: int = Field(200, ge=1, description="served at each constant split before one is chosen")
    trial_alphas: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7)
    policy: str = "helm"
    slo_ms: float = Field(80.0, gt=0)
    has_simulation: bool = True

    @property
    def side_s(self) -> float:
        return self.seconds / NUM_SIDES

    def workload(self, rate: float) -> Workload:
        """Return the traffic: steady, then a trend towards new users with other items, then bursts of those."""
        part_s = self.side_s / len(PARTS)
        shape = Shape(
            num_items=self.num_items,
            item_exponent=1.0,
            num_candidates=self.num_candidates,
            history=self.history,
            min_history=int(self.history / 5),
            max_history=int(2 * self.history),
            new_events=3,
            hot_share=0.9,
            hot_users=self.hot_users,
            rate=rate,
            duration_s=part_s,
            axis="all",
            burst_s=part_s / 4 / _BURSTS,
        )
        phases = tuple(phase for name in PARTS for phase in family(name, shape).phases)
        return family("steady", shape).model_copy(update={"name": "demo", "phases": phases})

    def part_at(self, elapsed_s: float) -> str:
        """Return the part of the traffic that a request due at this time belongs to."""
        return PARTS[min(int(elapsed_s / self.side_s * len(PARTS)), len(PARTS) - 1)]


QUICK = DemoPlan(
    seconds=9.0,
    num_items=2_000,
    pool="4MiB",
    hot_users=8,
    history=60,
    trial_requests=12,
    trial_alphas=(0.2, 0.5),
    has_simulation=False,
)


@dataclass(frozen=True, slots=True)
class PartFigures:
    """Latency of one part of the traffic under one split."""

    requests: int
    mean_ms: float
    p99_ms: float
    refused: int
