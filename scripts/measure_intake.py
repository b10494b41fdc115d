"""What the intake of a request costs here and in another checkout: `--against CHECKOUT`.

Both run at once, each in a process of its own, and take turns of a few requests. A turn's figure is its median time of
`Intake.prepare` in CPU time of the thread, which other work on the machine disturbs less than wall time; a ratio is the
median of the ratios of turns that follow each other.
"""

import argparse
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from scripts.provenance import write_measurement

OUT = Path("docs/measurements/intake-cpu.json")
PROFILES = ("kuairand", "dlrmv3")
LENGTHS = (256, 2_048, 6_700, 16_384)
PER_TURN = 15
_WORKER = """
import sys
import time
import numpy as np
from helmrec.engine.intake import Intake
from scripts.measure_host import Users, profile

ready = {}
for line in sys.stdin:
    name, num_events, repeats = line.split()
    if (name, num_events) not in ready:
        config = profile(name, 1_000).model_copy(update={"window": 65_536, "max_candidates": 256})
        users = Users(config, 1, int(num_events))
        ready[name, num_events] = Intake(config, 1, 1 << 20), users.request(0, int(num_events))
    intake, request = ready[name, num_events]
    times = []
    for _ in range(int(repeats)):
        start_s = time.thread_time()
        intake.prepare(request)
        times.append(time.thread_time() - start_s)
    print(1e6 * float(np.median(times)), len(intake._event_lines.names), flush=True)
"""  # in words that both checkouts understand


class Worker:
    """Times requests in one checkout."""

    def __init__(self, tree: Path) -> None:
        env = {**os.environ, "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _WORKER], cwd=tree, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def turn(self, profile: str, num_events: int) -> tuple[float, int]:
        """Microseconds, and fields of an event."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{profile} {num_events} {PER_TURN}\n")
        self.process.stdin.flush()
        took_us, num_fields = self.process.stdout.readline().split()
        return float(took_us), int(num_fields)


def compare(other: Path, num_turns: int) -> dict[str, Any]:
    rows = []
    with ExitStack() as stack:
        workers = [Worker(tree) for tree in (other, Path.cwd())]
        for worker in workers:
            stack.enter_context(worker.process)
        for profile in PROFILES:
            for num_events in LENGTHS:
                for worker in workers * 3:  # compiles what is compiled
                    _, num_fields = worker.turn(profile, num_events)
                pairs = [[worker.turn(profile, num_events)[0] for worker in workers] for _ in range(num_turns)]
                rows.append({"fields": num_fields, "events": num_events} | summary(np.array(pairs)))
                print(rows[-1])
    describe = ["git", "describe", "--always"]
    commit = subprocess.run(describe, cwd=other, capture_output=True, text=True, check=True).stdout.strip()
    load = [round(average, 1) for average in os.getloadavg()]
    return {"before": commit, "turns": num_turns, "requests_per_turn": PER_TURN, "load": load, "rows": rows}


def summary(pairs: np.ndarray[Any, Any]) -> dict[str, Any]:
    """pairs: (turns, 2) microseconds before and after."""
    before_us, after_us = np.median(pairs, axis=0).tolist()
    low, middle, high = np.quantile(pairs[:, 1] / pairs[:, 0], (0.25, 0.5, 0.75)).tolist()
    return {
        "before_cpu_us": round(before_us, 1),
        "after_cpu_us": round(after_us, 1),
        "ratio_median": round(middle, 3),
        "ratio_quartiles": [round(low, 3), round(high, 3)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, required=True, help="the checkout to compare with")
    parser.add_argument("--turns", type=int, default=200, help="of each checkout, for every kind of request")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    write_measurement(options.out, compare(options.against.resolve(), options.turns))


if __name__ == "__main__":
    main()
