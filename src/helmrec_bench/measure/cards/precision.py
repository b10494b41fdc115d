"""What eight bits gain and cost: layer times, what a pool holds, equal scores with and without caches, quality.

Every part can be measured by a call of its own; calls with the same `--out` fill one file. What compares precisions
goes on where the call before stopped, if the commit is the same, and several calls may compare others side by side.

helmrec bench run precision --only checks layers             # on a card: checks of the kernels, then layer times
helmrec bench run precision --only equality --window 4096 --limit-s 150   # on a card: begins no other after 150 s
helmrec bench run precision --only layers --meta DIR          # Meta's layers, of the package in DIR, in the same run
helmrec bench run precision --only capacity quality
helmrec bench run precision --variants                       # layer times without engines, in more ways
helmrec bench run precision --device cpu --requests 200      # without layer times
helmrec bench run precision --device cpu --only quality --model DIR --held-out FILE    # of a trained model too
helmrec bench run precision --device cpu --quick             # few requests: does the script work
"""

import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from helmrec.config import EngineConfig, FixedKVDtype
from helmrec.engine.precision_check import NUM_RANDOM, check_precision, random_requests
from helmrec.engine.setup import page_geometry
from helmrec.errors import ConfigError
from helmrec.model.config import ModelConfig
from helmrec.model.precision import FULL_PRECISION, LOW_PRECISIONS, Precision, Thresholds
from helmrec.model.profiles import profile
from helmrec.model.weights import LoadedModel, load_model, random_dense
from helmrec.traffic.request_lines import read_held_out
from helmrec_bench.measure.cards.coded_attention import attention_times
from helmrec_bench.measure.cards.equal_scores import compare_scores
from helmrec_bench.measure.cards.kernels import (
    ROWS,
    KernelUsers,
    failed_checks,
    fp8_gemm_ceiling,
    gemm_ceiling,
    make_engine,
    measure,
)
from helmrec_bench.measure.cards.layer_variants import TIMED, VARIANTS, all_times, print_times
from helmrec_bench.measure.cards.measured_parts import MeasuredParts, Row
from helmrec_bench.measure.cards.meta_layers import meta_times
from helmrec_bench.report.files import markdown_table

PARTS = ("checks", "layers", "capacity", "equality", "quality")
VARIANTS_PART = "variants"  # to tune with
NEED_CARD = ("checks", "layers")
KV_DTYPES: tuple[FixedKVDtype, ...] = ("model", "fp8_e4m3", "int8")
TIMED_PRECISIONS = (FULL_PRECISION, LOW_PRECISIONS["fp8-products"], LOW_PRECISIONS["fp8-layers"])
PRECISIONS = {"model": FULL_PRECISION, **LOW_PRECISIONS}
ASKED_MS = dict(  # in FP8 on an H200: at most, and the aim
    zip(TIMED, ((8.6, 7.6), (6.6, 5.8), (2.55, 2.3), (0.86, 0.8), (2.25, 2.0), (1.15, 1.05)), strict=True)
)
POOL_BYTES = 64 << 30
QUICK_REQUESTS = 40
CHECKS_S = 180


def layer_times(keep: Callable[[dict[str, Any]], None], meta: Path | None) -> None:
    """Time attention alone, then the layers of every shape in every precision; `keep` is given what there is so far.

    Profile by profile, so that pairs are close in time. Times of Meta's stack are published ones; those of this run
    come first if its package lies in the folder `meta`.
    """
    metas = {} if meta is None else meta_times(meta)
    attention = attention_times()
    print(*attention, sep="\n", flush=True)
    ceiling, fp8_ceiling, rows = gemm_ceiling(), fp8_gemm_ceiling(), [row for row in ROWS if row.name in TIMED]
    found: dict[str, Row] = {row.name: {"work": row.name, "meta_ms": row.meta_ms} for row in rows}
    for name, told in metas.items():
        found[name]["meta"] = told
    ceilings = {"gemm_tflops": round(ceiling, 1), "fp8_gemm_tflops": round(fp8_ceiling, 1)}
    for name in dict.fromkeys(row.profile for row in rows):
        for precision in TIMED_PRECISIONS:
            engine = make_engine(name, precision.kv_dtype, precision.compute_dtype)
            users = KernelUsers(engine.model_config)
            for row in rows:
                if row.profile == name:
                    measured = measure(engine, users, row, fp8_ceiling)
                    kept = ("layers_ms", "p10_ms", "p90_ms", "tflops", "share_of_ceiling")  # of the FP8 ceiling
                    found[row.name][str(precision)] = {key: measured[key] for key in kept}
                    print(f"{row.name}, {precision}: {measured['layers_ms']} ms", flush=True)
            engine.close()
            del engine
            torch.cuda.empty_cache()
            keep({**ceilings, "attention": attention, "rows": list(found.values())})


def capacity() -> list[dict[str, Any]]:
    """Tokens that a pool of 64 GiB holds at alpha 0 on a card, and rows at alpha 1."""
    found = []
    for name in ("dlrmv3", "nvidia-bench", "kuairand", "paper"):
        model = profile(name, 1_000)
        tokens: dict[str, int] = {}
        rows: dict[str, int] = {}
        for dtype in KV_DTYPES:
            geometry = page_geometry(model, EngineConfig(device="cuda", kv_dtype=dtype))
            tokens[dtype] = POOL_BYTES // geometry.page_bytes * geometry.page_tokens
            geometry = page_geometry(model, EngineConfig(device="cuda", row_dtype=dtype))
            rows[dtype] = POOL_BYTES // geometry.page_bytes * geometry.rows_per_page
        for kind, held in (("tokens", tokens), ("rows", rows)):
            found.append({"profile": name, "of": kind, **held, "ratio": round(held["int8"] / held["model"], 3)})
    return found


def random_model(config: ModelConfig) -> LoadedModel:
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, config.row_dtype)
    tables = {t.name: torch.randn((t.num_rows, config.row_dim), generator=generator).to(dtype) for t in config.tables}
    return LoadedModel(config, 1, random_dense(config, generator), tables)


class Subject(NamedTuple):
    """A model whose precisions are compared."""

    name: str
    model: LoadedModel
    held_out: Path | None = None  # requests with labels; None: random ones


def small_demo() -> ModelConfig:
    return profile("demo", 2_000).model_copy(update={"window": 64})


def subjects(flags: Namespace, dtypes: Sequence[str]) -> list[Subject]:
    """A model with random weights in each of these dtypes."""
    name = flags.shape or ("dlrmv3" if flags.device == "cuda" else "demo")
    shape = small_demo() if name == "demo" else profile(name, 20_000)
    window = flags.window or shape.window
    models = (random_model(shape.model_copy(update={"dtype": dtype, "window": window})) for dtype in dtypes)
    return [Subject(f"{name}, window {window}, random weights", model) for model in models]


class Comparison(NamedTuple):
    """A part with one row for each model and precision."""

    part: str
    run: Callable[[Subject, Precision], Row]
    asked: int  # requests; rows of other numbers are measured again

    def fill(self, parts: MeasuredParts, work: Iterable[tuple[Subject, str]], deadline_s: float) -> None:
        """Measure the rows that the file lacks, until the deadline."""
        done = [_identity(row) for row in parts.rows_of_this_commit(self.part)]
        for subject, name in work:
            row: Row = {"model": subject.name, "dtype": subject.model.config.dtype, "precision": name}
            row |= {**PRECISIONS[name]._asdict(), "asked": self.asked if subject.held_out is None else "held out"}
            if _identity(row) in done:
                continue
            if time.monotonic() > deadline_s:
                print(f"out of time: {self.part} goes on with {name} of {subject.name} in the next call", flush=True)
                return
            found = row | self.run(subject, PRECISIONS[name])
            parts.add_row(self.part, found)
            print(found, flush=True)


def _identity(row: Row) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("model", "dtype", "precision", "asked"))


def compare_equality(flags: Namespace, parts: MeasuredParts, deadline_s: float) -> None:
    """Compare scores with and without caches, alone and in batches."""
    num = QUICK_REQUESTS if flags.quick else flags.requests
    comparison = Comparison("equality", lambda s, precision: compare_scores(s.model, precision, num, flags.device), num)
    dtypes = ("bfloat16",) if flags.device == "cuda" else ("float32", "bfloat16")
    names = flags.precisions or PRECISIONS
    comparison.fill(parts, [(each, name) for each in subjects(flags, dtypes) for name in names], deadline_s)


def compare_quality(flags: Namespace, parts: MeasuredParts, deadline_s: float) -> None:
    """Compare scores in each low precision with full precision."""
    num = QUICK_REQUESTS if flags.quick else flags.random_requests

    def run(subject: Subject, precision: Precision) -> Row:
        asked, source = random_requests(subject.model.config, num, 0), "random, seed 0"
        if subject.held_out is not None:
            asked, source = read_held_out(subject.held_out, subject.model.config), "held out"
        figures = check_precision(subject.model, precision, asked, source, flags.device)
        return figures.model_dump(exclude_none=True) | {"objections": figures.objections(Thresholds())}

    chosen = subjects(flags, [flags.dtype])
    if flags.model is not None:
        chosen.append(Subject("trained", load_model(flags.model), flags.held_out))
    names = [name for name in flags.precisions or LOW_PRECISIONS if name in LOW_PRECISIONS]
    comparison = Comparison("quality", run, num)
    comparison.fill(parts, [(each, name) for each in chosen for name in names], deadline_s)


def objections_to(row: Row) -> list[str]:
    """What speaks against the claim that scores are the same with and without caches."""
    found = [f"{row['beyond_tolerance']} scores beyond the tolerance"] if row["beyond_tolerance"] else []
    if row["worst_alone_and_in_a_batch"] > row["tolerance"]:
        found.append(f"scores alone and in a batch differ by {row['worst_alone_and_in_a_batch']:.3g}")
    events = ("moves", "tokens_reused", "pages_reloaded", "pages_evicted")
    is_quick = row["asked"] <= QUICK_REQUESTS  # too few for all of them to happen
    return found + [f"no {event}" for event in events if not row[event] and not is_quick]


def print_layers(layers: dict[str, Any]) -> None:
    """Print milliseconds of every shape and precision beside what is asked, and the ceilings of this run."""
    names, low = [str(precision) for precision in TIMED_PRECISIONS], str(TIMED_PRECISIONS[-1])
    rows = []
    for row in layers["rows"]:
        times = [str(row[name]["layers_ms"]) if name in row else "" for name in names]
        share = f"{row[low]['share_of_ceiling']:.1%}" if low in row else ""
        meta = row.get("meta", {})
        metas = [str(meta.get(key, "")) for key in ("eager_ms", "graph_ms", "difference")]
        asked = [str(each) for each in ASKED_MS[row["work"]]]
        rows.append([row["work"], *times, *asked, share, *metas, str(row["meta_ms"] or "")])
    print(f"8192^3 products: bf16 {layers['gemm_tflops']}, fp8 {layers['fp8_gemm_tflops']} TFLOP/s")
    metas = ["Meta's stack", "as a graph", "relative difference", "published"]
    print(markdown_table(["layers, ms", *names, "at most", "aim", "share of FP8 ceiling", *metas], rows))


def print_rows(rows: list[Row]) -> None:
    left_out = {"kv_dtype", "compute_dtype", "row_dtype"}  # what the name of the precision says
    columns = [key for key in dict.fromkeys(key for row in rows for key in row) if key not in left_out]
    print(markdown_table(columns, [[_cell(row.get(column, "")) for column in columns] for row in rows]))


def _cell(value: object) -> str:
    if isinstance(value, list):
        return "; ".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, help="measure these parts; by default all that the device can"
    )
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, help="compare these; by default all")
    parser.add_argument("--limit-s", type=float, default=3_600, help="begin no other comparison after so long")
    parser.add_argument("--requests", type=int, default=2_000, help="compared with and without caches")
    parser.add_argument("--random-requests", type=int, default=NUM_RANDOM, help="whose quality is compared")
    parser.add_argument("--shape", choices=("demo", "dlrmv3"), help="of random weights; default dlrmv3, on a CPU demo")
    parser.add_argument("--window", type=int, help="longest history of random weights; default that of the shape")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of random weights: quality"
    )
    parser.add_argument("--model", type=Path, help="a trained model whose quality is measured too")
    parser.add_argument("--held-out", type=Path, help="its held-out requests, as for helmrec model check --precision")
    parser.add_argument("--meta", type=Path, help="time the layers of Meta's `generative_recommenders` of this folder")
    parser.add_argument(
        "--variants", nargs="*", choices=VARIANTS, help="only time layers without an engine in these ways, or in all"
    )
    parser.add_argument("--quick", action="store_true", help="few requests, to see that it runs")


def default_out(flags: Namespace) -> str:
    return "gpu-precision-h200.json" if flags.device == "cuda" else "precision-cpu.json"


def time_variants(names: Sequence[str], parts: MeasuredParts) -> None:
    """Time layers in variants, then check the kernels; the table comes last."""
    found: dict[str, Any] = {"layers": all_times(names)}
    parts.put(VARIANTS_PART, found)
    found["failed_checks"] = failed_checks("fp8", limit_s=CHECKS_S)
    parts.put(VARIANTS_PART, found)
    print("Checks that failed:", *found["failed_checks"] or ["none"], sep="\n")
    print_times(found["layers"])


def main(flags: Namespace) -> None:
    parts = MeasuredParts(flags.out, (*PARTS, VARIANTS_PART))
    if flags.variants is not None:
        time_variants(flags.variants or list(VARIANTS), parts)
        return
    chosen = flags.only or [part for part in PARTS if flags.device == "cuda" or part not in NEED_CARD]
    if flags.device != "cuda" and (needy := [part for part in chosen if part in NEED_CARD]):
        raise ConfigError(f"--only {' '.join(needy)} needs --device cuda, got {flags.device!r}")
    deadline_s = time.monotonic() + flags.limit_s
    if "checks" in chosen:
        found = failed_checks("fp8", limit_s=CHECKS_S)
        parts.put("checks", {"failed": found})  # times are taken all the same: a card is scarce
    if "layers" in chosen:
        layer_times(lambda found: parts.put("layers", found), flags.meta)
    if "capacity" in chosen:
        parts.put("capacity", capacity())
    if "equality" in chosen:
        compare_equality(flags, parts, deadline_s)
    if "quality" in chosen:
        compare_quality(flags, parts, deadline_s)
    conclude(parts, [part for part in chosen if part in parts])


def conclude(parts: MeasuredParts, chosen: Sequence[str]) -> None:
    """Print what was measured; the exit status is 1 if a check failed or scores differ by more than they may."""
    if "layers" in chosen:
        print_layers(parts["layers"])
    for name in (part for part in ("capacity", "equality", "quality") if part in chosen):
        print_rows(parts[name])
    wrong = list(parts["checks"]["failed"]) if "checks" in chosen else []
    for row in parts["equality"] if "equality" in chosen else ():
        wrong += [f"{row['precision']}, {row['dtype']}: {objection}" for objection in objections_to(row)]
    if wrong:
        print("Checks that failed:", *wrong, sep="\n")
        sys.exit(1)
