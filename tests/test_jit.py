"""Kept compiled code of another version of the package is ignored, not an error."""

import pickle
import tomllib
from pathlib import Path
from typing import Any

import numba
import pytest
from numba.core import caching

from helmrec.jit import ignore_outdated_code

ROOT = Path(__file__).parents[1]
KEPT: Any = caching.IndexDataCacheFile


def kept_file(folder: Path, module: str, name: str) -> Any:
    """Kept code whose index names `name` of `module`, as an earlier version left it."""
    index = pickle.dumps(numba.__version__, protocol=-1) + f"c{module}\n{name}\n.".encode()
    (folder / "loop.nbi").write_bytes(index)
    (folder / "loop.1.nbc").write_bytes(f"c{module}\n{name}\n.".encode())
    return KEPT(str(folder), "loop", (0.0, 0))


@pytest.fixture
def ignoring(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_load_index", "_load_data"):
        monkeypatch.setattr(KEPT, name, getattr(KEPT, name))
    ignore_outdated_code()


@pytest.mark.parametrize(("module", "name"), [("helmrec.gone", "Thing"), ("helmrec.errors", "GoneError")])
def test_what_names_a_part_of_ours_that_is_gone_is_compiled_again(
    tmp_path: Path, ignoring: None, module: str, name: str
) -> None:
    file = kept_file(tmp_path, module, name)
    assert file.load("any signature") is None
    with pytest.raises(FileNotFoundError):
        file._load_data("loop.1.nbc")
    file.save("a signature", "code")
    assert file.load("a signature") == "code"


def test_errors_of_other_packages_are_theirs(tmp_path: Path, ignoring: None) -> None:
    with pytest.raises(ModuleNotFoundError, match="other_package"):
        kept_file(tmp_path, "other_package", "Thing").load("any signature")


def test_numba_is_told_of_it() -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert points["numba_extensions"] == {"init": f"helmrec.jit:{ignore_outdated_code.__name__}"}
