"""The simulator's H200 calibration, from the kept measurements. Writes src/helmrec/sim/calibrations/h200.json."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from scripts.gpu import ROWS

MEASUREMENTS = Path("docs/measurements")
OUT = Path("src/helmrec/sim/calibrations/h200.json")
STEPS, MOVES, ROWS_FILE = "gpu-dlrmv3-h200.json", "gpu-moves-h200.json", "gpu-rows-h200.json"
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
    sources = {
        **dict.fromkeys(compute.keys() - {"fit"}, f"{STEPS}, rows: layers + embed + head of all work, fitted"),
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
