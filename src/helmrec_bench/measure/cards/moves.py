"""What moving data costs the requests: reload against recompute, saves, refill, and moves of the boundary.

helmrec bench run moves               # on a machine with a card; writes docs/measurements/gpu-moves-h200.json
"""

import statistics
from argparse import ArgumentParser, Namespace
from typing import Any

import numpy as np
import torch

from helmrec.engine.engine import Engine
from helmrec.engine.intake import Prepared
from helmrec.memory.prefix import PageLoad
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.measure.cards.traffic import (
    NUM_CANDIDATES,
    Mix,
    Served,
    Traffic,
    forget,
    serve,
    serving_config,
    serving_engine,
    set_limit,
)

LENGTHS = (1_000, 2_000, 4_000, 6_700, 10_000, 13_900)
REPEATS = 9
START_ALPHA, MOVES = 0.3, (0.1, 0.4)
REFILL_MIB = (0, 16)  # a step; the second is the default
WARM_UP, MEASURED = 60 * 8, 200 * 8  # requests
AFTER_MOVE = 1_100 * 8  # requests: about ten seconds


# Reload or recompute.


def time_once(engine: Engine, requests: list[Prepared]) -> float:
    """Milliseconds of one step of these requests, from plan to scores, on an idle card."""
    served = serve(engine, requests)
    assert len(served.step_ms) == 1, "one step was meant"
    return max(served.service_ms)


def evict(engine: Engine) -> None:
    engine.check()
    engine._pool.kv.evict(1 << 40)


def crossover(engine: Engine, traffic: Traffic) -> list[dict[str, Any]]:
    """A request of one user whose prefix is resident, must come from the host, or must be computed."""
    expander, rows = engine._pool.expander, []
    for length in LENGTHS:
        user = traffic.user_of(length)
        times: dict[str, list[float]] = {"resident": [], "reload": [], "recompute": [], "chosen": []}
        reloads = 0
        serve(engine, [user, user])
        for _ in range(REPEATS):
            times["resident"].append(time_once(engine, [user]))
            for way, policy in (("reload", "always"), ("recompute", "never"), ("chosen", "measured")):
                evict(engine)
                expander._policy = policy
                before = expander.reloaded_pages
                times[way].append(time_once(engine, [user]))
                reloads += way == "chosen" and expander.reloaded_pages > before
        medians = {f"{way}_ms": round(statistics.median(values), 3) for way, values in times.items()}
        best = min(medians["reload_ms"], medians["recompute_ms"])
        rows.append(
            {
                "tokens": length,
                **medians,
                "reload_chosen": f"{reloads} of {REPEATS}",
                "chosen_over_best": round(medians["chosen_ms"] / best, 3),
            }
        )
        print(rows[-1], flush=True)
    expander._policy = "measured"
    return rows


def exposure(engine: Engine, traffic: Traffic) -> dict[str, Any]:
    """How much longer a step of eight takes if one prefix of 6,700 tokens must come from the host."""
    users = [traffic.user_of(6_700) for _ in range(8)]
    expander = engine._pool.expander
    serve(engine, users + users)
    resident, one_reload = [], []
    for _ in range(REPEATS):
        resident.append(time_once(engine, users))
        engine.check()
        victim = engine._pool.kv._users[users[0].history.user_id][0]
        engine._pool.kv._truncate(victim, 0)
        engine._pool.kv._discard_if_empty(victim)
        expander._policy = "always"
        one_reload.append(time_once(engine, users))
    expander._policy = "measured"
    medians = [statistics.median(each) for each in (resident, one_reload)]
    found = {
        "tokens": 6_700,
        "load_alone_ms": round(time_load(engine, -(-6_700 // engine._pool.geometry.page_tokens)), 3),
        "step_of_8_resident_ms": round(medians[0], 3),
        "step_of_8_one_reload_ms": round(medians[1], 3),
        "exposed_ms": round(medians[1] - medians[0], 3),
    }
    print(found, flush=True)
    return found


def time_load(engine: Engine, num_pages: int) -> float:
    """Milliseconds of so many pages from the host, over pages that hold nothing."""
    evict(engine)
    host = engine._runner._host
    assert host._loading is not None
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record(host._loading)
        host.start_loading([PageLoad(i, engine._pool.ledger.num_pages - 1 - i) for i in range(num_pages)])
        end.record(host._loading)
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


# Under load.


def of_steps(served: Served) -> dict[str, Any]:
    p50, p99 = np.percentile(served.step_ms, [50, 99])
    return {"step_p50_ms": round(float(p50), 3), "step_p99_ms": round(float(p99), 3), **served.describe()}


def with_and_without_tier(engine: Engine, requests: list[Prepared]) -> list[dict[str, Any]]:
    rows = []
    expander = engine._pool.expander
    for repeat in range(2):
        for has_tier in (False, True):
            forget(engine, START_ALPHA)
            num_slots = expander.num_slots
            expander.clear(num_slots if has_tier else 0)
            serve(engine, requests[:WARM_UP])
            rows.append(
                {
                    "repeat": repeat,
                    "host_tier": has_tier,
                    **of_steps(serve(engine, requests[WARM_UP : WARM_UP + MEASURED])),
                }
            )
            expander.clear(num_slots)
            print(rows[-1], flush=True)
    return rows


def refill_budgets(engine: Engine, requests: list[Prepared]) -> list[dict[str, Any]]:
    """The boundary has grown by 0.4; what reading rows ahead does to the steps after, without regard to demand."""
    rows: list[dict[str, Any]] = []
    steps_ms: dict[int, list[float]] = {mib: [] for mib in REFILL_MIB}
    set_limit(engine, "refill_bytes_per_step", 0)
    for repeat in range(6):
        for mib in REFILL_MIB:
            forget(engine, START_ALPHA + 0.4)
            serve(engine, requests[:WARM_UP])  # fills the cache, which then shrinks and remembers what it lost
            engine.move_alpha(START_ALPHA)
            engine.settle()
            serve(engine, requests[:8])
            engine.move_alpha(START_ALPHA + 0.4)
            engine.settle()

            def read_ahead(step: int, budget: int = mib << 20) -> None:
                engine._runner.refill(budget)

            served = serve(engine, requests[WARM_UP : WARM_UP + 40 * 8], read_ahead)
            rows.append(
                {"repeat": repeat, "mib_per_step": mib, "seconds": round(served.seconds, 3), **of_steps(served)}
            )
            steps_ms[mib] += served.step_ms
            print(rows[-1], flush=True)
    for mib, each in steps_ms.items():
        p50, p99 = np.percentile(each, [50, 99]).round(3).tolist()
        rows.append({"all_repeats": len(each), "mib_per_step": mib, "step_p50_ms": p50, "step_p99_ms": p99})
        print(rows[-1], flush=True)
    set_limit(engine, "refill_bytes_per_step", 16 << 20)
    return rows


def moves(engine: Engine, requests: list[Prepared]) -> list[dict[str, Any]]:
    """The ten seconds after a move under load against a twin that was at the new place from the start."""
    rows = []
    for step in (*MOVES, *(-move for move in MOVES)):
        start = START_ALPHA if step > 0 else START_ALPHA - step
        for moves_now in (False, True):
            forget(engine, start if moves_now else start + step)
            serve(engine, requests[:WARM_UP])
            if moves_now:
                engine.move_alpha(start + step)
            served = serve(engine, requests[WARM_UP : WARM_UP + AFTER_MOVE])
            name = {"from": start, "to": round(start + step, 2), "moves": moves_now}
            rows.append({**name, "seconds": round(served.seconds, 2), **of_steps(served)})
            print(rows[-1], flush=True)
    return rows


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--no-saves", dest="saves", action="store_false", help="leave out saves to the host")


def main(flags: Namespace) -> None:
    config = serving_config(6, 16 << 30)
    engine = serving_engine(config, pool_bytes="4GiB", alpha=START_ALPHA, host_kv_bytes="8GiB", kv_admission="always")
    print(engine.report(), flush=True)
    set_limit(engine, "save_bytes_per_step", 1 << 30)  # for now, so that what was computed is on the host at once
    traffic = Traffic(engine, Mix(0.6, num_hot=32))
    results: dict[str, Any] = {"candidates": NUM_CANDIDATES, "crossover": crossover(engine, traffic)}
    results["exposure"] = exposure(engine, traffic)
    set_limit(engine, "save_bytes_per_step", 16 << 20)
    requests = traffic.take(WARM_UP + AFTER_MOVE)
    print(f"{len(requests)} requests made", flush=True)
    if flags.saves:
        results["saves"] = with_and_without_tier(engine, requests)
    results["refill"] = refill_budgets(engine, requests)
    results["moves"] = moves(engine, requests)
    engine.check()
    assert engine.stats().background_failures == 0
    write_measurement(flags.out, results)
