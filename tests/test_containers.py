"""The container files and the Kubernetes deployments, as far as they can be checked without building or applying."""

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from helmrec.cli.main import app
from helmrec.cluster import config as cluster_config
from tests.cli.test_help import commands, runner

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "examples").rglob("Dockerfile"))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
KNOWN = {"FROM", "RUN", "COPY", "ENV", "USER", "EXPOSE", "ENTRYPOINT", "CMD", "WORKDIR", "ARG", "LABEL"}
yaml = pytest.importorskip("yaml", reason="helmrec[cluster] is not installed")


def instructions(file: Path) -> list[tuple[str, str]]:
    """Instructions of a container file, with their arguments; continued lines joined, comments left out."""
    text = re.sub(r"\\\n\s*", " ", file.read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in lines]


def environment(file: Path) -> dict[str, str]:
    """Variables that a container file sets."""
    pairs = (shlex.split(rest) for name, rest in instructions(file) if name == "ENV")
    return dict(pair.split("=", 1) for words in pairs for pair in words)


def ids(file: Path) -> str:
    return file.parent.name


def test_there_is_a_container_file_for_a_node_and_for_a_cluster() -> None:
    assert [file.parent.name for file in FILES] == ["cluster", "node"]


@pytest.mark.parametrize("file", FILES, ids=ids)
def test_instructions_are_known_and_the_base_image_has_a_version(file: Path) -> None:
    found = instructions(file)
    assert {name for name, _ in found} <= KNOWN
    assert found[0][0] == "FROM"
    tag = found[0][1].partition(":")[2]
    assert tag
    assert "latest" not in tag
    python = re.search(r"(?:py|^)(3)\.?(\d+)", tag)
    assert python
    assert (int(python[1]), int(python[2])) >= (3, 11)


@pytest.mark.parametrize("file", FILES, ids=ids)
def test_what_is_copied_and_installed_exists(file: Path) -> None:
    for name, rest in instructions(file):
        if name == "COPY":
            *sources, _ = [word for word in rest.split() if not word.startswith("--")]
            assert all((ROOT / source).exists() for source in sources), rest
        if name == "RUN":
            wanted = {extra for group in re.findall(r"\[([\w,-]+)\]", rest) for extra in group.split(",")}
            assert wanted <= EXTRAS.keys(), rest
            assert "pip install" not in rest or "--no-cache-dir" in rest
            assert "apt-get install" not in rest or ("--no-install-recommends" in rest and "rm -rf" in rest)


@pytest.mark.parametrize("file", FILES, ids=ids)
def test_loops_are_compiled_into_a_cache_that_the_user_of_the_container_may_write(file: Path) -> None:
    found, cache = instructions(file), environment(file)["NUMBA_CACHE_DIR"]
    at = [i for i, (name, rest) in enumerate(found) if name == "RUN" and "helmrec compile" in rest]
    assert len(at) == 1
    assert next(i for i, (name, rest) in enumerate(found) if name == "ENV" and "NUMBA_CACHE_DIR" in rest) < at[0]
    made = found[at[0]][1]
    opened = re.findall(r"(?:chown -R \w+|chmod -R a\+rwX) (.+)$", made)
    places = " ".join(opened).replace("$NUMBA_CACHE_DIR", cache).replace('"', "").split()
    assert any(cache.startswith(place) for place in places), made


def test_a_node_does_not_run_as_root_and_starts_as_the_command_line_allows() -> None:
    file = ROOT / "examples" / "node" / "Dockerfile"
    found = dict(instructions(file))
    assert found["USER"] not in {"root", "0"}
    assert f"useradd --uid 1000 {found['USER']}" in file.read_text()
    entry, arguments = (eval_list(found[name]) for name in ("ENTRYPOINT", "CMD"))
    assert entry == ["helmrec", "serve"]
    options = {opt for name, command in commands() if name == "serve" for one in command.params for opt in one.opts}
    assert {word for word in arguments if word.startswith("--")} <= options
    assert runner.invoke(app, [entry[1], "--help"]).exit_code == 0


def eval_list(text: str) -> list[str]:
    found = yaml.safe_load(text)
    assert isinstance(found, list)
    return [str(each) for each in found]


def test_the_pod_of_a_node_runs_as_the_user_of_its_image() -> None:
    parts = list(yaml.safe_load_all((ROOT / "examples" / "node" / "kubernetes.yaml").read_text()))
    pod: dict[str, Any] = parts[0]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    security = {**pod.get("securityContext", {}), **container.get("securityContext", {})}
    assert security.get("runAsNonRoot") is True
    assert security.get("runAsUser", 1000) == 1000
    claims = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} <= claims
    exposed = [int(rest) for name, rest in instructions(ROOT / "examples/node/Dockerfile") if name == "EXPOSE"]
    assert [port["containerPort"] for port in container["ports"]][:1] == exposed


def test_a_cluster_waits_for_running_requests_before_its_pods_end() -> None:
    file = ROOT / "examples" / "cluster" / "rayservice.yaml"
    text = file.read_text()
    drain_s = cluster_config.ClusterConfig().drain_s
    graces = [int(each) for each in re.findall(r"terminationGracePeriodSeconds: (\d+)", text)]
    assert len(graces) == text.count("containers:")
    assert min(graces) > drain_s
    version = re.search(r"ray:(\d+\.\d+\.\d+)", (file.parent / "Dockerfile").read_text())
    assert version
    assert f"rayVersion: {version[1]}" in text.replace('"', "").replace("'", "")


def test_the_build_leaves_large_folders_out_and_nothing_it_needs() -> None:
    ignored = {line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"}
    assert {".git", ".venv"} <= ignored
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = ["pyproject.toml", "src", project["readme"], *project["license-files"]]
    assert all((ROOT / name).exists() and name not in ignored for name in needed)
