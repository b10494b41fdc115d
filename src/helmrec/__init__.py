"""HelmRec serves generative recommenders from one memory pool that embedding rows and KV prefixes share.

Exports are imported at their first use, so that `helmrec --help` does not wait for torch.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from helmrec.config import EngineConfig, RelayConfig
    from helmrec.deltas.producer import DeltaProducer
    from helmrec.engine.engine import Engine, EngineStats
    from helmrec.engine.relay.pre_inference import RelayStats
    from helmrec.errors import (
        AlphaOutOfRange,
        ConfigError,
        DeadlineExceeded,
        DeltaCorrupt,
        DeltaError,
        DeltaGap,
        DeltaOutOfOrder,
        DeltaUnavailable,
        DiskFull,
        DiskTooSlow,
        EngineClosed,
        Forgotten,
        HelmRecError,
        HistoryError,
        HistoryFull,
        HistoryUnavailable,
        ModelError,
        NonFiniteScores,
        PoolTooSmall,
        QueueFull,
        Refused,
        RequestError,
        RowLogError,
        RowsNotSynced,
        RowsUnreadable,
        ServerError,
        StaleVersion,
        TablesTooSmall,
        TooLarge,
        TraceError,
    )
    from helmrec.memory.stats import PoolStats
    from helmrec.serve.client import Client
    from helmrec.types import Lease, PrefillRequest, PrefillResult, RankRequest, RankResult, RowPosition, Timing

__version__ = "0.1.0"

__all__ = [
    "AlphaOutOfRange",
    "Client",
    "ConfigError",
    "DeadlineExceeded",
    "DeltaCorrupt",
    "DeltaError",
    "DeltaGap",
    "DeltaOutOfOrder",
    "DeltaProducer",
    "DeltaUnavailable",
    "DiskFull",
    "DiskTooSlow",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineStats",
    "Forgotten",
    "HelmRecError",
    "HistoryError",
    "HistoryFull",
    "HistoryUnavailable",
    "Lease",
    "ModelError",
    "NonFiniteScores",
    "PoolStats",
    "PoolTooSmall",
    "PrefillRequest",
    "PrefillResult",
    "QueueFull",
    "RankRequest",
    "RankResult",
    "Refused",
    "RelayConfig",
    "RelayStats",
    "RequestError",
    "RowLogError",
    "RowPosition",
    "RowsNotSynced",
    "RowsUnreadable",
    "ServerError",
    "StaleVersion",
    "TablesTooSmall",
    "Timing",
    "TooLarge",
    "TraceError",
    "__version__",
]

_MODULES = {
    **dict.fromkeys(("EngineConfig", "RelayConfig"), "helmrec.config"),
    "DeltaProducer": "helmrec.deltas.producer",
    **dict.fromkeys(("Engine", "EngineStats"), "helmrec.engine.engine"),
    "RelayStats": "helmrec.engine.relay.pre_inference",
    "PoolStats": "helmrec.memory.stats",
    "Client": "helmrec.serve.client",
    **dict.fromkeys(
        ("Lease", "PrefillRequest", "PrefillResult", "RankRequest", "RankResult", "RowPosition", "Timing"),
        "helmrec.types",
    ),
}  # exports that are not here are errors


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_MODULES.get(name, "helmrec.errors")), name)
    return found
