"""The verdict about low precision in a model folder: precision.json, beside config.json and bound to its weights.

`helmrec model check --precision` writes it, and an engine with `kv_dtype` or `row_dtype` `"auto"` obeys it. It does not
know how the figures were measured.
"""

import json
import os
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import Field

from helmrec.config import ComputeDtype, FixedKVDtype, FixedRowDtype, Frozen, RoundedKV
from helmrec.errors import ConfigError, ModelError

FILE = "precision.json"


class Precision(NamedTuple):
    """What an engine rounds: K/V, the inputs of products, and embedding rows."""

    kv_dtype: FixedKVDtype = "model"
    compute_dtype: ComputeDtype = "model"
    row_dtype: FixedRowDtype = "model"

    def __str__(self) -> str:
        return f"kv_dtype {self.kv_dtype}, compute_dtype {self.compute_dtype}, row_dtype {self.row_dtype}"


FULL_PRECISION = Precision()
ROUNDED: tuple[RoundedKV, ...] = ("fp8_e4m3", "int8")
LOW_PRECISIONS = {  # by the names of `helmrec model check --precision`: each alone, and all together
    "fp8": Precision("fp8_e4m3"),
    "int8": Precision("int8"),
    "fp8-products": Precision(compute_dtype="fp8_e4m3"),
    "fp8-rows": Precision(row_dtype="fp8_e4m3"),
    "int8-rows": Precision(row_dtype="int8"),
    "fp8-layers": Precision("fp8_e4m3", "fp8_e4m3"),
    "int8-caches": Precision("int8", row_dtype="int8"),
    "fp8-all": Precision("fp8_e4m3", "fp8_e4m3", "fp8_e4m3"),
}


class Thresholds(Frozen):
    """What low precision must keep."""

    quality: float = Field(0.999, gt=0, le=1, description="share of AUC and NDCG@10 in full precision, with labels")
    top_overlap: float = Field(0.99, gt=0, le=1, description="mean share of the first ten candidates, without labels")
    kendall_tau: float = Field(0.99, gt=-1, le=1, description="mean over requests, without labels")
    requests: int = Field(100, ge=1, description="fewest requests to decide by; with labels, fewest that have them")


class PrecisionFigures(Frozen):
    """Scores in low precision compared with those in full precision. Means are over requests."""

    requests: int
    source: str = Field(description="of the requests")
    largest_difference: float = Field(description="of a score")
    mean_difference: float = Field(description="absolute, over all scores")
    spread: float = Field(description="standard deviation of all scores in full precision, to set differences beside")
    top_overlap: float
    kendall_tau: float
    labelled: int = Field(0, description="requests with labels")
    auc: float | None = None
    full_auc: float | None = None
    ndcg: float | None = None
    full_ndcg: float | None = None

    def objections(self, limits: Thresholds) -> list[str]:
        """What speaks against low precision; with labels, their quality decides, else the order of candidates."""
        has_labels = self.labelled > 0
        num = self.labelled if has_labels else self.requests
        found = [f"{num} requests are fewer than {limits.requests}"] if num < limits.requests else []
        if not has_labels:
            pairs = ((name, getattr(self, name), getattr(limits, name)) for name in ("top_overlap", "kendall_tau"))
            found += [f"{name} {value:.4f} is below {limit:g}" for name, value, limit in pairs if value < limit]
        for name, low, full in (("AUC", self.auc, self.full_auc), ("NDCG@10", self.ndcg, self.full_ndcg)):
            if low is not None and full is not None and low < limits.quality * full:
                found.append(f"{name} {low:.5f} is below {limits.quality:.1%} of {full:.5f}")
        return found


class PrecisionVerdict(Frozen):
    """The figures of one precision, and whether it may be used."""

    figures: PrecisionFigures
    objections: tuple[str, ...] = ()

    @property
    def is_allowed(self) -> bool:
        return not self.objections


class PrecisionVerdicts(Frozen):
    """The content of precision.json."""

    format: Literal[2] = 2
    version: str = Field(description="of the weights that were checked")
    thresholds: Thresholds = Thresholds()
    verdicts: dict[str, PrecisionVerdict] = Field(default_factory=dict, description="by precision, as in its words")

    def with_verdict(self, precision: Precision, figures: PrecisionFigures) -> "PrecisionVerdicts":
        verdict = PrecisionVerdict(figures=figures, objections=tuple(figures.objections(self.thresholds)))
        return self.model_copy(update={"verdicts": {**self.verdicts, str(precision): verdict}})

    def about(self, precision: Precision) -> PrecisionVerdict | None:
        """Return the verdict about a precision, if it was checked."""
        return self.verdicts.get(str(precision))


def read_verdicts(folder: Path, version: int) -> PrecisionVerdicts | None:
    """Read the verdicts of a model folder; None if there are none about weights of this version."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        found = PrecisionVerdicts(**json.loads(path.read_text()))
    except (ConfigError, ValueError, TypeError, RecursionError) as error:
        raise ModelError(f"{path}: {error}; remove it, or run helmrec model check --precision again") from None
    return found if found.version == f"{version:016x}" else None


def write_verdicts(folder: Path, verdicts: PrecisionVerdicts) -> None:
    """Replace the verdicts of a model folder at once."""
    beside = folder / f"{FILE}.{os.getpid()}.new"
    beside.write_text(verdicts.model_dump_json(indent=2) + "\n")
    beside.replace(folder / FILE)
