"""What nobody can know: the first minute after a start, and the first burst of a run. Both are scored apart."""

import numpy as np
from numpy.typing import NDArray

from helmrec.sim.scenario import Scenario
from helmrec.types import FloatArray

OPENING_S = 60.0  # after a start
_AFTER_BURST_S = 10.0  # that the first burst's queue may take to drain
_BURSTS = ("burst", "flood", "flash")  # names of phases


def first_burst(scenario: Scenario) -> tuple[tuple[float, float], ...]:
    """From and until; none, if the scenario has none."""
    workload = scenario.workload
    assert workload is not None
    now_s = sum(phase.duration_s for phase in workload.opening)
    for phase in workload.phases:
        if phase.name in _BURSTS:
            return ((now_s, now_s + phase.duration_s),)
        now_s += phase.duration_s
    return ()


def is_in_burst(arrived_s: FloatArray, begin_s: float, end_s: float) -> NDArray[np.bool_]:
    """Whether requests came in a burst, or while its queue drained."""
    return (arrived_s >= begin_s) & (arrived_s < end_s + _AFTER_BURST_S)


def is_known(scenario: Scenario, arrived_s: FloatArray) -> NDArray[np.bool_]:
    """Whether requests came neither in the first minute nor in the first burst."""
    known = arrived_s >= OPENING_S
    for begin_s, end_s in first_burst(scenario):
        known &= ~is_in_burst(arrived_s, begin_s, end_s)
    return known
