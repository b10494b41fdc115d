from pathlib import Path

import pytest

from helmrec.errors import ConfigError
from helmrec.traffic.workload import Phase, Users, Workload, load_workload

GOOD = """
name = "lunch"
num_items = 5_000
num_lanes = 4
repeat = 2

[users]
cold_return = 0.5

[[phases]]
name = "calm"
duration_s = 30
rate = 20

[[phases]]
name = "rush"
duration_s = 10
rate = [20, 80]
hot_share = [0.7, 0.2]
"""


def write(tmp_path: Path, text: str) -> Path:
    (tmp_path / "w.toml").write_text(text)
    return tmp_path / "w.toml"


def test_a_workload_is_read_from_toml(tmp_path: Path) -> None:
    workload = load_workload(write(tmp_path, GOOD))
    assert workload == Workload(
        name="lunch",
        num_items=5_000,
        num_lanes=4,
        repeat=2,
        users=Users(cold_return=0.5),
        phases=(
            Phase(name="calm", duration_s=30, rate=20),
            Phase(name="rush", duration_s=10, rate=(20, 80), hot_share=(0.7, 0.2)),
        ),
    )
    assert workload.duration_s == 80


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("repeat = 2", "repeat = 0", "repeat must be at least 1, got 0"),
        ("repeat = 2", "reepat = 2", "reepat is not a known setting, got 2"),
        ("cold_return = 0.5", "cold_return = 2", "users.cold_return must be at most 1.0, got 2"),
        ("cold_return = 0.5", "min_history = 9\nmax_history = 5", r"max_history must be at least min_history \(9\)"),
        ("rate = 20", "rate = 0", "rate.0 must be more than 0.0, got 0"),
        ("rate = 20", "rat = 20", "rat is not a known setting"),
        ("[20, 80]", "[20]", "rate"),
        ("[0.7, 0.2]", "[0.7, 1.2]", "phases.1.hot_share.1 must be at most 1.0, got 1.2"),
        ("repeat = 2", "repeat =", "cannot read workload"),
    ],
)
def test_bad_settings_name_file_field_and_value(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = write(tmp_path, GOOD.replace(old, new))
    with pytest.raises(ConfigError, match=message) as caught:
        load_workload(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_raises_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read workload"):
        load_workload(tmp_path / "nowhere.toml")
