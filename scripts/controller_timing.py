"""How long a whole decision takes, features and limits included: 100,000 calls over the windows of a real run.

    taskset -c 0 python -m scripts.controller_timing      # writes docs/measurements/controller-timing.json
    taskset -c 0 python -m scripts.controller_timing --ahead     # the timed second ahead of all other processes (root)
    python -m scripts.controller_timing --plot            # draws docs/images/controller-timing.png from it

The calls come in blocks of 10,000, each with its own percentiles: on a machine that others use, blocks tell how much of
the time is theirs. All are kept; the histogram is of all calls.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from helmrec.bench.contest import Course
from helmrec.control.helm import HelmPolicy
from helmrec.control.policy import Limited, Limits
from helmrec.experiments.decisions import Keeps, took_us
from scripts.controller import scenario
from scripts.provenance import write_measurement

OUT, PLOT = Path("docs/measurements/controller-timing.json"), Path("docs/images/controller-timing.png")
SCENARIO, SEED, NUM_BLOCKS, BLOCK = "main-burst-20s", 0, 10, 10_000


def measure(is_ahead: bool) -> dict[str, Any]:
    course = Course(scenario(SCENARIO), SEED)
    keeps = Keeps(HelmPolicy(course.service_cost))
    course.judge(keeps)
    windows = [one for one in keeps.windows if one.curves is not None]
    policy = Limited(HelmPolicy(course.service_cost), Limits())
    took_us(policy, windows, BLOCK)  # compiled, and warm
    load = os.getloadavg()[0]
    if is_ahead:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    blocks = [took_us(policy, windows, BLOCK) for _ in range(NUM_BLOCKS)]
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    every = np.concatenate(blocks)
    edges = np.concatenate((np.arange(0, 20.25, 0.25), [50, 100, 1_000, 1e9]))
    clock = time.perf_counter_ns

    def told(values: NDArray[np.float64]) -> dict[str, float]:
        found = np.percentile(values, (50, 99, 99.9)).round(3).tolist()
        return dict(zip(("p50_us", "p99_us", "p999_us"), found, strict=True))

    return {
        "scenario": SCENARIO,
        "num_windows": len(windows),
        "num_calls": int(every.size),
        "load_of_the_machine": load,
        "ahead_of_other_processes": is_ahead,
        **told(every),
        "mean_us": round(float(every.mean()), 3),
        "blocks": [told(block) for block in blocks],
        "best_block": told(min(blocks, key=lambda block: float(np.percentile(block, 99)))),
        "histogram_edges_us": edges.tolist(),
        "histogram": np.histogram(every, edges)[0].tolist(),
        "an_empty_call_us": float(np.median([-(clock() - clock()) / 1e3 for _ in range(1_000)])),
    }


def plot(found: dict[str, Any]) -> None:
    import matplotlib.pyplot as plt  # noqa: PLC0415 - only a plot needs it

    edges, counts = np.array(found["histogram_edges_us"]), np.array(found["histogram"])
    shown = edges[1:] <= 20
    figure, axis = plt.subplots(figsize=(7, 3.5))
    axis.bar(edges[:-1][shown], counts[shown], width=0.25, align="edge")
    for share in (50, 99):
        axis.axvline(found[f"p{share}_us"], color="C1", linestyle="--")
        axis.text(
            found[f"p{share}_us"] + 0.1, counts.max() * 0.9, f"p{share} {found[f'p{share}_us']:.1f} µs", fontsize=8
        )
    axis.set(xlabel="µs for one decision, features and limits included", ylabel="calls", yscale="symlog")
    figure.tight_layout()
    figure.savefig(PLOT, dpi=110)
    print(f"wrote {PLOT}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument(
        "--ahead", action="store_true", help="no other process runs on this core meanwhile (SCHED_FIFO)"
    )
    parser.add_argument("--plot", action="store_true", help="draw the file there is")
    flags = parser.parse_args()
    if flags.plot:
        plot(json.loads(flags.out.read_text()))
    else:
        write_measurement(flags.out, measure(flags.ahead))


if __name__ == "__main__":
    main()
