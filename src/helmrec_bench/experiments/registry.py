"""All experiments by name, in the order of the report."""

from helmrec_bench.experiments import ablations, decisions, loads, routing, sensitivity, strategies, tails, traffic
from helmrec_bench.experiments.experiment import Experiment

_ORDER = (
    "ladder", "overall-p99", "slo-by-family", "control-strategies", "falsification", "hstu-settings",
    "latency-vs-ratio", "fluctuation", "alpha-over-time", "scale-and-hot-share", "system-ablation",
    "allocator-ablation", "error-over-time", "decision-latency", "move-cost",
    "routing",
)  # fmt: skip
_MODULES = (ablations, decisions, loads, routing, sensitivity, strategies, tails, traffic)
_FOUND = {one.name: one for module in _MODULES for one in module.EXPERIMENTS}
EXPERIMENTS: dict[str, Experiment] = {name: _FOUND[name] for name in _ORDER}
assert len(EXPERIMENTS) == len(_FOUND), "every experiment has its place in the report"
