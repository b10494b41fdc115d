"""HelmRec serves generative recommenders from one memory pool that embedding rows and KV prefixes share."""

from helmrec.config import EngineConfig
from helmrec.engine.engine import Engine, EngineStats
from helmrec.errors import (
    AlphaOutOfRange,
    ConfigError,
    DeadlineExceeded,
    EngineClosed,
    HelmRecError,
    ModelError,
    PoolTooSmall,
    QueueFull,
    Refused,
    RequestError,
    TraceError,
)
from helmrec.memory.stats import PoolStats
from helmrec.types import RankRequest, RankResult, Timing

__version__ = "0.1.0"

__all__ = [
    "AlphaOutOfRange",
    "ConfigError",
    "DeadlineExceeded",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineStats",
    "HelmRecError",
    "ModelError",
    "PoolStats",
    "PoolTooSmall",
    "QueueFull",
    "RankRequest",
    "RankResult",
    "Refused",
    "RequestError",
    "Timing",
    "TraceError",
    "__version__",
]
