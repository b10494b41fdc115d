"""`helmrec demo`: serve the same traffic at an untuned split, at the best constant one and under the policy."""

import multiprocessing
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.live import Live
from rich.progress import Progress
from rich.table import Table

from helmrec.control.static import UNTUNED_ALPHA
from helmrec.demo.plan import DemoPlan
from helmrec.demo.report import DemoResults, summary_rows, write_report
from helmrec.demo.side import Side, Split, serve_side
from helmrec.demo.simulated import Simulated, best_static, simulate_ways
from helmrec.demo.trial import SplitTrial, try_splits
from helmrec.load import LoadSnapshot
from helmrec.model.profiles import profile
from helmrec.model.weights import init_model
from helmrec.traffic.generate import generate

_UTILISATION = 0.4  # of the rate of sequential requests: bursts add to it, and driver and server share cores
_MOST_PER_S = 150.0
_KEPT_UP = 0.5  # share within the SLO below which requests mostly wait in the queue
_EFFECT = 0.05  # smaller relative differences of means are ignored
_SAME_ALPHA = 0.03
_MATTERS = 0.10  # the split matters if the worst constant one tried takes this much more processor time than the best


def run_demo(console: Console, plan: DemoPlan, report: Path) -> DemoResults:
    """Run the demonstration, print its results, and write the report.

    The simulation runs in a process of its own beside the trials, which measure processor time, and ends before
    servers are measured: on two cores, whatever has to be compiled is compiled in half the time.
    """
    console.print("Choosing the best constant split. The first run compiles, for about a minute.", highlight=False)
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        init_model(model, profile("demo", plan.num_items), plan.seed)
        with _simulating(plan) as simulation:
            trials = _try(console, plan, model)
            simulated = _simulated(console, simulation)
        best = min(trials, key=lambda trial: trial.cpu_ms)
        rate = min(_MOST_PER_S, _UTILISATION * 1e3 / median(trial.wall_ms for trial in trials))
        trace = generate(plan.workload(rate), plan.seed)
        console.print(
            f"best constant split: {best.alpha:g} ({best.cpu_ms:.1f} ms of processor time a request). Now, each time, "
            f"{trace.num_requests:,} requests over HTTP, {rate:.0f}/s; rows that miss the pool are read from files.",
            highlight=False,
        )
        constants = {"untuned": UNTUNED_ALPHA, "best constant": best.alpha}
        if best.alpha == UNTUNED_ALPHA:
            del constants["best constant"]
        splits = [Split(f"{name} {alpha:g}", f"static:{alpha}", alpha) for name, alpha in constants.items()]
        splits.append(Split(plan.policy, plan.policy, UNTUNED_ALPHA))
        sides = []
        for split in splits:
            with Live(console=console, refresh_per_second=4, transient=True) as live:
                shown = _View(console, plan, split.name, live)
                sides.append(serve_side(plan, model, split, trace, shown.update))
    results = DemoResults(plan, trials, sides, verdict(trials, sides, simulated), simulated)
    _print(console, results)
    write_report(report, results)
    console.print(f"report: {report.resolve()}", highlight=False, soft_wrap=True)
    return results


class _View:
    """The live table of one side. Prints the address of its dashboard once."""

    def __init__(self, console: Console, plan: DemoPlan, name: str, live: Live) -> None:
        self._console, self._plan, self._name, self._live = console, plan, name, live
        self._has_printed_url = False

    def update(self, url: str, seen: LoadSnapshot) -> None:
        if not self._has_printed_url:
            self._console.print(f"{self._name}: dashboard at {url}/", highlight=False)
            self._has_printed_url = True
        part = self._plan.part_at(seen.elapsed_s)
        table = Table(title=f"{self._name}, {part}, {seen.elapsed_s:.0f} s", show_header=False)
        for label, value in (
            ("offered / answered", f"{seen.offered:,} / {seen.answered:,}"),
            ("p50 / p99 (recent p99)", f"{seen.p50_ms:.1f} / {seen.p99_ms:.1f} ({seen.recent_p99_ms:.1f}) ms"),
            ("tokens reused, rows hit", f"{seen.pool.token_reuse_rate:.1%}, {seen.pool.row_hit_rate:.1%}"),
            ("alpha, target", f"{seen.pool.alpha:.3f}, {seen.pool.alpha_target:.3f}"),
        ):
            table.add_row(label, value)
        self._live.update(table)


def _try(console: Console, plan: DemoPlan, model: Path) -> list[SplitTrial]:
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("trying constant splits", total=len(plan.trial_alphas))
        return try_splits(plan, model, lambda: bar.advance(task))


@contextmanager
def _simulating(plan: DemoPlan) -> Iterator[Future[list[Simulated]] | None]:
    """Simulate in another process, if the plan has a simulation."""
    if not plan.has_simulation:
        yield None
        return
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool.submit(simulate_ways, plan.policy, plan.seed)


def _simulated(console: Console, simulation: Future[list[Simulated]] | None) -> list[Simulated]:
    if simulation is None:
        return []
    with Progress(console=console, transient=True) as bar:
        bar.add_task("simulating an H200", total=None)
        return simulation.result()


def verdict(trials: list[SplitTrial], sides: list[Side], simulated: list[Simulated]) -> str:
    """Summarise all sides and the simulation in lines of text that are true for any outcome."""
    text = _on_this_machine(trials, sides)
    if min(side.in_slo for side in sides) < _KEPT_UP:
        text += " The machine was too slow for this traffic: most of the latency is time in the queue."
    if simulated:
        text += f"\n{_on_a_card(simulated)}"
    wrong = sum(side.stats.audit_mismatches for side in sides)
    audits = sum(side.stats.audits for side in sides)
    return f"{text}\n{audits} requests were scored again without caches, {wrong} wrong."


def _on_this_machine(trials: list[SplitTrial], sides: list[Side]) -> str:
    """Say whether the policy beats the best constant split here, and if not, why.

    Better means less latency and less processor time: the first alone may come from other load on the machine.
    """
    *constants, ours = sides
    best = min(constants, key=lambda side: side.mean_ms)
    change, cpu_change = ours.mean_ms / best.mean_ms - 1, ours.cpu_ms / best.cpu_ms - 1 if best.cpu_ms else 0.0
    is_better = change <= -_EFFECT and cpu_change <= 0
    found = "better" if is_better else "not shown to be better" if change <= -_EFFECT else "not better"
    figures = ", ".join(f"{side.name} {side.mean_ms:.1f} ms" for side in sides)
    text = (
        f"On this machine {ours.name} is {found} than the best constant split: mean latency {change:+.1%}, "
        f"processor time {cpu_change:+.1%} (mean latency of {figures})"
    )
    return f"{text}." if is_better else f"{text}, because {_reason(trials, best, ours)}."


def _reason(trials: list[SplitTrial], best: Side, ours: Side) -> str:
    """Say why the policy is not better than the best constant split, from what was measured."""
    worst_of, best_of = (choose(trial.cpu_ms for trial in trials) for choose in (max, min))
    alpha = best.stats.pool.alpha
    if all(abs(sample.alpha - alpha) <= _SAME_ALPHA for sample in ours.samples):
        return f"it stayed at that split, {alpha:.2f}: what differs is other load on the machine"
    if ours.mean_ms <= (1 - _EFFECT) * best.mean_ms:
        return "its server did not work less, so the lower latency is likely an effect of other load on the machine"
    if worst_of / best_of - 1 < _MATTERS:
        return (
            f"the split hardly matters here: the worst of {len(trials)} constant splits takes only "
            f"{worst_of / best_of - 1:.0%} more processor time than the best, since a row that misses the pool comes "
            "from the system's page cache and costs about as much as a hit"
        )
    return (
        f"the best constant split was chosen beforehand on this very traffic, while {ours.name} starts at "
        f"{UNTUNED_ALPHA:g} and looks for the split as it serves"
    )


def _on_a_card(simulated: list[Simulated]) -> str:
    best, policy = best_static(simulated), simulated[-1]
    change = policy.mean_ms / best.mean_ms - 1
    return (
        f"On a simulated H200 under bursts, where rows that miss are read over a bus, {policy.name} takes "
        f"{policy.mean_ms:.1f} ms in the mean and {policy.p99_ms:.1f} at P99, the best constant split ({best.name}) "
        f"{best.mean_ms:.1f} and {best.p99_ms:.1f}: the mean is {change:+.1%}."
    )


def _print(console: Console, results: DemoResults) -> None:
    table = Table("", *(side.name for side in results.sides), title="the same traffic, each time")
    for label, values in summary_rows(results.sides):
        table.add_row(label, *values)
    console.print(table)
    if results.simulated:
        simulated = Table("simulated H200", "mean ms", "p99 ms", "in SLO")
        for each in results.simulated:
            simulated.add_row(each.name, f"{each.mean_ms:.1f}", f"{each.p99_ms:.1f}", f"{each.in_slo:.1%}")
        console.print(simulated)
    console.print(results.verdict, highlight=False)
