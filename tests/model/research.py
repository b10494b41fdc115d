"""Made-up weights of Meta's research HSTU by their published names, and requests; no published weight is in here."""

import numpy as np
import torch
from torch import Tensor

from helmrec.types import RankRequest

NUM_LAYERS, HEADS, QK, V, DIM = 3, 2, 5, 6, 16
NUM_ITEMS, MAX_EVENTS, MAX_OUTPUTS, NUM_BUCKETS = 80, 24, 3, 128
LENGTH = MAX_EVENTS + MAX_OUTPUTS  # of the padded sequence, which attention is divided by
LAYERS = "_hstu._attention_layers."
# Events and, once more in the second half, the same users with one event more.
LENGTHS = (1, 2, 9, 23, 24)


def shapes() -> dict[str, tuple[int, ...]]:
    layer: dict[str, tuple[int, ...]] = {
        "_uvqk": (DIM, 2 * HEADS * (QK + V)),
        "_o.weight": (DIM, HEADS * V),
        "_o.bias": (DIM,),
        "_rel_attn_bias._ts_w": (NUM_BUCKETS + 1,),
        "_rel_attn_bias._pos_w": (2 * LENGTH - 1,),
    }
    return {
        "_embedding_module._item_emb.weight": (NUM_ITEMS + 1, DIM),
        "_input_features_preproc._pos_emb.weight": (LENGTH, DIM),
        **{f"{LAYERS}{i}.{name}": shape for i in range(NUM_LAYERS) for name, shape in layer.items()},
    }


def weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made_up = {
        name: torch.randn(shape, generator=generator) * (0.5 if len(shape) == 1 else shape[-1] ** -0.5)
        for name, shape in shapes().items()
    }
    made_up["_embedding_module._item_emb.weight"][0] = 0.0  # the padding row
    return made_up


def request(rng: np.random.Generator, user: int, num_events: int) -> RankRequest:
    times = 1_000_000_000 + np.cumsum(2 ** rng.integers(0, 22, num_events))
    return RankRequest(
        user_id=user,
        items=rng.integers(1, NUM_ITEMS + 1, num_events),
        actions=np.zeros(num_events, np.int64),
        timestamps=times,
        candidates=rng.integers(1, NUM_ITEMS + 1, 6),
        request_time=int(times[-1]) + int(rng.integers(0, 10**6)),
    )
