"""Tables and pictures of the docs: Markdown text, and PNG files."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from helmrec.cli.console import err
from helmrec.errors import ConfigError


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def new_figure(size: tuple[float, float]) -> Any:
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra
    except ImportError:
        raise ConfigError("a picture needs matplotlib: pip install 'helmrec[bench]'") from None
    return Figure(figsize=size, layout="constrained")


@contextmanager
def picture(path: Path, size: tuple[float, float]) -> Iterator[Any]:
    """A matplotlib figure to draw on, which is then written to `path`."""
    figure = new_figure(size)
    yield figure
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    err.print(f"wrote {path}", highlight=False, soft_wrap=True)
