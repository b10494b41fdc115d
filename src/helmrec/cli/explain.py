"""`helmrec explain`: the proposals of each layer of the policy, from a log of decisions or a simulated scenario."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.table import Table

from helmrec.cli.console import exit_on_error, out, progress
from helmrec.errors import ConfigError

if TYPE_CHECKING:
    from helmrec.control.explain import Explanation
    from helmrec.control.helm import Helm
    from helmrec.control.policy import Move, Policy, WindowStats


def explain(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="SCENARIO|LOG",
            help="A scenario (.toml, or the name of an installed one), or decisions of `helmrec load`.",
        ),
    ],
    at_s: Annotated[float | None, typer.Option("--at", help="Second of the decision; default: the last one.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of a scenario's traffic.", min=0)] = 0,
    lines: Annotated[int, typer.Option(help="Number of earlier decisions to list.", min=0)] = 5,
) -> None:
    """Show the proposal of each layer for a decision, the prediction, and the result of the last move."""
    from helmrec.sim.scenario import find_scenario

    with exit_on_error():
        path = find_scenario(path)
        found = _simulated(path, seed, at_s) if path.suffix == ".toml" else list(read_explanations(path))
        upto = [one for one in found if at_s is None or one.time_s <= at_s + 1e-9]
        if not upto:
            raise ConfigError(f"{path} holds no decision{'' if at_s is None else f' up to {at_s:g} s'}")
        if at_s is not None and path.suffix != ".toml" and at_s > upto[-1].time_s and upto[-1] is found[-1]:
            raise ConfigError(f"--at is beyond the last decision of {path}, at {found[-1].time_s:g} s, got {at_s:g}")
        for one in upto[-1 - lines : -1]:
            out.print(one.line(), highlight=False, soft_wrap=True)
        out.print(_table(upto[-1]))


def read_explanations(path: Path) -> Iterator[Explanation]:
    """Read a file of decisions, one `as_json` line each."""
    from helmrec.control.explain import Explanation

    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read decisions {path}: {error}") from None
    for number, line in enumerate(lines, start=1):
        try:
            found = msgspec.json.decode(line, type=Explanation)
        except msgspec.DecodeError:
            raise ConfigError(f"{path}, line {number}: not a decision, got {line!r:.60}") from None
        if not found.proposals:
            raise ConfigError(f"{path}, line {number}: a decision without proposals")
        yield found


class _Enough(Exception):
    """Ends a simulation after the decision to explain."""


class _Explained:
    """Collects the explanations of `helm`, which decides within a policy."""

    def __init__(self, policy: Policy, helm: Helm) -> None:
        self._policy, self._helm = policy, helm
        self.explanations: list[Explanation] = []

    def decide(self, stats: WindowStats) -> Move | None:
        move = self._policy.decide(stats)
        if (explanation := self._helm.explanation) is not None:
            self.explanations.append(explanation)
        return move

    def reset(self) -> None:
        self._policy.reset()


def _simulated(path: Path, seed: int, until_s: float | None) -> list[Explanation]:
    """Simulate a scenario and collect the explanations."""
    from helmrec.control.helm import Helm
    from helmrec.control.policy import Limited, Limits
    from helmrec.sim.scenario import load_scenario
    from helmrec.sim.simulate import Options, simulate

    scenario = load_scenario(path)
    trace, cost = scenario.make_trace(seed), scenario.cost()
    if until_s is not None and until_s > trace.duration_s:
        raise ConfigError(f"--at is beyond the end of {path}, at {trace.duration_s:g} s, got {until_s:g}")
    config = scenario.node_config(trace)
    helm = Helm()
    policy = _Explained(Limited(helm, Limits()), helm)
    with progress() as bar:
        task = bar.add_task("simulating", total=trace.duration_s)

        def on_tick(now_s: float) -> None:
            bar.update(task, completed=now_s)
            if until_s is not None and now_s >= until_s:
                raise _Enough

        with suppress(_Enough):
            options = Options(scenario.faults.compiled(), has_curves=True, on_tick=on_tick)
            simulate(trace, config, cost, policy, scenario.tick_s, options)
    return policy.explanations


def _table(shown: Explanation) -> Table:
    from helmrec.control.explain import describe_move

    decided, title = (
        shown.decided,
        f"{shown.time_s:.1f} s: alpha {shown.alpha:.3f} -> {shown.decided.alpha:.3f}",
    )
    table = Table("layer", "proposes", "why", title=title)
    for one in shown.proposals:
        table.add_row(one.layer, "stay" if one.alpha == shown.alpha else f"{one.alpha:.3f}", one.reason)
    predicted = "no prediction" if shown.predicted_ms is None else f"{shown.predicted_ms:.2f} ms predicted"
    table.add_row("decided by", decided.layer, f"{decided.gain_ms:+.3f} ms a request predicted")
    table.add_row("measured", f"{shown.measured_ms:.2f} ms", f"{predicted}, {shown.arrivals_per_s:.0f} requests/s")
    if shown.last_move is not None:
        table.add_row("last move", "", describe_move(shown.last_move))
    return table
