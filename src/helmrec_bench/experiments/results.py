"""Results of experiments as files: figures and verdicts with seeds, scenarios, commit and hardware."""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helmrec.costs.calibrated import default_cost
from helmrec.errors import ConfigError
from helmrec_bench.experiments.experiment import Experiment, Figures, Measured
from helmrec_bench.lab.lab import Lab
from helmrec_bench.lab.provenance import provenance
from helmrec_bench.lab.tiers import TIERS
from helmrec_bench.report.claims import OUR_WORDS, WORDS, Verdict, unjudged
from helmrec_bench.report.files import markdown_table

Result = dict[str, Any]
_TOO_SHORT = "this tier only shows that the experiment runs"


def run_experiment(one: Experiment, lab: Lab) -> Result:
    """Measure, judge and write down; what was kept of earlier runs is not run again."""
    started_s = time.perf_counter()
    figures = plain(one.measure(lab))
    result = {
        "experiment": one.name,
        "tier": lab.tier.name,
        "seeds": list(lab.seeds),
        "scenarios": lab.scenarios_read,
        "calibration": default_cost().name,
        **provenance(f"helmrec bench run {one.name} --{lab.tier.name}"),
        "figures": figures,
        "verdicts": [verdict_json(verdict) for verdict in verdicts(one, figures, lab.tier.name)],
        "times": {"wall_s": round(time.perf_counter() - started_s, 2)},
    }
    path = result_path(lab.place.build, lab.tier.name, one.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return result


def verdicts(one: Experiment, figures: Figures, tier: str) -> list[Verdict]:
    found = one.judge(figures)
    return list(found) if TIERS[tier].is_judged else [unjudged(verdict, _TOO_SHORT) for verdict in found]


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    return {name: getattr(verdict, name) for name in Verdict.__dataclass_fields__}


def result_path(build: Path, tier: str, name: str) -> Path:
    return build / tier / f"{name}.json"


def read_results(build: Path, tier: str) -> dict[str, Result]:
    """By experiment, those that were run."""
    paths = sorted((build / tier).glob("*.json"))
    if not paths:
        raise ConfigError(f"no results in {build / tier}: run `helmrec bench all --{tier}` first")
    return {path.stem: json.loads(path.read_text()) for path in paths}


def together(results: Mapping[str, Result]) -> Result:
    """All results as one measurement file: what they share once, figures and verdicts by experiment."""
    first = next(iter(results.values()))
    shared = {key: first[key] for key in ("tier", "seeds", "calibration", "hardware", "versions")}
    own = ("seeds", "scenarios", "commit", "figures", "verdicts", "times")
    commits = sorted({result["commit"] for result in results.values()})
    return {
        "command": f"helmrec bench all --{first['tier']} --seeds {len(first['seeds'])}",
        "commit": ", ".join(commits),
        **shared,
        "experiments": {name: {key: result[key] for key in own} for name, result in results.items()},
    }


def claims_markdown(measurement: Result) -> str:
    """The table of claims that docs show: the paper's first, then ours."""
    found = [verdict for one in measurement["experiments"].values() for verdict in one["verdicts"]]
    found.sort(key=lambda verdict: not verdict["is_papers"])
    lines = []
    for verdict in found:
        words = WORDS if verdict["is_papers"] else OUR_WORDS
        cells = (verdict["claim"], verdict["paper"], verdict["ours"], words[verdict["finding"]])
        lines.append([cell.replace("|", "\\|").replace("*", "\\*") for cell in cells])
    return markdown_table(("claim", "paper", "ours", "verdict"), lines)


def read_measured(folder: Path) -> Measured:
    """Measurement files by name; figures of devices are shown beside simulated ones."""
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def plain(value: Any) -> Any:
    """As JSON can hold it: numbers that are none become null, others keep six digits."""
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def without_times(value: Any) -> Any:
    """What two runs of the same code, seeds and scenarios have in common."""
    if isinstance(value, dict):
        return {key: without_times(one) for key, one in value.items() if key != "times"}
    return [without_times(one) for one in value] if isinstance(value, list) else value
