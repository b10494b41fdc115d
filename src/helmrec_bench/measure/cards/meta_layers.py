"""Times of the layers of Meta's own `generative_recommenders` over rows of our table, with its Triton kernels.

The package comes from a folder that `generative_recommenders` lies in. Layers (`STULayer`: concat form, bfloat16, no
gradients) run eagerly, as its users run them, and as a CUDA graph where they can be captured. They have our weights,
and what they add to their input is compared with what ours add. Rows with resident tokens run `cached_forward`, which
needs `fbgemm_gpu`. Written for commit db1bf8f.
"""

import subprocess
import sys
import time
from argparse import ArgumentParser
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from helmrec.kernels.kv_rounding import Pages
from helmrec.model.precision import FULL_PRECISION
from helmrec.model.profiles import profile
from helmrec_bench.measure.cards.apart import run_apart, tell
from helmrec_bench.measure.cards.kernels import ROWS, KernelRow, times_ms
from helmrec_bench.measure.cards.layer_variants import TIMED, LayerRun, graph_ms

COMPILE_S, TIME_S = 150, 150
_OPS = "generative_recommenders.ops.triton"
_SELECT = "torchrec.modules.sorted_index_select"  # of a function that is imported beside layers and never called


def import_layers(folder: Path) -> ModuleType:
    """Import Meta's layers from this folder, without torchrec if it is not installed."""
    sys.path.insert(0, str(folder))
    if find_spec("torchrec") is None:
        for name in ("torchrec", "torchrec.modules", _SELECT):
            sys.modules[name] = ModuleType(name)
        sys.modules[_SELECT].maybe_sorted_index_select = None  # type: ignore[attr-defined]
    if find_spec("fbgemm_gpu") is not None:
        import_module("fbgemm_gpu")
    # Tune attention for every length. By default the first length tunes for all.
    import_module("generative_recommenders.common").set_use_runtime_max_seq_len(True)
    return import_module("generative_recommenders.modules.stu")


def same_with_descriptors() -> bool:
    """Whether attention gives the same with TMA descriptors of Q, K and V, inside a joined projection, and without.

    The descriptors describe contiguous tensors.
    """
    attention = import_module(f"{_OPS}.triton_hstu_attention")
    names = vars(attention)
    if not names["_should_enable_tma"]():
        return False
    kernel = names["_hstu_attn_fwd"]
    kernel.configs = kernel.configs[-1:]
    width = 4 * 128
    u, v, q, k = torch.randn((600, 4 * width), device="cuda").to(torch.bfloat16).split([width] * 4, dim=1)
    del u
    starts, candidates = (torch.tensor(each, device="cuda") for each in ([0, 400, 600], [16, 16]))
    outs = []
    for with_descriptors in (False, True):
        kernel.cache.clear()
        q4, k4, v4 = (each.unflatten(1, (4, 128)) for each in (q, k, v))
        settings: dict[str, Any] = {"max_attn_len": 0, "contextual_seq_len": 0, "sort_by_length_indices": None}
        settings |= {"N": 400, "alpha": 0.1, "q": q4, "k": k4, "v": v4, "enable_tma": with_descriptors}
        settings |= {"seq_offsets": starts, "num_targets": candidates, "num_softmax_heads": 0}
        outs.append(attention.triton_hstu_attention_fwd(**settings).float())
    return bool((outs[0] - outs[1]).norm() < 0.02 * outs[0].norm())


def leave_out_descriptors() -> None:
    vars(import_module(f"{_OPS}.triton_hstu_preprocess_and_attention"))["_should_enable_tma"] = lambda: False


class MetaRun:
    """Meta's layers of one row of the table, and ours with the same weights, input and resident K/V."""

    def __init__(self, row: KernelRow, layers: ModuleType, kernel: str = "TRITON") -> None:
        """layers: Meta's module of them. kernel: "TRITON" or "PYTORCH"."""
        config = profile(row.profile, 1_000)
        lengths = [s.resident + s.new + s.candidates for s in row.sequences]
        self.longest, self.has_resident = max(lengths), any(s.resident for s in row.sequences)
        self.ours = LayerRun(row, FULL_PRECISION, float(self.longest))  # Meta's layers divide by the longest
        self.ours.weights = [replace(each, output_bias=None) for each in self.ours.weights]  # Meta's have none
        device, heads = self.ours.x.device, config.num_heads
        live = [s.new + s.candidates for s in row.sequences]
        self._lengths = torch.tensor(live, device=device)
        self._starts = torch.tensor([0, *live], device=device).cumsum(0)
        self._candidates = torch.tensor([s.candidates for s in row.sequences], device=device)
        shape = layers.STULayerConfig(config.dim, heads, hidden_dim=config.v_dim, attention_dim=config.qk_dim)
        stack = [layers.STULayer(shape) for _ in range(config.num_layers)]
        for layer, weights in zip(stack, self.ours.weights, strict=True):
            taken = {
                "_uvqk_weight": weights.uvqk_weight, "_uvqk_beta": weights.uvqk_beta,
                "_input_norm_weight": weights.input_norm_weight, "_input_norm_bias": weights.input_norm_bias,
                "_output_weight": weights.output_weight, "_output_norm_weight": weights.output_norm_weight,
                "_output_norm_bias": weights.output_norm_bias,
            }  # fmt: skip
            layer.load_state_dict(taken, assign=True)
        self._stack = layers.STUStack(stack).eval()
        kernels = import_module("generative_recommenders.common").HammerKernel
        self._stack.set_hammer_kernel(kernels[kernel])
        if self.has_resident:
            self._keep_resident(stack, [s.resident for s in row.sequences])

    def _keep_resident(self, stack: list[Any], resident: list[int]) -> None:
        """Give Meta's layers the resident K/V that our pages hold."""
        table, starts = self.ours.batch.page_table, torch.tensor([0, *resident]).cumsum(0)
        for i, layer in enumerate(stack):
            layer.k_cache, layer.v_cache = (self._resident(each, i, table, resident) for each in self.ours.pages)
            layer.kv_caching_offsets, layer.max_kv_caching_len = starts.to(self.ours.x.device), max(resident)

    @staticmethod
    def _resident(pages: Pages, layer: int, table: Tensor, resident: list[int]) -> Tensor:  # (tokens, heads * dim)
        assert isinstance(pages, Tensor)
        rows = zip(table.tolist(), resident, strict=True)
        return torch.cat([pages[layer, of].flatten(0, 1).flatten(1)[:num] for of, num in rows])

    @torch.no_grad()
    def run(self) -> Tensor:
        if self.has_resident:
            out: Tensor = self._stack.cached_forward(self.ours.x, self._candidates)
        else:
            out = self._stack(self.ours.x, self._lengths, self._starts, self.longest, self._candidates)
        return out

    def difference(self) -> float:
        """Relative difference between what Meta's layers and ours add to the input."""
        x = self.ours.x.float()
        ours, theirs = self.ours.run().float() - x, self.run().float() - x
        return float((theirs - ours).norm() / ours.norm())


def time_rows(rows: list[KernelRow], layers: ModuleType) -> None:
    """Time rows one after another, then again as graphs; a line for each figure, as soon as it is known."""
    runs = {}
    for row in rows:
        if any(s.resident for s in row.sequences) and find_spec("fbgemm_gpu") is None:
            tell(work=row.name, left_out="layers over resident tokens need fbgemm_gpu")
            continue
        runs[row.name] = run = MetaRun(row, layers)
        tell(work=row.name, difference=round(run.difference(), 4))
        tell(work=row.name, eager_ms=round(median(times_ms(run.run)), 4))
    for name, run in runs.items():
        if not run.has_resident:  # layers over resident tokens wait for the card, which a graph cannot
            tell(work=name, graph_ms=round(graph_ms(run.run), 4))


def meta_times(folder: Path) -> dict[str, dict[str, Any]]:
    """What is known of every row: compile all rows side by side, then time them one after another."""
    command = [sys.executable, "-m", __name__, str(folder)]
    checked = run_apart([*command, "--check-descriptors"], COMPILE_S)
    said = next((each for each in checked if "descriptors" in each), {"descriptors": False})
    settings = [] if said["descriptors"] else ["--without-descriptors"]
    known = [row.name for row in ROWS if row.name in TIMED]
    compiling = [
        subprocess.Popen([*command, *settings, "--compile", "--rows", name], stdout=subprocess.DEVNULL)
        for name in known
    ]
    deadline_s = time.monotonic() + COMPILE_S
    for process in compiling:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0, deadline_s - time.monotonic()))
        process.kill()  # what it has compiled stays
    found: dict[str, dict[str, Any]] = {name: {"descriptors": said["descriptors"]} for name in known}
    for told in run_apart([*command, *settings], TIME_S):
        print(f"Meta's layers: {told}", flush=True)
        if told.get("work") in found:
            found[told.pop("work")].update(told)
    return found


def run_command() -> None:
    parser = ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", nargs="+", default=TIMED)
    parser.add_argument("--check-descriptors", action="store_true")
    parser.add_argument("--without-descriptors", action="store_true")
    parser.add_argument("--compile", action="store_true", help="fill the compiler's cache, time nothing")
    flags = parser.parse_args()
    layers = import_layers(flags.folder)
    if flags.check_descriptors:
        tell(descriptors=same_with_descriptors())
        return
    if flags.without_descriptors:
        leave_out_descriptors()
    rows = [row for row in ROWS if row.name in flags.rows]
    if not flags.compile:
        time_rows(rows, layers)
        return
    for row in rows:
        MetaRun(row, layers).run()


if __name__ == "__main__":
    run_command()
