"""Training from nothing to a file: lessons, the fit of crowding, distillation, PPO, and a trial on lessons held out."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np
from pydantic import Field

from helmrec.config import Frozen
from helmrec.control.features import STEPS
from helmrec.control.helm import HelmSettings
from helmrec.control.network import following_layers
from helmrec.control.outlook import Crowding, Floats
from helmrec.sim.cost import CostModel
from helmrec.train.crowding import fit_crowding
from helmrec.train.distil import distil, expected_regret
from helmrec.train.lessons import Ground, Lesson, at_speed, draw_ground, learn_ground
from helmrec.train.ppo import PPOPlan, train_ppo
from helmrec.train.rollout import Examples, base_of, record
from helmrec.train.trial import ALONE, Trial, try_base, try_constant

Arrays = dict[str, Floats]
Tell = Callable[[str, float], None]  # what is done, and which share of it

_SPEEDS = (0.8, 1.0, 1.2)  # at which a trace of one's own is gone through


class TrainPlan(Frozen):
    """How much is done. The defaults take about ten minutes on two cores that are left alone."""

    num_lessons: int = Field(12, ge=2, description="made-up nodes and traffic to learn on")
    num_trials: int = Field(6, ge=1, description="lessons held out, to choose between networks")
    lesson_s: float = Field(75.0, ge=40, description="seconds of traffic in a lesson")
    num_epochs: int = Field(150, ge=1, description="passes of each of the two distillations")
    ppo_steps: int = Field(8_192, ge=0, description="seconds of simulated life PPO learns from")
    num_workers: int = Field(2, ge=1, description="processes that make lessons")
    seed: int = Field(0, ge=0)


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """The networks and what became of them on lessons held out."""

    networks: dict[str, Arrays]
    chosen: str
    crowding: Crowding
    record: dict[str, Any]


def make_lessons(plan: TrainPlan, cost: CostModel, own: Ground | None, tell: Tell) -> list[Lesson]:
    """The first `num_lessons` are for learning; a trace of one's own comes first, at three speeds."""
    total = plan.num_lessons + plan.num_trials
    grounds = [] if own is None else [at_speed(own, speed) for speed in _SPEEDS]
    jobs = total - len(grounds)
    with ProcessPoolExecutor(plan.num_workers, mp_context=get_context("spawn")) as workers:
        started = [workers.submit(learn_ground, ground) for ground in grounds]
        started += [workers.submit(_draw_and_learn, number, cost, plan.lesson_s) for number in range(jobs)]
        lessons = list[Lesson]()
        for number, job in enumerate(started, start=1):
            lessons.append(job.result())
            tell("lessons", number / total)
    return lessons


def _draw_and_learn(number: int, cost: CostModel, lesson_s: float) -> Lesson:
    return learn_ground(draw_ground(number, cost, lesson_s))


def train(plan: TrainPlan, cost: CostModel, own: Ground | None, tell: Tell) -> Trained:
    """Everything; `own` is a trace of one's own on one's own node."""
    started_s = time.perf_counter()
    trained = train_on(make_lessons(plan, cost, own, tell), plan, cost, tell)
    trained.record["wall_s"] = round(time.perf_counter() - started_s, 1)
    return trained


def train_on(lessons: Sequence[Lesson], plan: TrainPlan, cost: CostModel, tell: Tell) -> Trained:
    """The first `num_lessons` teach, the others decide which network is taken. Untrained ones stand for it too."""
    taught, trials = lessons[: plan.num_lessons], lessons[plan.num_lessons :]
    crowding = fit_crowding(taught)
    following = following_layers()
    distilled, losses = _distil_twice(plan, taught, crowding, tell)
    networks = {"following": following, "distilled": distilled}
    if plan.ppo_steps:
        networks["distilled and PPO"] = _ppo(distilled, taught, crowding, plan, ("PPO", 3e-5, tell))
        nothing = {name: np.zeros_like(array) for name, array in following.items()}
        networks["PPO only"] = _ppo(nothing, taught, crowding, plan, ("PPO only", 1e-3, tell))
    alone, whole = _try_all(networks, trials, crowding, tell)
    chosen = min(networks, key=lambda name: float(np.mean([one.regret for one in whole[name]])))
    constant = [try_constant(one) for one in trials]
    return Trained(
        networks=networks,
        chosen=chosen,
        crowding=crowding,
        record={
            "plan": plan.model_dump(),
            "calibration": cost.name,
            "crowding": crowding.model_dump(),
            "lessons": [one.ground.name for one in taught],
            "trials": [one.ground.name for one in trials],
            "distillation_regret_by_epoch": losses,
            "trial_regret": {name: _column(found, "regret") for name, found in whole.items()},
            "trial_p99_change": {name: _column(found, "p99_change") for name, found in whole.items()},
            "trial_regret_alone": {name: _column(found, "regret") for name, found in alone.items()},
            "trial_p99_change_alone": {name: _column(found, "p99_change") for name, found in alone.items()},
            "trial_regret_of_best_constant": _column(constant, "regret"),
            "chosen": chosen,
            "chosen_by": "least mean regret of the whole policy on the trials, against the switching-cost oracle",
            "steps": list(STEPS),
        },
    )


def _try_all(
    networks: dict[str, Arrays], trials: Sequence[Lesson], crowding: Crowding, tell: Tell
) -> tuple[dict[str, list[Trial]], dict[str, list[Trial]]]:
    """Each network on each trial: alone, and with all layers."""
    alone, whole = dict[str, list[Trial]](), dict[str, list[Trial]]()
    for number, (name, arrays) in enumerate(networks.items(), start=1):
        base = base_of(arrays, crowding)
        alone[name] = [try_base(one, base, ALONE) for one in trials]
        whole[name] = [try_base(one, base, HelmSettings()) for one in trials]
        tell("trials", number / len(networks))
    return alone, whole


def _column(found: Sequence[Trial], field: str) -> list[float]:
    return [round(float(getattr(one, field)), 5) for one in found]


def _distil_twice(
    plan: TrainPlan, taught: Sequence[Lesson], crowding: Crowding, tell: Tell
) -> tuple[Arrays, list[float]]:
    """The second time on what the first network gets itself into, too."""
    arrays, parts, losses = following_layers(), list[Examples](), list[float]()
    for turn in range(2):
        base = base_of(arrays, crowding)
        for number, lesson in enumerate(taught, start=1):
            parts.append(record(lesson, base, plan.seed + 1_000 * turn + number))
            tell(f"runs {turn + 1}", number / len(taught))
        examples = Examples.joined(parts)
        losses.append(expected_regret(arrays, examples))
        epochs = list[float]()

        def tell_epoch(loss: float, epochs: list[float] = epochs, turn: int = turn) -> None:
            epochs.append(loss)
            tell(f"distilling {turn + 1}", len(epochs) / plan.num_epochs)

        arrays = distil(arrays, examples, plan.num_epochs, plan.seed, tell_epoch)
        losses += [round(loss, 6) for loss in epochs[:: max(1, plan.num_epochs // 20)]]
        losses.append(expected_regret(arrays, examples))
    return arrays, losses


def _ppo(
    start: Arrays, taught: Sequence[Lesson], crowding: Crowding, plan: TrainPlan, how: tuple[str, float, Tell]
) -> Arrays:
    name, learning_rate, tell = how
    ppo = PPOPlan(plan.ppo_steps, learning_rate, seed=plan.seed)
    return train_ppo(start, taught, crowding, ppo, lambda done: tell(name, min(1.0, done / plan.ppo_steps)))
