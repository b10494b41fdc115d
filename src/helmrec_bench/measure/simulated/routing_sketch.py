"""How well a sketch of a few kilobytes says what share of a request's rows a node lacks.

Writes docs/measurements/router-sketch.json. Nodes hold the popular rows of everybody and those of their own crowd; a
request reads both. Errors are of the absent share, 0..1; the reported hit rate is a node's mean over all requests.
"""

from argparse import Namespace
from typing import Any, NamedTuple

import numpy as np

from helmrec.router.policy import RouterSettings
from helmrec.router.sketch import (
    DEFAULT_BITS,
    ROWS_PER_BIT,
    RowPrior,
    RowSketch,
    SketchTable,
    absent_rows,
    build_sketch,
    count_clear,
    sample_rows,
    shared_rate,
)
from helmrec.types import IntArray
from helmrec_bench.lab.provenance import write_measurement

ROWS_PER_TOKEN = 6
NUM_CROWDS = 4
NUM_REQUESTS = 120
KINDS = {"cold": 6_700, "hit": 32}  # new history tokens
NUM_CANDIDATES = 2_048
HEADS = (256, 1)
SIZES = (500_000, 4_000_000, 32_000_000)
CROWD = 1 << 32  # row ids of a crowd begin at a multiple of this


class SketchCase(NamedTuple):
    history: IntArray
    candidates: IntArray
    truth: list[float]  # absent share, by node


def ranks(rng: np.random.Generator, count: int, popularity: tuple[int, int]) -> IntArray:
    """Popularity falls as one over rank and head: ranks well below the head are equally popular."""
    catalogue, head = popularity
    return (head * (np.exp(rng.random(count) * np.log1p(catalogue / head)) - 1)).astype(np.int64)


def rows_of(rng: np.random.Generator, num_tokens: int, crowd: int, popularity: tuple[int, int]) -> IntArray:
    """Half of the reads are everybody's, half the crowd's own."""
    count = num_tokens * ROWS_PER_TOKEN
    rows = ranks(rng, count, popularity)
    rows[rng.random(count) < 0.5] += crowd * CROWD
    return rows.reshape(num_tokens, ROWS_PER_TOKEN)


def is_resident(rows: IntArray, crowd: int, size: int) -> np.ndarray:
    """Half of a node's rows are everybody's most popular, half its own crowd's."""
    return (rows % CROWD < size // 2) & ((rows < CROWD) | (rows // CROWD == crowd))


def resident_rows(crowd: int, size: int) -> IntArray:
    return np.concatenate([np.arange(size // 2), crowd * CROWD + np.arange(size // 2)])


def cases(rng: np.random.Generator, size: int, num_tokens: int, head: int) -> list[SketchCase]:
    found = []
    for index in range(NUM_REQUESTS):
        crowd = 1 + index % NUM_CROWDS
        history, candidates = (rows_of(rng, n, crowd, (8 * size, head)) for n in (num_tokens, NUM_CANDIDATES))
        rows = np.concatenate([history.reshape(-1), candidates.reshape(-1)])
        truth = [float(1 - is_resident(rows, node, size).mean()) for node in range(1, 1 + NUM_CROWDS)]
        found.append(SketchCase(history, candidates, truth))
    return found


def estimates(nodes: list[RowSketch], case: SketchCase, beliefs: list[float], weight: float) -> list[float]:
    sample = sample_rows(case.history, case.candidates)
    table = SketchTable(
        np.stack([n.words for n in nodes], axis=1),
        np.array([n.threshold for n in nodes]),
        np.array([n.fill for n in nodes]),
    )
    clear = count_clear(table, sample, np.zeros(len(nodes), np.int64))
    num_rows = case.history.size + case.candidates.size
    return [
        absent_rows(
            clear[i],
            node.fill,
            shared_rate(node.threshold, sample.threshold),
            RowPrior(num_rows, beliefs[i], weight),
        )
        / num_rows
        for i, node in enumerate(nodes)
    ]


def measured(nodes: list[RowSketch], some: list[SketchCase], weight: float) -> dict[str, Any]:
    truth = np.array([case.truth for case in some])
    beliefs = truth.mean(axis=0)  # what a node would report: over all requests, not over its own crowd's
    found = np.array([estimates(nodes, case, beliefs.tolist(), weight) for case in some])
    error = found - truth
    best = truth.argmin(axis=1)
    return {
        "mean_absent_share": round(float(truth.mean()), 4),
        "bias": round(float(error.mean()), 4),
        "rms_error": round(float(np.sqrt((error**2).mean())), 4),
        "p95_error": round(float(np.percentile(np.abs(error), 95)), 4),
        "rms_error_of_the_hit_rate_alone": round(float(np.sqrt(((beliefs - truth) ** 2).mean())), 4),
        "finds_the_best_of_4_nodes": round(float((found.argmin(axis=1) == best).mean()), 4),
    }


def main(flags: Namespace) -> None:
    rng, rows = np.random.default_rng(0), []
    default_weight = RouterSettings().sketch_weight
    for size in SIZES:
        resident = [resident_rows(crowd, size) for crowd in range(1, 1 + NUM_CROWDS)]
        some = {(kind, head): cases(rng, size, KINDS[kind], head) for kind in KINDS for head in HEADS}
        for num_bits, load in ((1 << 14, 0.7), (1 << 16, 0.1), (1 << 16, 0.7), (1 << 16, 2.0), (1 << 18, 0.7)):
            nodes = [build_sketch(rows, num_bits, load) for rows in resident]
            for (kind, head), of_kind in some.items():
                for weight in (0.0, default_weight):
                    found = {
                        "resident_rows": size,
                        "sketch_bytes": nodes[0].num_bytes,
                        "rows_per_bit": load,
                        "request": kind,
                        "popularity_head": head,
                        "belief_weight": weight,
                        **measured(nodes, of_kind, weight),
                    }
                    found["is_default"] = (num_bits, load, weight) == (DEFAULT_BITS, ROWS_PER_BIT, default_weight)
                    rows.append(found)
                    print(found, flush=True)
    write_measurement(
        flags.out, {"requests": NUM_REQUESTS, "nodes": NUM_CROWDS, "kinds_new_tokens": KINDS, "rows": rows}
    )
