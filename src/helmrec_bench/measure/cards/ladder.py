"""The ladder on a card: the largest load with P99 within 80 ms as parts are switched on, live.

    helmrec bench run ladder-card --limit-s 560          # on a card; call it again until it says that all is done
    helmrec bench run ladder-card --shapes wide --repeats 1 --rungs "fixed split, LRU" "+ admission"
    helmrec bench run ladder-card --quick                # a small model on the CPU: that it runs, no figures

Traffic is the course of `live`: steady, a trend to many regular users, a burst, then many regular users, with the rate
of each mix in proportion to what one constant bears of it. Every course begins with empty caches, requests all at once,
and some seconds at 70% of the rate that do not count. The load is raised and lowered in steps of 2.5%; a course that
more than 1% of the requests have missed the SLO in is cut off. A rung with a constant split has one of its own, out of
a grid of 0.05: all are compared by throughput, the best of them under the SLO. Whoever moves the split starts at 0.5.

Rungs share kernels, host code and one copy of the tables. "Distinct rows once a step" is no rung: the engine always
reads a missed row once a step, so no setting is without it. Meta's stack without reuse is not run here: its load is
computed from our time for a step without reuse and the measured difference of layer times (`gpu-h200.json`).
"""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from helmrec_bench.experiments.results import plain
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.measure.cards.ladder_search import (
    CallClock,
    Climb,
    LadderLengths,
    OutOfTime,
    best_rates,
    reached,
    summary,
)
from helmrec_bench.measure.cards.ladder_stand import (
    ALONE,
    CARD,
    CUMULATIVE,
    FIRST,
    QUICK,
    ROWS,
    RUNGS,
    LadderScale,
    LadderStand,
    Rung,
)
from helmrec_bench.measure.controller.live import COURSES, MIXES, plan_times
from helmrec_bench.report.files import markdown_table

LAYERS, LAYER_SHAPE = Path("docs/measurements/gpu-h200.json"), "dlrmv3 8 x 6700+2048"
BATCH = 8
EXPECTED = {"+ controller": 1.3, "+ FP8 compute": 1.8}  # over the tuned fixed split
ALPHAS = tuple(round(0.05 * step, 2) for step in range(1, 20))


class ShapeLadder:
    """The rungs of one shape; `found` is its part of the file."""

    def __init__(self, found: dict[str, Any], flags: Namespace, clock: CallClock, save: Callable[[], None]) -> None:
        self._found, self._flags, self._clock, self._save = found, flags, clock, save

    def climb_of(self, rung: Rung) -> Climb:
        flags = self._flags
        repeats = 1 if rung in ALONE else flags.repeats
        alphas, finalists = (ALPHAS[1::8], 1) if flags.quick else (ALPHAS, 2)
        lengths = LadderLengths(
            flags.seconds, flags.screen_s, 10.0 if not flags.quick else 2.0, repeats, alphas, finalists
        )
        found = self._found.setdefault("rungs", {}).setdefault(rung.name, {})
        return Climb(rung.name, found, lengths, self._clock, self._save)

    def missing(self, rungs: Sequence[Rung]) -> list[Rung]:
        """Rungs of which something is not measured yet."""
        return [rung for rung in rungs if not self._is_done(self.climb_of(rung))]

    def measure(self, stand: LadderStand, rungs: Sequence[Rung]) -> None:
        """Go through the rungs, those of one engine together; the first one is needed by all."""
        self._first_rung(stand)
        for kind in dict.fromkeys(rung.kind for rung in rungs):
            for rung in (one for one in rungs if one.kind == kind):
                climb = self.climb_of(rung)
                stand.use(kind)
                self._choose(stand, climb, rung)
                climb.climb(stand)
                climb.at(stand, self._found["shared_load"])

    def _first_rung(self, stand: LadderStand) -> None:
        """The rates of load 0, then the tuned fixed split, then the load that it just holds."""
        climb = self.climb_of(FIRST)
        if "rates" not in self._found:
            stand.use(FIRST.kind)
            self._found["rates"] = best_rates(climb.throughput(stand))
        stand.rates = {float(mix): rate for mix, rate in self._found["rates"].items()}
        if "shared_load" in self._found:
            return
        stand.use(FIRST.kind)
        climb.tuned(stand, self._found["rates"])
        climb.climb(stand)
        alpha = float(climb.found["policy"].partition(":")[2])
        if "without_reuse_per_s" not in self._found:
            self._found["without_reuse_per_s"] = round(stand.without_reuse(alpha), 1)
        held = [load for load in climb.found["limits"].values() if load is not None]
        if not held:
            raise SystemExit("the tuned fixed split holds the SLO at no load: nothing can be compared with it")
        self._found["shared_load"] = sorted(held)[(len(held) - 1) // 2]
        self._save()

    def _is_done(self, climb: Climb) -> bool:
        if "shared_load" not in self._found:
            return False
        seeds = {str(seed) for seed in range(1, climb.lengths.repeats + 1)}
        load, policy = self._found["shared_load"], climb.found.get("policy")
        shared = {
            str(each["seed"])
            for each in climb.found.get("courses", [])
            if (each["load"], each["policy"], each["seconds"]) == (load, policy, climb.lengths.seconds)
        }
        return seeds <= climb.found.get("limits", {}).keys() and seeds <= shared

    def _choose(self, stand: LadderStand, climb: Climb, rung: Rung) -> None:
        first = self._found["rungs"][FIRST.name]
        if rung.splits == "tuned":
            climb.tuned(stand, self._found["rates"])
        else:
            policy = self._flags.policy if rung.splits == "moving" else first["policy"]
            climb.adaptive(stand, policy, self._guess(rung))

    def _guess(self, rung: Rung) -> int:
        """Where the rung below was, else the first one."""
        below = CUMULATIVE[max(0, CUMULATIVE.index(rung) - 1)] if rung in CUMULATIVE else FIRST
        found = self._found["rungs"]
        limits = [load for load in found.get(below.name, {}).get("limits", {}).values() if load is not None]
        return max(limits) if limits else int(self._found["shared_load"])


def requests_per_s(found: dict[str, Any], seconds: float) -> float:
    """Arrivals of the course at load 0."""
    rates = {float(mix): rate for mix, rate in found["rates"].items()}
    return sum(1 for _ in plan_times(COURSES["all"], rates, 50 * seconds, 0)) / (50 * seconds)


def described(found: dict[str, Any], flags: Namespace) -> dict[str, Any]:
    """Every rung in a line, with what was expected of it."""
    if "shared_load" not in found:
        return {}
    per_s, rungs, load = requests_per_s(found, flags.seconds), found["rungs"], found["shared_load"]
    first = rungs[FIRST.name]
    lines = {name: summary(one, _cut(first, one), per_s, load) for name, one in rungs.items()}
    for name, least in EXPECTED.items():
        over = lines.get(name, {}).get("over_fixed_split")
        if over is not None:
            lines[name] |= {"expected_over_fixed_split": least, "is_expected_met": over["mean"] >= least}
    is_card = not flags.quick and LAYERS.exists()  # times of layers are those of a card
    meta = meta_without_reuse(found, first, per_s) if is_card else {"is_computed": False}
    return {"requests_per_s_at_load_0": round(per_s, 1), "meta_without_reuse": meta, "rungs": lines}


def _cut(first: dict[str, Any], one: dict[str, Any]) -> dict[str, Any]:
    """The first rung on the seeds of another one."""
    limits = {seed: first["limits"][seed] for seed in one.get("limits", {}) if seed in first["limits"]}
    return first | {"limits": limits}


def meta_without_reuse(found: dict[str, Any], first: dict[str, Any], per_s: float) -> dict[str, Any]:
    """Compute what Meta's layers would bear with our rest: nothing of it was run."""
    row = next(row for row in json.loads(LAYERS.read_text())["rows"] if row["work"] == LAYER_SHAPE)
    step_ms = BATCH * 1e3 / found["without_reuse_per_s"]
    theirs_ms = step_ms + row["meta_ms"] - row["layers_ms"]
    limits = reached(first, per_s)
    share = sum(limits) / len(limits) / per_s  # of its saturated rates, that the tuned fixed split bears
    return {
        "is_computed": True,
        "layers_ms": row["meta_ms"],
        "our_layers_ms": row["layers_ms"],
        "our_step_ms": round(step_ms, 2),
        "saturated_per_s": round(BATCH * 1e3 / theirs_ms, 1),
        "requests_per_s": round(share * BATCH * 1e3 / theirs_ms, 1),
    }


def table(shape: str, said: dict[str, Any]) -> str:
    rows = []
    if (meta := said["meta_without_reuse"])["is_computed"]:
        rows.append(["Meta's layers without reuse, computed", "", f"{meta['requests_per_s']:.0f}", "", ""])
    for name, one in said["rungs"].items():
        if "requests_per_s" not in one:
            continue
        over, per_s = one.get("over_fixed_split"), one["requests_per_s"]
        p99 = ", ".join("cut off" if ms is None else f"{ms:.0f}" for ms in one["p99_ms_at_shared_load"])
        rate = _shown(per_s, "{:.0f}", one["seeds"])
        rows.append([name, one["policy"], rate, "" if over is None else _shown(over, "{:.2f} x", one["seeds"]), p99])
    header = (shape, "split", "requests/s within the SLO", "over the fixed split", "P99 ms at its load")
    return markdown_table(header, rows)


def _shown(seen: dict[str, float], form: str, num: int) -> str:
    """With its interval, where there are several seeds."""
    text = form.format(seen["mean"])
    return text if num < 2 else f"{text} ({form.format(seen['low'])} to {form.format(seen['high'])})"


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="*", choices=ROWS, default=list(ROWS))
    parser.add_argument("--rungs", nargs="*", choices=RUNGS, default=None, help="default: all; alone: on wide only")
    parser.add_argument("--seconds", type=float, default=12.0, help="of traffic in a course")
    parser.add_argument("--screen-s", type=float, default=6.0, help="of traffic in a course of a search")
    parser.add_argument(
        "--repeats", type=int, default=3, help="seeds of a rung, which a later call may add to; a rung alone has one"
    )
    parser.add_argument("--policy", default="helm", help="what moves the split")
    parser.add_argument("--limit-s", type=float, default=560.0, help="begin no course that would end after so long")
    parser.add_argument("--quick", action="store_true", help="a small model on the CPU")


def rungs_of(shape: str, flags: Namespace) -> list[Rung]:
    if flags.rungs is not None:
        return [RUNGS[name] for name in flags.rungs]
    return [*CUMULATIVE, *(ALONE if shape == "wide" else ())]


def plan_of(flags: Namespace, scale: LadderScale) -> dict[str, Any]:
    """What courses of one file have in common."""
    asked = {name: getattr(flags, name) for name in ("seconds", "screen_s", "policy")}
    traffic = {"mixes": MIXES, "course": [stretch._asdict() for stretch in COURSES["all"]]}
    plan: dict[str, Any] = json.loads(json.dumps({**asked, **traffic, "slo_ms": scale.slo_ms, "pool": scale.pool}))
    return plan


def main(flags: Namespace) -> None:
    clock, scale = CallClock(flags.limit_s), QUICK if flags.quick else CARD
    plan = plan_of(flags, scale)
    known: dict[str, Any] = json.loads(flags.out.read_text()) if flags.out.exists() else {"plan": plan, "shapes": {}}
    if known["plan"] != plan:
        raise SystemExit(f"{flags.out} holds courses of another plan: give another --out, or remove it")
    shapes = known["shapes"]

    def save() -> None:
        said = {shape: described(found, flags) for shape, found in shapes.items()}
        write_measurement(flags.out, plain({"plan": plan, "said": said, "shapes": shapes}))

    is_done = True
    for shape in flags.shapes:
        one = ShapeLadder(shapes.setdefault(shape, {}), flags, clock, save)
        if not (missing := one.missing(rungs_of(shape, flags))):
            continue
        stand = LadderStand(shape, scale)
        try:
            one.measure(stand, missing)
        except OutOfTime:
            is_done = False
        stand.close()
        save()
        if not is_done:
            break
    for shape, found in shapes.items():
        if said := described(found, flags):
            print(table(shape, said), flush=True)
    print("all is done" if is_done else "not done: run the command again", flush=True)
