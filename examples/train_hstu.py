"""Train a small HSTU ranker on a public log, export it, serve it, and judge it with caches on and off, and over HTTP.

python -m examples.train_hstu --data ratings.dat --kind movietweetings     # under three minutes on one core
python -m examples.train_hstu --data ml-1m/ratings.dat --kind movielens

Of every user the last two events are held out. The served model ranks all items before each of them, in the order of
time, so that the second request finds the history of the first. Quality is the place of the held-out item among all:
HR@10 and NDCG@10. Then a server does the same: it keeps the histories, and each event is appended over HTTP.
"""

import argparse
import json
import os
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from examples.histories import Example, Histories, batches, histories_or_exit
from examples.served import Judged, place_of, requests_of, serve, serve_over_http
from helmrec import RankRequest
from helmrec.model import EncoderConfig, HstuRanker, ModelConfig, RankBatch, TableConfig, save_model
from helmrec.model.config import ITEM
from helmrec.types import IntArray
from helmrec_bench.lab.provenance import write_measurement

NUM_NEGATIVES = 31
BATCH = 128


def model_config(data: Histories, window: int = 24) -> ModelConfig:
    """In the append-stable form: forward positions, gaps between events, a constant normaliser."""
    return ModelConfig(
        name="trained",
        num_layers=2,
        num_heads=2,
        qk_dim=16,
        v_dim=16,
        dim=32,
        hidden_dim=32,
        normaliser=window,
        window=window,
        max_candidates=data.num_items,
        num_actions=data.num_actions,
        row_dim=32,
        features=(TableConfig(name=ITEM, num_rows=data.num_items),),
        encoders=(EncoderConfig(name="item", tables=(ITEM,)),),
        candidate_encoder=EncoderConfig(name="candidate", tables=(ITEM,)),
    )


def as_batch(examples: Sequence[Example], window: int, candidates: IntArray) -> RankBatch:
    """Lay the last events before each target out flat. candidates: (examples, candidates) items."""
    spans = [(h, slice(max(0, end - window), end)) for h, end in examples]
    return RankBatch(
        events={ITEM: torch.from_numpy(np.concatenate([h.items[span] for h, span in spans]))},
        actions=torch.from_numpy(np.concatenate([h.actions[span] for h, span in spans])),
        timestamps=torch.from_numpy(np.concatenate([h.times[span] for h, span in spans])),
        lengths=torch.tensor([span.stop - span.start for _, span in spans]),
        candidates={ITEM: torch.from_numpy(candidates.ravel())},
        num_candidates=torch.full((len(spans),), candidates.shape[1]),
        request_times=torch.tensor([h.times[end] for h, end in examples]),
    )


def train(data: Histories, config: ModelConfig, num_steps: int, seed: int) -> HstuRanker:
    """Learn to tell the item that came next from others drawn at random."""
    print(f"training for {num_steps:,} steps of {BATCH} events", flush=True)
    rng, ranker = np.random.default_rng(seed), HstuRanker(config, seed)
    optimiser = torch.optim.Adam(ranker.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, num_steps)
    started, recent = time.monotonic(), deque[float](maxlen=100)
    epochs = (batches(data, BATCH, rng) for _ in count())
    for step, examples in enumerate(islice(chain.from_iterable(epochs), num_steps), start=1):
        others = rng.integers(0, data.num_items, (BATCH, NUM_NEGATIVES))
        candidates = np.concatenate([[[example.target] for example in examples], others], axis=1)
        logits = ranker(as_batch(examples, config.window, candidates))
        loss = F.cross_entropy(logits.view(BATCH, -1), torch.zeros(BATCH, dtype=torch.int64))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        recent.append(loss.item())
        if step % 100 == 0:
            print(f"step {step}: loss {np.mean(recent):.3f} after {time.monotonic() - started:.0f} s", flush=True)
    return ranker


def by_popularity(data: Histories, asked: Sequence[tuple[RankRequest, int]]) -> Judged:
    counts = data.popularity()
    ranks = np.array([place_of(target, counts) for _, target in asked])
    return Judged(ranks, np.zeros(len(asked), np.float32), 0.0)


def write_held_out(path: Path, asked: Sequence[tuple[RankRequest, int]]) -> None:
    """Write the requests with labels, for `helmrec model check --precision`."""
    with path.open("w") as file:
        for request, target in asked:
            fields = {name: value for name, value in asdict(request).items() if value is not None}
            whole = {name: each.tolist() if isinstance(each, np.ndarray) else each for name, each in fields.items()}
            labels = [int(item == target) for item in request.candidates]
            file.write(json.dumps({**whole, "labels": labels}) + "\n")


def run(
    data: Histories, num_steps: int, num_users: int, seed: int, folder: Path, held_out: Path | None = None
) -> dict[str, Any]:
    """Train, export to `folder`, serve three times; what came of it."""
    config = model_config(data)
    save_model(folder, train(data, config, num_steps, seed))
    chosen = np.random.default_rng(seed).permutation(len(data.users))[:num_users]
    asked = requests_of([data.users[i] for i in chosen], data.num_items)
    if held_out is not None:
        write_held_out(held_out, asked)
    print(f"serving {len(asked):,} requests, with all caches on and with none", flush=True)
    cached, plain = (serve(folder, asked, with_caches=with_caches) for with_caches in (True, False))
    print("serving them over HTTP", flush=True)
    with tempfile.TemporaryDirectory() as histories:
        over_http = serve_over_http(folder, asked, Path(histories) / "histories")
    return {
        "users": len(data.users),
        "items": data.num_items,
        "requests": len(asked),
        "all caches on": cached.describe(),
        "all caches off": plain.describe(),
        "over HTTP": over_http.describe(),
        "popularity": by_popularity(data, asked).describe(),
        "ranks_that_differ": int(((cached.ranks != plain.ranks) | (over_http.ranks != plain.ranks)).sum()),
        "largest_score_difference": max(
            float(np.abs(each.scores - plain.scores).max()) for each in (cached, over_http)
        ),
    }


def cpu_s() -> float:
    """Of this process and of those it has waited for, such as the server."""
    return sum(os.times()[:4])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the log, as published")
    parser.add_argument(
        "--kind", default="movietweetings", help="movietweetings, movielens, amazon, taobao or kuairand"
    )
    parser.add_argument("--steps", type=int, default=600, help="how long to train, in batches of 128")
    parser.add_argument("--users", type=int, default=300, help="whose held-out events are asked for")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="where to keep the exported model; a new folder")
    parser.add_argument("--held-out", type=Path, help="where to write what is asked, with labels, as JSON lines")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    arguments = parser.parse_args()
    print(f"reading {arguments.data}; the first run compiles, for about a minute in all", flush=True)
    data = histories_or_exit(arguments.kind, arguments.data, BATCH)
    print(f"{len(data.users):,} users, {data.num_items:,} items", flush=True)
    started, cpu = time.perf_counter(), cpu_s()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.model or Path(scratch) / "model"
        result = run(data, arguments.steps, arguments.users, arguments.seed, folder, arguments.held_out)
    result |= {"seconds": round(time.perf_counter() - started), "cpu_seconds": round(cpu_s() - cpu)}
    for name, value in result.items():
        print(f"{name}: {value}")
    if arguments.out is not None:
        write_measurement(
            arguments.out, {"kind": arguments.kind, "steps": arguments.steps, "seed": arguments.seed, **result}
        )


if __name__ == "__main__":
    main()
