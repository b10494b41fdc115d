"""The simulator's H200 calibration, from the kept measurements. Writes src/helmrec/sim/calibrations/h200.json."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from scripts.gpu import ROWS

MEASUREMENTS = Path("docs/measurements")
OUT = Path("src/helmrec/sim/calibrations/h200.json")
STEPS, MOVES, ROWS_FILE = "gpu-dlrmv3-h200.json", "gpu-moves-h200.json", "gpu-rows-h200.json"
TRADEOFF = "gpu-tradeoff-small-h200.json"
ROWS_PER_TOKEN = 6  # of the shape
SHAPE = "dlrmv3"
ROW_BYTES = 1_024
ALONE_PROGRAMS, BESIDE_PROGRAMS = 4, 8  # the engine runs eight; alone, four is the nearest that was timed
BESIDE = "products of a dlrmv3 layer, 8 x 4096+256"


def read(name: str) -> dict[str, Any]:
    return json.loads((MEASUREMENTS / name).read_text())


def compute_terms() -> dict[str, Any]:
    """Floor, tokens and pairs by least squares of the relative error over every dlrmv3 row that was timed."""
    timed = read(STEPS)["rows"]
    measured = {row["work"]: row["layers_ms"] + row["embed_ms"] + row["head_ms"] for row in timed}
    rows = [row for row in ROWS if row.profile == SHAPE]
    work = [
        (
            1.0,
            sum(s.new + s.candidates for s in row.sequences) / 1e3,
            sum(s.new * (s.resident + s.new / 2) + s.candidates * (s.resident + s.new) for s in row.sequences) / 1e6,
        )
        for row in rows
    ]
    times = np.array([measured[row.name] for row in rows])
    terms = np.linalg.lstsq(np.array(work) / times[:, None], np.ones(len(rows)), rcond=None)[0]
    fit = np.array(work) @ terms / times
    return {
        "compute_floor_ms": round(float(terms[0]), 4),
        "compute_token_us": round(float(terms[1]), 5),
        "compute_pair_ns": round(float(terms[2]), 6),
        "fit": {row.name: round(float(ratio), 3) for row, ratio in zip(rows, fit, strict=True)},
    }


def row_compute_ns(compute: dict[str, float], host: dict[str, float], rows: dict[str, float]) -> float:
    """What a row costs that goes into a token, beside its reading: from steps in turn with 24 rows a token.

    Such a step takes longer than the sum of what six rows a token, its misses, its hits and the host account for. The
    rest is laid to the other eighteen. Histories there are uniform between 2,000 and 11,400 events. Alphas up to 0.6:
    beyond, KV is too small for whole batches.
    """
    measured, mean, mean_square = read(TRADEOFF), 6_700, 6_700**2 + 9_400**2 / 12
    found = []
    for cell in measured["cells"]:
        if cell["overlap"] or cell["alpha"] > 0.6 or cell["host_tier"]:
            continue
        new = 1 - cell["token_reuse_rate"]
        tokens, pairs = 8 * (new * mean + 2_048), 8 * (new * mean_square / 2 + 2_048 * mean)
        missed = 8 * cell["mib_by_cause"]["row-miss"] * 2**20 / measured["set_up"]["requests"] / ROW_BYTES
        hit = missed / (1 - cell["row_hit_rate"]) - missed
        known_ms = compute["compute_floor_ms"] + compute["compute_token_us"] * tokens / 1e3
        known_ms += compute["compute_pair_ns"] * pairs / 1e6
        known_ms += ROW_BYTES / 1e6 * (missed / rows["sorted_alone_gb_per_s"] + hit / rows["hit_gb_per_s"])
        known_ms += host["host_floor_ms"] + 8 * host["host_request_ms"] + host["host_token_us"] * tokens / 1e3
        extra_rows = (cell["rows_per_token"] - ROWS_PER_TOKEN) * tokens
        found.append((8e3 / cell["requests_per_s"] - known_ms) * 1e6 / extra_rows)
    return max(0.0, float(np.median(found)))


def host_terms(compute: dict[str, Any]) -> dict[str, float]:
    """From two steps of eight requests, which differ in computed tokens, and one of a lone request.

    The lone one is timed from its plan to its scores; what is left when its compute is taken off is the host's.
    """
    few, many = (row for row in read(STEPS)["host"] if row["profile"] == SHAPE)
    token_ms = (many["step_ms_median"] - few["step_ms_median"]) / (8 * 1_280 - 8 * 384)
    eight_ms = few["step_ms_median"] - token_ms * 8 * 384
    lone, num_candidates = read(MOVES)["crossover"][0], read(MOVES)["candidates"]
    lone_ms = lone["resident_ms"] - compute["compute_floor_ms"] - token_ms * num_candidates
    lone_ms -= compute["compute_token_us"] * num_candidates / 1e3
    lone_ms -= compute["compute_pair_ns"] * num_candidates * lone["tokens"] / 1e6
    request_ms = (eight_ms - lone_ms) / 7
    return {
        "host_floor_ms": round(lone_ms - request_ms, 3),
        "host_request_ms": round(request_ms, 4),
        "host_token_us": round(token_ms * 1e3, 4),
        "intake_ms": round(few["intake_ms_median"] / 8, 3),
    }


def row_terms() -> dict[str, float]:
    rows = [row for row in read(ROWS_FILE)["rows"] if row["row_bytes"] == ROW_BYTES]

    def find(work: str, order: str, programs: int | str) -> dict[str, Any]:
        return next(
            row
            for row in rows
            if (row["work"], row["order"], row["programs"]) == (work, order, programs)
            and row.get("compute", BESIDE) == BESIDE
        )

    in_order = find("miss beside compute", "address", BESIDE_PROGRAMS)
    return {
        "hit_gb_per_s": find("hit alone", "as they come", "full grid")["gb_per_s"],
        "alone_gb_per_s": find("miss alone", "as they come", ALONE_PROGRAMS)["gb_per_s"],
        "beside_gb_per_s": find("miss beside compute", "as they come", BESIDE_PROGRAMS)["gb_per_s"],
        "sorted_alone_gb_per_s": find("miss alone", "address", ALONE_PROGRAMS)["gb_per_s"],
        "sorted_beside_gb_per_s": in_order["gb_per_s"],
        "beside_slowdown": in_order["compute_slowdown"],
        "sorted_from_rows": 16_384,
    }


def reload_terms() -> dict[str, float]:
    """One prefix alone, and how much longer a step of eight took because one of them had to come from the host."""
    exposure = read(MOVES)["exposure"]
    num_bytes = -(-exposure["tokens"] // 128) * 128 * 10 * 1_024
    return {
        "reload_gb_per_s": round(num_bytes / exposure["load_alone_ms"] / 1e6, 1),
        "reload_floor_ms": 0.0,
        "reload_exposed": round(exposure["exposed_ms"] / exposure["load_alone_ms"], 3),
    }


def _how(name: str) -> str:
    beside = f"{BESIDE_PROGRAMS} programs, beside {BESIDE}"
    return beside if "beside" in name else f"{ALONE_PROGRAMS} programs, alone"


def main() -> None:
    compute = compute_terms()
    host, rows, reload = host_terms(compute), row_terms(), reload_terms()
    row_ns = row_compute_ns(compute, host, rows)
    compute["compute_token_us"] = round(compute["compute_token_us"] - ROWS_PER_TOKEN * row_ns / 1e3, 5)
    compute["compute_row_ns"] = round(row_ns, 3)
    sources = {
        **dict.fromkeys(compute.keys() - {"fit"}, f"{STEPS}, rows: layers + embed + head of all work, fitted"),
        "compute_row_ns": f"{TRADEOFF}, steps in turn: what 24 rows a token take beyond six, spread over them",
        **dict.fromkeys(
            host, f"{STEPS}, host: steps of eight; {MOVES}, crossover: a lone request, its compute taken off"
        ),
        "intake_ms": f"{STEPS}, host: eight returning users of 4,096 events",
        **{name: f"{ROWS_FILE}, {ROW_BYTES} byte rows, {_how(name)}" for name in rows},
        "hit_gb_per_s": f"{ROWS_FILE}, {ROW_BYTES} byte rows, full grid",
        "sorted_from_rows": "a setting of the engine (docs/decisions/0008-rows-by-address.md)",
        **dict.fromkeys(reload, f"{MOVES}, exposure: 6,700 tokens; the floor is inside the speed"),
    }
    calibration = {
        "name": "h200",
        "device": read(STEPS)["hardware"]["gpu"],
        "shape": SHAPE,
        **compute,
        **host,
        **rows,
        **reload,
        "sources": dict(sorted(sources.items())),
    }
    OUT.write_text(json.dumps(calibration, indent=2) + "\n")
    print(f"wrote {OUT}")


if __name__ == "__main__":
    main()
