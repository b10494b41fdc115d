"""What eight-bit K/V gain and cost: layer times, what a pool holds, equal scores with and without caches, quality.

helmrec bench run precision                                  # on a card: every precision in one run
helmrec bench run precision --device cpu --requests 200      # without layer times
helmrec bench run precision --device cpu --model DIR --held-out FILE    # quality of a trained model too
"""

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from helmrec.config import EngineConfig, FixedKVDtype, RoundedKV
from helmrec.engine.engine import Engine
from helmrec.engine.precision_check import NUM_RANDOM, check_precision, random_requests
from helmrec.engine.setup import page_geometry
from helmrec.engine.warm_up import make_request
from helmrec.model.config import ModelConfig
from helmrec.model.profiles import profile
from helmrec.model.weights import LoadedModel, load_model, random_dense
from helmrec.traffic.request_lines import read_held_out
from helmrec.types import RankRequest
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.measure.cards.kernels import ROWS, KernelUsers, gemm_ceiling, make_engine, measure
from helmrec_bench.report.files import markdown_table

PRECISIONS: tuple[FixedKVDtype, ...] = ("model", "fp8_e4m3", "int8")
ROUNDED: tuple[RoundedKV, ...] = ("fp8_e4m3", "int8")
TIMED = (  # of `kernels`: the shapes whose times low precision is to cut
    "nvidia-bench 8 x 4096+256",
    "dlrmv3 8 x 6700+2048",
    "dlrmv3 8 x 4096+256",
    "dlrmv3 1 x 6700+2048",
    "dlrmv3 8 x 6668 of 6700 cached, 2048",
    "nvidia-bench 8 x 3968 of 4096 cached, 256",
)
POOL_BYTES = 64 << 30
NUM_USERS, BATCH = 40, 4


def layer_times() -> dict[str, Any]:
    """Time the layers of every shape in every precision; profile by profile, so that pairs are close in time."""
    ceiling, rows = gemm_ceiling(), [row for row in ROWS if row.name in TIMED]
    found: dict[str, dict[str, Any]] = {row.name: {"work": row.name} for row in rows}
    for name in dict.fromkeys(row.profile for row in rows):
        for kv_dtype in PRECISIONS:
            engine = make_engine(name, kv_dtype)
            users = KernelUsers(engine.model_config)
            for row in rows:
                if row.profile == name:
                    measured = measure(engine, users, row, ceiling)
                    found[row.name][kv_dtype] = {
                        key: measured[key] for key in ("layers_ms", "p10_ms", "p90_ms", "tflops")
                    }
            engine.close()
            del engine
            torch.cuda.empty_cache()
    return {"gemm_tflops": round(ceiling, 1), "rows": list(found.values())}


def capacity() -> list[dict[str, Any]]:
    """Tokens that a pool of 64 GiB holds at alpha 0, on a card."""
    rows = []
    for name in ("dlrmv3", "nvidia-bench", "kuairand", "paper"):
        model = profile(name, 1_000)
        tokens: dict[str, int] = {}
        for kv_dtype in PRECISIONS:
            geometry = page_geometry(model, EngineConfig(device="cuda", kv_dtype=kv_dtype))
            tokens[kv_dtype] = POOL_BYTES // geometry.page_bytes * geometry.page_tokens
        rows.append({"profile": name, **tokens, "ratio": round(tokens["int8"] / tokens["model"], 3)})
    return rows


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


def exactness(model: LoadedModel, kv_dtype: FixedKVDtype, num: int, device: str) -> dict[str, Any]:
    """Score random requests in batches with caches, and each again without: boundary moves and reloads in between.

    Every request is also ranked alone by a second engine.
    """
    settings: dict[str, Any] = {"device": device, "kv_dtype": kv_dtype, "kv_admission": "always", "kv_reload": "always"}
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
        "kv_dtype": kv_dtype,
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
    for kv_dtype in ROUNDED:
        if held_out is None:
            asked, source = random_requests(model.config, NUM_RANDOM, 0), "random, seed 0"
        else:
            asked, source = read_held_out(held_out, model.config), "held out"
        figures = check_precision(model, kv_dtype, asked, source, device)
        rows.append({"model": name, "kv_dtype": kv_dtype, **figures.model_dump(exclude_none=True)})
    return rows


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--requests", type=int, default=2_000, help="compared with and without caches")
    parser.add_argument("--model", type=Path, help="a trained model whose quality is measured too")
    parser.add_argument("--held-out", type=Path, help="its held-out requests, as for helmrec model check --precision")
    parser.add_argument("--skip-layers", action="store_true", help="time no layers; always so on a CPU")


def main(flags: Namespace) -> None:
    found: dict[str, Any] = {"capacity": capacity()}
    on_card = flags.device == "cuda"
    if on_card and not flags.skip_layers:
        found["layers"] = layer_times()
        write_measurement(flags.out, found)  # a run that is stopped leaves what it has
    shape = profile("dlrmv3", 20_000) if on_card else profile("demo", 2_000).model_copy(update={"window": 64})
    dtypes: Sequence[str] = ("bfloat16",) if on_card else ("float32", "bfloat16")
    models = [random_model(shape.model_copy(update={"dtype": dtype})) for dtype in dtypes]
    found["exactness"] = [exactness(m, kv, flags.requests, flags.device) for m in models for kv in PRECISIONS]
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
