"""Times of layers and of their attention alone in every precision, without an engine: seconds instead of minutes.

Each row of the table of low precision is one batch of random tokens over random pages. Layers run as a CUDA graph, as
an engine runs them, with random weights. A variant that fails is reported, and the others are timed all the same.
"""

import statistics
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from helmrec.kernels.attention_plan import plan_for
from helmrec.kernels.kv_rounding import Pages, empty_pages
from helmrec.kernels.layer import LayerShape, LayerWeights
from helmrec.kernels.ragged import RaggedBatch
from helmrec.model.config import ModelConfig
from helmrec.model.precision import FULL_PRECISION, LOW_PRECISIONS, Precision
from helmrec.model.profiles import profile
from helmrec_bench.measure.cards.apart import run_apart, tell
from helmrec_bench.measure.cards.kernels import ROWS, KernelRow, Sequence, times_ms
from helmrec_bench.report.files import markdown_table

DEVICE, PAGE_TOKENS = "cuda", 128
FP8 = torch.float8_e4m3fn
LIMIT_S = 75  # of one variant
TIMED = (  # of `kernels`: the shapes whose times low precision is to cut
    "nvidia-bench 8 x 4096+256",
    "dlrmv3 8 x 6700+2048",
    "dlrmv3 8 x 4096+256",
    "dlrmv3 1 x 6700+2048",
    "dlrmv3 8 x 6668 of 6700 cached, 2048",
    "nvidia-bench 8 x 3968 of 4096 cached, 256",
)
_PROFILED = {"bf16", "fp8-layers"}


def batch_of(sequences: list[Sequence]) -> RaggedBatch:
    """The layout of these sequences; pages of one follow those of another."""
    num_pages = [-(-(s.resident + s.new) // PAGE_TOKENS) for s in sequences]
    table = torch.zeros((len(sequences), max(num_pages)), dtype=torch.int32)
    slots, first = [], 0
    for i, (s, pages) in enumerate(zip(sequences, num_pages, strict=True)):
        table[i, :pages] = torch.arange(first, first + pages)
        kept = first * PAGE_TOKENS + torch.arange(s.resident, s.resident + s.new)
        slots += [kept, torch.full((s.candidates,), -1)]
        first += pages
    starts = torch.tensor([0, *(s.new + s.candidates for s in sequences)]).cumsum(0).int()
    resident, new = (
        torch.tensor(each, dtype=torch.int32) for each in ([s.resident for s in sequences], [s.new for s in sequences])
    )
    lengths = starts.to(DEVICE), resident.to(DEVICE), new.to(DEVICE)
    return RaggedBatch(*lengths, table.to(DEVICE), torch.cat(slots).to(DEVICE), num_context=0, page_tokens=PAGE_TOKENS)


def random_pages(shape: tuple[int, ...], dtype: torch.dtype, *, transposed: bool) -> Pages:
    """Pages full of tokens like those of a batch."""
    pages = empty_pages(shape, dtype, torch.device(DEVICE), transposed=transposed)
    if isinstance(pages, Tensor):
        return pages.normal_()
    pages.codes.view(torch.uint8).random_(0x30, 0x7F)  # from a 256th of the largest value on
    pages.exponents.fill_(127 - 7)
    return pages


def random_weights(config: ModelConfig) -> LayerWeights:
    width = config.num_heads * config.v_dim

    def noise(*shape: int) -> Tensor:
        return (torch.randn(shape, device=DEVICE) / config.dim**0.5).to(torch.bfloat16)

    norms = (1 + noise(config.dim), noise(config.dim))
    outputs = (noise(3 * width, config.dim), 1 + noise(width), noise(width), noise(config.dim))
    return LayerWeights(noise(config.dim, 4 * width), noise(4 * width), *norms, *outputs)


class LayerRun:
    """The layers of one row of the table in one precision."""

    def __init__(self, row: KernelRow, precision: Precision, normaliser: float | None = None) -> None:
        """normaliser: of attention; by default the model's."""
        from helmrec.kernels import fused  # noqa: PLC0415 - triton is not on every machine

        config = profile(row.profile, 1_000)
        batch = batch_of(row.sequences)
        heads, dim, num_tokens = config.num_heads, config.qk_dim, int(batch.cu_tokens[-1])
        like = torch.empty((num_tokens, heads, dim), dtype=torch.bfloat16, device=DEVICE)
        in_fp8, kept = precision.compute_dtype == "fp8_e4m3", precision.kv_dtype == "fp8_e4m3"
        self.batch = replace(batch, plan=plan_for(like, like, batch, "codes" if in_fp8 and kept else None))
        shape = (config.num_layers, int(batch.page_table.max()) + 1, PAGE_TOKENS, heads, dim)
        dtype = FP8 if kept else torch.bfloat16
        self.pages = [random_pages(shape, dtype, transposed=each and in_fp8 and kept) for each in (False, True)]
        weights = [random_weights(config) for _ in range(config.num_layers)]
        self.weights = [each.in_fp8() if in_fp8 else each for each in weights]
        self.shape = LayerShape("concat", heads, dim**-0.5, normaliser or float(config.normaliser))
        self.x = torch.randn((num_tokens, config.dim), device=DEVICE).to(torch.bfloat16)
        self._run_layers = fused.run_layers

    def run(self) -> Tensor:
        x = self.x.clone()
        return self._run_layers(x, self.weights, self.shape, self.pages[0], self.pages[1], self.batch)

    def difference(self, usual: Tensor) -> float:
        """Relative difference between what layers add to x and what they usually add."""
        x, out = self.x.float(), self.run().float()
        return round(float((out - usual).norm() / (usual - x).norm()), 5)

    def kernel_ms(self) -> dict[str, float]:
        """Milliseconds of each kernel, all layers together, by the profiler."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(5):
                self.run()
            torch.cuda.synchronize()
        events = sorted(profiler.key_averages(), key=lambda each: -each.device_time_total)
        return {each.key[:60]: round(each.device_time_total / 5 / 1e3, 4) for each in events[:12]}

    def median_ms(self) -> float:
        """Median of the replays of a graph, less that of the copy of x before the layers."""
        assert self.run().isfinite().all(), "layers gave numbers that are not finite"
        return graph_ms(self.run) - graph_ms(self.x.clone)


def graph_ms(run: Callable[[], object]) -> float:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return statistics.median(times_ms(graph.replay))


class Variant(NamedTuple):
    """A precision, and settings of kernels that differ from those in use."""

    precision: Precision
    settings: tuple[tuple[str, Any], ...] = ()  # where, and what


_KERNELS, _LAYERS = "helmrec.kernels", LOW_PRECISIONS["fp8-layers"]
_TILES = f"{_KERNELS}.triton_fp8_project.TILES"
VARIANTS = {
    "bf16": Variant(FULL_PRECISION),
    "fp8-products": Variant(LOW_PRECISIONS["fp8-products"]),
    "fp8-layers": Variant(_LAYERS),
    "small tiles": Variant(_LAYERS, ((_TILES, {128: (64, 128, 4, 4, 128), 256: (64, 128, 4, 2, None)}),)),
    "few warps": Variant(_LAYERS, ((_TILES, {128: (128, 128, 4, 3, None), 256: (128, 64, 8, 3, None)}),)),
}


def time_variant(name: str) -> None:
    """Time one variant, row after row; a line of JSON for each time, as soon as it is known."""
    variant = VARIANTS[name]
    for row in (row for row in ROWS if row.name in TIMED):
        usual = None
        if variant.settings:
            torch.manual_seed(0)
            usual = LayerRun(row, variant.precision).run()
        with ExitStack() as stack:
            for place, value in variant.settings:
                stack.enter_context(patch(place, value))
            torch.manual_seed(0)
            run = LayerRun(row, variant.precision)
            if usual is not None:
                tell(work=row.name, difference=run.difference(usual))
            tell(work=row.name, ms=round(run.median_ms(), 4))
            if name in _PROFILED and (row.name in TIMED[:2] or name != "bf16"):
                tell(work=row.name, kernels=run.kernel_ms())
            del run
            torch.cuda.empty_cache()


def run_variant(name: str) -> list[dict[str, Any]]:
    """Time a variant in a process of its own."""
    found = run_apart([sys.executable, "-m", "helmrec_bench.measure.cards.layer_variants", name], LIMIT_S)
    print(*(f"{name}: {each}" for each in found), sep="\n", flush=True)
    return found


def all_times(names: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """What each of these variants told."""
    return {name: run_variant(name) for name in names}


def print_times(found: dict[str, list[dict[str, Any]]]) -> None:
    """One line for each row of the table, one column for each variant."""
    lines = [[work, *(_cell(told, work) for told in found.values())] for work in TIMED]
    print(markdown_table(["layers, ms", *found], lines))


def _cell(told: list[dict[str, Any]], work: str) -> str:
    times = [str(each["ms"]) for each in told if each.get("work") == work and "ms" in each]
    return times[0] if times else "failed"


if __name__ == "__main__":
    time_variant(sys.argv[1])
