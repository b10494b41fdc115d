"""`helmrec compile`: compile the host's loops ahead of the first start."""

import time
from pathlib import Path
from typing import Annotated

import typer

from helmrec.cli.console import err, out, told_plainly
from helmrec.engine.warm_up import compile_ahead
from helmrec.model.profiles import profile
from helmrec.model.weights import read_manifest


def compile_loops(
    model: Annotated[
        Path | None, typer.Argument(metavar="[MODEL]", help="A model folder; else the demo's form.")
    ] = None,
) -> None:
    """Compile the host's loops now, so that servers start quickly: for container images, and after an upgrade.

    Compiled code goes where NUMBA_CACHE_DIR says, or beside the package if that is writable. Kernels of a card are
    compiled on that card at the first start, and kept where TRITON_CACHE_DIR says.
    """
    with told_plainly():
        form = profile("demo") if model is None else read_manifest(model).model
        with err.status("compiling"):
            started_s = time.perf_counter()
            num_kinds = compile_ahead(form)
        out.print(f"loops of {num_kinds} kinds of engines in {time.perf_counter() - started_s:.1f} s", highlight=False)
