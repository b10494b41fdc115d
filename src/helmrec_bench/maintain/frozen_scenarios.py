"""Write the scenarios controllers are judged on, with loads that are shares of the best constant's capacity in the map.

    helmrec bench run frozen-scenarios            # all, or those named: control, main, stress

Reads docs/measurements/map.json, writes src/helmrec_bench/scenarios/*.toml. They are frozen:
docs/decisions/0015-frozen-scenarios.md says why they are what they are, and tests/bench/test_scenarios.py holds their
content. Run it again only to take up a new calibration, before any controller has been judged with it.
"""

import json
import tomllib
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from helmrec.sim.scenario import Scenario
from helmrec.traffic.workload import Phase
from helmrec_bench.judging.contest import Course
from helmrec_bench.judging.judge import largest_of
from helmrec_bench.map.cells import MOVE_BYTES, POOL_GB, REGIMES, SLO_MS, Cell, Regime
from helmrec_bench.measure.simulated.map import FAVOURABLE, MAIN, from_json

MAP = Path("docs/measurements/map.json")
LOAD = 0.85  # of the largest load the best constant serves within the SLO
SHARES = tuple(round(0.5 + 0.04 * step, 2) for step in range(14))  # of what the regimes of the map alone would bear
LIMIT_SEED = 40  # nobody is judged on it

_HEADER = """\
# {title}
# Frozen: docs/decisions/0015-frozen-scenarios.md has the reasons, a test holds the content. Arrivals are {load:.0%} of
# what a well-chosen constant split ({alpha:g}) serves within the SLO.
name = "{name}"
profile = "{profile}"
slo_ms = {slo_ms:g}
warm_up_s = {warm_up_s:g}
row_sample = {row_sample}
{bus}
[engine]
pool_bytes = "{pool_gb:g}GB"
max_batch_requests = 8
move_bytes_per_step = "{move_bytes}"
{overlap}
[workload]
name = "{name}"
num_items = {num_items}
num_lanes = {num_lanes}
item_shift = {item_shift:g}
repeat = {repeat}

[workload.users]
min_history = 2000
max_history = 14000
"""


class FrozenSetting(NamedTuple):
    """A node of the map under a name."""

    name: str
    title: str
    cell: Cell


class FrozenTraffic(NamedTuple):
    """A variant: phases at a base rate of 1, and how many times the base rate its regimes bring."""

    name: str
    title: str
    phases: tuple[Phase, ...]
    repeat: int
    times: Mapping[Regime, float]


SETTINGS = (
    FrozenSetting("control", "Control: one row a token. Adapting should gain nothing.", Cell(rows_per_token=1)),
    FrozenSetting("main", "Main: 24 rows a token, hot prefixes and hot rows together as large as the pool.", MAIN),
    FrozenSetting("stress", "Stress, FAVOURABLE to adapting: as main, but stages do not overlap.", FAVOURABLE),
)


def calm(cell: Cell, duration_s: float) -> Phase:
    return cell.phase("returning", duration_s, 1.0).model_copy(update={"name": "calm"})


def changed(before: Phase, name: str, **settings: Any) -> Phase:
    return Phase(**before.model_dump() | {"name": name} | settings)


def trend(cell: Cell, duration_s: float, rush: float) -> Phase:
    """From one regime to the other; the crowd changes head by head."""
    start, end = calm(cell, duration_s), cell.phase("browsing", duration_s, rush)
    ramps = {
        key: (getattr(start, key)[0], getattr(end, key)[1])
        for key in ("rate", "hot_share", "hot_first", "history", "item_exponent")
    }
    return changed(start, "trend", **ramps)


def bursts(cell: Cell, length_s: float, repeat: int, rush: float) -> FrozenTraffic:
    burst = cell.phase("browsing", length_s, rush).model_copy(update={"name": "burst"})
    return FrozenTraffic(
        f"burst-{length_s:g}s",
        f"Every {4 * length_s:g} s a burst of {length_s:g} s.",
        (calm(cell, 3 * length_s), burst),
        repeat,
        {"returning": 1, "browsing": rush},
    )


def variants(cell: Cell, rush: float) -> tuple[FrozenTraffic, ...]:
    """`rush`: how many times the calm rate a burst brings."""
    after = cell.phase("browsing", 30, rush).model_copy(update={"name": "after"})
    rest, flooded = calm(cell, 40), calm(cell, 30)
    return (
        FrozenTraffic("steady", "Nothing changes.", (calm(cell, 80),), 1, {"returning": 1}),
        FrozenTraffic(
            "trend",
            "A slow change to another crowd, shorter histories, flatter taste and more requests.",
            (trend(cell, 90, rush), after),
            1,
            {"returning": 1, "browsing": rush},
        ),
        bursts(cell, 3, 12, rush),
        bursts(cell, 20, 2, rush),
        bursts(cell, 60, 1, rush),
        FrozenTraffic(
            "cold-flood",
            "Adversarial: new users on top of the usual traffic, as many again, then twice as many.",
            (
                rest,
                changed(flooded, "flood", rate=2, hot_share=0.35),
                rest,
                changed(flooded, "flood", rate=3, hot_share=0.7 / 3),
            ),
            1,
            {"returning": 1, "flood": 3},
        ),
        FrozenTraffic(
            "flash-items",
            "Adversarial: half of all draws go to a thousand items nobody knew, others each time.",
            (calm(cell, 20), changed(calm(cell, 20), "flash", flash_share=(0.5, 0.2))),
            4,
            {"returning": 1},
        ),
    )


def rush_of(setting: FrozenSetting, sweeps: Mapping[str, Any]) -> float:
    """Half as many requests again; where adapting is to be favoured, what makes both regimes equally critical."""
    if setting.cell != FAVOURABLE:
        return 1.5
    calm_load, other = (float(from_json(sweeps[regime]).capacity.max()) for regime in REGIMES)
    return round(other / calm_load, 2)


def base_rate(sweeps: Mapping[str, Any], times: Mapping[Regime, float]) -> tuple[float, float]:
    """The best constant's largest base rate, and its split."""
    swept = {regime: from_json(sweeps[regime]) for regime in times}
    worst = np.min([swept[regime].capacity / factor for regime, factor in times.items()], axis=0)
    at = int(worst.argmax())
    return float(worst[at]), float(next(iter(swept.values())).alphas[at])


def frozen_text(setting: FrozenSetting, traffic: FrozenTraffic, sweeps: Mapping[str, Any]) -> str:
    """Regimes alone say what a constant would bear; the whole scenario, run at shares of that, says what it does."""
    limit, alpha = base_rate(sweeps, traffic.times)
    tried = Scenario(**tomllib.loads(scenario_text(setting, traffic, limit, alpha)))

    def is_met(share: float) -> bool:
        return Course(tried, LIMIT_SEED, share).static(alpha).meets(SLO_MS)

    share = largest_of(SHARES, is_met)
    assert share is not None, f"{tried.name}: not even half of what its regimes bear is served within the SLO"
    return scenario_text(setting, traffic, round(LOAD * share * limit), alpha)


def scenario_text(setting: FrozenSetting, traffic: FrozenTraffic, rate: float, alpha: float) -> str:
    cell = setting.cell
    workload = cell.workload(calm(cell, 1), traffic.phases)
    head = _HEADER.format(
        title=f"{setting.title} {traffic.title}",
        name=f"{setting.name}-{traffic.name}",
        profile=cell.node(0.5).model.name,
        load=LOAD,
        alpha=alpha,
        slo_ms=SLO_MS,
        warm_up_s=cell.warm_up_s,
        bus=f"bus_speed = {cell.bus_speed:g}\n" if cell.bus_speed != 1 else "",
        overlap="" if cell.overlap else "overlap = false\n",
        pool_gb=POOL_GB,
        move_bytes=MOVE_BYTES,
        row_sample=1 / cell.num_lanes,
        num_items=workload.num_items,
        num_lanes=cell.num_lanes,
        item_shift=workload.item_shift,
        repeat=traffic.repeat,
    )
    warm_up = changed(calm(cell, cell.warm_up_s), "warm-up")
    return head + phase_text("opening", warm_up, rate) + "".join(phase_text("phases", p, rate) for p in traffic.phases)


def phase_text(table: str, one: Phase, rate: float) -> str:
    lines = [f"\n[[workload.{table}]]", f'name = "{one.name}"', f"duration_s = {one.duration_s:g}"]
    lines.append(f"rate = {_value(tuple(rate * share for share in one.rate))}")
    defaults = Phase(name="default", duration_s=1)
    keys = ("hot_share", "hot_users", "hot_first", "history", "item_exponent", "flash_share")
    lines += [f"{key} = {_value(getattr(one, key))}" for key in keys if getattr(one, key) != getattr(defaults, key)]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if not isinstance(value, tuple):
        return f"{value:g}"
    first, second = (round(one, 4) for one in value)
    return f"{first:g}" if first == second else f"[{first:g}, {second:g}]"


def options(parser: ArgumentParser) -> None:
    names = [setting.name for setting in SETTINGS]
    parser.add_argument("settings", nargs="*", choices=names, default=names)


def main(flags: Namespace) -> None:
    cells = {json.dumps(one["cell"]): one["sweeps"] for one in json.loads(MAP.read_text())["cells"]}
    flags.out.mkdir(exist_ok=True)
    for setting in (one for one in SETTINGS if one.name in flags.settings):
        sweeps = cells[json.dumps(setting.cell.model_dump())]
        for traffic in variants(setting.cell, rush_of(setting, sweeps)):
            path = flags.out / f"{setting.name}-{traffic.name}.toml"
            path.write_text(frozen_text(setting, traffic, sweeps))
            print(path)
