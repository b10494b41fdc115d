"""What users import is a promise: this list changes only on purpose."""

import types

import helmrec
import helmrec.model

EXPORTS = [
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


def test_the_export_list_is_the_promised_one() -> None:
    assert sorted(helmrec.__all__) == EXPORTS


def test_the_export_list_of_models_is_the_promised_one() -> None:
    assert helmrec.model.__all__ == [
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


def test_every_export_exists() -> None:
    assert [name for name in EXPORTS if not hasattr(helmrec, name)] == []


def test_nothing_else_leaks_out() -> None:
    for name in EXPORTS:  # imported at their first use
        getattr(helmrec, name)
    public = {name for name, value in vars(helmrec).items() if not isinstance(value, types.ModuleType)}
    assert {name for name in public if not name.startswith("_")} == set(EXPORTS) - {"__version__"}
    assert not hasattr(helmrec, "Nothing")


def test_every_error_a_caller_can_cause_is_exported_and_has_one_root() -> None:
    from helmrec import errors  # noqa: PLC0415 - the module itself is looked at

    found = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert found <= set(EXPORTS)
    assert all(issubclass(getattr(errors, name), helmrec.HelmRecError) for name in found)
