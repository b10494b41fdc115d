from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helmrec.errors import ConfigError
from helmrec.router.policy import EmbKVAware
from helmrec.router.settings import StateSettings
from helmrec.router.sketch import RowSketch, build_sketch
from helmrec.router.state import ClusterState, NodeReport, Sent, UserTokens
from tests.router.cases import COST, NUM_BITS, request

SETTINGS = StateSettings(
    kept_from_visit=1, prefix_ttl_s=100, open_ttl_s=5, stale_s=2, max_users=1_000, sketch_bits=NUM_BITS
)


def cluster(*nodes: int, **settings: float) -> ClusterState:
    state = ClusterState(SETTINGS.model_copy(update=settings))
    for node in nodes:
        state.join(node)
    return state


NUMBERS = count(1)


def report(
    node: int, as_of_s: float = 0.0, alpha: float = 0.4, sketch: RowSketch | None = None, **more: object
) -> NodeReport:
    """Newer than all made before it, unless it is given another `sequence`."""
    settings: dict[str, object] = {"queue_ms": 0.0, "num_waiting": 0, "waiting_tokens": 0, "row_hit_rate": 0.7}
    settings |= {"sequence": next(NUMBERS), "pool_tokens": 20_000}
    return NodeReport(node, as_of_s=as_of_s, alpha=alpha, sketch=sketch, **settings | more)  # type: ignore[arg-type]


def test_a_user_is_believed_to_be_where_the_last_request_went() -> None:
    state = cluster(10, 20, 30)
    state.sent(request(user=5, num_tokens=900), 20, 1.0, now_s=1.0)
    assert state.look(5, 1.0).resident_tokens.tolist() == [0, 900, 0]
    assert state.look(6, 1.0).resident_tokens.tolist() == [0, 0, 0]
    state.sent(request(user=5, num_tokens=950), 30, 1.0, now_s=2.0)
    assert state.look(5, 2.0).resident_tokens.tolist() == [0, 900, 950]
    state.check()


def test_beliefs_expire() -> None:
    state = cluster(1)
    state.sent(request(user=5), 1, 1.0, now_s=0.0)
    assert state.look(5, 100.0).resident_tokens.tolist() == [4_000]
    late = state.look(5, 100.1)
    assert (late.resident_tokens.tolist(), late.visits.tolist()) == ([0], [0])


def test_a_prefix_counts_from_the_visit_that_nodes_keep() -> None:
    state = cluster(1, 2, kept_from_visit=2)
    state.sent(request(user=5), 2, 1.0, now_s=0.0)
    once = state.look(5, 1.0)
    assert (once.resident_tokens.tolist(), once.visits.tolist()) == ([0, 0], [0, 1])
    state.sent(request(user=5), 2, 1.0, now_s=1.0)
    assert state.look(5, 1.0).resident_tokens.tolist() == [0, 4_000]


def test_a_node_that_gives_more_of_its_pool_to_rows_is_believed_to_hold_fewer_prefixes() -> None:
    held = {}
    for alpha in (0.2, 0.7):
        state = cluster(1)
        state.report(report(1, alpha=alpha), now_s=0.0)  # room for 16,000 tokens, or for 6,000
        for user in range(4):
            state.sent(request(user, num_tokens=3_000), 1, 1.0, now_s=1.0)
        held[alpha] = [int(state.look(user, 1.0).resident_tokens[0]) for user in range(4)]
    assert held == {0.2: [3_000] * 4, 0.7: [0, 0, 3_000, 3_000]}
    state.report(report(1, as_of_s=1.5, alpha=0.99), now_s=1.5)
    assert [int(state.look(user, 1.5).resident_tokens[0]) for user in range(4)] == [0] * 4, "the boundary moved"


def test_a_node_knows_better_than_a_guess() -> None:
    state = cluster(1, 2)
    state.sent(request(user=5), 1, 1.0, now_s=0.0)
    state.report(report(1, 1.0, users=(UserTokens(5, 0), UserTokens(6, 300))), now_s=1.0)
    assert state.look(5, 1.0).visits.tolist() == [0, 0]
    assert state.look(6, 1.0).resident_tokens.tolist() == [300, 0]
    state.correct(99, UserTokens(5, 1), 1.0)
    state.check()


def test_load_is_what_was_reported_and_what_was_sent_since() -> None:
    state = cluster(1, 2)
    early = state.sent(request(num_tokens=100), 1, 2.0, now_s=0.999)
    state.sent(request(num_tokens=200), 1, 3.0, now_s=1.002)
    state.report(report(1, 1.0, queue_ms=10.0, num_waiting=4, waiting_tokens=400), now_s=1.002)
    seen = state.look(0, 1.002)
    assert seen.queue_ms.tolist() == pytest.approx([10 - 2 + 3, 0.0]), "two milliseconds of it are done"
    assert (seen.num_waiting[0], seen.waiting_tokens[0]) == (5, 600)
    state.finished(early)  # the report has counted it
    assert state.look(0, 1.002).num_waiting.tolist() == [4, 0]
    state.check()


def test_a_queue_shrinks_as_time_goes_by_and_never_below_nothing() -> None:
    state = cluster(1)
    state.report(report(1, 0.0, queue_ms=10.0), now_s=0.0)
    assert [state.look(0, now_s).queue_ms[0] for now_s in (0.0, 0.004, 0.5)] == pytest.approx([10, 6, 0])
    state.sent(request(), 1, 5.0, now_s=1.0)
    assert state.look(0, 1.001).queue_ms[0] == pytest.approx(4), "idle time is not saved up"


def test_without_reports_load_is_what_was_sent_and_did_not_end() -> None:
    state = cluster(1, 2)
    state.report(report(1, 0.0, queue_ms=50.0, num_waiting=20), now_s=0.0)
    sends = [state.sent(request(), node, 2.0, now_s=3.0) for node in (1, 1, 2)]
    seen = state.look(0, 3.0)
    assert not seen.is_fresh.any()
    assert seen.queue_ms.tolist() == [4.0, 2.0]
    state.finished(sends[0])
    assert state.look(0, 3.0).num_waiting.tolist() == [1, 1]


def test_a_send_without_an_end_does_not_count_forever() -> None:
    state = cluster(1)
    for now_s in range(100):
        state.sent(request(), 1, 2.0, float(now_s))
    assert state.look(0, 99.0).num_waiting[0] == 5
    state.check()


def test_reports_go_stale_and_old_ones_do_not_undo_new_ones() -> None:
    state = cluster(1)
    state.report(report(1, 5.0, row_hit_rate=0.3, sequence=8), now_s=5.1)
    state.report(report(1, 5.2, row_hit_rate=0.9, sequence=7), now_s=5.2)
    state.report(report(1, 5.2, row_hit_rate=0.9, sequence=8), now_s=5.2)
    assert state.look(0, 7.0).row_hit_rate.tolist() == [0.3]
    assert state.look(0, 7.0).is_fresh.tolist() == [True]
    assert state.look(0, 7.1).is_fresh.tolist() == [False]


def test_the_newer_report_counts_even_if_the_clock_went_back() -> None:
    state = cluster(1)
    state.report(report(1, 5_000.0, row_hit_rate=0.3, queue_ms=80.0, sequence=1), now_s=5_000.0)
    state.report(report(1, 10.0, row_hit_rate=0.9, sequence=2), now_s=10.0)
    seen = state.look(0, 10.0)
    assert (seen.row_hit_rate.tolist(), seen.queue_ms.tolist(), seen.is_fresh.tolist()) == ([0.9], [0.0], [True])
    assert state.look(0, 12.1).is_fresh.tolist() == [False]
    state.check()


def test_a_request_of_a_former_life_does_not_lighten_the_node_that_came_back() -> None:
    state = cluster(1)
    before = state.sent(request(), 1, 2.0, now_s=0.0)
    state.join(1)
    state.report(report(1, 1.0, queue_ms=9.0, num_waiting=3, sequence=1), now_s=1.0)
    state.finished(before)
    assert state.look(0, 1.0).num_waiting.tolist() == [3]


def test_nodes_come_and_go_with_what_they_held() -> None:
    state = cluster(1, 2, 3)
    for node in (1, 2, 3):
        state.sent(request(user=5), node, 1.0, now_s=0.0)
    state.report(report(3, 0.0, sketch=build_sketch(np.arange(500), NUM_BITS)), now_s=0.0)
    words = state.look(0, 0.0).sketch_words[:, 2].copy()
    state.leave(2)
    seen = state.look(5, 0.0)
    assert (seen.ids.tolist(), seen.visits.tolist()) == ([1, 3], [1, 1])
    assert (seen.sketch_words[:, 1] == words).all()
    state.join(2)
    assert state.look(5, 0.0).visits.tolist() == [1, 1, 0], "it came back empty"
    state.leave(77)
    state.check()


def test_a_sketch_of_another_size_is_not_used() -> None:
    state = cluster(1)
    state.report(report(1, sketch=build_sketch(np.arange(500), 2 * NUM_BITS)), now_s=0.0)
    assert state.look(0, 0.0).sketch_threshold.tolist() == [0]
    with pytest.raises(ConfigError, match="power of two, got 100"):
        ClusterState(StateSettings(sketch_bits=100))


def test_memory_is_bounded_and_those_who_came_long_ago_go_first() -> None:
    state = cluster(1, max_users=3)
    for user in (1, 2, 3, 1, 4):
        state.sent(request(user), 1, 1.0, now_s=0.0)
    assert [int(state.look(user, 0.0).visits[0]) for user in (1, 2, 3, 4)] == [2, 0, 1, 1]
    state.check()


def test_a_user_is_remembered_at_few_nodes_the_latest_ones() -> None:
    state = cluster(1, 2, 3, max_homes=2)
    for node in (1, 2, 1, 3):
        state.sent(request(user=5), node, 1.0, now_s=0.0)
    assert state.look(5, 0.0).visits.tolist() == [2, 0, 1]
    state.check()


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4), st.integers(0, 9)), max_size=60))
def test_whatever_happens_the_books_balance_and_the_living_are_chosen(events: list[tuple[int, int, int]]) -> None:
    state, policy = cluster(0, 1), EmbKVAware(COST)
    open_sends: list[Sent] = []
    alive, now_s = {0, 1}, 0.0
    for kind, node, number in events:
        now_s += number / 4
        if kind == 0:
            state.join(node)
            alive.add(node)
        elif kind == 1:
            state.leave(node)
            alive.discard(node)
        elif kind == 2:
            state.report(report(node, now_s - number / 8, queue_ms=float(number), num_waiting=number), now_s)
        elif kind == 3:
            state.correct(node, UserTokens(number, number * 100 % 300), now_s)
        elif kind == 4 and open_sends:
            state.finished(open_sends.pop(number % len(open_sends)))
        else:
            ask = request(user=number)
            choice = policy.choose(ask, state.look(number, now_s), now_s)
            assert (choice is None) == (not alive)
            if choice is not None:
                assert choice.node in alive
                open_sends.append(state.sent(ask, choice.node, choice.service_ms, now_s))
        state.check()
