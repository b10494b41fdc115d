"""Train on while a server answers: new rows reach it as they are trained, and its ranking gets better.

python -m examples.train_and_stream --data ratings.dat --kind movietweetings     # a few minutes on two cores

A small HSTU is trained for a while, exported and served. Then the training goes on with the embedding rows alone, which
are what changes most, and pushes the rows it has changed every few steps (`DeltaProducer`, three lines of the loop).
The server follows them while clients ask it without a pause. HR@10 and NDCG@10 of held-out events, as the server ranks
them, are measured before and after; afterwards every score is compared with that of the module in the trainer.
"""

import argparse
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import chain, count, cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from examples.histories import Histories, batches, histories_or_exit
from examples.served import Judged, place_of, requests_of
from examples.train_hstu import BATCH, NUM_NEGATIVES, as_batch, model_config, train
from helmrec import Client, DeltaProducer, RankRequest
from helmrec.model import HstuRanker, save_model
from helmrec.model.config import ITEM
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.measure.server import ServerProcess

Asked = Sequence[tuple[RankRequest, int]]


def train_on(ranker: HstuRanker, data: Histories, producer: DeltaProducer, num_steps: int, push_every: int) -> None:
    """Train the rows of items alone, and push those that have changed."""
    rng, rows = np.random.default_rng(1), dict(ranker.named_parameters())[f"tables.{ITEM}.rows"]
    for weight in ranker.parameters():
        weight.requires_grad_(weight is rows)
    optimiser = torch.optim.Adagrad([rows], lr=0.06)  # it leaves rows as they are that a batch does not read
    touched = torch.zeros(0, dtype=torch.int64)
    epochs = (batches(data, BATCH, rng) for _ in count())
    for step, examples in enumerate(islice(chain.from_iterable(epochs), num_steps), start=1):
        others = rng.integers(0, data.num_items, (BATCH, NUM_NEGATIVES))
        candidates = np.concatenate([[[example.target] for example in examples], others], axis=1)
        batch = as_batch(examples, ranker.config.window, candidates)
        loss = F.cross_entropy(ranker(batch).view(BATCH, -1), torch.zeros(BATCH, dtype=torch.int64))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        touched = torch.unique(torch.cat([touched, batch.events[ITEM], batch.candidates[ITEM]]))
        if step % push_every == 0 or step == num_steps:
            producer.push(ITEM, touched, rows[touched], step=step)
            touched = touched[:0]


class Clients:
    """Asks the server one request after the other, in a thread of its own, until it is closed."""

    def __init__(self, url: str, asked: Asked) -> None:
        self._url, self._asked, self._is_over = url, asked, threading.Event()
        self.positions: list[int] = []  # of the rows of each answer
        self.latencies_ms: list[float] = []
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        with Client(self._url) as client:
            for request, _ in cycle(self._asked):
                if self._is_over.is_set():
                    return
                started_s = time.perf_counter()
                answer = client.rank(request)
                self.latencies_ms.append((time.perf_counter() - started_s) * 1e3)
                self.positions.append(answer.row_position.sequence)

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()


def ask_all(url: str, asked: Asked) -> tuple[Judged, NDArray[np.float32]]:
    """How the server ranks the held-out items, and all scores, (requests, items)."""
    started_s, scores, reused = time.perf_counter(), [], 0
    with Client(url) as client:
        for request, _ in asked:
            answer = client.rank(request)
            scores.append(answer.scores[:, 0])
            reused += answer.reused_tokens
    ranks = np.array([place_of(target, own) for (_, target), own in zip(asked, scores, strict=True)])
    every = np.stack(scores)
    return Judged(ranks, every[:, 0], time.perf_counter() - started_s, reused), every


def wait_for_rows(url: str, sequence: int) -> float:
    """Wait until the server has this delta; seconds."""
    started_s = time.perf_counter()
    with Client(url) as client:
        while (stream := client.row_stream()) is None or stream.position < sequence:
            assert stream is None or stream.stop is None, stream
            time.sleep(0.01)
    return time.perf_counter() - started_s


def scores_of(ranker: HstuRanker, asked: Asked) -> NDArray[np.float32]:  # (requests, items)
    """What the module in the trainer says to the same requests."""
    with torch.no_grad():
        return np.stack([ranker([request])[:, 0].numpy() for request, _ in asked])


def quality(judged: Judged) -> dict[str, float]:
    return {name: judged.describe()[name] for name in ("hr_at_10", "ndcg_at_10")}


def run(data: Histories, steps: tuple[int, int], push_every: int, num_users: int, folder: Path) -> dict[str, Any]:
    """Train `steps[0]` steps, serve, train `steps[1]` more and stream; what came of it."""
    ranker = train(data, model_config(data), steps[0], seed=0)
    save_model(folder / "model", ranker)
    chosen = np.random.default_rng(0).permutation(len(data.users))[:num_users]
    asked = requests_of([data.users[i] for i in chosen], data.num_items)
    with DeltaProducer(str(folder / "deltas")) as producer:
        settings = {"pool_bytes": "32MiB", "alpha": 0.1, "kv_admission": "always", "row_deltas": folder / "deltas"}
        print("starting a server", flush=True)
        server = ServerProcess.of_model(folder / "model", settings)
        try:
            before, _ = ask_all(server.url, asked)
            clients, started_s = Clients(server.url, asked), time.perf_counter()
            try:
                train_on(ranker, data, producer, steps[1], push_every)
                trained_s = time.perf_counter() - started_s
                lag_s = wait_for_rows(server.url, producer.newest)
            finally:
                clients.close()
            after, scores = ask_all(server.url, asked)
            rows = server.stats().row_stream
        finally:
            server.end()
    assert rows is not None
    seen = np.array(clients.positions)
    return {
        "requests": len(asked),
        "before": quality(before),
        "after": quality(after),
        "largest_score_difference_to_the_trainer": float(np.abs(scores - scores_of(ranker, asked)).max()),
        "deltas": rows.deltas,
        "rows": rows.rows,
        "rows_per_s": round(rows.rows / trained_s),
        "s_until_the_last_rows_were_visible": round(lag_s, 3),
        "answered_meanwhile": seen.size,
        "positions_of_their_answers": len(set(clients.positions)),
        "positions_never_went_back": bool((np.diff(seen) >= 0).all()),
        "p50_ms_meanwhile": round(float(np.median(clients.latencies_ms)), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the log, as published")
    parser.add_argument("--kind", default="movietweetings", help="movietweetings, movielens, amazon, taobao, kuairand")
    parser.add_argument("--steps", type=int, nargs=2, default=(150, 450), help="before and while it is served")
    parser.add_argument("--push-every", type=int, default=5, help="steps between two deltas")
    parser.add_argument("--users", type=int, default=300, help="whose held-out events are asked for")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    arguments = parser.parse_args()
    print(f"reading {arguments.data}; the first run compiles, for about a minute in all", flush=True)
    data = histories_or_exit(arguments.kind, arguments.data, BATCH)
    print(f"{len(data.users):,} users, {data.num_items:,} items", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        result = run(data, tuple(arguments.steps), arguments.push_every, arguments.users, Path(scratch))
    for name, value in result.items():
        print(f"{name}: {value}")
    if arguments.out is not None:
        write_measurement(arguments.out, {"kind": arguments.kind, "steps": arguments.steps, **result})


if __name__ == "__main__":
    main()
