import pytest

from helmrec.errors import ConfigError
from helmrec.model.profiles import PROFILES, profile


def test_the_profiles_of_the_command_line_exist() -> None:
    assert list(PROFILES) == ["demo", "kuairand", "narrow", "dlrmv3", "wide", "nvidia-bench", "paper"]


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_is_a_valid_model_named_after_itself(name: str) -> None:
    config = profile(name, num_rows=123)
    assert config.name == name
    assert config.features[0].num_rows == 123
    assert config.normaliser >= config.window


def test_rows_default_to_the_profiles_own_number() -> None:
    assert profile("demo").features[0].num_rows == 50_000


def test_wide_has_24_feature_rows_per_token() -> None:
    assert len(profile("wide").features) == 24


def test_one_row_is_enough_for_every_profile() -> None:
    for name in PROFILES:
        assert all(table.num_rows >= 1 for table in profile(name, num_rows=1).tables)


def test_the_paper_shape_takes_12_kib_per_token() -> None:
    config = profile("paper")
    assert config.num_layers * config.num_heads * (config.qk_dim + config.v_dim) * 2 == 12 * 1024


def test_an_unknown_profile_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"profile must be one of demo, .*paper, got 'huge'"):
        profile("huge")


@pytest.mark.parametrize("rows", [0, -5])
def test_too_few_rows_are_named(rows: int) -> None:
    with pytest.raises(ConfigError, match=f"rows must be at least 1, got {rows}"):
        profile("demo", num_rows=rows)
