"""The example trains, exports and serves what it trained; a small log of our own stands in for a public one."""

from pathlib import Path

import numpy as np
import torch
from examples.histories import Batch, Histories, History, batches, read_histories
from examples.learner import Learner
from examples.train_hstu import model_config, run

from helmrec import Engine, EngineConfig, RankRequest
from helmrec.model.weights import save_model

GROUPS, PER_GROUP = 2, 20


def write_log(path: Path, num_users: int = 150) -> None:
    """Every user rates items of one group only, in the format of MovieTweetings."""
    rng, lines = np.random.default_rng(0), []
    for user in range(num_users):
        items = user % GROUPS * PER_GROUP + rng.integers(0, PER_GROUP, rng.integers(8, 14))
        times = 1_600_000_000 + np.sort(rng.integers(0, 10**7, items.size))
        lines += [f"{user}::{item:05}::{rng.integers(1, 11)}::{time}" for item, time in zip(items, times, strict=True)]
    path.write_text("\n".join(lines) + "\n")


def histories(tmp_path: Path) -> Histories:
    write_log(tmp_path / "ratings.dat")
    return read_histories("movietweetings", tmp_path / "ratings.dat", min_ratings=5)


def test_a_trained_model_ranks_the_same_with_and_without_caches_and_above_popularity(tmp_path: Path) -> None:
    result = run(histories(tmp_path), num_steps=80, num_users=40, seed=0, folder=tmp_path / "model")
    cached, plain = result["all caches on"], result["all caches off"]
    assert result["ranks_that_differ"] == 0
    assert (cached["hr_at_10"], cached["ndcg_at_10"]) == (plain["hr_at_10"], plain["ndcg_at_10"])
    assert cached["reused_tokens"] > 0 == plain["reused_tokens"]
    assert cached["row_hit_rate"] > 0.5
    assert plain["row_hit_rate"] == 0
    assert cached["hr_at_10"] > 1.5 * result["popularity"]["hr_at_10"]


def test_what_is_served_is_what_was_trained(tmp_path: Path) -> None:
    """The learner's padded arithmetic and the engine's paged one are two ways to the same logits."""
    data = histories(tmp_path)
    config = model_config(data, window=16)
    learner = Learner(config, seed=1)
    save_model(tmp_path / "model", config, learner.dense(), learner.tables())
    batch = next(batches(data, config.window, config.time_buckets, 8, np.random.default_rng(0)))
    candidates = torch.arange(data.num_items).expand(8, -1)
    with torch.no_grad():
        logits = learner(batch, candidates).numpy()
    engine = Engine.from_model(tmp_path / "model", EngineConfig(pool_bytes="4MiB"))
    for i in range(8):
        seen = batch.items[i, : batch.lengths[i]].tolist()
        history = next(h for h in data.users if is_example_of(h, batch, i))
        request = RankRequest(
            user_id=history.user,
            items=history.items[: len(seen)],
            actions=history.actions[: len(seen)],
            timestamps=history.times[: len(seen)],
            candidates=np.arange(data.num_items),
            request_time=int(history.times[len(seen)]),
        )
        assert np.abs(engine.rank([request])[0].scores[:, 0] - logits[i]).max() <= 1e-4


def is_example_of(history: History, batch: Batch, i: int) -> bool:
    num = int(batch.lengths[i])
    return (
        history.items[: num + 1].tolist() == [*batch.items[i, :num].tolist(), int(batch.target[i])]
        and history.actions[:num].tolist() == batch.actions[i, :num].tolist()
        and history.gaps(64)[: num + 1].tolist() == [*batch.gaps[i, :num].tolist(), int(batch.target_gap[i])]
    )


def test_held_out_events_are_never_learned_from(tmp_path: Path) -> None:
    data = histories(tmp_path)
    learned = {
        (tuple(batch.items[i, : batch.lengths[i]].tolist()), int(batch.target[i]))
        for batch in batches(data, 32, 64, 1, np.random.default_rng(0))
        for i in range(1)
    }
    for history in data.users:
        for end in range(history.items.size - 2, history.items.size):
            assert (tuple(history.items[:end].tolist()), int(history.items[end])) not in learned
    assert len(learned) > 500
