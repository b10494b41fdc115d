"""`helmrec demo`: a small model under changing traffic, over HTTP."""

from pathlib import Path
from typing import Annotated

import typer

from helmrec.cli.console import out, told_plainly
from helmrec.demo.plan import QUICK, DemoPlan
from helmrec.demo.run import run_demo


def demo(
    seconds: Annotated[float, typer.Option(help="Of traffic, half for each side.", min=6)] = 60,
    seed: Annotated[int, typer.Option(help="Same seed, same traffic.", min=0)] = 0,
    report: Annotated[Path, typer.Option("--out", help="Where the report goes.")] = Path("helmrec-demo.html"),
    quick: Annotated[bool, typer.Option("--quick", help="A few seconds, a tiny model, no simulation.")] = False,
) -> None:
    """Serve a small model over HTTP while traffic changes: the best constant split, then ours, side by side."""
    with told_plainly():
        chosen = {"seed": seed} if quick else {"seed": seed, "seconds": seconds}
        plan = DemoPlan(**(QUICK if quick else DemoPlan()).model_dump() | chosen)
        run_demo(out, plan, report)
