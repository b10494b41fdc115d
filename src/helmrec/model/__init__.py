"""HSTU ranking models: their shape, their weights on disk, their arithmetic."""

from helmrec.model.config import (
    AttentionBias,
    Cycle,
    EncoderConfig,
    ModelConfig,
    QueryFrame,
    RetrievalHead,
    StateHead,
    TableConfig,
)
from helmrec.model.rank_batch import RankBatch
from helmrec.model.ranker import HstuRanker
from helmrec.model.weights import LoadedModel, load_model, save_model

__all__ = [
    "AttentionBias",
    "Cycle",
    "EncoderConfig",
    "HstuRanker",
    "LoadedModel",
    "ModelConfig",
    "QueryFrame",
    "RankBatch",
    "RetrievalHead",
    "StateHead",
    "TableConfig",
    "load_model",
    "save_model",
]
