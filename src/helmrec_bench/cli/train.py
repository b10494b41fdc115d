"""`helmrec train`: train a network for the controller. Needs `helmrec[train]`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from helmrec.cli.console import err, exit_on_error, make_folder, out
from helmrec.errors import ConfigError

_SAVE_EVERY = 10  # rounds


def train(
    folder: Annotated[Path, typer.Option("--out", help="Checkpoint and network; goes on from a checkpoint there.")],
    design: Annotated[str, typer.Option(help="What the network sees and is rewarded for.")] = "expected",
    steps: Annotated[int, typer.Option(help="Simulated seconds of nodes, in all.", min=1)] = 2_000_000,
    seed: Annotated[int, typer.Option(help="Same seed, same network.", min=0)] = 0,
    nodes: Annotated[int, typer.Option(help="Nodes that are steered at once.", min=1)] = 128,
) -> None:
    """Train the network of `--policy ppo` on simple nodes, with PPO; a training that was interrupted goes on."""
    with exit_on_error():
        try:
            from helmrec_bench.train.ppo import CHECKPOINT, Training, TrainSettings
        except ModuleNotFoundError as error:
            raise ConfigError(f"training needs pip install 'helmrec[train]' ({error})") from None
        make_folder("--out", folder)
        settings = TrainSettings(design=design, steps=steps, seed=seed, nodes=nodes)
        begun = (folder / CHECKPOINT).exists()
        training = Training.resume(folder, settings) if begun else Training(settings)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=err, transient=True) as bar:
            task = bar.add_task(f"training {design}", total=steps, completed=training.num_done)

            def on_round(num_done: int) -> None:
                lost = training.curve[-1].lost
                bar.update(task, completed=num_done, description=f"training {design}, {lost:+.1%} from the best split")
                if len(training.curve) % _SAVE_EVERY == 0:
                    training.save(folder)

            training.run(on_round)
        training.save(folder)
        details = f"{training.num_done:,} steps, {training.curve[-1].lost:+.1%} from the best split"
        out.print(f"{folder}/network.safetensors: {details}", highlight=False)
