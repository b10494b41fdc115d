"""How latency grows with load on a node, fitted to windows of runs at constant splits."""

from collections.abc import Sequence

import numpy as np

from helmrec.control.outlook import Crowding
from helmrec.control.service_cost import ServiceCost
from helmrec.train.lessons import Lesson


def fit_crowding(lessons: Sequence[Lesson]) -> Crowding:
    """Least squares of the fourth root of latency over a lone request's, in pressure and its square."""
    pressure, growth = (np.concatenate(column) for column in zip(*(_observed(one) for one in lessons), strict=True))
    known = np.column_stack((pressure, pressure**2))
    weights = 1 / growth  # an error of a tenth counts the same everywhere
    found, *_ = np.linalg.lstsq(known * weights[:, None], (growth - 1) * weights, rcond=None)
    if found.min() < 0:  # one term says it all
        found = np.array([0.0, float((known[:, 1] * weights**2 @ (growth - 1)) / (known[:, 1] ** 2 @ weights**2))])
    return Crowding(first=float(found[0]), second=float(max(found[1], 0.0)))


def _observed(lesson: Lesson) -> tuple[np.ndarray, np.ndarray]:
    """Pressure and growth of each window in which the node was neither idle nor drowning."""
    cost: ServiceCost = lesson.ground.service
    new, resident, missed, rate, mean_ms = np.array(lesson.steps).T
    compute = cost.floor_ms + new * (cost.token_ms + cost.pair_ms * (new + resident) / 2)
    lead = cost.host_floor_ms + cost.host_token_ms * new + cost.missed_row_ms * missed
    pressure = rate / 1e3 * (np.hypot(compute, lead) if cost.is_overlapping else compute + lead)
    is_telling = (mean_ms > 0) & (pressure > 0.05) & (pressure < 1.3) & (mean_ms < 200)
    growth = (mean_ms / (cost.step_ms + compute + lead)) ** 0.25
    return pressure[is_telling], np.maximum(growth[is_telling], 1.0)
