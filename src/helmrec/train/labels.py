"""What each step would have cost in the end, from every split at every moment: the switching-cost oracle, all of it.

`sim.oracle.cheapest_path` tells the one best path; a policy that has strayed from it needs to know what is best from
where it is. The same dynamic programme, run backwards over ticks, tells.
"""

import numpy as np
from numpy.typing import NDArray

from helmrec.control.features import STEPS
from helmrec.control.outlook import Floats
from helmrec.sim.oracle import SwitchPrices, switching_costs
from helmrec.train.lessons import SPLITS, WINDOW_S, Ground, Lesson

FINE: Floats = np.linspace(0.03, 0.9, 88)  # every step is a whole number of these
_OFFSETS = np.round(np.array(STEPS) / 0.01).astype(np.int64)


def switch_prices(ground: Ground, load: float = 0.7) -> SwitchPrices:
    """What a byte costs that changes hands on this node."""
    cost = ground.service
    tokens = float(ground.trace.backlog.mean()) if ground.trace.num_users else 1_000.0
    return SwitchPrices(
        pool_bytes=float(ground.config.engine.pool_bytes),
        rewarm_ms_per_byte=(cost.token_ms + cost.pair_ms * tokens / 2) / cost.kv_token_bytes,
        refill_ms_per_byte=cost.missed_row_ms / cost.row_bytes,
        load=load,
    )


def fine_costs(costs: Floats) -> Floats:
    """(windows, FINE) of a sweep over SPLITS; straight lines in the logarithm.

    A smooth curve through a split that drowns, beside one that does not, would swing below zero between them.
    """
    return np.exp([np.interp(FINE, SPLITS, row) for row in np.log(np.maximum(costs, 1e-6))])


def costs_to_go(lesson: Lesson, discount: float = 0.97) -> Floats:
    """(ticks, FINE, STEPS): cost of each step at the end of each second, and of the best that can follow it.

    Discounted, since what lies far ahead cannot be known; as shares of what a second costs at best.
    """
    num_ticks = lesson.num_ticks
    window = np.minimum((np.arange(num_ticks) / WINDOW_S).astype(np.int64), lesson.costs.shape[0] - 1)
    per_tick = fine_costs(lesson.costs)[window] / WINDOW_S
    switching = switching_costs(FINE, switch_prices(lesson.ground))
    places = np.clip(np.arange(FINE.size)[:, None] + _OFFSETS, 0, FINE.size - 1)  # (FINE, STEPS)
    paid = np.take_along_axis(switching, places, axis=1)
    scale = float(per_tick.min(axis=1).mean())
    answer = np.zeros((num_ticks, FINE.size, len(STEPS)))
    after = np.zeros(FINE.size)
    for tick in range(num_ticks - 2, -1, -1):
        answer[tick] = (paid + (per_tick[tick + 1] + discount * after)[places]) / scale
        after = answer[tick].min(axis=1) * scale
    return answer


def place_of(alphas: NDArray[np.float64]) -> NDArray[np.int64]:
    """Nearest place in FINE."""
    return np.clip(np.round((alphas - FINE[0]) / 0.01), 0, FINE.size - 1).astype(np.int64)
