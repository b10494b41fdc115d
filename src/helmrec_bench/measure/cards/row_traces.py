"""Traces of row reads for comparisons of row caches, and tables whose rows can be recognised."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from helmrec.memory.geometry import PageGeometry
from helmrec.types import IntArray


@dataclass(frozen=True, slots=True)
class Profile:
    """What is read, and from what."""

    num_rows: int
    geometry: PageGeometry
    step_rows: int
    warm_up: int  # steps
    measured: int  # steps
    exponent: float
    shares: tuple[float, ...]  # of the rows that a cache holds
    drift: float = 0.0  # share of the rows that swap their popularity in each step


FULL = Profile(8 << 20, PageGeometry(128, 5, 4, 128, 128, 2, 512, 2), 65_536, 100, 100, 1.0, (0.01, 0.05))
DRIFTING = replace(FULL, warm_up=400, measured=200, shares=(0.01,), drift=0.005)
# Few rows and many lookups: eight requests of about 250 events over the films of ML-1M.
REPEATING = Profile(4_096, PageGeometry(8, 1, 1, 64, 64, 2, 512, 2), 2_048, 100, 100, 0.8, (0.05, 0.2))
QUICK = Profile(4_000, PageGeometry(8, 1, 1, 64, 64, 2, 64, 2), 256, 15, 10, 1.0, (0.1,))


def zipf_steps(profile: Profile, seed: int) -> IntArray:  # (steps, rows)
    """Rows by popularity 1 / rank ** exponent; which row has which rank is drawn, so that neighbours differ."""
    rng = np.random.default_rng(seed)
    below = np.cumsum(1.0 / np.arange(1, profile.num_rows + 1) ** profile.exponent)
    num_steps = profile.warm_up + profile.measured
    drawn = np.sort(rng.random(num_steps * profile.step_rows)) * below[-1]  # sorted, since searching is faster so
    steps = np.searchsorted(below, drawn)
    rng.shuffle(steps)
    steps, name_of = steps.reshape(num_steps, profile.step_rows), rng.permutation(profile.num_rows)
    for step in steps:
        swapped = rng.choice(profile.num_rows, int(profile.drift * profile.num_rows), replace=False)
        name_of[swapped] = name_of[rng.permutation(swapped)]
        step[:] = name_of[step]
    return steps


def make_table(num_rows: int, row_dim: int) -> Tensor:
    """Rows whose first three values are the digits of their number, so that rows may be compared as numbers."""
    table, rows = torch.zeros((num_rows, row_dim), dtype=torch.float16), torch.arange(num_rows)
    for i in range(3):
        table[:, i] = (rows >> 10 * i) & 1023
    return table


def numbers_of(values: Tensor) -> Tensor:
    return sum(values[:, i].cpu().long() << 10 * i for i in range(3))  # type: ignore[return-value]
