"""A fixture in the published format: files laid out as Meta's DLRMv3 training writes them, with made-up weights.

No published weight is in here. `non_sparse.ckpt` is what torch.save makes of a dictionary with the dense weights beside
an optimiser's state; `sparse/` is what torch.distributed.checkpoint makes of three tables, each split by rows in two.

    python -m tests.model.published FOLDER ITEMS    # of the published size, with so many items
"""

import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from helmrec.model.dlrmv3_names import BITS, NUM_UNITS, UNIT_S, CheckpointSizes, published_shapes
from helmrec.types import RankRequest

SMALL = CheckpointSizes(
    num_layers=2,
    dim=16,
    row_dim=12,
    width=16,
    qk_width=12,
    input_hidden=10,
    hidden=14,
    num_tasks=2,
    num_bits=5,
    bit_dim=3,
    num_positions=24,
    num_times=40,
    num_cycles=2,
)
PUBLISHED = CheckpointSizes(
    num_layers=5,
    dim=512,
    row_dim=512,
    width=512,
    qk_width=512,
    input_hidden=256,
    hidden=512,
    num_tasks=1,
    num_bits=5,
    bit_dim=8,
    num_positions=8_192,
    num_times=2_049,
    num_cycles=2,
)
# What Meta's classes fix whatever their configuration; for the golden logits.
GOLDEN = replace(SMALL, hidden=512, bit_dim=8, num_positions=8_192, num_times=2_049)
# Three contextual features, two features besides the item, three tasks, and an output without the time of the query.
WIDE = replace(GOLDEN, num_layers=3, num_tasks=3, num_cycles=0, num_context=3, num_extra=2, num_item_features=3)
WIDE_ROWS = {"item_id": 200, "extra_a": 9, "extra_b": 30, "ctx_user": 30, "ctx_city": 7, "ctx_age": 5}
HEADS = 2
NOW = 1_700_000_000
ROWS = {"item_id": 200, "item_category_id": 9, "user_id": 30}


def dense_weights(sizes: CheckpointSizes, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def made_up(name: str, shape: tuple[int, ...]) -> Tensor:
        spread = 1.0 if len(shape) == 1 else max(1, shape[-1]) ** -0.5
        is_factor = len(shape) == 1 and name.endswith("weight")
        return spread * torch.randn(shape, generator=generator) * 0.5 + (1.0 if is_factor else 0.0)

    weights = {name: made_up(name, shape) for name, shape in published_shapes(sizes).items()}
    weights[BITS] = torch.tensor([1 << i for i in range(sizes.num_bits)])
    if sizes.num_cycles:
        weights[UNIT_S] = torch.tensor([[3_600.0, 86_400.0]])
        weights[NUM_UNITS] = torch.tensor([[24.0, 7.0]])
    return weights


def tables(sizes: CheckpointSizes, seed: int = 1, rows: Mapping[str, int] = ROWS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn((num, sizes.row_dim), generator=generator).half() for name, num in rows.items()}


def write_dense(path: Path, weights: Mapping[str, Tensor]) -> None:
    """With parameters as parameters, an ordered dictionary's worth of other things, and a set, as the original has."""
    dense: dict[str, Any] = {
        name: torch.nn.Parameter(value) if value.is_floating_point() else value for name, value in weights.items()
    }
    others = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.zeros(4)}}, "param_groups": [{"lr": 1e-3}]}
    saved = {
        "dense_dict": dense,
        "optimizer_dict": others,
        "class_metrics": {"train": [], "eval": []},
        "reg_metrics": {"train": [], "eval": []},
        "global_step": {"train": 7},
        "sparse_tensor_keys": {"_embedding_collection.embeddings.item_id.weight"},
    }
    torch.save(saved, path)


def write_tables(folder: Path, values: Mapping[str, Tensor]) -> None:
    """Each table in two shards, the first of them two thirds of its rows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what torch says about itself
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        try:
            tables = {f"_embedding_collection.embeddings.{name}.weight": _sharded(v) for name, v in values.items()}
            save_sharded({"sparse_dict": tables}, storage_writer=FileSystemWriter(folder))
        finally:
            dist.destroy_process_group()


def _sharded(table: Tensor) -> Any:
    split = 2 * len(table) // 3
    shards = [
        Shard.from_tensor_and_offsets(part.clone(), [start, 0], rank=0)
        for start, part in ((0, table[:split]), (split, table[split:]))
    ]
    return init_from_local_shards(shards, *table.shape)


def write_published(folder: Path, sizes: CheckpointSizes = SMALL, rows: Mapping[str, int] = ROWS) -> None:
    """The two parts, as they lie in one folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_dense(folder / "non_sparse.ckpt", dense_weights(sizes))
    write_tables(folder / "sparse", tables(sizes, rows=rows))


def wide_query(rng: np.random.Generator, user: int, num: int, num_candidates: int) -> RankRequest:
    """A request for a model of the sizes WIDE, soon after time 0: the original clamps ages at the width of a token."""
    times = np.cumsum(rng.integers(0, 100, num))
    extra, context = (("extra_a", "extra_b"), ("ctx_user", "ctx_city", "ctx_age"))
    return random_query(
        rng,
        user,
        num,
        num_candidates,
        features={name: rng.integers(0, WIDE_ROWS[name], num) for name in extra},
        candidate_features={name: rng.integers(0, WIDE_ROWS[name], num_candidates) for name in extra},
        context={name: int(rng.integers(0, WIDE_ROWS[name])) for name in context},
        timestamps=times,
        request_time=int(times[-1]) + 500,
    )


def random_query(rng: np.random.Generator, user: int, num: int, num_candidates: int, **overrides: Any) -> RankRequest:
    """A request that models of this format take; `overrides` replace whole fields."""
    times = NOW + np.cumsum(rng.integers(0, 4_000, num))
    fields: dict[str, Any] = {
        "user_id": user,
        "items": rng.integers(0, ROWS["item_id"], num),
        "actions": rng.integers(0, 32, num),
        "timestamps": times,
        "candidates": rng.integers(0, ROWS["item_id"], num_candidates),
        "features": {"category": rng.integers(0, ROWS["item_category_id"], num)},
        "candidate_features": {"category": rng.integers(0, ROWS["item_category_id"], num_candidates)},
        "context": {"user": user % ROWS["user_id"]},
        "request_time": int(times[-1]) + int(rng.integers(0, 9_000)) if num else NOW,
    }
    return RankRequest(**fields | overrides)


if __name__ == "__main__":
    num_items = int(sys.argv[2])
    sizes = {"item_id": num_items, "item_category_id": 128, "user_id": max(1, num_items // 100)}
    write_published(Path(sys.argv[1]), PUBLISHED, sizes)
