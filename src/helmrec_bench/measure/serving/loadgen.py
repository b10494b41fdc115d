"""MLPerf LoadGen's verdict on the small model on this machine's CPU: Server scenario, P99 within 80 ms.

`helmrec bench run loadgen` writes docs/measurements/loadgen-cpu.json. Shorter than the 600 s of a submission.
"""

import os
import tempfile
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

from helmrec.config import EngineConfig
from helmrec.model.profiles import profile
from helmrec.model.weights import init_model
from helmrec.traffic.families import family, preset
from helmrec.traffic.generate import generate
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.loadgen import LoadGenConfig, judge_trace


def run(qps: float, seconds: float) -> dict[str, Any]:
    base = preset("amazon-video-games").stretched(60)
    shape = type(base)(**base.model_dump() | {"rate": 1.3 * qps, "duration_s": seconds, "num_candidates": 64})
    trace = generate(family("steady", shape), seed=0)
    with tempfile.TemporaryDirectory() as name:
        init_model(Path(name) / "model", profile("demo", trace.catalogue.num_items), 0)
        config = LoadGenConfig(target_qps=qps, seconds=seconds)
        verdict, pool = judge_trace(Path(name) / "model", EngineConfig(pool_bytes="64MiB", device="cpu"), trace, config)
    return {
        "model": "demo",
        "scenario": "Server",
        "latency_ms": config.latency_ms,
        "seconds": seconds,
        "token_reuse_rate": round(pool.token_reuse_rate, 4),
        "result": "VALID" if verdict.is_valid else "INVALID",
        **asdict(verdict),
    }


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--qps", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=60.0)


def main(flags: Namespace) -> None:
    load = [round(average, 1) for average in os.getloadavg()]
    results = run(flags.qps, flags.seconds)
    print(results)
    write_measurement(flags.out, {"load_average_before": load, **results})
