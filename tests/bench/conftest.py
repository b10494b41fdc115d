"""Scenarios of the package, and a lab of the smallest tier with folders of its own."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helmrec_bench.lab.lab import Lab
from helmrec_bench.lab.place import Place
from helmrec_bench.lab.tiers import TIERS

ROOT = Path(__file__).parents[2]
SCENARIOS = Place().scenarios
MakeLab = Callable[..., Lab]


@pytest.fixture(autouse=True, scope="package")
def one_commit() -> Iterator[None]:
    """Whoever commits while tests run does not make two runs differ."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HELMREC_COMMIT", "under test")
        yield


@pytest.fixture
def make_lab(tmp_path: Path) -> MakeLab:
    """Labs that share their finished pieces unless `build` names another folder."""

    def make(build: str = "bench", scenarios: Path = SCENARIOS) -> Lab:
        place = Place(scenarios, ROOT / "docs" / "measurements", tmp_path / build)
        return Lab(TIERS["smoke"], place, is_quiet=True)

    return make
