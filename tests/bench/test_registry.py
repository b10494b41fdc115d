"""Measurements by name: what is listed can be run, with options of its own."""

import ast
import re
import shlex
from argparse import ArgumentParser, Namespace
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

import helmrec_bench
from helmrec_bench.cli.bench import bench_app
from helmrec_bench.experiments.registry import EXPERIMENTS
from helmrec_bench.lab.provenance import this_command
from helmrec_bench.registry import REGISTERED, Measurement

SOURCE = Path(helmrec_bench.__file__).parent
PRIVATE = re.compile(r"(?<!self)(?<!cls)\._(?!replace\b|asdict\b|fields\b|make\b)[a-z]\w*")
OWN = {  # a class that restores another instance of itself
    "train/ppo.py": {"._make", "._restore"},
    "measure/controller/sensitivity.py": {"._streams"},
    "measure/cards/kernels.py": {"._scaled_mm"},  # of torch
}
cli = CliRunner()


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def test_names_of_measurements_and_of_experiments_differ() -> None:
    assert not REGISTERED.keys() & EXPERIMENTS.keys()


@pytest.mark.parametrize("name", REGISTERED)
def test_every_measurement_has_a_module_and_says_what_it_needs(name: str) -> None:
    one = REGISTERED[name]
    tree = ast.parse((SOURCE / f"{one.module.replace('.', '/')}.py").read_text())
    assert "main" in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert one.what.endswith(".")
    assert one.takes
    assert one.needs


def test_every_module_with_a_main_is_listed() -> None:
    found = [path for path in modules() if "measure" in path.parts and "\ndef main(" in path.read_text()]
    assert {one.module for one in REGISTERED.values()} == {
        ".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in found
    }


def test_the_list_shows_names_needs_and_files() -> None:
    shown = cli.invoke(bench_app, ["list"], env={"COLUMNS": "200"}).output
    assert all(name in shown for name in (*REGISTERED, *EXPERIMENTS))
    assert "gpu-rows-h200.json" in shown
    assert "a GPU" in shown


def test_help_shows_the_options_of_a_measurement() -> None:
    shown = cli.invoke(bench_app, ["run", "host", "--help"])
    assert shown.exit_code == 0
    assert "--out" in shown.output
    assert "docs/measurements/host-cpu.json" in shown.output


def test_a_measurement_is_run_with_its_own_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Namespace] = []

    def options(parser: ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int)

    module = ModuleType("fake", "What is measured.")
    module.__dict__.update(options=options, main=seen.append)
    monkeypatch.setattr(Measurement, "load", lambda one: module)
    assert cli.invoke(bench_app, ["run", "host", "--seeds", "3", "--out", str(tmp_path)]).exit_code == 0
    assert seen == [Namespace(seeds=3, out=tmp_path)]
    assert cli.invoke(bench_app, ["run", "host", "--nothing"]).exit_code == 2


@pytest.mark.parametrize(
    ("command", "file"),
    [
        ("pauses", "pauses-cpu.json"),
        ("pauses --device cuda", "pauses-h200.json"),
        ("fidelity --small", "fidelity-cpu.json"),
        ("fidelity --engine-only", "fidelity-engine-h200.json"),
    ],
)
def test_variants_of_a_measurement_write_files_of_their_own(command: str, file: str) -> None:
    name, *options = command.split()
    assert REGISTERED[name].parse(options).out == Path("docs/measurements", file)


def test_a_measurement_of_a_gpu_is_refused_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    refused = cli.invoke(bench_app, ["run", "row-reads"])
    assert refused.exit_code == 2
    assert "row-reads needs a GPU" in refused.output


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    refused = cli.invoke(bench_app, ["run", "nothing"])
    assert refused.exit_code == 2
    assert "row-reads" in refused.output
    assert "ladder" in refused.output


@pytest.mark.parametrize("options", [[], ["--policies", "helm base"]])
def test_a_measurement_records_the_command_as_it_was_typed(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/helmrec", "bench", "run", "live", *options])
    assert shlex.split(this_command()) == ["helmrec", "bench", "run", "live", *options]


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_private_attributes_stay_private(path: Path) -> None:
    found = set(PRIVATE.findall(path.read_text()))
    assert found <= OWN.get(path.relative_to(SOURCE).as_posix(), set())


def test_every_class_has_a_name_of_its_own() -> None:
    names = [
        node.name for path in modules() for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)
    ]
    assert not [name for name, num in Counter(names).items() if num > 1]
