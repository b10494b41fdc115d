"""`helmrec compile`: compile the host's loops before the first start."""

import time
from pathlib import Path
from typing import Annotated

import typer

from helmrec.cli.console import err, exit_on_error, out


def compile_loops(
    model: Annotated[
        Path | None, typer.Argument(metavar="[MODEL]", help="A model folder; default: the model of the demo.")
    ] = None,
) -> None:
    """Compile the host's loops now, so that servers start quickly: for container images, and after an upgrade.

    Compiled code is stored in NUMBA_CACHE_DIR, or next to the package if that is writable. GPU kernels are compiled at
    the first start on a GPU, and stored in TRITON_CACHE_DIR.
    """
    from helmrec.engine.warm_up import compile_ahead
    from helmrec.model.folder import read_manifest
    from helmrec.model.profiles import profile

    with exit_on_error():
        config = profile("demo") if model is None else read_manifest(model).model
        with err.status("compiling"):
            started_s = time.perf_counter()
            num_kinds = compile_ahead(config)
        out.print(f"loops of {num_kinds} kinds of engines in {time.perf_counter() - started_s:.1f} s", highlight=False)
