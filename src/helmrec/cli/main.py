"""The `helmrec` command: commands of the product and of installed packages, each imported when it runs."""

import ast
import re
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from helmrec import __version__
from helmrec.extensions import COMMANDS, extensions

_OWN = {
    "serve": "helmrec.cli.serve:serve",
    "rank": "helmrec.cli.rank:rank",
    "load": "helmrec.cli.load:load",
    "demo": "helmrec.cli.demo:demo",
    "simulate": "helmrec.cli.simulate:run_simulate",
    "explain": "helmrec.cli.explain:explain",
    "plan": "helmrec.cli.plan:plan",
    "trace": "helmrec.cli.trace:trace_app",
    "histories": "helmrec.cli.histories:histories_app",
    "rows": "helmrec.cli.rows:rows_app",
    "calibrate": "helmrec.cli.calibrate:calibrate",
    "compile": "helmrec.cli.compile_loops:compile_loops",
    "model": "helmrec.cli.model:model_app",
    "import": "helmrec.cli.import_model:import_app",
}


class CommandGroup(TyperGroup):
    """Commands of the product, then those of installed packages. Listing them imports none of them.

    A group of an installed package with the name of a group of the product adds its commands to that group.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return [*_OWN, *(name for name in extensions(COMMANDS) if name not in _OWN)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own = [EntryPoint(cmd_name, _OWN[cmd_name], COMMANDS)] if cmd_name in _OWN else []
        entries = own + [entry for entry in extensions(COMMANDS).values() if entry.name == cmd_name]
        return DeferredCommand(*entries) if entries else None


class DeferredCommand(TyperCommand):
    """Stands for a command until it runs: has its name and summary, and is replaced when its context is made."""

    def __init__(self, entry: EntryPoint, *more: EntryPoint) -> None:
        super().__init__(entry.name, help=_summary(entry))
        self._entry, self._more = entry, more

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        command = _as_command(self._entry.name, self._entry.load())
        for entry in self._more if isinstance(command, TyperGroup) else ():
            command.commands = {**_as_command(entry.name, entry.load()).commands, **command.commands}
        return command.make_context(*args, **kwargs)


def _summary(entry: EntryPoint) -> str:
    """The first line of the docstring of a command's module, read without importing the module."""
    try:
        spec = find_spec(entry.module)
    except ImportError:
        spec = None
    if spec is None or spec.origin is None:
        return f"Cannot be imported: {entry.module}"
    docstring = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    line = docstring.partition("\n")[0].removeprefix(f"`helmrec {entry.name}`: ")
    return escape(line[:1].upper() + line[1:])


def _as_command(name: str, added: Any) -> Any:
    """Convert a Typer app to a group of commands, or a function to a command."""
    holder = typer.Typer()
    if isinstance(added, typer.Typer):
        holder.add_typer(added, name=name)
    else:
        holder.command(name)(added)
    command = typer.main.get_group(holder).commands[name]
    _unwrap_help(command)
    return command


def _unwrap_help(command: Any) -> None:
    """Join the lines of each paragraph of the help, which Rich would keep as the source breaks them."""
    command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", command.help or "")
    for inner in command.commands.values() if isinstance(command, TyperGroup) else ():
        _unwrap_help(inner)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"helmrec {__version__}")
        raise typer.Exit


app = typer.Typer(cls=CommandGroup, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Serve generative recommenders from one memory pool that embedding rows and KV prefixes share."""
