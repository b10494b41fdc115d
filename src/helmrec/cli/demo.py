"""`helmrec demo`: a small model under changing traffic, over HTTP."""

from pathlib import Path
from typing import Annotated

import typer

from helmrec.cli.console import check_writable, exit_on_error, out


def demo(
    seconds: Annotated[float, typer.Option(help="Seconds of traffic, a third for each split.", min=9)] = 75,
    seed: Annotated[int, typer.Option(help="Same seed, same traffic.", min=0)] = 0,
    report: Annotated[Path, typer.Option("--out", help="The report to write.")] = Path("helmrec-demo.html"),
    quick: Annotated[bool, typer.Option("--quick", help="A few seconds, a tiny model, no simulation.")] = False,
) -> None:
    """Serve a small model over HTTP while traffic changes: at an untuned split, at the best constant one, by `helm`."""
    from helmrec.demo.plan import QUICK, DemoPlan
    from helmrec.demo.run import run_demo

    with exit_on_error():
        check_writable("--out", report)
        chosen = {"seed": seed} if quick else {"seed": seed, "seconds": seconds}
        plan = DemoPlan(**(QUICK if quick else DemoPlan()).model_dump() | chosen)
        run_demo(out, plan, report)
