"""HSTU ranking models: their shape, their weights on disk, their arithmetic.

Exports that need torch are imported at their first use: the shape of a model is read by code that does not compute.
"""

import importlib
import typing

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

if typing.TYPE_CHECKING:
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

_MODULES = {
    "HstuRanker": "helmrec.model.ranker",
    "RankBatch": "helmrec.model.rank_batch",
    **dict.fromkeys(("LoadedModel", "load_model", "save_model"), "helmrec.model.weights"),
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return found
