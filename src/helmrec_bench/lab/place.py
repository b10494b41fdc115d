"""Folders an evaluation works in."""

from dataclasses import dataclass
from pathlib import Path

from helmrec_bench import scenarios


@dataclass(frozen=True, slots=True)
class Place:
    """Folders an evaluation works in."""

    scenarios: Path = Path(scenarios.__file__).parent
    measurements: Path = Path("docs/measurements")
    build: Path = Path("build/bench")
