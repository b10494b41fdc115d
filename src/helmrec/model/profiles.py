"""Named model shapes: published ones, and a small one for a laptop."""

from typing import Any

from helmrec.errors import ConfigError
from helmrec.model.config import ITEM, EncoderConfig, ModelConfig, TableConfig

PROFILES = ("demo", "kuairand", "narrow", "dlrmv3", "wide", "nvidia-bench", "paper")
# DLRMv3 of Meta with this many event tables besides item and category: as published, only the items of events have a
# large table; with 24 feature rows per token, both caches need much memory.
_EXTRA_TABLES = {"narrow": 0, "dlrmv3": 4, "wide": 22}
_ITEMS_ONLY: dict[str, dict[str, Any]] = {
    "kuairand": {"num_layers": 3, "qk_dim": 128, "v_dim": 128, "dim": 512, "window": 4_096, "max_candidates": 100},
    "nvidia-bench": {
        "num_layers": 8,
        "qk_dim": 256,
        "v_dim": 256,
        "dim": 1_024,
        "window": 4_096,
        "max_candidates": 256,
    },
    # KV per token of the HELM paper; its value width of about 195 is rounded to a multiple of 16
    "paper": {"num_layers": 6, "qk_dim": 64, "v_dim": 192, "dim": 512, "window": 15_000, "max_candidates": 512},
}


def profile(name: str, num_rows: int | None = None) -> ModelConfig:
    """Return the named shape; `num_rows` sets the size of the item table (published ones have up to 10^9 rows)."""
    if name not in PROFILES:
        raise ConfigError(f"profile must be one of {', '.join(PROFILES)}, got {name!r}")
    if num_rows is not None and num_rows < 1:
        raise ConfigError(f"rows must be at least 1, got {num_rows}")
    if name in _EXTRA_TABLES:
        return dlrmv3_shape(name, num_rows, _EXTRA_TABLES[name])
    return _demo(num_rows) if name == "demo" else _items_only(name, num_rows)


def _demo(num_rows: int | None) -> ModelConfig:
    return ModelConfig(
        name="demo",
        num_layers=3,
        num_heads=2,
        qk_dim=32,
        v_dim=32,
        dim=64,
        hidden_dim=64,
        normaliser=512,
        window=512,
        max_candidates=256,
        num_actions=8,
        num_tasks=2,
        row_dim=64,
        features=(TableConfig(name=ITEM, num_rows=num_rows or 50_000), TableConfig(name="category", num_rows=500)),
        user_context=(TableConfig(name="country", num_rows=200),),
        request_context=(TableConfig(name="hour", num_rows=24),),
        encoders=(EncoderConfig(name="item", tables=(ITEM,)), EncoderConfig(name="extra", tables=("category",))),
        candidate_encoder=EncoderConfig(name="candidate", tables=(ITEM, "category")),
    )


def dlrmv3_shape(name: str, num_rows: int | None, num_extra: int) -> ModelConfig:
    """Meta DLRMv3 with `num_extra` event tables besides item and category."""
    rows = num_rows or 1_000_000
    extra = tuple(TableConfig(name=f"feature_{i}", num_rows=max(1, rows // 4)) for i in range(num_extra))
    return ModelConfig(
        name=name,
        num_layers=5,
        num_heads=4,
        qk_dim=128,
        v_dim=128,
        dim=512,
        normaliser=16_384,
        dtype="bfloat16",
        window=14_000,
        max_candidates=2_048,
        num_actions=256,
        row_dim=512,
        row_dtype="float16",
        features=(TableConfig(name=ITEM, num_rows=rows), TableConfig(name="category", num_rows=128), *extra),
        user_context=(TableConfig(name="user", num_rows=max(1, rows // 100)),),
        encoders=(
            EncoderConfig(name="item", tables=(ITEM,)),
            EncoderConfig(name="extra", tables=("category", *(t.name for t in extra)), pooling="sum"),
        ),
        candidate_encoder=EncoderConfig(name="candidate", tables=(ITEM, "category")),
    )


def _items_only(name: str, num_rows: int | None) -> ModelConfig:
    """Return a published shape with one table."""
    return ModelConfig(
        name=name,
        **_ITEMS_ONLY[name],
        num_heads=4,
        normaliser=_ITEMS_ONLY[name]["window"],
        dtype="bfloat16",
        num_actions=16,
        row_dim=512,
        row_dtype="float16",
        features=(TableConfig(name=ITEM, num_rows=num_rows or 1_000_000),),
        encoders=(EncoderConfig(name="item", tables=(ITEM,)),),
        candidate_encoder=EncoderConfig(name="candidate", tables=(ITEM,)),
    )
