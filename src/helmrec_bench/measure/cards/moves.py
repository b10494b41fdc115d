"""What moving data costs the requests: reload against recompute, saves, refill, and moves of the boundary.

On a GPU. A move of the boundary is compared with an engine that was at the new place from the start.
"""

import statistics
from argparse import Namespace
from typing import Any

import numpy as np

from helmrec.engine.intake import Prepared
from helmrec.engine.probe import EngineProbe
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.measure.cards.traffic import (
    NUM_CANDIDATES,
    PreparedTraffic,
    Served,
    card_crowd,
    serve,
    serving_config,
    serving_engine,
)

LENGTHS = (1_000, 2_000, 4_000, 6_700, 10_000, 13_900)
REPEATS = 9
START_ALPHA, MOVES = 0.3, (0.1, 0.4)
REFILL_MIB = (0, 16)  # a step; the second is the default
WARM_UP, MEASURED = 60 * 8, 200 * 8  # requests
AFTER_MOVE = 1_100 * 8  # requests: about ten seconds


# Reload or recompute.


def time_once(probe: EngineProbe, requests: list[Prepared]) -> float:
    """Milliseconds of one step of these requests, from plan to scores, on an idle card."""
    served = serve(probe, requests)
    assert len(served.step_ms) == 1, "one step was meant"
    return max(served.service_ms)


def evict(probe: EngineProbe) -> None:
    probe.engine.check()
    probe.pool.kv.evict(1 << 40)


def crossover(probe: EngineProbe, traffic: PreparedTraffic) -> list[dict[str, Any]]:
    """A request of one user whose prefix is resident, must come from the host, or must be computed."""
    host_tier, rows = probe.pool.host_tier, []
    for length in LENGTHS:
        user = traffic.user_of(length)
        times: dict[str, list[float]] = {"resident": [], "reload": [], "recompute": [], "chosen": []}
        reloads = 0
        serve(probe, [user, user])
        for _ in range(REPEATS):
            times["resident"].append(time_once(probe, [user]))
            for way, policy in (("reload", "always"), ("recompute", "never"), ("chosen", "measured")):
                evict(probe)
                host_tier.policy = policy
                before = host_tier.reloaded_pages
                times[way].append(time_once(probe, [user]))
                reloads += way == "chosen" and host_tier.reloaded_pages > before
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
    host_tier.policy = "measured"
    return rows


# Under load.


def of_steps(served: Served) -> dict[str, Any]:
    p50, p99 = np.percentile(served.step_ms, [50, 99])
    return {"step_p50_ms": round(float(p50), 3), "step_p99_ms": round(float(p99), 3), **served.describe()}


def with_and_without_tier(probe: EngineProbe, requests: list[Prepared]) -> list[dict[str, Any]]:
    rows, host_tier = [], probe.pool.host_tier
    for repeat in range(2):
        for has_tier in (False, True):
            probe.clear(START_ALPHA)
            num_slots = host_tier.num_slots
            host_tier.clear(num_slots if has_tier else 0)
            serve(probe, requests[:WARM_UP])
            rows.append(
                {
                    "repeat": repeat,
                    "host_tier": has_tier,
                    **of_steps(serve(probe, requests[WARM_UP : WARM_UP + MEASURED])),
                }
            )
            host_tier.clear(num_slots)
            print(rows[-1], flush=True)
    return rows


def refill_budgets(probe: EngineProbe, requests: list[Prepared]) -> list[dict[str, Any]]:
    """The boundary has grown by 0.4; what reading rows ahead does to the steps after, without regard to demand."""
    rows: list[dict[str, Any]] = []
    steps_ms: dict[int, list[float]] = {mib: [] for mib in REFILL_MIB}
    probe.set_limit("refill_bytes_per_step", 0)
    for repeat in range(6):
        for mib in REFILL_MIB:
            probe.clear(START_ALPHA + 0.4)
            serve(probe, requests[:WARM_UP])  # fills the cache, which then shrinks and remembers what it lost
            probe.engine.move_alpha(START_ALPHA)
            probe.engine.settle()
            serve(probe, requests[:8])
            probe.engine.move_alpha(START_ALPHA + 0.4)
            probe.engine.settle()

            def read_ahead(step: int, budget: int = mib << 20) -> None:
                probe.refill(budget)

            served = serve(probe, requests[WARM_UP : WARM_UP + 40 * 8], read_ahead)
            rows.append(
                {"repeat": repeat, "mib_per_step": mib, "seconds": round(served.seconds, 3), **of_steps(served)}
            )
            steps_ms[mib] += served.step_ms
            print(rows[-1], flush=True)
    for mib, each in steps_ms.items():
        p50, p99 = np.percentile(each, [50, 99]).round(3).tolist()
        rows.append({"all_repeats": len(each), "mib_per_step": mib, "step_p50_ms": p50, "step_p99_ms": p99})
        print(rows[-1], flush=True)
    probe.set_limit("refill_bytes_per_step", 16 << 20)
    return rows


def moves(probe: EngineProbe, requests: list[Prepared]) -> list[dict[str, Any]]:
    """The ten seconds after a move under load against a twin that was at the new place from the start."""
    rows = []
    for step in (*MOVES, *(-move for move in MOVES)):
        start = START_ALPHA if step > 0 else START_ALPHA - step
        for moves_now in (False, True):
            probe.clear(start if moves_now else start + step)
            serve(probe, requests[:WARM_UP])
            if moves_now:
                probe.engine.move_alpha(start + step)
            served = serve(probe, requests[WARM_UP : WARM_UP + AFTER_MOVE])
            name = {"from": start, "to": round(start + step, 2), "moves": moves_now}
            rows.append({**name, "seconds": round(served.seconds, 2), **of_steps(served)})
            print(rows[-1], flush=True)
    return rows


def main(flags: Namespace) -> None:
    config = serving_config(6, 16 << 30)
    engine = serving_engine(config, pool_bytes="4GiB", alpha=START_ALPHA, host_kv_bytes="8GiB", kv_admission="always")
    print(engine.report(), flush=True)
    probe = EngineProbe(engine)
    probe.set_limit("save_bytes_per_step", 1 << 30)  # for now, so that what was computed is on the host at once
    traffic = PreparedTraffic(probe, card_crowd(32))
    results: dict[str, Any] = {"candidates": NUM_CANDIDATES, "crossover": crossover(probe, traffic)}
    probe.set_limit("save_bytes_per_step", 16 << 20)
    requests = traffic.take(WARM_UP + AFTER_MOVE, 0.6)
    print(f"{len(requests)} requests made", flush=True)
    results["saves"] = with_and_without_tier(probe, requests)
    results["refill"] = refill_budgets(probe, requests)
    results["moves"] = moves(probe, requests)
    engine.check()
    assert engine.stats().background_failures == 0
    write_measurement(flags.out, results)
