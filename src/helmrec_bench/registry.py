"""Every measurement by name: what it shows, what it needs, how long it takes and which files it writes.

A measurement is a module with `main(flags)` and, where it has options of its own, `options(parser)`. It is imported
when it is run, so that the list needs none of their libraries. Experiments of the evaluation, which share tiers and a
report, are in `helmrec_bench.experiments.registry`.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

from helmrec.errors import ConfigError

MEASUREMENTS = Path("docs/measurements")
CARD = "a GPU"
_WITHOUT_CARD = ("quick", "small", "again", "plot")  # options that need none


@dataclass(frozen=True, slots=True)
class Measurement:
    """One entry of the registry."""

    name: str
    what: str
    module: str  # below helmrec_bench
    takes: str
    writes: tuple[str, ...] = ()  # the first one is where `--out` points; paths without a folder are MEASUREMENTS'
    needs: str = "nothing"

    @property
    def out(self) -> Path | None:
        if not self.writes:
            return None
        path = Path(self.writes[0])
        return path if path.parent != Path() else MEASUREMENTS / path

    def load(self) -> ModuleType:
        try:
            return import_module(f"helmrec_bench.{self.module}")
        except ModuleNotFoundError as error:
            raise ConfigError(f"{self.name} needs {self.needs}: no module named {error.name!r}") from None

    def parser(self) -> ArgumentParser:
        module = self.load()
        parser = ArgumentParser(
            prog=f"helmrec bench run {self.name}",
            description=module.__doc__,
            formatter_class=RawDescriptionHelpFormatter,
        )
        parser.add_argument("--out", type=Path, default=self.out, help="file to write (default: %(default)s)")
        if hasattr(module, "options"):
            module.options(parser)
        return parser

    def run(self, arguments: Sequence[str]) -> None:
        flags = self.parser().parse_args(list(arguments))
        device = getattr(flags, "device", None)
        if device == "cuda" or (
            device is None and self.needs == CARD and not any(getattr(flags, name, None) for name in _WITHOUT_CARD)
        ):
            _require_card(self.name)
        self.load().main(flags)


def _require_card(name: str) -> None:
    import torch  # noqa: PLC0415 - the list does without

    if not torch.cuda.is_available():
        raise ConfigError(f"{name} needs {CARD}, and torch finds none")


_ALL = (
    Measurement(
        "kernels",
        "Check every kernel and the engine on a GPU, and time the dense path of published shapes.",
        "measure.cards.kernels",
        "6 min",
        ("gpu-h200.json", "gpu-dlrmv3-h200.json"),
        CARD,
    ),
    Measurement(
        "row-reads",
        "Time reads of embedding rows over the bus and from the pool, alone and beside compute.",
        "measure.cards.row_reads",
        "2 min",
        ("gpu-rows-h200.json",),
        CARD,
    ),
    Measurement(
        "moves",
        "Time what reloads, saves, refills and boundary moves add to requests.",
        "measure.cards.moves",
        "4 min",
        ("gpu-moves-h200.json",),
        CARD,
    ),
    Measurement(
        "trade-off",
        "Throughput over alpha for 1, 6 and 24 rows a token, with and without overlap and host tier.",
        "measure.cards.trade_off",
        "10 min",
        ("gpu-tradeoff-h200.json", "gpu-tradeoff-rule-h200.json", "gpu-tradeoff-small-h200.json"),
        CARD,
    ),
    Measurement(
        "fidelity",
        "Serve one trace with the engine and with the simulator, and compare hit rates and latencies.",
        "measure.cards.fidelity",
        "5 min",
        ("fidelity-h200.json", "fidelity-engine-h200.json"),
        CARD,
    ),
    Measurement(
        "loadgen-card",
        "Find the largest rate that MLPerf LoadGen calls valid, in process and over HTTP.",
        "measure.cards.loadgen",
        "3 min",
        ("gpu-loadgen-h200.json",),
        CARD,
    ),
    Measurement(
        "row-caches",
        "Compare our row cache with other caches on one trace of lookups.",
        "measure.cards.row_caches",
        "90 s",
        ("gpu-peers-h200.json",),
        CARD,
    ),
    Measurement(
        "relay-card",
        "Rate and history length within a budget, with and without prefixes computed ahead.",
        "measure.cards.relay",
        "7 min",
        ("gpu-relay-h200.json", "gpu-relay-chunks-h200.json", "gpu-relay-lengths-h200.json"),
        CARD,
    ),
    Measurement(
        "host",
        "CPU time of the bookkeeping of a batch, and what prefix reuse saves on a CPU.",
        "measure.serving.host",
        "2 min",
        ("host-cpu.json",),
    ),
    Measurement(
        "http",
        "Requests a second and latency of the HTTP front end, without a model behind it.",
        "measure.serving.http_front",
        "2 min",
        ("http-cpu.json",),
    ),
    Measurement(
        "loadgen",
        "Let MLPerf LoadGen judge the demo model on a CPU.",
        "measure.serving.loadgen",
        "1 min",
        ("loadgen-cpu.json",),
    ),
    Measurement(
        "overload",
        "Offer a server three times the load it can serve, and see it recover.",
        "measure.serving.overload",
        "4 min",
        ("overload-cpu.json",),
    ),
    Measurement(
        "restart",
        "Kill a server under load, and see what is there and how warm it is after a restart.",
        "measure.serving.restart",
        "2 min",
        ("restart-cpu.json",),
    ),
    Measurement(
        "soak",
        "Serve for ten minutes with every background operation, and watch memory and latency.",
        "measure.serving.soak",
        "11 min",
        ("soak-cpu.json",),
    ),
    Measurement(
        "pauses",
        "Latency by the minute at a constant load, while users grow; finds pauses.",
        "measure.serving.pauses",
        "8 min",
        ("pauses-cpu.json", "pauses-h200.json"),
        "a GPU for --device cuda",
    ),
    Measurement(
        "ray",
        "Scores, failures, scaling, updates and hit rates of replicas under Ray Serve.",
        "measure.serving.ray_cluster",
        "10 min",
        ("cluster-ray.json",),
        "Ray",
    ),
    Measurement(
        "prefix-checks",
        "Wrong scores of prefixes found without verification, and the cost of a fixed split.",
        "measure.serving.prefix_checks",
        "2 min",
        ("peers-kv-cpu.json",),
    ),
    Measurement(
        "cluster",
        "Every router on simulated clusters: presets, old reports, the controller, cluster size.",
        "measure.simulated.cluster",
        "hours",
        ("cluster.json",),
    ),
    Measurement(
        "map",
        "Where the split matters: the best constant of every cell, and what moving gains.",
        "measure.simulated.map",
        "15 min",
        ("map.json",),
    ),
    Measurement(
        "relay-routes",
        "Prefixes computed ahead on simulated clusters: load within a budget, and longer histories.",
        "measure.simulated.relay",
        "20 min",
        ("relay.json",),
    ),
    Measurement(
        "baselines",
        "Every policy on the frozen scenarios, five paired seeds.",
        "measure.simulated.baselines",
        "40 min",
        ("baselines.json",),
    ),
    Measurement(
        "sim-speed",
        "Requests a second that the simulator gets through.",
        "measure.simulated.speed",
        "3 min",
        ("sim-speed.json", "sim-speed-headline.json"),
    ),
    Measurement(
        "traces",
        "How close generated traces are to published figures, and how fast they are made.",
        "measure.simulated.traces",
        "1 min",
        ("traces-cpu.json",),
    ),
    Measurement(
        "router-speed",
        "Time of one routing decision, by cluster size.",
        "measure.simulated.routing_speed",
        "1 min",
        ("router-speed.json",),
    ),
    Measurement(
        "router-sketch",
        "Error of the hit rates that a router predicts from sketches.",
        "measure.simulated.routing_sketch",
        "2 min",
        ("router-sketch.json",),
    ),
    Measurement(
        "miss-curves",
        "Error of predicted miss curves against replays, and their cost.",
        "measure.simulated.miss_curves",
        "10 min",
        ("miss-curves.json", "miss-curves-cost.json"),
    ),
    Measurement(
        "ppo",
        "Learning curves of trained networks, and their loss on nodes that no training saw.",
        "measure.controller.ppo",
        "2 min",
        ("ppo.json",),
        "folders that `helmrec train` wrote",
    ),
    Measurement(
        "controller-trials",
        "Policies against constant splits on drawn and frozen scenarios.",
        "measure.controller.trials",
        "hours",
    ),
    Measurement(
        "controller-loads",
        "The largest load of policies within the SLO, as multiples of the frozen arrivals.",
        "measure.controller.loads",
        "1 h",
    ),
    Measurement(
        "controller-sensitivity",
        "The controller with each of its constants halved and doubled.",
        "measure.controller.sensitivity",
        "1 h",
    ),
    Measurement(
        "live",
        "The controller against constants on a GPU, in real time.",
        "measure.controller.live",
        "20 min",
        ("live-h200.json", "live-steady-h200.json"),
        CARD,
    ),
    Measurement(
        "live-cpu",
        "The controller against constants on a CPU, in real time.",
        "measure.controller.live_cpu",
        "25 min",
        ("live-cpu.json",),
    ),
    Measurement(
        "frozen-scenarios",
        "Maintenance: write the frozen scenarios again from the map.",
        "maintain.frozen_scenarios",
        "10 min",
        ("src/helmrec_bench/scenarios",),
    ),
    Measurement(
        "screenshots",
        "Maintenance: pictures of the dashboard under changing traffic.",
        "maintain.screenshots",
        "2 min",
        ("docs/images",),
        "Chromium and helmrec[web]",
    ),
)
REGISTERED = {one.name: one for one in _ALL}
assert len(REGISTERED) == len(_ALL), "two measurements of one name"
