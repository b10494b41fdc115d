"""What eight bits gain and cost: layer times, what a pool holds, equal scores with and without caches, quality.

helmrec bench run precision                                  # on a card: every precision in one run
helmrec bench run precision --only-layers                    # on a card: checks of the kernels, then layer times
helmrec bench run precision --variants                       # the same without engines, in more ways
helmrec bench run precision --device cpu --requests 200      # without layer times
helmrec bench run precision --device cpu --model DIR --held-out FILE    # quality of a trained model too
"""

import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from helmrec.config import EngineConfig, FixedKVDtype
from helmrec.engine.engine import Engine
from helmrec.engine.precision_check import NUM_RANDOM, check_precision, random_requests
from helmrec.engine.setup import page_geometry
from helmrec.engine.warm_up import make_request
from helmrec.kernels.attention_plan import plan_for
from helmrec.kernels.kv_rounding import ScaledPages, empty_pages
from helmrec.kernels.ragged import RaggedBatch
from helmrec.model.config import ModelConfig
from helmrec.model.precision import FULL_PRECISION, LOW_PRECISIONS, Precision
from helmrec.model.profiles import profile
from helmrec.model.weights import LoadedModel, load_model, random_dense
from helmrec.traffic.request_lines import read_held_out
from helmrec.types import RankRequest
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.measure.cards.kernels import (
    ROWS,
    KernelUsers,
    failed_checks,
    fp8_gemm_ceiling,
    gemm_ceiling,
    make_engine,
    measure,
    times_ms,
)
from helmrec_bench.measure.cards.layer_variants import TIMED, all_times, print_times
from helmrec_bench.report.files import markdown_table

KV_DTYPES: tuple[FixedKVDtype, ...] = ("model", "fp8_e4m3", "int8")
TIMED_PRECISIONS = (FULL_PRECISION, LOW_PRECISIONS["fp8-products"], LOW_PRECISIONS["fp8-layers"])
POOL_BYTES = 64 << 30
NUM_USERS, BATCH, HEADS = 40, 4, 4


def layer_times() -> dict[str, Any]:
    """Time attention alone, then the layers of every shape in every precision; each time is printed as it is found.

    Profile by profile, so that pairs are close in time.
    """
    attention = attention_times()
    print(*attention, sep="\n", flush=True)
    ceiling, rows = gemm_ceiling(), [row for row in ROWS if row.name in TIMED]
    found: dict[str, dict[str, Any]] = {row.name: {"work": row.name} for row in rows}
    for name in dict.fromkeys(row.profile for row in rows):
        for precision in TIMED_PRECISIONS:
            engine = make_engine(name, precision.kv_dtype, precision.compute_dtype)
            users = KernelUsers(engine.model_config)
            for row in rows:
                if row.profile == name:
                    measured = measure(engine, users, row, ceiling)
                    found[row.name][str(precision)] = {
                        key: measured[key] for key in ("layers_ms", "p10_ms", "p90_ms", "tflops")
                    }
                    print(f"{row.name}, {precision}: {measured['layers_ms']} ms", flush=True)
            engine.close()
            del engine
            torch.cuda.empty_cache()
    ceilings = {"gemm_tflops": round(ceiling, 1), "fp8_gemm_tflops": round(fp8_gemm_ceiling(), 1)}
    return {**ceilings, "attention": attention, "rows": list(found.values())}


def attention_times() -> list[dict[str, Any]]:
    """Time attention alone, nothing cached: in bfloat16, and over codes with the pass that encodes them apart."""
    rows = []
    for dim, tokens, candidates in ((128, 6_700, 2_048), (256, 4_096, 256)):
        plain = AttentionRun.random(dim, tokens, candidates)
        pairs = 8 * (tokens * (tokens + 1) // 2 + candidates * (tokens + 1))
        operations = 4 * HEADS * dim * pairs
        timed = {"bf16": plain.in_bf16, "encode": plain.encode, "fp8": plain.in_fp8}
        found = {name: statistics.median(times_ms(run)) for name, run in timed.items()}
        rates = {f"{name} tflops": round(operations / ms / 1e9) for name, ms in found.items() if name != "encode"}
        rows.append({"dim": dim, **{f"{name} ms": round(ms, 4) for name, ms in found.items()}, **rates})
    return rows


class AttentionRun:
    """Attention over one random batch of eight sequences in two precisions."""

    def __init__(self, projected: Tensor, pages: list[ScaledPages], batch: RaggedBatch) -> None:
        """projected: (tokens, 3, heads, dim)."""
        self._q, self._k, self._v = projected.unbind(1)
        self._pages, self._batch, self._plan = (pages[0], pages[1]), batch, plan_for(self._q, self._v, batch)
        self._codes_plan = plan_for(self._q, self._v, batch, "codes")
        self._tokens = self.encode()
        self._out = torch.empty_like(self._v)

    @classmethod
    def random(cls, dim: int, tokens: int, candidates: int) -> "AttentionRun":
        length, page = tokens + candidates, 128
        num_pages = -(-tokens // page)
        table = torch.arange(8 * num_pages, dtype=torch.int32, device="cuda").view(8, num_pages)
        slots = torch.full((8, length), -1, dtype=torch.int64, device="cuda")
        slots[:, :tokens] = torch.arange(tokens, device="cuda") + torch.arange(8, device="cuda")[:, None] * (
            num_pages * page
        )
        counts = [torch.full((8,), n, dtype=torch.int32, device="cuda") for n in (0, tokens)]
        starts = torch.arange(9, dtype=torch.int32, device="cuda") * length
        batch = RaggedBatch(starts, counts[0], counts[1], table, slots.flatten(), num_context=0, page_tokens=page)
        projected = torch.randn((8 * length, 3, HEADS, dim), device="cuda").to(torch.bfloat16)
        shape = (8 * num_pages, page, HEADS, dim)
        fp8, device = torch.float8_e4m3fn, projected.device
        pages = [empty_pages(shape, fp8, device, transposed=transposed) for transposed in (False, True)]
        return cls(projected, [each for each in pages if isinstance(each, ScaledPages)], batch)

    def encode(self) -> Any:
        from helmrec.kernels.triton_encode import encode_tokens  # noqa: PLC0415 - triton is not on every machine

        k_pages, v_pages = self._pages
        return encode_tokens(self._q, self._k, self._v, k_pages, v_pages, self._batch)

    def in_fp8(self) -> None:
        from helmrec.kernels import hopper_fp8_attention  # noqa: PLC0415 - triton is not on every machine

        hopper_fp8_attention.launch(self._tokens, self._pages, self._batch, self._out, self._codes_plan, (0.1, 4_096.0))

    def in_bf16(self) -> None:
        from helmrec.kernels.triton_attention import attend  # noqa: PLC0415 - triton is not on every machine

        none = self._v.new_empty((1, 128, *self._v.shape[1:]))  # no token is resident
        settings: dict[str, Any] = {"scale": 0.1, "normaliser": 4_096.0, "plan": self._plan, "out": self._out}
        attend(self._q, self._k, self._v, none, none, self._batch, **settings)


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


class GrowingUsers:
    """Users who come again with more events, in random order."""

    def __init__(self, model: ModelConfig, seed: int = 0) -> None:
        self._model, self._rng = model, np.random.default_rng(seed)
        num_items, longest = model.features[0].num_rows, 3 * model.window // 2
        self._items = self._rng.integers(num_items, size=(NUM_USERS, longest))
        self._lengths = self._rng.integers(1, longest // 2, NUM_USERS)

    def next_requests(self, num: int) -> list[RankRequest]:
        requests = []
        for user in self._rng.integers(NUM_USERS, size=num).tolist():
            grown = self._lengths[user] + int(self._rng.integers(0, max(2, self._model.window // 16)))
            self._lengths[user] = min(grown, self._items.shape[1])
            candidates = self._rng.integers(self._model.features[0].num_rows, size=min(16, self._model.max_candidates))
            requests.append(make_request(self._model, user, self._items[user, : self._lengths[user]], candidates))
        return requests


def exactness(model: LoadedModel, precision: Precision, num: int, device: str) -> dict[str, Any]:
    """Score random requests in batches with caches, and each again without: boundary moves and reloads in between.

    Every request is also ranked alone by a second engine.
    """
    settings: dict[str, Any] = {
        "device": device,
        **precision._asdict(),
        "kv_admission": "always",
        "kv_reload": "always",
    }
    page = page_geometry(model.config, EngineConfig(**settings))
    num_pages = 6 * (1 + page.pages_for(model.config.max_prefix_tokens))  # too few for all users
    settings |= {"pool_bytes": num_pages * page.page_bytes, "host_kv_bytes": 4 * num_pages * page.page_bytes}
    config = EngineConfig(**settings, audit_every=1, max_batch_requests=BATCH)
    users, rng, worst_alone, started = GrowingUsers(model.config), np.random.default_rng(1), 0.0, time.monotonic()
    with Engine(model, config) as engine, Engine(model, EngineConfig(**settings)) as alone:
        for _ in range(-(-num // BATCH)):
            if rng.random() < 0.1:
                engine.move_alpha(float(rng.uniform(0, engine.stats().pool.alpha_max)))
            requests = users.next_requests(BATCH)
            for request, result in zip(requests, engine.rank(requests), strict=True):
                difference = np.abs(alone.rank([request])[0].scores - result.scores).max()
                worst_alone = max(worst_alone, float(difference))
        engine.check()
        stats = engine.stats()
    return {
        "model": model.config.name,
        "dtype": model.config.dtype,
        **precision._asdict(),
        "requests": stats.audits,
        "worst_cached_and_uncached": stats.audit_max_error,
        "worst_alone_and_in_a_batch": worst_alone,
        "beyond_tolerance": stats.audit_mismatches,
        "tokens_reused": stats.pool.reused_tokens,
        "pages_reloaded": stats.pool.host_reloaded_pages,
        "pages_evicted": stats.pool.kv_evicted_pages,
        "seconds": round(time.monotonic() - started, 1),
    }


def quality(model: LoadedModel, held_out: Path | None, name: str, device: str) -> list[dict[str, Any]]:
    """Compare scores in each low precision with full precision."""
    rows = []
    for precision in LOW_PRECISIONS.values():
        if held_out is None:
            asked, source = random_requests(model.config, NUM_RANDOM, 0), "random, seed 0"
        else:
            asked, source = read_held_out(held_out, model.config), "held out"
        figures = check_precision(model, precision, asked, source, device)
        rows.append({"model": name, **precision._asdict(), **figures.model_dump(exclude_none=True)})
    return rows


def _print_layers(layers: dict[str, Any]) -> None:
    """Print milliseconds of every shape and precision, and the ceilings of this run."""
    names = [str(precision) for precision in TIMED_PRECISIONS]
    rows = [[row["work"], *(str(row[name]["layers_ms"]) for name in names)] for row in layers["rows"]]
    print(f"8192^3 products: bf16 {layers['gemm_tflops']}, fp8 {layers['fp8_gemm_tflops']} TFLOP/s")
    print(markdown_table(["layers, ms", *names], rows))


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--requests", type=int, default=2_000, help="compared with and without caches")
    parser.add_argument("--model", type=Path, help="a trained model whose quality is measured too")
    parser.add_argument("--held-out", type=Path, help="its held-out requests, as for helmrec model check --precision")
    parser.add_argument("--only-layers", action="store_true", help="check kernels and time layers, nothing else")
    parser.add_argument("--variants", action="store_true", help="time layers without an engine in more ways, only that")
    parser.add_argument("--skip-layers", action="store_true", help="time no layers; always so on a CPU")


def time_variants(out: Path) -> None:
    """Time layers in every variant, then check the kernels; the table comes last."""
    found: dict[str, Any] = {"layers": all_times()}
    write_measurement(out, found)
    found["failed_checks"] = failed_checks("fp8", limit_s=90)
    write_measurement(out, found)
    print("Checks that failed:", *found["failed_checks"] or ["none"], sep="\n")
    print_times(found["layers"])


def main(flags: Namespace) -> None:
    if flags.variants:
        time_variants(flags.out)
        return
    found: dict[str, Any] = {"capacity": capacity()}
    if flags.device == "cuda" and not flags.skip_layers:
        found["failed_checks"] = failed_checks("fp8")  # times are taken all the same: a card is scarce
        found["layers"] = layer_times()
        write_measurement(flags.out, found)  # a run that is stopped leaves what it has
        _print_layers(found["layers"])
    if not flags.only_layers:
        compare(flags, found)
    if found.get("failed_checks"):
        print("Checks that failed:", *found["failed_checks"], sep="\n")
        sys.exit(1)


def compare(flags: Namespace, found: dict[str, Any]) -> None:
    """Compare scores with and without caches, and in every precision; adds to what was found."""
    on_card = flags.device == "cuda"
    shape = profile("dlrmv3", 20_000) if on_card else profile("demo", 2_000).model_copy(update={"window": 64})
    dtypes: Sequence[str] = ("bfloat16",) if on_card else ("float32", "bfloat16")
    models = [random_model(shape.model_copy(update={"dtype": dtype})) for dtype in dtypes]
    found["exactness"] = [
        exactness(m, each, flags.requests, flags.device)
        for m in models
        for each in (FULL_PRECISION, *LOW_PRECISIONS.values())
    ]
    write_measurement(flags.out, found)
    found["quality"] = quality(models[-1], None, f"{shape.name}, random weights", flags.device)
    if flags.model is not None:
        trained = load_model(flags.model)
        found["quality"] += quality(trained, flags.held_out, trained.config.name, flags.device)
    write_measurement(flags.out, found)
    for name in ("capacity", "exactness", "quality"):
        rows = [{key: value for key, value in row.items() if not isinstance(value, dict)} for row in found[name]]
        columns = list(dict.fromkeys(key for row in rows for key in row))
        print(markdown_table(columns, [[str(row.get(column, "")) for column in columns] for row in rows]))
