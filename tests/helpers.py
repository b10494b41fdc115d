"""Small real models, engines and requests that tests build in milliseconds."""

from typing import Any

import numpy as np
import torch

from helmrec.clock import Clock, ManualClock
from helmrec.config import EngineConfig, KVDtype
from helmrec.engine.engine import Engine
from helmrec.memory.embedding_cache import EmbeddingCache
from helmrec.memory.geometry import PageGeometry
from helmrec.memory.pool import Pool
from helmrec.model.config import (
    ITEM,
    AttentionBias,
    Cycle,
    EncoderConfig,
    ModelConfig,
    QueryFrame,
    RetrievalHead,
    StateHead,
    TableConfig,
)
from helmrec.model.weights import LoadedModel, random_dense
from helmrec.types import RankRequest

TINY_PAGES = 30
# What a model may have besides the defaults.
OPTIONS: dict[str, dict[str, Any]] = {
    "output bias": {"output_bias": True},
    "retrieval": {"num_tasks": 1, "retrieval": RetrievalHead(state_norm="layer", temperature=4.0)},
    "retrieval of rows": {
        "num_tasks": 1,
        "retrieval": RetrievalHead(state_norm="l2", item_norm="l2", temperature=0.2),
        "request_context": (),
        "encoders": (EncoderConfig(name="event", tables=("item", "category"), pooling="sum", kind="linear"),),
        "candidate_encoder": EncoderConfig(name="candidate", tables=("item",), kind="linear"),
    },
    "attention bias": {
        "num_tasks": 1,
        "retrieval": RetrievalHead(state_norm="l2", item_norm="l2", temperature=0.2),
        "attention_bias": AttentionBias(time_buckets=12, bucket_width=0.6),
        "qk_scale": 1.0,
        "user_context": (),
        "request_context": (),
    },
    "state head": {"state_head": StateHead(widths=(12, 9)), "layer_norm_eps": 1e-3},
    "window": {"max_attn_len": 5},
    "window with a tail": {"max_attn_len": 3, "full_attn_tail": 4},
    "window, tail, retrieval": {
        "num_tasks": 1,
        "retrieval": RetrievalHead(state_norm="layer", temperature=4.0),
        "max_attn_len": 4,
        "full_attn_tail": 2,
        "request_context": (),
    },
}
# Models whose tokens are relative to the query.
QUERY_FRAMES: dict[str, dict[str, Any]] = {
    "clock and context": {
        "query_frame": QueryFrame(
            num_positions=9, bucket_s=5, min_context_events=7, cycles=(Cycle(unit_s=60, num_units=24),)
        ),
        "request_context": (),
        "normaliser": 1,
    },
    "no clock, two contexts, a window": {
        "query_frame": QueryFrame(num_positions=20, bucket_s=60, min_context_events=(12, 3)),
        "request_context": (),
        "user_context": (TableConfig(name="country", num_rows=5), TableConfig(name="city", num_rows=9)),
        "max_attn_len": 6,
        "normaliser": 1,
    },
    "neither": {
        "query_frame": QueryFrame(num_positions=9),
        "request_context": (),
        "user_context": (),
        "normaliser": 2,
    },
}


def tiny_config(**overrides: Any) -> ModelConfig:
    """Two layers, two heads, a window of 16 events; every kind of table."""
    settings: dict[str, Any] = {
        "name": "tiny",
        "form": "concat",
        "num_layers": 2,
        "num_heads": 2,
        "qk_dim": 8,
        "v_dim": 8,
        "dim": 16,
        "hidden_dim": 16,
        "normaliser": 16,
        "window": 16,
        "max_candidates": 8,
        "num_actions": 4,
        "num_tasks": 2,
        "time_buckets": 16,
        "row_dim": 16,
        "features": (TableConfig(name=ITEM, num_rows=300), TableConfig(name="category", num_rows=20)),
        "user_context": (TableConfig(name="country", num_rows=5),),
        "request_context": (TableConfig(name="hour", num_rows=24),),
        "encoders": (EncoderConfig(name="item", tables=(ITEM,)), EncoderConfig(name="extra", tables=("category",))),
        "candidate_encoder": EncoderConfig(name="candidate", tables=(ITEM, "category")),
    }
    return ModelConfig(**settings | overrides)


def tiny_model(seed: int = 0, **overrides: Any) -> LoadedModel:
    """A model with random weights, in memory only."""
    config = tiny_config(**overrides)
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config.row_dtype)
    dense = random_dense(config, generator)
    tables = {
        table.name: torch.randn((table.num_rows, config.row_dim), generator=generator).to(dtype)
        for table in config.tables
    }
    return LoadedModel(config=config, version=seed + 1, dense=dense, tables=tables)


def tiny_geometry(config: ModelConfig, page_tokens: int = 4, kv_dtype: KVDtype = "model") -> PageGeometry:
    is_rounded = kv_dtype != "model"
    return PageGeometry(
        page_tokens=page_tokens,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        qk_dim=config.qk_dim,
        v_dim=config.v_dim,
        kv_itemsize=1 if is_rounded else getattr(torch, config.dtype).itemsize,
        row_dim=config.row_dim,
        row_itemsize=getattr(torch, config.row_dtype).itemsize,
        kv_scale_bytes=1 if is_rounded else 0,
    )


def tiny_engine(model: LoadedModel | None = None, clock: Clock | None = None, **engine_overrides: Any) -> Engine:
    """An engine on a pool of 30 pages of 4 tokens or 16 rows: too few for either cache to hold all."""
    model = model or tiny_model()
    page_tokens, kv_dtype = engine_overrides.get("page_tokens", 4), engine_overrides.get("kv_dtype", "model")
    settings: dict[str, Any] = {
        "pool_bytes": TINY_PAGES * tiny_geometry(model.config, page_tokens, kv_dtype).page_bytes,
        "alpha": 0.4,
        "page_tokens": page_tokens,
        "device": "cpu",
    }
    return Engine(model, EngineConfig(**settings | engine_overrides), clock or ManualClock())


def random_request(
    rng: np.random.Generator,
    config: ModelConfig,
    user_id: int | str = 0,
    num_events: int = 5,
    num_candidates: int = 3,
    **overrides: Any,
) -> RankRequest:
    """A valid request of a user with a random history; `overrides` replace whole fields."""
    extra = config.features[1:]
    fields: dict[str, Any] = {
        "user_id": user_id,
        "items": rng.integers(0, config.features[0].num_rows, num_events),
        "actions": rng.integers(0, config.num_actions, num_events),
        "timestamps": 1_000 + np.cumsum(rng.integers(0, 100, num_events)),
        "candidates": rng.integers(0, config.features[0].num_rows, num_candidates),
        "features": {table.name: rng.integers(0, table.num_rows, num_events) for table in extra},
        "candidate_features": {table.name: rng.integers(0, table.num_rows, num_candidates) for table in extra},
        "context": {
            table.name: int(rng.integers(0, table.num_rows))
            for table in (*config.user_context, *config.request_context)
        },
    }
    return RankRequest(**fields | overrides)


def host_rows(pool: Pool) -> EmbeddingCache:
    """The embedding cache of a pool whose index is on the host."""
    assert isinstance(pool.rows, EmbeddingCache)
    return pool.rows
