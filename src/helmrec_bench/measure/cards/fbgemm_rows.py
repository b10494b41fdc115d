"""FBGEMM's embedding cache for inference, as a reader of rows: the package itself, with its own kernels.

`IntNBitTableBatchedEmbeddingBagsCodegen`: FP16 rows in host memory that the card reads (`uvm_host_mapped`), a cache of
32 ways on the card (`MANAGED_CACHING`), no pooling, no check of bounds. Written for fbgemm-gpu 1.6.0.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from helmrec.types import IntArray

WAYS = 32
_CHUNK = 1 << 20  # rows copied at once


def find_fbgemm(folder: Path | None) -> bool:
    """Whether the package can be imported, from this folder if one is given."""
    if folder is not None:
        sys.path.insert(0, str(folder))
    return find_spec("fbgemm_gpu") is not None


class FbgemmRows:
    """Rows of one table through FBGEMM's cache. It counts hits in a run of its own, since counting takes time."""

    def __init__(self, rows: Tensor, num_slots: int, algorithm: str, steps: IntArray) -> None:
        """algorithm: "LRU" or "LFU". steps: (steps, rows) all that will be read, in order."""
        import_module("fbgemm_gpu")
        ops = import_module("fbgemm_gpu.split_table_batched_embeddings_ops_inference")
        common = import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common")
        fp16 = import_module("fbgemm_gpu.split_embedding_configs").SparseType.FP16
        place = common.EmbeddingLocation.MANAGED_CACHING
        self._op = ops.IntNBitTableBatchedEmbeddingBagsCodegen(
            [("rows", len(rows), rows.shape[1], fp16, place)],
            pooling_mode=common.PoolingMode.NONE,
            device=torch.device("cuda"),
            bounds_check_mode=common.BoundsCheckMode.NONE,
            output_dtype=fp16,
            cache_algorithm=common.CacheAlgorithm[algorithm],
            cache_sets=num_slots // WAYS,
            record_cache_metrics=common.RecordCacheMetrics(True, False),
            uvm_host_mapped=True,
            indices_dtype=torch.int64,
        )
        self._op.initialize_weights()
        weights = self._op.split_embedding_weights()[0][0]
        assert weights.shape == (len(rows), rows.shape[1] * rows.itemsize), "rows are not as wide as the table's"
        for start in range(0, len(rows), _CHUNK):
            weights[start : start + _CHUNK].copy_(rows[start : start + _CHUNK].contiguous().view(torch.uint8))
        self._offsets = torch.arange(steps.shape[1] + 1, device="cuda")
        self._hits_after = self._count_hits(steps)
        self._op.record_cache_metrics = common.RecordCacheMetrics(False, False)
        self._op.reset_cache_states()
        self._num_read = 0

    def _count_hits(self, steps: IntArray) -> list[int]:
        """Return the hits after each number of steps: lookups less the distinct rows that were missed."""
        hits = [0]
        for rows in steps:
            self._op.reset_cache_miss_counter()
            self._look_up(rows)
            hits.append(hits[-1] + rows.size - int(self._op.get_cache_miss_counter()[1]))
        return hits

    @property
    def hits(self) -> int:
        return self._hits_after[self._num_read]

    def read(self, rows: IntArray) -> Tensor:
        self._num_read += 1
        return self._look_up(rows)

    def _look_up(self, rows: IntArray) -> Tensor:
        wanted = torch.from_numpy(rows).pin_memory().to("cuda", non_blocking=True)
        values: Tensor = self._op(wanted, self._offsets)
        return values

    def finish(self) -> None:
        torch.cuda.synchronize()
