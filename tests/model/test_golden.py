"""Layers against golden vectors: our own (float64 reference), and any further folder of the same format.

Set HELMREC_GOLDEN to a folder of safetensors files, for instance vectors made by another implementation.
"""

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from helmrec.kernels import plain
from helmrec.kernels.layer import Form, LayerShape, LayerWeights
from helmrec.kernels.ragged import RaggedBatch

OWN = Path(__file__).parent.parent / "data"
FOLDERS = [OWN, *(Path(p) for p in [os.environ.get("HELMREC_GOLDEN")] if p)]
FILES = [path for folder in FOLDERS for path in sorted(folder.glob("*.safetensors"))]
PAGE_TOKENS = 4


def _ragged(lengths: Tensor, num_candidates: Tensor, num_cached: int) -> RaggedBatch:
    """Each sequence in its own run of pages, nothing resident."""
    new = lengths - num_candidates
    max_pages = int(-(-new.max() // PAGE_TOKENS)) + num_cached
    table = torch.arange(len(lengths) * max_pages, dtype=torch.int32).reshape(len(lengths), max_pages)
    slots = []
    for i, (length, kept) in enumerate(zip(lengths.tolist(), new.tolist(), strict=True)):
        own = table[i, 0].item() * PAGE_TOKENS + torch.arange(kept)
        slots.append(torch.cat([own, torch.full((length - kept,), -1)]))
    bounds = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()
    return RaggedBatch(bounds, torch.zeros_like(new).int(), new.int(), table, torch.cat(slots), 0, PAGE_TOKENS)


def _run(tensors: dict[str, Tensor], case: dict[str, int], form: Form) -> Tensor:
    batch = _ragged(tensors["lengths"], tensors["num_candidates"], num_cached=1)
    num_pages, heads = batch.page_table.numel(), case["num_heads"]
    x = tensors["x"]
    for i in range(case["num_layers"]):
        get = {name.replace(f"layers.{i}._", f"layers.{i}."): value for name, value in tensors.items()}
        names = [field.name for field in fields(LayerWeights) if f"layers.{i}.{field.name}" in get]
        given: dict[str, Any] = {name: get[f"layers.{i}.{name}"] for name in names}
        weights = LayerWeights(**given)
        k_pages = torch.full((num_pages, PAGE_TOKENS, heads, case["qk_dim"]), torch.nan, dtype=x.dtype)
        v_pages = torch.full((num_pages, PAGE_TOKENS, heads, case["v_dim"]), torch.nan, dtype=x.dtype)
        shape = LayerShape(form, heads, case["qk_dim"] ** -0.5, float(case["normaliser"]))
        x = plain.run_layer(x, weights, shape, k_pages, v_pages, batch)
    return x


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_layers_reproduce_golden_vectors(path: Path, dtype: torch.dtype) -> None:
    with safe_open(path, framework="pt") as file:
        case = json.loads(file.metadata()["case"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    cast = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    got = _run(cast, case, case["output_form"])
    scale = tensors["y"].abs().max().clamp(min=1)
    assert ((got.double() - tensors["y"]).abs().max() / scale).item() <= 1e-5
