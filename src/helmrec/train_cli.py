"""`helmrec train`: make the base policy anew, on made-up traffic and, if there is one, a trace of one's own."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from helmrec.config import EngineConfig
from helmrec.console import err, out, told_plainly
from helmrec.control.network import save_base
from helmrec.errors import ConfigError
from helmrec.model.profiles import profile
from helmrec.sim.cost import default_cost, load_cost
from helmrec.sim.node_config import NodeConfig
from helmrec.sim.trace_file import read_trace

if TYPE_CHECKING:
    from helmrec.train.run import Trained


def train(  # noqa: PLR0913, PLR0917 - one parameter per flag
    folder: Annotated[Path, typer.Option("--out", help="Folder for base.safetensors and its record.")],
    trace: Annotated[Path | None, typer.Option(help="A trace of your own, from `helmrec trace`.")] = None,
    calibration: Annotated[Path | None, typer.Option(help="Costs of your device; default: the H200's.")] = None,
    shape: Annotated[str, typer.Option("--profile", help="Model shape the trace is served with.")] = "wide",
    pool: Annotated[str, typer.Option(help="Memory both caches share, with --trace.")] = "20GiB",
    lessons: Annotated[int, typer.Option(help="Made-up nodes to learn on.", min=2)] = 12,
    ppo_steps: Annotated[int, typer.Option(help="Seconds of simulated life for PPO; 0 leaves it out.", min=0)] = 8_192,
    seed: Annotated[int, typer.Option(help="Same seed, same network.", min=0)] = 0,
) -> None:
    """Train the base policy from scratch: about ten minutes on two idle cores."""
    with told_plainly():
        try:
            from helmrec.train.lessons import Ground  # noqa: PLC0415 - the extra may be missing
            from helmrec.train.run import TrainPlan  # noqa: PLC0415
            from helmrec.train.run import train as run_training  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise ConfigError(f"training needs the extra train: pip install 'helmrec[train]' ({error})") from None
        cost = default_cost() if calibration is None else load_cost(calibration)
        own = None
        if trace is not None:
            served = read_trace(trace)
            model = profile(shape, served.catalogue.num_items)
            engine = EngineConfig.model_validate({"pool_bytes": pool})
            own = Ground(trace.name, served, NodeConfig(model=model, engine=engine), cost)
        columns = (TextColumn("{task.description:<14}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=err) as bar:
            tasks: dict[str, int] = {}

            def tell(what: str, share: float) -> None:
                if what not in tasks:
                    tasks[what] = bar.add_task(what, total=1.0)
                bar.update(tasks[what], completed=share)  # type: ignore[arg-type]
                if not err.is_terminal and share == 1:
                    err.print(f"{what}: done", highlight=False)

            trained = run_training(TrainPlan(num_lessons=lessons, ppo_steps=ppo_steps, seed=seed), cost, own, tell)
        save_networks(folder, trained)
        out.print(_table(trained))


def save_networks(folder: Path, trained: "Trained") -> None:
    """The chosen network as `base`, the others beside it for comparison."""
    for name, arrays in trained.networks.items():
        save_base(folder / f"{name.replace(' ', '_').lower()}.safetensors", arrays, trained.record)
    save_base(folder / "base.safetensors", trained.networks[trained.chosen], trained.record)


def _table(trained: "Trained") -> Table:
    table = Table("network", "regret on lessons held out", title=f"chosen: {trained.chosen}")
    for name, regrets in trained.record["trial_regret"].items():
        table.add_row(name, f"{sum(regrets) / len(regrets):.2%}")
    constant = trained.record["trial_regret_of_best_constant"]
    table.add_row("best constant in hindsight", f"{sum(constant) / len(constant):.2%}")
    return table
