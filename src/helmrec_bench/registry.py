"""Every measurement by name: what it shows, what it needs, how long it takes and which files it writes.

A measurement is a module with `main(flags)` and, where it has options of its own, `options(parser)`; where options
decide which file is written, `default_out(flags)` names it. A module is imported when it is run, so that the list needs
none of their libraries. Experiments of the evaluation, which share tiers and a report, are in
`helmrec_bench.experiments.registry`.
"""

import tomllib
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

from helmrec.errors import ConfigError

MEASUREMENTS = Path("docs/measurements")
CARD = "a GPU"
_WITHOUT_CARD = ("quick", "small", "again", "plot")  # options that need none


@dataclass(frozen=True, slots=True)
class Measurement:
    """One entry of the registry."""

    name: str
    what: str
    module: str  # below helmrec_bench
    takes: str
    writes: Sequence[str] = ()
    needs: str = "nothing"

    @property
    def out(self) -> Path | None:
        if not self.writes:
            return None
        path = Path(self.writes[0])
        return path if path.parent != Path() else MEASUREMENTS / path

    def load(self) -> ModuleType:
        try:
            return import_module(f"helmrec_bench.{self.module}")
        except ModuleNotFoundError as error:
            raise ConfigError(f"{self.name} needs {self.needs}: no module named {error.name!r}") from None

    def parser(self) -> ArgumentParser:
        module = self.load()
        parser = ArgumentParser(
            prog=f"helmrec bench run {self.name}",
            description=module.__doc__,
            formatter_class=RawDescriptionHelpFormatter,
        )
        parser.add_argument("--out", type=Path, help=f"file to write (default: {self.out})")
        if hasattr(module, "options"):
            module.options(parser)
        return parser

    def parse(self, arguments: Sequence[str]) -> Namespace:
        """Options, with the file that a variant of the measurement writes if `--out` is not given."""
        flags = self.parser().parse_args(list(arguments))
        if flags.out is None:
            choose = getattr(self.load(), "default_out", lambda flags: None)
            name = choose(flags)
            flags.out = self.out if name is None else MEASUREMENTS / name
        return flags

    def run(self, arguments: Sequence[str]) -> None:
        flags = self.parse(arguments)
        device = getattr(flags, "device", None)
        if device == "cuda" or (
            device is None and self.needs == CARD and not any(getattr(flags, name, None) for name in _WITHOUT_CARD)
        ):
            _require_card(self.name)
        self.load().main(flags)


def _require_card(name: str) -> None:
    import torch  # noqa: PLC0415 - the list does without

    if not torch.cuda.is_available():
        raise ConfigError(f"{name} needs {CARD}, and torch finds none")


def _read(path: Path) -> dict[str, Measurement]:
    return {name: Measurement(name, **entry) for name, entry in tomllib.loads(path.read_text()).items()}


REGISTERED = _read(Path(__file__).with_name("measurements.toml"))
