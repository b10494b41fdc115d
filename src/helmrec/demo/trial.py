"""Try constant splits on a sample of the traffic, in this process, with sequential requests."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from helmrec.config import EngineConfig
from helmrec.demo.plan import DemoPlan
from helmrec.engine.engine import Engine
from helmrec.engine.warm_up import warm_up
from helmrec.traffic.generate import generate
from helmrec.traffic.requests import rank_requests


@dataclass(frozen=True, slots=True)
class SplitTrial:
    """Mean time of a request at a constant split."""

    alpha: float
    cpu_ms: float  # processor time: nearly independent of other load on the machine
    wall_ms: float


def try_splits(plan: DemoPlan, model: Path, progress: Callable[[], None]) -> list[SplitTrial]:
    """Measure each of the plan's splits on one thread, as the servers run; `progress` is called after each."""
    torch.set_num_threads(1)
    trace = generate(plan.workload(plan.trial_requests / plan.side_s), plan.seed)
    trials = []
    for alpha in plan.trial_alphas:
        with Engine.from_model(model, EngineConfig(pool_bytes=plan.pool, alpha=alpha, device="cpu")) as engine:
            requests = list(rank_requests(trace, engine.model_config))
            warm_up(engine)  # compiles what runs compiled
            started_s, cpu_s = time.perf_counter(), time.process_time()
            for request in requests:
                engine.rank([request])
            cpu_ms, wall_ms = (time.process_time() - cpu_s) * 1e3, (time.perf_counter() - started_s) * 1e3
            trials.append(SplitTrial(alpha, cpu_ms / len(requests), wall_ms / len(requests)))
        progress()
    return trials
