"""A frozen network as the base: its file, its inputs, its steps."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file

from helmrec.control.helm import Helm
from helmrec.control.latency import ALPHAS, Prediction
from helmrec.control.layers import View
from helmrec.control.policy import Limited
from helmrec.errors import ModelError
from helmrec.policies import make_policy
from helmrec.ppo.network import SHIPPED, Network, NetworkRecord
from helmrec.ppo.observation import Signal, observe, signals_of
from tests.control.bowl import Bowl

STEPS = (-0.1, 0.0, 0.1)
SIGNALS = tuple(signal.name.lower() for signal in Signal)
NEAR = (-0.1, 0.1)


def write(folder: Path, **changed: Any) -> Path:
    """A network of 32 random hidden units twice; `changed` are fields of its record, or weights by name."""
    num = 2 * len(NEAR) + len(SIGNALS)
    fields: dict[str, Any] = {
        "near": NEAR,
        "whole": (),
        "signals": SIGNALS,
        "steps": STEPS,
        "factor": 2.0,
        "least": 0.01,
        "centre": (0.0,) * num,
        "scale": (1.0,) * num,
        "most": 5.0,
        "training": {},
    }
    rng = np.random.default_rng(0)
    sizes = (num, 32, 32, len(STEPS))
    weights: dict[str, Any] = {}
    for layer in range(3):
        weights[f"weight{layer}"] = rng.normal(size=(sizes[layer + 1], sizes[layer])).astype(np.float32)
        weights[f"bias{layer}"] = rng.normal(size=sizes[layer + 1]).astype(np.float32)
    fields |= {name: value for name, value in changed.items() if name in fields}
    weights |= {name: value for name, value in changed.items() if name in weights}
    path = folder / "made.safetensors"
    save_file(weights, path)
    path.with_suffix(".json").write_text(NetworkRecord(**fields).model_dump_json())
    return path


def biased_to(action: int) -> dict[str, Any]:
    """Weights of a network that always takes the same step."""
    return {"weight2": np.zeros((3, 32), np.float32), "bias2": 50 * np.eye(3, dtype=np.float32)[action]}


def view(alpha: float = 0.5, idle_s: float = 10.0) -> View:
    bowl = Bowl()
    mean_ms = np.array([bowl.latency_ms(float(split)) for split in ALPHAS])
    return View(bowl.window(alpha), Prediction(mean_ms, mean_ms), idle_s, predicted_ms=5.0, realised=0.5)


def test_the_forward_pass_is_that_of_torch(tmp_path: Path) -> None:
    path = write(tmp_path)
    network, weights = Network(path), load_file(path)
    inputs = np.random.default_rng(1).normal(size=len(network.record.centre))
    x = torch.as_tensor(inputs, dtype=torch.float32)
    for layer in range(3):
        x = torch.nn.functional.linear(x, weights[f"weight{layer}"], weights[f"bias{layer}"])
        x = torch.relu(x) if layer < 2 else x
    assert network.forward(inputs) == pytest.approx(x.numpy(), abs=1e-4)


@pytest.mark.parametrize(("action", "expected"), [(0, 0.3), (1, 0.5), (2, 0.7)])
def test_an_action_is_a_step_and_may_hold(tmp_path: Path, action: int, expected: float) -> None:
    seen = view(0.5)
    assert Network(write(tmp_path, **biased_to(action))).choose(seen.newest.mean_ms, seen) == pytest.approx(expected)


@pytest.mark.parametrize(("more", "expected"), [(0.05, 0.5), (1.0, 0.5 + 2 * 0.1 * (np.e - 1) / (np.e + 2))])
def test_the_mean_of_likely_steps_is_taken_unless_it_is_small(tmp_path: Path, more: float, expected: float) -> None:
    seen = view(0.5)
    weights = {"weight2": np.zeros((3, 32), np.float32), "bias2": np.array((0, 0, more), np.float32)}
    assert Network(write(tmp_path, **weights)).choose(seen.newest.mean_ms, seen) == pytest.approx(expected)


def test_no_step_leaves_the_range_of_curves(tmp_path: Path) -> None:
    seen = view(float(ALPHAS[-1]) - 0.01)
    alpha = Network(write(tmp_path, **biased_to(2))).choose(seen.newest.mean_ms, seen)
    assert alpha == ALPHAS[-1]


def test_inputs_are_points_of_both_curves_relative_to_here_and_signals(tmp_path: Path) -> None:
    seen, sight = view(0.5), Network(write(tmp_path)).record.sight
    signals = signals_of(seen)
    inputs = observe(2 * seen.newest.mean_ms, seen.newest.mean_ms, signals, sight)
    here_ms, less_ms, more_ms = np.interp((0.5, 0.4, 0.6), ALPHAS, seen.newest.mean_ms)
    relative = [np.log(less_ms / here_ms), np.log(more_ms / here_ms)]
    assert inputs[:4] == pytest.approx([*relative, *relative])
    assert inputs[4:] == pytest.approx(signals)
    assert signals[Signal.ALPHA] == 0.5
    assert signals[Signal.REALISED] == 0.5
    assert signals[Signal.IDLE] == pytest.approx(np.log(11))
    best = ALPHAS[seen.newest.mean_ms.argmin()]
    assert signals[[Signal.DISTANCE, Signal.NEWEST_DISTANCE]] == pytest.approx(best - 0.5)
    assert signals[Signal.GAIN] == pytest.approx(np.log(here_ms / seen.newest.mean_ms.min()))


def test_a_node_that_never_moved_is_seen_as_idle_for_ever(tmp_path: Path) -> None:
    seen = view(idle_s=float("inf"))
    assert Network(write(tmp_path)).choose(seen.newest.mean_ms, seen) == pytest.approx(0.5, abs=0.2)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"weight0": np.zeros((32, 3), np.float32)}, "layer 0 does not fit 20 inputs"),
    ({"bias1": np.zeros(31, np.float32)}, "layer 1 does not fit 32 inputs"),
    ({"steps": (0.0, 0.1)}, "3 outputs for 2 steps"),
    ({"near": (0.1,)}, "must scale its 18 inputs, got 20 and 20"),
    ({"signals": (*SIGNALS[1:], "weather")}, r"names of signals, got .'weather'."),
]


@pytest.mark.parametrize(("changed", "message"), WRONG)
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Network(write(tmp_path, **changed))


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_bytes(b"weights")
    with pytest.raises(ModelError, match="cannot read network"):
        Network(path)
    path.with_suffix(".json").write_text("{}")
    with pytest.raises(ModelError, match="cannot read network"):
        Network(path)


def test_the_network_that_ships_steers_by_its_name() -> None:
    policy = make_policy("ppo")
    assert isinstance(policy, Limited) and isinstance(policy.policy, Helm)
    assert Network(SHIPPED).record.training["done"] >= 2_000_000


def test_a_forward_pass_takes_a_few_small_products() -> None:
    network = Network(SHIPPED)
    inputs, square, line = np.zeros(len(network.record.centre)), np.zeros((32, 32)), np.zeros(32)
    assert least_s(lambda: network.forward(inputs)) < 15 * least_s(lambda: square @ line)


def least_s(call: Callable[[], Any], num_calls: int = 20) -> float:
    """Of one call; the least of many tries, since others use the machine."""
    least = np.inf
    for _ in range(300):
        start_s = time.perf_counter()
        for _ in range(num_calls):
            call()
        least = min(least, (time.perf_counter() - start_s) / num_calls)
    return float(least)
