"""`helmrec explain`: what each layer of the policy said, from a log of decisions or at one moment of a scenario."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress
from rich.table import Table

from helmrec.console import err, out, told_plainly
from helmrec.control.explain import Explanation, read_explanations
from helmrec.control.helm import HelmPolicy
from helmrec.control.policy import Limited, Limits, Move, WindowStats
from helmrec.errors import ConfigError
from helmrec.sim.scenario import load_scenario, service_cost
from helmrec.sim.simulate import Options, simulate


def explain(
    path: Annotated[Path, typer.Argument(help="A scenario (.toml), or decisions written by `helmrec load`.")],
    at_s: Annotated[float | None, typer.Option("--at", help="Second of the decision; default: the last one.")] = None,
    seed: Annotated[int, typer.Option(help="Of a scenario's traffic.", min=0)] = 0,
    lines: Annotated[int, typer.Option(help="Log lines shown before it.", min=0)] = 5,
) -> None:
    """Show what each layer of a decision said, what it was expected to gain and to cost."""
    with told_plainly():
        found = _replayed(path, seed, at_s) if path.suffix == ".toml" else list(read_explanations(path))
        upto = [one for one in found if at_s is None or one.time_s <= at_s + 1e-9]
        if not upto:
            raise ConfigError(f"{path} holds no decision{'' if at_s is None else f' up to {at_s:g} s'}")
        for one in upto[-1 - lines : -1]:
            out.print(one.line(), highlight=False, soft_wrap=True)
        out.print(_table(upto[-1]))


class _Enough(Exception):
    """What was to be seen has been."""


class _Explained:
    """Keeps what a policy said in each window."""

    def __init__(self, policy: HelmPolicy) -> None:
        self._limited = Limited(policy, Limits())
        self._helm = policy
        self.explanations: list[Explanation] = []

    def decide(self, stats: WindowStats) -> Move | None:
        move = self._limited.decide(stats)
        if (told := self._helm.explanation) is not None:
            self.explanations.append(told)
        return move

    def reset(self) -> None:
        self._limited.reset()


def _replayed(path: Path, seed: int, until_s: float | None) -> list[Explanation]:
    """Run a scenario anew and listen."""
    scenario = load_scenario(path)
    trace, cost = scenario.make_trace(seed), scenario.cost()
    config = scenario.node_config(trace)
    policy = _Explained(HelmPolicy(service_cost(cost, config, trace)))
    with Progress(console=err, transient=True) as bar:
        task = bar.add_task("replaying", total=trace.duration_s)

        def on_tick(now_s: float) -> None:
            bar.update(task, completed=now_s)
            if until_s is not None and now_s >= until_s:
                raise _Enough

        with suppress(_Enough):
            options = Options(scenario.faults.compiled(), has_curves=True, on_tick=on_tick)
            simulate(trace, config, cost, policy, scenario.tick_s, options)
    return policy.explanations


def _table(told: Explanation) -> Table:
    table = Table("layer", "says", title=f"{told.time_s:.1f} s: alpha {told.alpha:.3f} -> {told.wanted:.3f}")
    static = f"adapting is put aside for {told.static_alpha:.3f}" if told.is_aside else "adapting goes on"
    burst = (
        told.burst if not told.verdict else f"{told.burst} at {told.burst_alpha:.3f}, {told.burst_left_s:.0f} s left"
    )
    for layer, says in (
        ("miss curves", f"least latency at {told.fresh_best:.3f} lately, {told.lasting_best:.3f} for longer"),
        ("base", f"step {told.base_step:+.2f}, to {told.base_alpha:.3f}"),
        ("residual", f"{told.residual:+.4f}"),
        ("burst", burst),
        ("guardrail", f"{static}; best constant lately {told.static_alpha:.3f}"),
        ("decided by", told.cause),
        ("expected gain", f"{told.expected_gain_ms:+.3f} ms a request, of {told.expected_ms:.2f} ms there"),
        ("expected cost", f"{told.expected_cost_ms:.1f} ms over all requests it delays"),
        ("measured", f"{told.measured_ms:.2f} ms a request at {told.rate:.0f} requests/s"),
    ):
        table.add_row(layer, says)
    return table
