"""What an engine that is started again is given."""

import msgspec
import numpy as np

from helmrec.serve.replay import AdminCall, Replay


def calls(replay: Replay, max_bytes: int = 1 << 20) -> list[AdminCall]:
    replay.check()
    return [*replay.row_calls(max_bytes), *replay.setting_calls()]


def test_only_the_last_value_of_everything_is_given() -> None:
    replay = Replay(1 << 20)
    assert calls(replay) == []
    for alpha in (0.2, 0.7):
        replay.note_alpha(alpha)
    replay.note_mode("freeze")
    replay.note_rows("item", [3, 5], [[1.0, 2.0], [3.0, 4.0]])
    replay.note_rows("item", np.array([5]), np.array([[7.0, 8.0]]))
    assert [tuple(call) for call in calls(replay)] == [
        ("update_rows", {"table": "item", "ids": [3, 5], "values": [[1.0, 2.0], [7.0, 8.0]]}),
        ("move_alpha", {"alpha": 0.7}),
        ("set_mode", {"mode": "freeze"}),
    ]
    replay.note_swap()
    assert [call.name for call in calls(replay)] == ["move_alpha", "set_mode"]


def test_many_rows_are_given_in_calls_that_fit() -> None:
    replay = Replay(1 << 20)
    values = np.random.default_rng(0).standard_normal((300, 16)).astype(np.float32)
    replay.note_rows("item", range(300), values)
    given = calls(replay, 4_096)
    assert all(len(msgspec.msgpack.encode(call.arguments)) < 5_000 for call in given)
    assert [row for call in given for row in call.arguments["ids"]] == list(range(300))
    told = np.concatenate([np.array(call.arguments["values"]) for call in given])
    np.testing.assert_array_equal(told.astype(np.float32), values)


def test_rows_beyond_the_bound_are_counted_and_those_kept_are_still_renewed() -> None:
    replay = Replay(1_000)  # three rows of 64 bytes, with what keeping them costs
    replay.note_rows("item", range(5), np.zeros((5, 16)))
    assert replay.num_lost == 2
    replay.note_rows("item", [1], np.ones((1, 16)))
    (call,) = calls(replay)
    assert call.arguments["ids"] == [0, 1, 2]
    assert call.arguments["values"][1] == [1.0] * 16
    assert replay.num_lost == 2


def test_a_table_of_which_nothing_could_be_kept_is_no_call() -> None:
    replay = Replay(300)
    replay.note_rows("item", [1], np.zeros((1, 16)))
    replay.note_rows("category", [1, 2], np.zeros((2, 16)))
    replay.note_rows("country", [], np.zeros((0, 16)))
    assert [call.arguments["table"] for call in calls(replay)] == ["item"]
    assert replay.num_lost == 2


def test_rows_belong_to_the_model_that_took_them() -> None:
    replay = Replay(1 << 20)
    replay.note_rows("item", [1], [[1.0]], num_swaps=0)
    replay.note_rows("item", [2], [[2.0]], num_swaps=1)  # the new model serves, the swap has not ended
    assert [call.arguments["ids"] for call in calls(replay)] == [[1]]
    replay.note_swap()
    replay.note_rows("item", [3], [[3.0]], num_swaps=0)  # a late answer of the old model
    assert [call.arguments["ids"] for call in calls(replay)] == [[2]]
    assert replay.note_start() == 0
    assert [call.arguments["ids"] for call in calls(replay)] == [[2]]
    replay.note_rows("item", [4], [[4.0]], num_swaps=0)  # swaps are counted anew in a new engine
    replay.note_rows("item", [5], [[5.0]], num_swaps=1)
    assert replay.note_start() == 1, "the swap did not end: its rows are lost"
    assert [call.arguments["ids"] for call in calls(replay)] == [[2, 4]]


def test_bytes_and_rows_agree_after_any_stream_of_calls() -> None:
    rng = np.random.default_rng(0)
    replay, num_swaps = Replay(3_000), 0
    for _ in range(2_000):
        kind = rng.integers(0, 20)
        if kind == 0:
            replay.note_swap()
            num_swaps += 1
        elif kind == 1:
            replay.note_start()
            num_swaps = 0
        else:
            ids = rng.choice(30, size=rng.integers(0, 4), replace=False)
            swaps = num_swaps + int(rng.integers(-1, 2))
            replay.note_rows(f"table {rng.integers(2)}", ids, rng.normal(size=(ids.size, 16)), max(0, swaps))
        calls(replay)
