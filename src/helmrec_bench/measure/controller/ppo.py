"""Learning curves of trainings, and what their networks and the plain rule lose on nodes that no training saw.

Reads folders that `helmrec train --out build/train/NAME` wrote; writes docs/measurements/ppo.json and
docs/images/ppo-learning.png.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from helmrec.control.latency import ALPHAS
from helmrec.control.layers import EQUAL_SHARE, nearest_middle
from helmrec.ppo.network import Network
from helmrec.ppo.observation import Signal
from helmrec.types import FloatArray
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.report.files import picture
from helmrec_bench.train.designs import STEPS
from helmrec_bench.train.env import observe_all, scaled
from helmrec_bench.train.fleet import Fleet

PICTURE = Path("docs/images/ppo-learning.png")
SEED, NUM_NODES, NUM_S = 999, 256, 400
SMOOTH = 5  # points of a learning curve that are averaged in the picture
Chooser = Callable[[Fleet], FloatArray]


def rule(fleet: Fleet) -> FloatArray:
    """As `control.layers.Rule`, for all nodes at once, in the largest steps that a network may take."""
    start, low, high = fleet.signals[:, Signal.ALPHA], float(ALPHAS[0]), float(ALPHAS[-1])
    targets = [
        nearest_middle(curve, low, high, at, EQUAL_SHARE) for at, curve in zip(start, fleet.mean_ms, strict=True)
    ]
    return np.clip(np.array(targets), start + STEPS[0], start + STEPS[-1])


def chooser_of(network: Network) -> Chooser:
    """As `Network.choose`, for all nodes at once."""
    record = network.record
    sight, centre, scale = record.sight, np.array(record.centre), np.array(record.scale)

    def choose(fleet: Fleet) -> FloatArray:
        logits = np.array([network.forward(line) for line in scaled(observe_all(fleet, sight), centre, scale)])
        likely = np.exp(logits - logits.max(axis=1, keepdims=True))
        step = np.clip(record.factor * (likely @ np.array(record.steps)) / likely.sum(axis=1), STEPS[0], STEPS[-1])
        start = fleet.signals[:, Signal.ALPHA]
        return np.clip(start + np.where(np.abs(step) < record.least, 0.0, step), ALPHAS[0], ALPHAS[-1])

    return choose


def judge(choose: Chooser) -> dict[str, float]:
    """Means over nodes that no training saw. Latency is over the least one at any split, minus 1."""
    fleet, lost, travel = Fleet(NUM_NODES, SEED), [], 0.0
    for _ in range(NUM_S):
        targets = choose(fleet)
        travel += float(np.abs(targets - fleet.signals[:, Signal.ALPHA]).mean())
        outcome = fleet.step(targets)
        lost.append([outcome.expected.mean(), outcome.measured.mean(), outcome.tail.mean()])
    expected, measured, tail = np.expm1(np.mean(lost, axis=0)).round(4).tolist()
    return {"expected": expected, "measured": measured, "p99": tail, "travel_per_minute": round(60 * travel / NUM_S, 4)}


def plot(trainings: list[dict[str, Any]], rule_lost: float) -> None:
    with picture(PICTURE, (9, 4.5)) as figure:
        axis = figure.subplots()
        for training in trainings:
            done, lost = np.array([(point["steps"], 100 * point["lost"]) for point in training["curve"]]).T
            mean = np.convolve(lost, np.ones(SMOOTH) / SMOOTH, "valid")
            label = f"{training['design']}, seed {training['seed']}, {training['steps']:,} steps"
            axis.plot(done[SMOOTH - 1 :], mean, label=label, linewidth=1)
        axis.axhline(
            100 * rule_lost, color="black", linestyle="--", linewidth=1, label="the plain rule, on other nodes"
        )
        axis.set(xlabel="steps", ylabel="expected latency above the best split, %", yscale="log")
        axis.legend(fontsize="small")


def options(parser: ArgumentParser) -> None:
    parser.add_argument("folders", nargs="+", type=Path)


def main(flags: Namespace) -> None:
    trainings = []
    for folder in flags.folders:
        network = Network(folder / "network.safetensors")
        trainings.append({**network.record.training, "on_other_nodes": judge(chooser_of(network))})
        print(folder, trainings[-1]["on_other_nodes"])
    results: dict[str, Any] = {"rule_on_other_nodes": judge(rule), "trainings": trainings}
    write_measurement(flags.out, results)
    plot(trainings, results["rule_on_other_nodes"]["expected"])
