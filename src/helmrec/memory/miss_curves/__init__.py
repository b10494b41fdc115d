"""Miss curves: the hit rates that both caches would have at other splits of the pool (see `joint`).

`HistoryVisit`, `serve`, `put_aside` and `shadows` are for compiled code of other packages that feeds the curves.
"""

from helmrec.memory.miss_curves.joint import (
    GRID,
    MOST_WAITING,
    CurveRequest,
    JointCurves,
    JointMissCurves,
    MissCurveConfig,
    sampling_rate_of,
)
from helmrec.memory.miss_curves.kv import HistoryVisit
from helmrec.memory.miss_curves.step import put_aside, serve, shadows

__all__ = [
    "GRID",
    "MOST_WAITING",
    "CurveRequest",
    "HistoryVisit",
    "JointCurves",
    "JointMissCurves",
    "MissCurveConfig",
    "put_aside",
    "sampling_rate_of",
    "serve",
    "shadows",
]
