"""HelmRec serves generative recommenders from one memory pool that embedding rows and KV prefixes share."""

from helmrec.config import EngineConfig, RelayConfig
from helmrec.engine.engine import Engine, EngineStats
from helmrec.engine.relay.pre_inference import RelayStats
from helmrec.errors import (
    AlphaOutOfRange,
    ConfigError,
    DeadlineExceeded,
    DiskFull,
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
    ServerError,
    StaleVersion,
    TablesTooSmall,
    TooLarge,
    TraceError,
)
from helmrec.memory.stats import PoolStats
from helmrec.serve.client import Client
from helmrec.types import Lease, PrefillRequest, PrefillResult, RankRequest, RankResult, Timing

__version__ = "0.1.0"

__all__ = [
    "AlphaOutOfRange",
    "Client",
    "ConfigError",
    "DeadlineExceeded",
    "DiskFull",
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
    "ServerError",
    "StaleVersion",
    "TablesTooSmall",
    "Timing",
    "TooLarge",
    "TraceError",
    "__version__",
]
