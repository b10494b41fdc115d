"""The example trains, exports and serves what it trained; a small log of our own stands in for a public one."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from examples import train_and_stream, train_hstu
from examples.histories import Histories, batches, read_histories
from examples.train_hstu import as_batch, model_config, run

from helmrec import Engine, EngineConfig, RankRequest
from helmrec.model import HstuRanker, save_model

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


def test_a_trained_model_ranks_the_same_with_and_without_caches_and_above_popularity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(histories(tmp_path), num_steps=80, num_users=40, seed=0, folder=tmp_path / "model")
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("training", "serving"))]
    assert said == [
        "training for 80 steps of 128 events",
        "serving 80 requests, with all caches on and with none",
        "serving them over HTTP",
    ]
    cached, plain = result["all caches on"], result["all caches off"]
    assert result["ranks_that_differ"] == 0
    assert (cached["hr_at_10"], cached["ndcg_at_10"]) == (plain["hr_at_10"], plain["ndcg_at_10"])
    assert cached["reused_tokens"] > 0 == plain["reused_tokens"]
    assert plain["row_hit_rate"] < 0.5 < cached["row_hit_rate"]  # without caches: repeats within a request
    over_http = result["over HTTP"]
    assert (over_http["hr_at_10"], over_http["ndcg_at_10"]) == (plain["hr_at_10"], plain["ndcg_at_10"])
    assert over_http["reused_tokens"] > 0
    assert cached["hr_at_10"] > 1.5 * result["popularity"]["hr_at_10"]


def test_what_is_served_is_what_was_trained(tmp_path: Path) -> None:
    """The flat batches of the training and the requests of the engine are two ways to the same logits."""
    data = histories(tmp_path)
    config = model_config(data, window=16)
    ranker = HstuRanker(config, seed=1)
    save_model(tmp_path / "model", ranker)
    examples = next(batches(data, 8, np.random.default_rng(0)))
    items = np.arange(data.num_items)
    with torch.no_grad():
        logits = ranker(as_batch(examples, config.window, np.tile(items, (8, 1)))).view(8, -1).numpy()
    engine = Engine.from_model(tmp_path / "model", EngineConfig(pool_bytes="4MiB"))
    for (history, end), expected in zip(examples, logits, strict=True):
        request = RankRequest(
            user_id=history.user,
            items=history.items[:end],
            actions=history.actions[:end],
            timestamps=history.times[:end],
            candidates=items,
            request_time=int(history.times[end]),
        )
        assert np.abs(engine.rank([request])[0].scores[:, 0] - expected).max() <= 1e-5


def test_held_out_events_are_never_learned_from(tmp_path: Path) -> None:
    data = histories(tmp_path)
    learned = [example for [example] in batches(data, 1, np.random.default_rng(0))]
    assert len(learned) > 500
    assert all(example.end < example.history.items.size - 2 for example in learned)


@pytest.mark.parametrize("example", [train_hstu, train_and_stream])
def test_a_log_that_cannot_be_learned_from_is_one_line(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(tmp_path / "few.dat", num_users=2)
    for name, problem in (("nowhere.dat", "no such file"), ("few.dat", "too few events")):
        monkeypatch.setattr("sys.argv", ["example", "--data", str(tmp_path / name)])
        with pytest.raises(SystemExit, match="2"):
            example.main()
        (line,) = (printed := capsys.readouterr()).err.splitlines()
        assert line.startswith("error: ")
        assert problem in line
        assert name in line
        assert "the first run compiles" in printed.out


@pytest.mark.slow
def test_rows_that_are_trained_on_reach_a_running_server(tmp_path: Path) -> None:
    result = train_and_stream.run(histories(tmp_path), (10, 120), push_every=2, num_users=40, folder=tmp_path)
    assert result["after"]["ndcg_at_10"] > result["before"]["ndcg_at_10"]
    assert result["largest_score_difference_to_the_trainer"] <= 1e-4
    assert result["deltas"] == 60
    assert result["answered_meanwhile"] > 0
    assert result["positions_of_their_answers"] > 1
    assert result["positions_never_went_back"]
