"""What an experiment is: something measured at a tier, claims judged by it, and how it is shown."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from helmrec_bench.lab.lab import Lab
from helmrec_bench.report.blocks import Block
from helmrec_bench.report.claims import Verdict

Figures = dict[str, Any]  # as JSON has it; times stand under "times", so that all else is the same in every run
Measured = Mapping[str, Any]  # files of docs/measurements by their names, those that are there


@dataclass(frozen=True, slots=True)
class Experiment:
    """One figure or table of the paper, or of what its reviewers missed."""

    name: str
    title: str
    source: str  # which figure of the paper, or whose question
    shows: str  # what the paper shows there, or what is asked
    ran: str  # what we run for it
    measure: Callable[[Lab], Figures]
    judge: Callable[[Figures], Sequence[Verdict]]
    show: Callable[[Figures, Measured], Sequence[Block]]
