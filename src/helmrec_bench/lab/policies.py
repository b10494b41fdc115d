"""Policies by the names experiments know them by: those of commands, and some that only an experiment has."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from helmrec.control.helm import Helm, HelmSettings
from helmrec.control.policy import Limited, Limits, Move, Policy, WindowStats
from helmrec.control.static import UNTUNED_ALPHA
from helmrec.errors import ConfigError
from helmrec_bench.baselines.registry import POLICY_NAMES, make_policy, needs_curves
from helmrec_bench.baselines.service_cost import ServiceCost
from helmrec_bench.map.shifts import Planned

LAYERS = {
    "helm base": HelmSettings(has_residual=False, has_bursts=False, has_payback=False),
    "helm without residual": HelmSettings(has_residual=False),
    "helm without bursts": HelmSettings(has_bursts=False),
    "helm without payback": HelmSettings(has_payback=False),
}


class StartedPolicy(NamedTuple):
    """A policy, where its node starts, and whether it must be shown miss curves."""

    policy: Policy
    alpha: float
    has_curves: bool


class Frozen:
    """Lets a policy decide, and does nothing of what it decides."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def decide(self, stats: WindowStats) -> Move | None:
        self._policy.decide(stats)
        return None

    def reset(self) -> None:
        self._policy.reset()


class Jump:
    """Stays, and goes elsewhere at one moment."""

    def __init__(self, alpha: float, at_s: float) -> None:
        self._alpha, self._at_s = alpha, at_s

    def decide(self, stats: WindowStats) -> Move | None:
        if stats.traffic.end_s < self._at_s or stats.alpha_target == self._alpha:
            return None
        return Move(self._alpha, "planned")

    def reset(self) -> None:
        """There is nothing to forget."""


def _static(value: str, cost: ServiceCost) -> StartedPolicy:
    return StartedPolicy(
        make_policy(f"static:{value}", cost), float(value), False
    )  # born there, as a tuned node would be


def _frozen(value: str, cost: ServiceCost) -> StartedPolicy:
    return StartedPolicy(Frozen(make_policy("helm", cost)), float(value), True)


def _jump(value: str, cost: ServiceCost) -> StartedPolicy:
    """`jump:0.3>0.5@40`."""
    start, _, rest = value.partition(">")
    alpha, _, at_s = rest.partition("@")
    return StartedPolicy(Jump(float(alpha), float(at_s)), float(start), False)


def _path(value: str, cost: ServiceCost) -> StartedPolicy:
    """`path:10@30=0.5,0.6`: windows of 10 s from 30 s on."""
    windows, _, splits = value.partition("=")
    window_s, _, start_s = windows.partition("@")
    alphas = np.array([float(split) for split in splits.split(",")])
    return StartedPolicy(Planned(alphas, float(window_s), float(start_s)), float(alphas[0]), False)


_TAKING_A_VALUE: dict[str, Callable[[str, ServiceCost], StartedPolicy]] = {
    "static": _static,
    "frozen helm": _frozen,
    "jump": _jump,
    "path": _path,
}


def started_policy(text: str, cost: ServiceCost) -> StartedPolicy:
    name, _, value = text.partition(":")
    if name in LAYERS:
        return StartedPolicy(Limited(Helm(LAYERS[name]), Limits()), UNTUNED_ALPHA, True)
    if not value:
        return StartedPolicy(make_policy(name, cost), UNTUNED_ALPHA, needs_curves(name))
    if name not in _TAKING_A_VALUE:
        known = (*POLICY_NAMES, *LAYERS, *(f"{kind}:..." for kind in _TAKING_A_VALUE))
        raise ConfigError(f"policy must be one of {', '.join(known)}, got {text!r}")
    try:
        return _TAKING_A_VALUE[name](value, cost)
    except ValueError:
        raise ConfigError(f"policy {name} cannot be made of {value!r}, got {text!r}") from None


def is_blind(text: str) -> bool:
    """Whether the policy does without miss curves."""
    name = text.partition(":")[0]
    return name in {"jump", "path"} or (name in {"static", *POLICY_NAMES} and not needs_curves(name))


def path_text(alphas: list[float], window_s: float, start_s: float) -> str:
    return f"path:{window_s:g}@{start_s:g}=" + ",".join(f"{alpha:g}" for alpha in alphas)
