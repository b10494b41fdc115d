"""Named model shapes: published ones, and a small one for a laptop."""

from collections.abc import Callable
from typing import NamedTuple

from helmrec.errors import ConfigError
from helmrec.model.config import ITEM, EncoderConfig, ModelConfig, TableConfig


def profile(name: str, num_rows: int | None = None) -> ModelConfig:
    """Return the named shape; `num_rows` sets the size of the item table (published ones have up to 10^9 rows)."""
    if name not in PROFILES:
        raise ConfigError(f"profile must be one of {', '.join(PROFILES)}, got {name!r}")
    if num_rows is not None and num_rows < 1:
        raise ConfigError(f"rows must be at least 1, got {num_rows}")
    return PROFILES[name](num_rows)


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


def _dlrmv3(num_rows: int | None) -> ModelConfig:
    """Meta DLRMv3, with four extra event tables besides item and category."""
    return dlrmv3_shape("dlrmv3", num_rows, num_extra=4)


def _narrow(num_rows: int | None) -> ModelConfig:
    """Meta DLRMv3 as published: only the items of events have a large table."""
    return dlrmv3_shape("narrow", num_rows, num_extra=0)


def _wide(num_rows: int | None) -> ModelConfig:
    """DLRMv3 with 24 feature rows per token, for which both caches need much memory."""
    return dlrmv3_shape("wide", num_rows, num_extra=22)


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


class _Heads(NamedTuple):
    """The attention heads of a layer."""

    num: int
    qk_dim: int
    v_dim: int


def _kuairand(num_rows: int | None) -> ModelConfig:
    return _plain("kuairand", num_rows, layers=3, heads=_Heads(4, 128, 128), dim=512, window=4_096, candidates=100)


def _nvidia_bench(num_rows: int | None) -> ModelConfig:
    return _plain(
        "nvidia-bench", num_rows, layers=8, heads=_Heads(4, 256, 256), dim=1_024, window=4_096, candidates=256
    )


def _paper(num_rows: int | None) -> ModelConfig:
    """The HELM paper's KV per token; its value width of about 195 is rounded to a multiple of 16."""
    return _plain("paper", num_rows, layers=6, heads=_Heads(4, 64, 192), dim=512, window=15_000, candidates=512)


def _plain(  # noqa: PLR0913 - the columns of the table of published shapes
    name: str, num_rows: int | None, *, layers: int, heads: _Heads, dim: int, window: int, candidates: int
) -> ModelConfig:
    return ModelConfig(
        name=name,
        num_layers=layers,
        num_heads=heads.num,
        qk_dim=heads.qk_dim,
        v_dim=heads.v_dim,
        dim=dim,
        normaliser=window,
        dtype="bfloat16",
        window=window,
        max_candidates=candidates,
        num_actions=16,
        row_dim=512,
        row_dtype="float16",
        features=(TableConfig(name=ITEM, num_rows=num_rows or 1_000_000),),
        encoders=(EncoderConfig(name="item", tables=(ITEM,)),),
        candidate_encoder=EncoderConfig(name="candidate", tables=(ITEM,)),
    )


PROFILES: dict[str, Callable[[int | None], ModelConfig]] = {
    "demo": _demo,
    "kuairand": _kuairand,
    "narrow": _narrow,
    "dlrmv3": _dlrmv3,
    "wide": _wide,
    "nvidia-bench": _nvidia_bench,
    "paper": _paper,
}
