"""The cells of the map: what a node is and which two regimes of traffic it lives between.

All have the same pool. Rows lie in fewer or more tables, but take the same bytes in all: so shapes differ in how many
rows a token reads, not in how large the hot set is; that is another axis.
"""

from typing import Any, Literal

from pydantic import Field

from helmrec.config import EngineConfig, Frozen
from helmrec.costs.calibrated import CostModel
from helmrec.model.profiles import profile
from helmrec.sim.node.config import NodeConfig
from helmrec.sim.scenario import with_bus_speed
from helmrec.traffic.workload import Phase, Users, Workload

SLO_MS = 80.0  # the published limit of ranking (MLPerf DLRMv3)
POOL_GB = 80.0  # what a card of 141 GB leaves beside weights, buffers and graphs, with room
HOT_USERS = 1_200  # their prefixes take 82 GB
NUM_ROWS = 260_000_000  # of 1 KiB, all tables together; a third of them take nine tenths of the reads: 90 GB
HOT_GB = 86.0  # the mean of the two
MOVE_BYTES = "64MiB"  # per step: the default would take half a minute to move a third of such a pool

Regime = Literal["returning", "browsing", "flood"]
REGIMES: tuple[Regime, Regime] = ("returning", "browsing")
_TABLES = {1: 1.0, 6: 2.0, 24: 6.5}  # rows of all tables per row of the item table: extra tables have a quarter
_PROFILES = {1: "narrow", 6: "dlrmv3", 24: "wide"}
_EXPONENT, _SHIFT_SHARE = 1.0, 1 / 40_000  # reuse between Meta's published traces of 2021 and 2022
# One lane is simulated.
_LANES = {1: 256, 6: 512, 24: 1024}
# Runs of wide shapes take longest and fill their row cache soonest.
_WARM_UP_S = {1: 120.0, 6: 60.0, 24: 30.0}


class Cell(Frozen):
    """One node of the map."""

    rows_per_token: Literal[1, 6, 24]
    bus_speed: float = Field(1.0, gt=0, description="share of the calibration's")
    hot: float = Field(1.0, gt=0, description="times as many hot users and rows")
    overlap: bool = Field(True, description="whether rows are read while another step computes")

    @property
    def name(self) -> str:
        ending = "" if self.overlap else ", no overlap"
        return f"{self.rows_per_token} rows, bus x {self.bus_speed:g}, hot x {self.hot:g}{ending}"

    @property
    def hot_users(self) -> int:
        return round(HOT_USERS * self.hot)

    @property
    def num_items(self) -> int:
        return round(NUM_ROWS * self.hot / _TABLES[self.rows_per_token])

    @property
    def warm_up_s(self) -> float:
        """Until both caches evict, with some reserve."""
        return 1.0 + _WARM_UP_S[self.rows_per_token]

    @property
    def num_lanes(self) -> int:
        return _LANES[self.rows_per_token]

    def node(self, alpha: float) -> NodeConfig:
        engine = EngineConfig(
            pool_bytes=f"{POOL_GB:g}GB",
            alpha=alpha,
            max_batch_requests=8,
            move_bytes_per_step=MOVE_BYTES,
            overlap=self.overlap,
        )
        model = profile(_PROFILES[self.rows_per_token], self.num_items)
        return NodeConfig(model=model, engine=engine, row_sample=1 / self.num_lanes, slo_ms=SLO_MS)

    def cost(self, measured: CostModel) -> CostModel:
        return with_bus_speed(measured, self.bus_speed)

    def workload(self, warm_up: Phase, phases: tuple[Phase, ...]) -> Workload:
        """Histories that users bring along are made of what was popular at the very start: a moment of calm."""
        return Workload(
            name=self.name,
            num_items=self.num_items,
            num_lanes=self.num_lanes,
            item_shift=self.num_items * _SHIFT_SHARE,
            num_candidates=2_048,
            users=Users(min_history=2_000, max_history=14_000),
            opening=(self.phase("returning", 1.0, warm_up.rate), warm_up),
            phases=phases,
        )

    def phase(self, regime: Regime, duration_s: float, rate: float | tuple[float, float]) -> Phase:
        """Returning users with long histories; another crowd, half as many of it known, with half the history and
        flatter taste; or new users on top of the usual traffic, twice as many."""
        settings: dict[str, Any] = {"hot_share": 0.7, "history": 6_700, "item_exponent": _EXPONENT}
        if regime == "browsing":
            settings = {
                "hot_share": 0.35,
                "history": 3_350,
                "hot_first": self.hot_users,
                "item_exponent": _EXPONENT - 0.3,
            }
        elif regime == "flood":
            settings["hot_share"] = 0.7 / 3
        return Phase(name=regime, duration_s=duration_s, rate=rate, hot_users=self.hot_users, **settings)
