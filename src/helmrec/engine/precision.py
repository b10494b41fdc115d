"""The precision of an engine: which types keep K/V and rows, which version its caches have, how far audits may be off.

It is fixed when an engine starts. A precision that changed from step to step would make scores depend on what else
is in a batch.
"""

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from helmrec.config import EngineConfig, FixedKVDtype, RoundedKV
from helmrec.model.precision import LOW_PRECISIONS, ROUNDED, Precision, PrecisionVerdicts
from helmrec.model.weights import LoadedModel

# Largest difference of scores with and without caches that rounding explains.
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
# A key that differs in its last bit may be rounded to the next code.
_CODE_TOLERANCE = {"fp8_e4m3": 5e-2, "int8": 1e-2}
_PRODUCTS_TOLERANCE = 5e-2  # the same of the inputs of products


class ChosenPrecision(NamedTuple):
    """Settings without `auto`, and lines that say what was chosen and why, where it is not the default."""

    config: EngineConfig
    reasons: tuple[str, ...]


def choose_precision(config: EngineConfig, model: LoadedModel, no_kv_codes: str | None = None) -> ChosenPrecision:
    """Choose eight bits for K/V, then for rows, if the model's own check allows them with all else that is rounded.

    no_kv_codes: why the card cannot read K/V in eight bits, if it cannot.
    """
    config, kv_reasons = _choose_kv_dtype(config, model.precision, no_kv_codes)
    config, row_reasons = _choose_row_dtype(config, model.precision)
    return ChosenPrecision(config, (*kv_reasons, *row_reasons))


def _choose_kv_dtype(config: EngineConfig, found: PrecisionVerdicts | None, no_kv_codes: str | None) -> ChosenPrecision:
    if config.kv_dtype != "auto":
        return ChosenPrecision(config, _as_set("kv_dtype", config.kv_dtype))
    fixed = config if config.row_dtype != "auto" else config.model_copy(update={"row_dtype": "model"})
    others = Precision("model", config.compute_dtype, fixed.row_rounding)
    if no_kv_codes is None:
        choice = _choose(found, {code: others._replace(kv_dtype=code) for code in ROUNDED})
    else:
        choice = _Choice("model", no_kv_codes)
    chosen = config.model_copy(update={"kv_dtype": choice.code})
    return ChosenPrecision(chosen, (f"kv_dtype: {choice.code}, chosen since {choice.why}",))


def _choose_row_dtype(config: EngineConfig, found: PrecisionVerdicts | None) -> ChosenPrecision:
    host = config.host_row_dtype
    host_reasons = _as_set("host_row_dtype", host)
    if config.row_dtype != "auto":
        return ChosenPrecision(config, (*_as_set("row_dtype", config.row_dtype), *host_reasons))
    if host != "model":
        choice = _Choice(host, "host_row_dtype has rounded the rows already")
    else:
        others = Precision(config.fixed_kv_dtype, config.compute_dtype)
        choice = _choose(found, {code: others._replace(row_dtype=code) for code in ROUNDED})
    chosen = config.model_copy(update={"row_dtype": choice.code})
    return ChosenPrecision(chosen, (f"row_dtype: {choice.code}, chosen since {choice.why}", *host_reasons))


def _as_set(name: str, value: str) -> tuple[str, ...]:
    return () if value == "model" else (f"{name}: {value}, as set",)


class _Choice(NamedTuple):
    code: FixedKVDtype
    why: str


def _choose(found: PrecisionVerdicts | None, candidates: Mapping[RoundedKV, Precision]) -> _Choice:
    """Choose the candidate that is allowed and whose scores are closest to full precision; else the model's dtype."""
    about = {code: None if found is None else found.about(each) for code, each in candidates.items()}
    verdicts = {code: verdict for code, verdict in about.items() if verdict is not None}
    allowed = {code: verdict.figures.mean_difference for code, verdict in verdicts.items() if verdict.is_allowed}
    if not verdicts:
        names = [name for name, precision in LOW_PRECISIONS.items() if precision in candidates.values()]
        wanted = f"; helmrec model check --precision {' or '.join(names)} makes one" if names else ""
        return _Choice("model", f"the model folder has no check of this precision for these weights{wanted}")
    if not allowed:
        objections = (f"{code}: {', '.join(verdict.objections)}" for code, verdict in verdicts.items())
        return _Choice("model", "; ".join(objections))
    best = min(allowed, key=lambda code: allowed[code])
    return _Choice(best, f"the model's check allows it (mean difference of scores {allowed[best]:.3g})")


def cache_version(version: int, config: EngineConfig) -> int:
    """Return the version under which K/V are kept: of the model's weights, and of the precision that computed them.

    Rows have the same values whether they are rounded in the pool or in host memory. Where a page holds values with
    tokens side by side, the version says so: pages of another layout, in a snapshot or a host tier, are not found.
    """
    precision: str = config.fixed_kv_dtype
    if config.compute_dtype != "model":
        precision += f" {config.compute_dtype}"
    if config.kv_dtype == config.compute_dtype == "fp8_e4m3":
        precision += " values by dim"
    if config.row_rounding != "model":
        precision += f" rows {config.row_rounding}"
    digest = hashlib.blake2b(f"{version} {precision}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def audit_tolerance(dtype: str, config: EngineConfig) -> float:
    """Return the largest difference of scores that an audit accepts. dtype: of the model.

    Rounded rows need no more than others: an audit reads the same values, bit for bit.
    """
    if config.audit_tolerance is not None:
        return config.audit_tolerance
    products = 0.0 if config.compute_dtype == "model" else _PRODUCTS_TOLERANCE
    return max(TOLERANCE[dtype], _CODE_TOLERANCE.get(config.kv_dtype, 0.0), products)
