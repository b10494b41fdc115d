import numpy as np
import pytest

from helmrec.errors import ConfigError
from helmrec.router.nodes import Nodes
from helmrec.router.policy import RoutingPolicy
from helmrec.router.sketch import sample_rows
from helmrec_bench.baselines.routers import (
    DynamoStyle,
    EmbAware,
    KVAware,
    LeastLoaded,
    PowerOfTwo,
    RandomNode,
    SessionHash,
)
from tests.router.cases import COST, fresh_nodes, holding, request


def chosen(policy: RoutingPolicy, nodes: Nodes, users: range = range(400)) -> list[int]:
    choices = [policy.choose(request(user), nodes, 0.0) for user in users]
    return [choice.node for choice in choices if choice is not None]


def test_random_looks_at_nothing() -> None:
    nodes = fresh_nodes(4, num_waiting=[0, 99, 0, 0], resident_tokens=[4_000, 0, 0, 0])
    counts = np.bincount(chosen(RandomNode(COST, np.random.default_rng(0)), nodes))
    assert counts.min() > 70


def test_power_of_two_takes_the_less_busy_of_two() -> None:
    nodes = fresh_nodes(4, num_waiting=[0, 1, 2, 3])
    counts = np.bincount(chosen(PowerOfTwo(COST, np.random.default_rng(0)), nodes, range(1_200)), minlength=4)
    np.testing.assert_allclose(counts / 1_200, [1 / 2, 1 / 3, 1 / 6, 0], atol=0.04)


def test_least_loaded_takes_the_fewest_waiting_wherever_the_caches_are() -> None:
    nodes = fresh_nodes(4, num_waiting=[5, 4, 3, 4], resident_tokens=[4_000, 0, 0, 0])
    assert set(chosen(LeastLoaded(COST), nodes)) == {2}


def test_a_session_stays_whatever_the_load_is() -> None:
    idle = chosen(SessionHash(COST), fresh_nodes(4))
    assert chosen(SessionHash(COST), fresh_nodes(4, num_waiting=[0, 500, 0, 0])) == idle
    without = chosen(SessionHash(COST), fresh_nodes(4, is_alive=[True, False, True, True]))
    assert all(new == old for old, new in zip(idle, without, strict=True) if old != 1)
    assert 1 not in without


def test_kv_aware_follows_the_prefix_and_is_blind_to_rows() -> None:
    prefix = fresh_nodes(4, resident_tokens=[0, 0, 4_000, 0])
    assert set(chosen(KVAware(COST), prefix)) == {2}
    rows = np.arange(24_000).reshape(4_000, 6)
    nodes = holding(prefix, {0: rows.reshape(-1)})
    ask = request(sample=sample_rows(rows, rows[:500]))
    kv, emb = (policy.choose(ask, nodes, 0.0) for policy in (KVAware(COST), EmbAware(COST)))
    assert kv is not None
    assert emb is not None
    assert (kv.node, emb.node) == (2, 0)


def test_kv_aware_gives_up_a_small_hit_for_an_idle_node() -> None:
    nodes = fresh_nodes(3, resident_tokens=[400, 0, 0], num_waiting=[10, 0, 8])
    assert set(chosen(KVAware(COST), nodes)) == {1}
    assert set(chosen(KVAware(COST, load_weight=0.0), nodes)) == {0}
    with pytest.raises(ConfigError, match=r"load_weight must be at most 1\.0, got 2"):
        KVAware(COST, load_weight=2)


def test_dynamo_style_weighs_blocks_to_compute_against_blocks_in_work() -> None:
    nodes = fresh_nodes(3, resident_tokens=[3_840, 0, 0], waiting_tokens=[2_560, 0, 12_800])
    assert set(chosen(DynamoStyle(COST), nodes)) == {0}, "2 blocks and 20 in work, against 32"
    assert set(chosen(DynamoStyle(COST, overlap_weight=0.5), nodes)) == {1}
    assert set(chosen(DynamoStyle(COST), fresh_nodes(3))) == {0, 1, 2}, "of equals by hash"


def test_equal_nodes_are_chosen_by_hash() -> None:
    for policy in (KVAware(COST), EmbAware(COST)):
        assert min(np.bincount(chosen(policy, fresh_nodes(4)))) > 60
