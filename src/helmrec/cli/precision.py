"""`helmrec model check --precision`: held-out requests in full and in low precision, and the verdict."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from helmrec.cli.console import out, pairs_table
from helmrec.errors import ConfigError

if TYPE_CHECKING:
    from helmrec.model.precision import Precision, PrecisionVerdict


def check_precision_of(folder: Path, name: str, requests: Path | None, seed: int, device: str) -> bool:
    """Check a model folder, write its precision.json, print the figures; return whether the precision is allowed."""
    from helmrec.engine.precision_check import NUM_RANDOM, check_precision, random_requests
    from helmrec.model.precision import LOW_PRECISIONS, PrecisionVerdicts, write_verdicts
    from helmrec.model.weights import load_model
    from helmrec.traffic.request_lines import read_held_out

    names = {**LOW_PRECISIONS, "fp8_e4m3": LOW_PRECISIONS["fp8"]}
    if name not in names:
        *most, last = LOW_PRECISIONS
        raise ConfigError(f"--precision must be {', '.join(most)} or {last}, got {name!r}")
    if device not in {"cpu", "cuda"}:
        raise ConfigError(f"--device must be cpu or cuda, got {device!r}")
    precision, model = names[name], load_model(folder)
    if requests is None:
        asked, source = random_requests(model.config, NUM_RANDOM, seed), f"random, seed {seed}"
    else:
        asked, source = read_held_out(requests, model.config), requests.name
    figures = check_precision(model, precision, asked, source, device)
    verdicts = model.precision or PrecisionVerdicts(version=f"{model.version:016x}")
    verdicts = verdicts.with_verdict(precision, figures)
    write_verdicts(folder, verdicts)
    verdict = verdicts.verdicts[str(precision)]
    _show(folder, precision, verdict)
    return verdict.is_allowed


def _show(folder: Path, precision: Precision, verdict: PrecisionVerdict) -> None:
    found = verdict.figures
    rows = [
        ("requests", f"{found.requests:,} ({found.source}), {found.labelled:,} with labels"),
        ("difference of scores", f"largest {found.largest_difference:.3g}, mean {found.mean_difference:.3g}"),
        ("spread of scores", f"{found.spread:.3g}"),
        ("the same among the first ten", f"{found.top_overlap:.2%}"),
        ("Kendall's tau", f"{found.kendall_tau:.4f}"),
    ]
    for name, low, full in (("AUC", found.auc, found.full_auc), ("NDCG@10", found.ndcg, found.full_ndcg)):
        if low is not None and full is not None:
            rows.append((name, f"{low:.5f}, in full precision {full:.5f} ({low / full:.3%})" if full else f"{low:.5f}"))
    rows.append(("verdict", "allowed" if verdict.is_allowed else "not allowed: " + "; ".join(verdict.objections)))
    out.print(pairs_table(f"{precision} of {folder}", rows))
