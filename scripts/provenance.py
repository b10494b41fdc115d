"""Where a figure comes from, as scripts write it down; `helmrec_bench.lab.provenance` knows machine and commit."""

import json
import sys
from pathlib import Path
from typing import Any

from helmrec_bench.lab import provenance as known


def provenance() -> dict[str, Any]:
    return known.provenance(f"python -m scripts.{Path(sys.argv[0]).stem} {' '.join(sys.argv[1:])}".strip())


def write_measurement(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**provenance(), **results}, indent=2) + "\n")
    print(f"wrote {path}")
