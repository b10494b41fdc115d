"""Help and version of the command line: fast, and with every default."""

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import Any

import pytest
import typer
from typer.core import TyperGroup, TyperOption
from typer.testing import CliRunner

from helmrec import __version__
from helmrec.cli.console import exit_on_error
from helmrec.cli.main import CommandGroup, app
from helmrec.errors import ConfigError

runner = CliRunner()
LARGE = {"torch", "numba", "ray", "scipy", "pyarrow", "matplotlib"}
LISTS_COMMANDS = """
import sys
from helmrec.cli.main import app
app(["--help"], standalone_mode=False)
print("imported:", sorted({"torch", "numba", "ray", "numpy", "pydantic"} & sys.modules.keys()))
"""


def commands() -> Iterator[tuple[str, Any]]:
    """Every command by its full name, groups resolved."""
    group = typer.main.get_group(app)
    assert isinstance(group, CommandGroup)
    context = group.make_context("helmrec", ["none"])
    for name in group.list_commands(context):
        command = group.get_command(context, name).make_context(name, ["x"], context, resilient_parsing=True).command
        yield from leaves(name, command)


def leaves(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(command, TyperGroup):
        for inner, each in command.commands.items():
            yield from leaves(f"{name} {inner}", each)
    else:
        yield name, command


def test_listing_the_commands_imports_none_of_the_large_libraries() -> None:
    shown = output_of(LISTS_COMMANDS)
    assert "imported: []" in shown
    assert "Serve a model over HTTP." in shown


def test_the_help_of_no_command_imports_large_libraries() -> None:
    """They take seconds to import. A command imports them when it runs; every command of the app is tried."""
    imports = json.loads(output_of(f"from {__name__} import imports_of_help; imports_of_help()"))
    assert {"serve", "rank", "rows push", "trace import csv", "trace describe", "bench run", "train"} <= imports.keys()
    assert {name: large for name, large in imports.items() if large} == {}


def imports_of_help() -> None:
    """Print the large libraries that the help of each command imports first, as JSON."""
    before, imports = set[str](), dict[str, list[str]]()
    for name, _ in commands():
        with redirect_stdout(io.StringIO()) as shown:
            app([*name.split(), "--help"], prog_name="helmrec", standalone_mode=False)
        assert f"helmrec {name} [OPTIONS]" in shown.getvalue()
        imports[name] = sorted(LARGE & sys.modules.keys() - before)
        before = set(sys.modules)
    typer.echo(json.dumps(imports))


def output_of(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_version_is_printed() -> None:
    shown = runner.invoke(app, ["--version"])
    assert (shown.exit_code, shown.output) == (0, f"helmrec {__version__}\n")


def test_every_option_shows_its_default() -> None:
    without = [
        f"{name} {option.opts[0]}"
        for name, command in commands()
        for option in command.params
        if isinstance(option, TyperOption)
        and not (option.required or option.is_flag or isinstance(option.show_default, str))
        and option.default is None
        and "default" not in (option.help or "")
    ]
    assert without == []


@pytest.mark.parametrize("command", [["--help"], ["serve", "--help"]])
def test_brackets_of_extras_survive_in_help(command: list[str]) -> None:
    extra = {"--help": "helmrec[train]", "serve": "helmrec[cluster]"}[command[0]]
    assert extra in runner.invoke(app, command, env={"COLUMNS": "160"}).output


def test_lines_of_a_paragraph_are_joined_and_paragraphs_are_kept() -> None:
    shown = runner.invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    lines = [line.strip() for line in shown.splitlines()]
    assert any(line.startswith("Set the token") and line.endswith("can see flags.") for line in lines)
    assert "Flags override HELMREC_* variables, which override the file of --config." in lines


def test_arguments_have_the_same_name_in_every_command() -> None:
    """A model folder is MODEL everywhere; no argument shows the name of a variable."""
    shown = {
        (name, argument.name): argument.metavar
        for name, command in commands()
        for argument in command.params
        if not isinstance(argument, TyperOption)
    }
    assert [each for each, metavar in shown.items() if metavar is None] == []
    assert {shown[name, "model"] for name in ("serve", "rank", "loadgen")} == {"MODEL"}
    assert {shown[name, "folder"] for name in ("model info", "model check")} == {"MODEL"}


def test_brackets_of_extras_survive_in_errors(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), exit_on_error():
        raise ConfigError("pip install 'helmrec[bench]'")
    assert "pip install 'helmrec[bench]'" in capsys.readouterr().err


def test_flags_of_serve_have_the_names_of_their_settings() -> None:
    """A setting has one name as a flag, in a file and in the environment; some flags have a short form besides."""
    serve = dict(commands())["serve"]
    options = {option.opts[0]: option for option in serve.params if isinstance(option, TyperOption)}
    settings = ("pool_bytes", "alpha", "device", "deadline_ms", "host", "history_path", "policy", "port")
    assert {f"--{name.replace('_', '-')}" for name in settings} <= options.keys()
    assert "--pool" in options["--pool-bytes"].opts
