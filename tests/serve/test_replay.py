"""What an engine that is started again is told."""

import msgspec
import numpy as np

from helmrec.serve.replay import Replay


def test_only_the_last_value_of_everything_is_told() -> None:
    replay = Replay(1 << 20)
    assert list(replay.calls(1_000)) == []
    for alpha in (0.2, 0.7):
        replay.note_alpha(alpha)
    replay.note_mode("freeze")
    replay.note_rows("item", [3, 5], [[1.0, 2.0], [3.0, 4.0]])
    replay.note_rows("item", np.array([5]), np.array([[7.0, 8.0]]))
    assert [tuple(call) for call in replay.calls(1_000)] == [
        ("move_alpha", {"alpha": 0.7}),
        ("set_mode", {"mode": "freeze"}),
        ("update_rows", {"table": "item", "ids": [3, 5], "values": [[1.0, 2.0], [7.0, 8.0]]}),
    ]
    replay.forget_rows()
    assert [call.name for call in replay.calls(1_000)] == ["move_alpha", "set_mode"]


def test_many_rows_are_told_in_calls_that_fit() -> None:
    replay = Replay(1 << 20)
    values = np.random.default_rng(0).standard_normal((300, 16)).astype(np.float32)
    replay.note_rows("item", range(300), values)
    calls = list(replay.calls(4_096))
    assert all(len(msgspec.msgpack.encode(call.arguments)) < 5_000 for call in calls)
    assert [row for call in calls for row in call.arguments["ids"]] == list(range(300))
    told = np.concatenate([np.array(call.arguments["values"]) for call in calls])
    np.testing.assert_array_equal(told.astype(np.float32), values)


def test_rows_beyond_the_bound_are_counted_and_those_kept_are_still_renewed() -> None:
    replay = Replay(1_000)  # three rows of 64 bytes, with what keeping them costs
    replay.note_rows("item", range(5), np.zeros((5, 16)))
    assert replay.num_lost == 2
    replay.note_rows("item", [1], np.ones((1, 16)))
    (call,) = replay.calls(1 << 20)
    assert call.arguments["ids"] == [0, 1, 2]
    assert call.arguments["values"][1] == [1.0] * 16
    assert replay.num_lost == 2
