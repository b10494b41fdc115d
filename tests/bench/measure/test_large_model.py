"""Models for measurements of tables, and what the measurements make of their cases."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helmrec.model.folder import find_rows
from helmrec.model.weights import load_model
from helmrec_bench.measure.cards.disk_rows import ALL, QUICK, cases, judged, known_cases, popular_rows
from helmrec_bench.measure.large_model import STAMPED, large_config, stamps, write_large_model


def test_every_row_of_a_large_model_says_which_row_it_is(tmp_path: Path) -> None:
    config = large_config("cpu", 50 << 20)  # two parts
    said: list[str] = []
    write_large_model(tmp_path / "model", config, said.append)
    model = load_model(tmp_path / "model")
    for name, rows in model.tables.items():
        wanted = torch.from_numpy(stamps(np.arange(len(rows)))).to(rows.dtype)
        assert torch.equal(rows[:, :STAMPED], wanted), name
        assert torch.equal(rows[:, STAMPED:], rows[:1, STAMPED:].expand(len(rows), -1)), name
    assert len(torch.unique(model.tables["item"][:, :STAMPED], dim=0)) == len(model.tables["item"])
    for table in config.tables:
        assert find_rows(tmp_path / "model", table, config).start % 4_096 == 0
    written_s = (tmp_path / "model" / "config.json").stat().st_mtime_ns
    write_large_model(tmp_path / "model", config, said.append)
    assert (tmp_path / "model" / "config.json").stat().st_mtime_ns == written_s, "it is there"


def test_popular_rows_are_distinct_and_of_all_tables() -> None:
    config = large_config("cpu", 16 << 20)
    rows = popular_rows(config, 5_000)
    assert np.unique(rows).size == rows.size
    assert 4_000 < rows.size <= 5_000
    assert 0 <= rows.min() <= rows.max() < config.num_rows
    for feature in config.features:
        start = config.offsets[feature.name]
        assert ((rows >= start) & (rows < start + feature.num_rows)).any()


def served(per_s: float, from_disk: float | None = None) -> dict[str, Any]:
    found = {"requests_per_s": per_s, "p99_ms": 10.0, "asked_per_s": 0.6 * per_s}
    return found if from_disk is None else found | {"rows_from_disk_per_request": from_disk}


def test_cases_are_judged_by_memory_and_by_what_the_disk_allows() -> None:
    disk = cases(QUICK)[1].name
    found = {
        ALL.name: {"zipf": served(100.0), "disk_reads_per_s": 1_000.0},
        disk: {"zipf": served(45.0, from_disk=20.0), "disk_reads_per_s": 1_000.0},
    }
    (share,) = judged(found).values()
    assert share["share_of_all_in_memory"] == pytest.approx(0.45)
    assert share["share_of_what_the_disk_allows"] == pytest.approx(0.9), "50 requests/s of 20 rows each"
    assert judged({disk: found[disk]}) == {}


def test_a_run_goes_on_with_cases_of_the_same_plan_only(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert known_cases(out, QUICK) == {}
    out.write_text(json.dumps({"plan": QUICK._asdict(), "cases": {"all in memory": {"wrong_rows": 0}}}))
    assert list(known_cases(out, QUICK)) == [ALL.name]
    with pytest.raises(SystemExit, match="another plan"):
        known_cases(out, QUICK._replace(num_hot=1))
