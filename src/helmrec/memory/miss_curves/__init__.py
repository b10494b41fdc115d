"""What the hit rates of both caches would be at other splits of the pool: `joint` says how, and what is left out.

`History`, `serve`, `put_aside` and `shadows` are for compiled code that serves requests of its own making.
"""

from helmrec.memory.miss_curves.joint import (
    GRID,
    MOST_WAITING,
    JointCurves,
    JointMissCurves,
    MissCurveConfig,
    Observed,
    Whole,
)
from helmrec.memory.miss_curves.kv import History
from helmrec.memory.miss_curves.step import put_aside, serve, shadows

__all__ = [
    "GRID",
    "MOST_WAITING",
    "History",
    "JointCurves",
    "JointMissCurves",
    "MissCurveConfig",
    "Observed",
    "Whole",
    "put_aside",
    "serve",
    "shadows",
]
