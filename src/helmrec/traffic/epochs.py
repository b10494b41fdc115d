"""Divides the phases of a workload into epochs of constant popularity, and lists the laws that they need."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from helmrec.traffic.popularity import mix
from helmrec.traffic.trace import Epoch, ZipfLaw
from helmrec.traffic.workload import Phase, Workload

_EXPONENT_STEP = 0.02  # ramps of the exponent are rounded to steps, so that few alias tables are needed


class Stretch(NamedTuple):
    """One occurrence of a phase."""

    phase: Phase
    start_s: float


class EpochPlan(NamedTuple):
    """The laws and epochs of a workload. Epoch `epoch[i]` begins at `start_s[i]`."""

    laws: tuple[ZipfLaw, ...]
    epochs: tuple[Epoch, ...]
    start_s: NDArray[np.float64]
    epoch: NDArray[np.int32]


def lay_out(workload: Workload) -> list[Stretch]:
    """All phases of a workload with their start times."""
    stretches, start_s = [], 0.0
    for phase in workload.all_phases:
        stretches.append(Stretch(phase, start_s))
        start_s += phase.duration_s
    return stretches


def plan_epochs(workload: Workload, stretches: list[Stretch], seed: int) -> EpochPlan:
    """Plan the epochs. Epoch 0 is the popularity at the start, without drift and flash; backlogs are drawn from it."""
    first = workload.all_phases[0].item_exponent[0]
    laws, epochs = {_step(first): 0}, {Epoch(): 0}
    starts, index, drifted = [], [], 0.0
    for number, stretch in enumerate(stretches):
        phase = stretch.phase
        flash_first = int(mix(number, seed)) % (workload.num_items // workload.lanes)
        for start_s, share in _pieces(workload, phase):
            law = laws.setdefault(_step(_at(phase.item_exponent, share)), len(laws))
            fresh_items = drifted + phase.drift_items_per_hour * start_s / 3_600
            epoch = Epoch(law=law, drift_blocks=int(fresh_items / workload.lanes))
            if flash_share := _at(phase.flash_share, share):
                blocks = -(-phase.flash_items // workload.lanes)
                flash = {"flash_share": flash_share, "flash_first": flash_first, "flash_blocks": blocks}
                epoch = epoch.model_copy(update=flash)
            starts.append(stretch.start_s + start_s)
            index.append(epochs.setdefault(epoch, len(epochs)))
        drifted += phase.drift_items_per_hour * phase.duration_s / 3_600
    return EpochPlan(
        laws=tuple(ZipfLaw(exponent=exponent, shift=workload.item_shift) for exponent in laws),
        epochs=tuple(epochs),
        start_s=np.array(starts),
        epoch=np.array(index, np.int32),
    )


def _pieces(workload: Workload, phase: Phase) -> list[tuple[float, float]]:
    """Pieces of a phase: start time, and share of the ramp at its middle. One piece if nothing changes."""
    is_constant = all(start == end for start, end in (phase.item_exponent, phase.flash_share))
    if is_constant and not phase.drift_items_per_hour:
        return [(0.0, 0.0)]
    count = int(np.ceil(phase.duration_s / workload.epoch_s))
    return [(i * phase.duration_s / count, (i + 0.5) / count) for i in range(count)]


def _at(ramp: tuple[float, float], share: float) -> float:
    start, end = ramp
    return start + (end - start) * share


def _step(exponent: float) -> float:
    return round(round(exponent / _EXPONENT_STEP) * _EXPONENT_STEP, 6)
