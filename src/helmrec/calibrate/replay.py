"""Predict when steps end that are all queued at the start, by the cost terms of the simulator."""

import numba
import numpy as np

from helmrec.costs.calibrated import BusLoad, ComputeWork, CostTerms, compute_ms, host_ms, reload_ms, rows_ms
from helmrec.types import FloatArray, IntArray


@numba.njit(cache=True)
def replay(terms: CostTerms, works: FloatArray, starts: IntArray, overlaps: bool) -> FloatArray:
    """Return the milliseconds from the start of each run until the results of each of its steps.

    Run i is works[starts[i] : starts[i + 1]]. Columns of works: requests, tokens, pairs, rows read, bytes of rows
    hit and missed, rows missed, bytes of pages loaded. The stages follow each other as in the simulated node.
    """
    ends = np.zeros(works.shape[0])
    for run in range(starts.size - 1):
        now, bus_free, compute_free = 0.0, 0.0, 0.0
        for i in range(starts[run], starts[run + 1]):
            requests, tokens, pairs, num_rows, hit_bytes, miss_bytes, missed, loaded = works[i]
            now += host_ms(terms, int(requests), int(tokens), num_rows)
            bus = max(now, bus_free)
            rows = rows_ms(terms, BusLoad(hit_bytes, miss_bytes, missed), max(0.0, compute_free - bus), 1.0)
            load = reload_ms(terms, loaded, 1.0)
            bus_end = bus + rows + load
            delay = max(0.0, min(bus_end, compute_free) - bus) * terms.beside_slowdown
            if i > starts[run] and compute_free > bus:
                ends[i - 1] += delay
                compute_free += delay
            compute = compute_ms(terms, ComputeWork(int(tokens), pairs, num_rows))
            ends[i] = max(max(bus + rows + terms.reload_exposed * load, compute_free) + compute, bus_end)
            bus_free, compute_free = bus_end, ends[i]
            if not overlaps:
                now = ends[i] + terms.background_ms
            elif i > starts[run]:
                ends[i - 1] = max(now, ends[i - 1])  # the host reads results after it has launched the next step
                now = ends[i - 1] + terms.background_ms
    return ends
