from typing import Any

import pytest

from helmrec.config import EngineConfig, Frozen
from helmrec.errors import ConfigError
from helmrec.model.config import EncoderConfig, RetrievalHead, TableConfig
from tests.helpers import tiny_config


class Needs(Frozen):
    table_bytes: int


def test_tables_share_one_id_space_in_order() -> None:
    config = tiny_config()
    assert [table.name for table in config.tables] == ["item", "category", "country", "hour"]
    assert config.offsets == {"item": 0, "category": 300, "country": 320, "hour": 325}
    assert config.num_rows == 349


def test_token_limits_count_context_history_and_candidates() -> None:
    config = tiny_config()
    assert config.max_prefix_tokens == 1 + 16
    assert config.max_request_tokens == 1 + 16 + 1 + 8


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        tiny_config().window = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"window": 3}, "window must be at least 4, got 3"),
        ({"time_buckets": 1}, "time_buckets must be at least 2, got 1"),
        ({"form": "plain"}, "form: .*'gated' or 'concat', got 'plain'"),
        ({"dtype": "int8"}, "dtype: .*got 'int8'"),
        ({"format": 2}, "format: .*got 2"),
        ({"depth": 3}, "depth is not a known setting, got 3"),
        ({"features": ()}, r"features: .*got \(\)"),
        (
            {"state_head": {}, "retrieval": {}, "num_tasks": 1},
            "a model with a state_head has neither a retrieval head nor a query_frame",
        ),
        ({"full_attn_tail": 3}, "full_attn_tail needs a max_attn_len, got 3"),
        (
            {"max_attn_len": 1, "user_context": tuple(TableConfig(name=f"t{i}", num_rows=3) for i in range(2))},
            "max_attn_len must reach over the 2 user_context tokens",
        ),
        ({"attention_bias": {}}, "a model with an attention_bias has a retrieval head, and no context tables"),
        ({"retrieval": RetrievalHead()}, "a retrieval head has one task, got num_tasks 2"),
        ({"retrieval": {"temperature": 0.0}, "num_tasks": 1}, "temperature must be .*0.*, got 0"),
        (
            {"retrieval": {}, "num_tasks": 1, "query_frame": {"num_positions": 4}, "request_context": ()},
            "a model with a query_frame has no retrieval head",
        ),
        (
            {"features": (TableConfig(name="movie", num_rows=3),)},
            "first feature table must be named 'item', not 'movie'",
        ),
        ({"user_context": (TableConfig(name="hour", num_rows=3),)}, r"table names must be distinct, \['hour'\] repeat"),
        (
            {"encoders": (EncoderConfig(name="e", tables=("item", "colour")),)},
            r"encoder 'e' names unknown feature tables \['colour'\]",
        ),
        (
            {"candidate_encoder": EncoderConfig(name="c", tables=("country",))},
            r"encoder 'c' names unknown feature tables \['country'\]",
        ),
    ],
)
def test_a_bad_shape_names_field_and_value(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_config(**overrides)


def test_an_empty_table_is_named() -> None:
    with pytest.raises(ConfigError, match="num_rows must be at least 1, got 0"):
        TableConfig(name="item", num_rows=0)


def test_sizes_take_units() -> None:
    assert EngineConfig(pool_bytes="24GiB").pool_bytes == 24 << 30


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"pool_bytes": 0}, "pool_bytes must be more than 0, got 0"),
        ({"pool_bytes": "many"}, "pool_bytes: .*got 'many'"),
        ({"alpha": 1.5}, r"alpha must be at most 1.*, got 1\.5"),
        ({"alpha": -0.5}, r"alpha must be at least 0.*, got -0\.5"),
        ({"alpha": float("nan")}, "alpha: .*got nan"),
        ({"device": "tpu"}, "device: .*got 'tpu'"),
        ({"page_tokens": 0}, "page_tokens must be at least 1, got 0"),
        ({"max_batch_tokens": 0}, "max_batch_tokens must be at least 1, got 0"),
        ({"max_batch_requests": 0}, "max_batch_requests must be at least 1, got 0"),
        ({"max_history": 0}, "max_history must be at least 1, got 0"),
        ({"queue_limit": 0}, "queue_limit must be at least 1, got 0"),
        ({"deadline_ms": 0}, "deadline_ms must be more than 0.*, got 0"),
        ({"row_order": "fifo"}, "row_order: .*got 'fifo'"),
        ({"row_admission": "never"}, "row_admission: .*got 'never'"),
        ({"row_admission": "frequency"}, "row_admission 'frequency' needs row_order 'frequency', got 'lru'"),
        (
            {"row_admission": "frequency", "row_order": "frequency", "row_index": "host"},
            "needs the index on the device, got row_index 'host'",
        ),
        ({"kv_admission": "never"}, "kv_admission: .*got 'never'"),
        ({"kv_freshness": -1.0}, r"kv_freshness.* got -1\.0"),
        ({"kv_freshness": "stale"}, "kv_freshness.* got 'stale'"),
        ({"max_forks": 0}, "max_forks must be at least 1, got 0"),
        ({"move_bytes_per_step": 0}, "move_bytes_per_step must be more than 0, got 0"),
        ({"audit_every": -1}, "audit_every must be at least 0, got -1"),
        ({"audit_tolerance": 0}, "audit_tolerance must be more than 0.*, got 0"),
        ({"alhpa": 0.5}, r"alhpa is not a known setting, got 0\.5"),
    ],
)
def test_a_bad_engine_setting_names_field_and_value(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**{"pool_bytes": 1 << 20} | overrides)


def test_a_missing_setting_is_named() -> None:
    with pytest.raises(ConfigError, match="table_bytes is required"):
        Needs()  # type: ignore[call-arg]


def test_all_bad_settings_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"max_forks must .*; .*queue_limit|queue_limit must .*; .*max_forks"):
        EngineConfig(pool_bytes=1 << 20, max_forks=0, queue_limit=0)
