"""A signal ahead of a rank, and the rank itself, go to one node; and to one other node if that one is lost."""

from helmrec.router.policy import EmbKVAware
from helmrec.router.settings import StateSettings
from helmrec.router.state import ClusterState
from tests.router.cases import COST, NUM_BITS, request

NODES = tuple(range(8))


def cluster() -> ClusterState:
    """Nodes that keep prefixes from the second visit on."""
    state = ClusterState(StateSettings(sketch_bits=NUM_BITS))
    for node in NODES:
        state.join(node)
    return state


def send(state: ClusterState, user: int, now_s: float) -> int:
    """Route what a user sends, signal or rank: both are chosen for in the same way."""
    asked = request(user=user, num_tokens=8_000)
    choice = EmbKVAware(COST).choose(asked, state.look(user, now_s), now_s)
    assert choice is not None
    state.finished(state.sent(asked, choice.node, choice.service_ms, now_s))
    return choice.node


def test_the_rank_follows_its_signal_though_other_users_came_in_between() -> None:
    state, signalled = cluster(), {}
    for user in range(200):
        signalled[user] = send(state, user, now_s=user * 1e-3)
    assert set(signalled.values()) == set(NODES), "signals are spread"
    assert all(send(state, user, now_s=0.3 + user * 1e-3) == node for user, node in signalled.items())


def test_if_the_signals_node_is_lost_the_rank_and_the_next_signal_go_to_one_other_node() -> None:
    state = cluster()
    signalled = {user: send(state, user, now_s=0.0) for user in range(100)}
    state.leave(3)
    moved = {user: send(state, user, now_s=0.1) for user in signalled}
    assert 3 not in moved.values()
    assert all(moved[user] == node for user, node in signalled.items() if node != 3), "others stay where they were"
    orphans = [user for user, node in signalled.items() if node == 3]
    assert len(orphans) > 3
    assert all(send(state, user, now_s=0.2) == moved[user] for user in orphans)
    state.join(3)
    assert all(send(state, user, now_s=0.3) == moved[user] for user in orphans), "it came back with nothing"
