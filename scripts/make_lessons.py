"""Lessons of `helmrec train` made beforehand, on a machine with many cores; `--from FOLDER` trains on them.

    python -m scripts.make_lessons --to FOLDER --processes 16
    python -m scripts.make_lessons --from FOLDER --out src/helmrec/control/policies

Both together do what `helmrec train` does, with the same lessons and seeds: the making takes most of the time and needs
no torch, the training little. Files are for the same version of the code, from one's own hands: they are pickled.
"""

import argparse
import lzma
import pickle
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from helmrec.sim.cost import default_cost
from helmrec.train.lessons import Lesson, draw_ground, learn_ground

PER_FILE = 3


def make(number: int, lesson_s: float) -> Lesson:
    return learn_ground(draw_ground(number, default_cost(), lesson_s))


def write(folder: Path, lessons: dict[int, Lesson]) -> None:
    path = folder / f"lessons-{min(lessons)}.pkl.xz"
    path.write_bytes(lzma.compress(pickle.dumps(lessons), preset=1))
    names = [one.ground.name for one in lessons.values()]
    print(f"{path.name}: {path.stat().st_size / 2**20:.1f} MiB, {names}", flush=True)


def load(folder: Path) -> list[Lesson]:
    found: dict[int, Lesson] = {}
    for path in folder.glob("lessons-*.pkl.xz"):
        found |= pickle.loads(lzma.decompress(path.read_bytes()))  # noqa: S301 - our own, as the docstring says
    return [found[number] for number in sorted(found)]


def teach(folder: Path, out: Path) -> None:
    from helmrec.train.run import TrainPlan, train_on  # noqa: PLC0415 - lessons are made without torch
    from helmrec.train_cli import save_networks  # noqa: PLC0415

    started_s, plan, last = time.perf_counter(), TrainPlan(), [""]

    def tell(what: str, share: float) -> None:
        if what != last[0] or share == 1:
            print(f"{time.perf_counter() - started_s:.0f} s: {what} {share:.0%}", flush=True)
        last[0] = what

    trained = train_on(load(folder)[: plan.num_lessons + plan.num_trials], plan, default_cost(), tell)
    trained.record["wall_s_without_lessons"] = round(time.perf_counter() - started_s, 1)
    save_networks(out, trained)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, help="make lessons here")
    parser.add_argument("--from", dest="source", type=Path, help="train on the lessons here")
    parser.add_argument("--out", type=Path, help="folder for the networks")
    parser.add_argument("--num", type=int, default=18)
    parser.add_argument("--lesson-s", type=float, default=75.0)
    parser.add_argument("--processes", type=int, default=2)
    flags = parser.parse_args()
    if flags.to is not None:
        flags.to.mkdir(parents=True, exist_ok=True)
        with ProcessPoolExecutor(flags.processes, mp_context=get_context("spawn")) as workers:
            made = list(enumerate(workers.map(make, range(flags.num), [flags.lesson_s] * flags.num)))
        for at in range(0, flags.num, PER_FILE):
            write(flags.to, dict(made[at : at + PER_FILE]))
    if flags.source is not None:
        teach(flags.source, flags.out)


if __name__ == "__main__":
    main()
