"""HelmRec as a wheel in an environment that has its core dependencies and nothing else."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
_BUILT_FROM = ("src", "pyproject.toml", "README.md", "LICENSE")


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel, and an empty folder to run commands in."""

    bin: Path
    folder: Path

    def run(self, *command: str, timeout_s: float = 240) -> "subprocess.CompletedProcess[str]":
        """Run a command as a user of this environment would. The environment is that of a new shell."""
        variables = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "HOME": str(self.folder),
            "OMP_NUM_THREADS": "1",
            "LANG": "C.UTF-8",
        }
        variables["COLUMNS"] = "200"
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command, cwd=self.folder, env=variables, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        ) as process:
            try:
                out, err = process.communicate(timeout=timeout_s)
            finally:
                with suppress(ProcessLookupError):  # a server that a failed script has left running
                    os.killpg(process.pid, signal.SIGKILL)
        return subprocess.CompletedProcess(command, process.returncode, out, err)


def install_wheel(place: Path) -> Installed:
    """Build the wheel and install it, without network: core dependencies are links to those installed here."""
    wheel = build_wheel(place)
    environment, folder = place / "environment", place / "empty"
    folder.mkdir()
    _run(sys.executable, "-m", "venv", "--without-pip", str(environment))
    python = environment / "bin" / "python"
    _run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        str(wheel),
    )
    (site,) = environment.glob("lib/python*/site-packages")
    (links := place / "core").mkdir()
    (metadata,) = site.glob("helmrec-*.dist-info")
    for name in sorted(core_names(PathDistribution(metadata))):
        _link(distribution(name), links)
    (site / "core.pth").write_text(f"{links}\n")
    return Installed(environment / "bin", folder)


def adopt_compiled(installed: Installed) -> None:
    """Let the installed package use what Numba has compiled of the same sources here, which else takes minutes.

    Numba keeps it beside a source and checks the source's time and size.
    """
    (package,) = installed.bin.parent.glob("lib/python*/site-packages/helmrec")
    for theirs in package.rglob("*.py"):
        ours = ROOT / "src" / "helmrec" / theirs.relative_to(package)
        assert theirs.read_bytes() == ours.read_bytes(), f"the wheel has another {ours}"
        shutil.copystat(ours, theirs)
        compiled = list((ours.parent / "__pycache__").glob(f"{ours.stem}.*.nb[ic]"))
        if compiled:
            (theirs.parent / "__pycache__").mkdir(exist_ok=True)
        for file in compiled:
            shutil.copy2(file, theirs.parent / "__pycache__")


def build_wheel(place: Path) -> Path:
    """Build from a copy: a build leaves files beside the sources."""
    source = place / "source"
    source.mkdir()
    hidden = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.nbi", "*.nbc")
    for name in _BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=hidden)
        else:
            shutil.copy(ROOT / name, source / name)
    flags = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(place))
    _run(sys.executable, "-m", "pip", "wheel", *flags, str(source))
    (wheel,) = place.glob("*.whl")
    return wheel


def core_names(root: Distribution) -> set[str]:
    """Names of all distributions that `root` needs without extras, and of those that these need."""
    names, todo = set[str](), list(_needed(root, set()))
    while todo:
        need = todo.pop()
        if need.name.lower() not in names:
            names.add(need.name.lower())
            todo.extend(_needed(distribution(need.name), need.extras))
    return names


def _needed(dist: Distribution, extras: set[str]) -> Iterator[Requirement]:
    for text in dist.requires or ():
        need = Requirement(text)
        if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield need


def _link(dist: Distribution, links: Path) -> None:
    for top in {file.parts[0] for file in dist.files or ()} - {"..", "__pycache__"}:
        link = links / top
        if not link.exists():
            link.symlink_to(Path(str(dist.locate_file(top))))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr
