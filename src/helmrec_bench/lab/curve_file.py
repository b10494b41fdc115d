"""Miss curves of a run in a file: recording them takes ten times as long as the run they are shown to."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np

from helmrec.memory.miss_curves import JointCurves

_CURVES = tuple(field.name for field in fields(JointCurves) if field.name not in {"alphas", "num_requests", "faded"})


def save_curves(path: Path, curves: Sequence[JointCurves | None]) -> None:
    """By tick; None where too little had been seen."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = next((one for one in curves if one is not None), None)
    alphas = np.empty(0) if known is None else known.alphas
    table = np.full((len(curves), 1 + len(_CURVES), alphas.size), np.nan)
    faded = np.zeros(len(curves))
    for at, one in enumerate(curves):
        if one is not None:
            faded[at], table[at, 0] = one.faded, one.num_requests
            table[at, 1:] = [getattr(one, name) for name in _CURVES]
    with path.open("wb") as file:  # np.savez would add an ending to the name
        np.savez_compressed(file, alphas=alphas, table=table, faded=faded)


def load_curves(path: Path) -> list[JointCurves | None]:
    with np.load(path) as kept:
        alphas, table, faded = kept["alphas"], kept["table"], kept["faded"].tolist()
    return [
        None
        if not alphas.size or np.isnan(one[0, 0])
        else JointCurves(alphas, float(one[0, 0]), **dict(zip(_CURVES, one[1:].copy(), strict=True)), faded=gone)
        for one, gone in zip(table, faded, strict=True)
    ]
