"""The precision of an engine: which types keep K/V, which version its caches have, how far audits may be off.

It is fixed when an engine starts. A precision that changed from step to step would make scores depend on what else
is in a batch.
"""

import hashlib
from typing import NamedTuple

import torch

from helmrec.config import EngineConfig
from helmrec.model.weights import LoadedModel

KV_DTYPES: dict[str, torch.dtype] = {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}
# Largest difference of scores with and without caches that rounding explains.
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
# A key that differs in its last bit may be rounded to the next code.
_CODE_TOLERANCE = {"fp8_e4m3": 5e-2, "int8": 1e-2}
_PRODUCTS_TOLERANCE = 5e-2  # the same of the inputs of products


class ChosenKV(NamedTuple):
    """Settings without `auto`, and lines that say what was chosen and why, where it is not the default."""

    config: EngineConfig
    reasons: tuple[str, ...]


def choose_kv_dtype(config: EngineConfig, model: LoadedModel) -> ChosenKV:
    """Choose eight bits for K/V if the model's own check allows them."""
    if config.kv_dtype != "auto":
        is_default = config.kv_dtype == "model"
        return ChosenKV(config, () if is_default else (f"kv_dtype: {config.kv_dtype}, as set",))
    found = model.precision
    best = None if found is None else found.best_kv_dtype()
    if found is None or not found.kv_dtype:
        why = "the model folder has no check of low precision for these weights"
    elif best is None:
        why = "; ".join(f"{name}: {', '.join(verdict.objections)}" for name, verdict in found.kv_dtype.items())
    else:
        difference = found.kv_dtype[best].figures.mean_difference
        why = f"the model's check allows it (mean difference of scores {difference:.3g})"
    chosen = config.model_copy(update={"kv_dtype": best or "model"})
    return ChosenKV(chosen, (f"kv_dtype: {chosen.kv_dtype}, chosen since {why}",))


def cache_version(version: int, config: EngineConfig) -> int:
    """Return the version under which K/V are kept: of the model's weights, and of the precision that computed them."""
    precision: str = config.fixed_kv_dtype
    if config.compute_dtype != "model":
        precision += f" {config.compute_dtype}"
    digest = hashlib.blake2b(f"{version} {precision}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def audit_tolerance(dtype: str, config: EngineConfig) -> float:
    """Return the largest difference of scores that an audit accepts. dtype: of the model."""
    if config.audit_tolerance is not None:
        return config.audit_tolerance
    products = 0.0 if config.compute_dtype == "model" else _PRODUCTS_TOLERANCE
    return max(TOLERANCE[dtype], _CODE_TOLERANCE.get(config.kv_dtype, 0.0), products)
