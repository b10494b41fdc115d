"""What docs say of an evaluation is what its file says."""

import json
from pathlib import Path

import pytest

from helmrec_bench.experiments.results import claims_markdown, together
from tests.bench.conftest import ROOT

KEPT = sorted((ROOT / "docs" / "measurements").glob("evaluation-*.json"))


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.name)
def test_the_table_of_claims_is_that_of_the_measurement(path: Path) -> None:
    assert claims_markdown(json.loads(path.read_text())) in (ROOT / "docs" / "evaluation.md").read_text()


def test_claims_of_the_paper_come_first_and_have_other_words_than_ours() -> None:
    def verdict(claim: str, finding: str, *, is_papers: bool) -> dict[str, object]:
        return {"claim": claim, "paper": "p", "ours": "1", "finding": finding, "is_papers": is_papers}

    shared = {"tier": "quick", "seeds": [0], "calibration": "h200", "hardware": {}, "versions": {}, "commit": "c"}
    own: dict[str, object] = {"scenarios": {}, "figures": {}, "times": {}}
    results = {
        "a": {**shared, **own, "verdicts": [verdict("mean |a - a*|", "reproduced", is_papers=False)]},
        "b": {**shared, **own, "verdicts": [verdict("of the paper", "not", is_papers=True)]},
    }
    assert claims_markdown(together(results)).splitlines()[2:] == [
        "| of the paper | p | 1 | not reproduced |",
        "| mean \\|a - a\\*\\| | p | 1 | met |",
    ]
