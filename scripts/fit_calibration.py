"""The simulator's H200 calibration, from the kept measurements. Writes src/helmrec/sim/calibrations/h200.json."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from scripts.gpu import ROWS

MEASUREMENTS = Path("docs/measurements")
OUT = Path("src/helmrec/sim/calibrations/h200.json")
SHAPE = "dlrmv3"
ROW_BYTES = 1_024
ALONE_PROGRAMS, BESIDE_PROGRAMS = 4, 8  # the engine runs eight; alone, four is the nearest that was timed
BESIDE = "products of a dlrmv3 layer, 8 x 4096+256"


def read(name: str) -> dict[str, Any]:
    return json.loads((MEASUREMENTS / name).read_text())


def compute_terms() -> dict[str, Any]:
    """Floor, tokens and pairs by least squares of the relative error over every dlrmv3 row that was timed."""
    timed = read("gpu-h200.json")["rows"]
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


def host_terms() -> dict[str, float]:
    """Two steps of eight requests: 8 x (128 + 256) and 8 x (1,024 + 256) computed tokens."""
    few, many = (row for row in read("gpu-h200.json")["host"] if row["profile"] == SHAPE)
    token_ms = (many["step_ms_median"] - few["step_ms_median"]) / (8 * 1_280 - 8 * 384)
    return {
        "host_floor_ms": round(few["step_ms_median"] - token_ms * 8 * 384, 3),
        "host_token_us": round(token_ms * 1e3, 4),
        "intake_ms": round(few["intake_ms_median"] / 8, 3),
    }


def row_terms() -> dict[str, float]:
    rows = [row for row in read("gpu-rows-h200.json")["rows"] if row["row_bytes"] == ROW_BYTES]

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


def reload_terms() -> tuple[dict[str, float], str]:
    """From the load of one prefix timed alone, where that is kept; else from copies noted before files were kept."""
    path = MEASUREMENTS / "gpu-moves-h200.json"
    if not path.exists():
        note = "pinned copies of 1 MiB on an H200: 37 GB/s after a floor of 20 us; noted early, in no kept file yet"
        return {"reload_gb_per_s": 37.0, "reload_floor_ms": 0.02}, note
    exposure = json.loads(path.read_text())["exposure"]
    num_bytes = -(-exposure["tokens"] // 128) * 128 * 10 * 1_024
    speed = num_bytes / exposure["load_alone_ms"] / 1e6
    return {"reload_gb_per_s": round(speed, 1), "reload_floor_ms": 0.0}, "gpu-moves-h200.json, exposure.load_alone_ms"


def _how(name: str) -> str:
    beside = f"{BESIDE_PROGRAMS} programs, beside {BESIDE}"
    return beside if "beside" in name else f"{ALONE_PROGRAMS} programs, alone"


def main() -> None:
    reload, reload_source = reload_terms()
    compute, host, rows = compute_terms(), host_terms(), row_terms()
    sources = {
        **dict.fromkeys(compute.keys() - {"fit"}, "gpu-h200.json, rows: layers + embed + head of dlrmv3 work, fitted"),
        **dict.fromkeys(
            host, "gpu-h200.json, host: dlrmv3, eight requests, few and many tokens; row index on the host"
        ),
        **{name: f"gpu-rows-h200.json, {ROW_BYTES} byte rows, {_how(name)}" for name in rows},
        "hit_gb_per_s": f"gpu-rows-h200.json, {ROW_BYTES} byte rows, full grid",
        "sorted_from_rows": "a setting of the engine (docs/decisions/0008-rows-by-address.md)",
        **dict.fromkeys(reload, reload_source),
    }
    calibration = {
        "name": "h200",
        "device": read("gpu-h200.json")["hardware"]["gpu"],
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
