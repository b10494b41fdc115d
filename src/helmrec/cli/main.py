"""The `helmrec` command: commands of the product and of installed packages."""

from typing import Any

import typer
from typer.core import TyperGroup

from helmrec.cli.calibrate import calibrate
from helmrec.cli.compile_loops import compile_loops
from helmrec.cli.demo import demo
from helmrec.cli.explain import explain
from helmrec.cli.import_model import import_app
from helmrec.cli.load import load
from helmrec.cli.model import model_app
from helmrec.cli.plan import plan
from helmrec.cli.rank import rank
from helmrec.cli.serve import serve
from helmrec.cli.simulate import run_simulate
from helmrec.extensions import COMMANDS, extensions


class ExtensibleGroup(TyperGroup):
    """Adds the commands of installed packages, which are loaded when a command runs or help lists it."""

    def list_commands(self, ctx: Any) -> list[str]:
        own = super().list_commands(ctx)
        return [*own, *(name for name in extensions(COMMANDS) if name not in own)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        entry = extensions(COMMANDS).get(cmd_name)
        return None if entry is None else _as_command(cmd_name, entry.load())


def _as_command(name: str, added: Any) -> Any:
    """Convert a Typer app to a group of commands, or a function to a command."""
    holder = typer.Typer()
    if isinstance(added, typer.Typer):
        holder.add_typer(added, name=name)
    else:
        holder.command(name)(added)
    return typer.main.get_group(holder).commands[name]


app = typer.Typer(
    cls=ExtensibleGroup,
    help="Serve generative recommenders from one memory pool that embedding rows and KV prefixes share.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(model_app, name="model")
app.add_typer(import_app, name="import")
app.command()(calibrate)
app.command()(load)
app.command()(serve)
app.command("simulate")(run_simulate)
app.command()(explain)
app.command()(plan)
app.command()(rank)
app.command("compile")(compile_loops)
app.command()(demo)
