import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helmrec.costs.routing import RequestWork, Stages, expected_ms, service_ms, stages_of
from helmrec.router.nodes import Nodes, RouteRequest, blank_nodes
from helmrec.router.policy import Choice, EmbKVAware, Weighing, price
from helmrec.router.settings import RouterSettings
from helmrec.router.sketch import sample_rows
from helmrec_bench.baselines.routers import policies
from tests.router.cases import COST, NUM_BITS, fresh_nodes, holding, request

OURS = EmbKVAware(COST)
AT_HOME = {"resident_tokens": [0, 3_900, 0, 0], "visits": [0, 3, 0, 0]}


def ours(nodes: Nodes, ask: RouteRequest | None = None, policy: EmbKVAware = OURS) -> Choice:
    choice = policy.choose(ask or request(), nodes, 0.0)
    assert choice is not None
    return choice


@st.composite
def any_nodes(draw: st.DrawFn) -> Nodes:
    """Up to nine nodes in any state a router may see, contradictory ones too."""
    count = draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    nodes = blank_nodes(rng.choice(1_000, count, replace=False), NUM_BITS // 64)
    return nodes._replace(
        is_alive=rng.random(count) < draw(st.sampled_from([0.0, 0.5, 1.0])),
        is_fresh=rng.random(count) < draw(st.sampled_from([0.0, 0.5, 1.0])),
        queue_ms=rng.choice([0.0, 1.0, 30.0, 1e9], count) * rng.random(count),
        num_waiting=rng.integers(0, 50, count).astype(float),
        waiting_tokens=rng.integers(0, 10**6, count).astype(float),
        row_hit_rate=rng.choice([np.nan, 0.0, 0.5, 1.0], count),
        resident_tokens=rng.choice([0, 0, 500, 10**6], count),
        visits=rng.integers(0, 3, count),
        sketch_words=rng.integers(0, 2**63, (NUM_BITS // 64, count)).astype(np.uint64),
        sketch_threshold=rng.choice(np.array([0, 2**60, 2**64 - 1], np.uint64), count),
        sketch_fill=rng.choice([0.0, 0.5, 1.0], count),
    )


@st.composite
def any_request(draw: st.DrawFn) -> RouteRequest:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = rng.integers(0, 10**6, (draw(st.integers(0, 60)), 3))
    sample = sample_rows(rows, rows[:10], draw(st.integers(1, 200)))
    tokens, candidates = draw(st.integers(0, 20_000)), draw(st.integers(0, 3_000))
    return request(draw(st.integers(0, 2**62)), tokens, sample, num_candidates=candidates, rows_per_token=3)


@settings(max_examples=60)
@given(any_nodes(), any_request())
def test_every_policy_chooses_a_living_node_whenever_there_is_one(nodes: Nodes, ask: RouteRequest) -> None:
    for name, make in policies(COST, np.random.default_rng(0)).items():
        choice = make().choose(ask, nodes, 0.0)
        assert (choice is None) == (not nodes.is_alive.any()), name
        if choice is not None:
            assert choice.node in nodes.ids[nodes.is_alive], name
            assert np.isfinite(choice.expected_ms)
            assert choice.expected_ms >= choice.service_ms >= 0


@settings(max_examples=30)
@given(any_nodes(), any_request())
def test_the_same_inputs_make_the_same_choice(nodes: Nodes, ask: RouteRequest) -> None:
    for name in policies(COST, np.random.default_rng(4)):
        one, other = (policies(COST, np.random.default_rng(4))[name]() for _ in range(2))
        assert [one.choose(ask, nodes, 0.0) for _ in range(2)] == [other.choose(ask, nodes, 0.0) for _ in range(2)]


@given(any_nodes(), any_request())
def test_cold_users_never_go_above_the_bound(nodes: Nodes, ask: RouteRequest) -> None:
    nobody = np.zeros(nodes.num_nodes, np.int64)
    nodes = nodes._replace(resident_tokens=nobody, visits=nobody)
    choice = OURS.choose(ask, nodes, 0.0)
    if choice is not None:
        queues, limits = nodes.queue_ms[nodes.is_alive], OURS.settings
        bound = limits.load_factor * queues.mean() + limits.load_slack_ms
        assert nodes.queue_ms[nodes.ids == choice.node][0] <= bound * (1 + 1e-9)


def plain_price(ask: RouteRequest, nodes: Nodes, place: int) -> tuple[Stages, float]:
    """A request on a node without a sketch, by the formulas alone."""
    resident = min(int(nodes.resident_tokens[place]), ask.num_tokens)
    known = nodes.row_hit_rate[nodes.is_fresh & nodes.is_alive & ~np.isnan(nodes.row_hit_rate)]
    hit_rate = known.mean() if known.size else 0.5
    if nodes.is_fresh[place] and not np.isnan(nodes.row_hit_rate[place]):
        hit_rate = nodes.row_hit_rate[place]
    new = ask.num_tokens - resident
    absent = (new + ask.num_candidates) * ask.rows_per_token * (1 - hit_rate)
    return stages_of(COST, RequestWork(resident, new, ask.num_candidates, absent)), absent


@given(any_nodes(), any_request())
def test_prices_are_the_formulas_node_by_node(nodes: Nodes, ask: RouteRequest) -> None:
    nodes = nodes._replace(sketch_threshold=np.zeros(nodes.num_nodes, np.uint64))
    found, terms = price(Weighing(COST, 8.0, 0.5), ask, nodes), COST
    for place in range(nodes.num_nodes):
        stages, absent = plain_price(ask, nodes, place)
        assert found.alone_ms[place] == pytest.approx(stages.compute_ms + stages.bus_ms)
        assert found.service_ms[place] == pytest.approx(service_ms(terms, stages))
        assert found.expected_ms[place] == pytest.approx(expected_ms(terms, stages, nodes.queue_ms[place]))
        assert found.absent_rows[place] == pytest.approx(absent)


def test_a_known_user_goes_home() -> None:
    assert ours(fresh_nodes(4, **AT_HOME)).node == 1


def test_affinity_breaks_past_a_load_gap_and_returns() -> None:
    slow = EmbKVAware(COST._replace(token_us=20.0))  # recomputing would take 80 ms
    for home_queue_ms, node in ((0.0, 1), (12.0, 1), (15.0, None), (12.0, 1)):  # a quarter of it is the mean
        choice = ours(fresh_nodes(4, queue_ms=[0, home_queue_ms, 0, 0], **AT_HOME), policy=slow)
        assert (choice.node == 1) == (node == 1)


def test_affinity_breaks_sooner_where_another_answers_first() -> None:
    saved_ms = ours(fresh_nodes(1)).expected_ms - ours(fresh_nodes(4, **AT_HOME)).expected_ms
    assert 0 < saved_ms < 9
    kept, left = (ours(fresh_nodes(4, queue_ms=[0, q, 0, 0], **AT_HOME)) for q in (0.8 * saved_ms, saved_ms + 1.5))
    assert kept.node == 1
    assert left.node != 1


def test_who_must_leave_home_goes_to_the_best_hit_among_the_near_least_loaded() -> None:
    queues = [0.5, 60.0, 0.0, 30.0]
    choice = ours(fresh_nodes(4, queue_ms=queues, resident_tokens=[3_000, 4_000, 0, 4_000], visits=[1, 9, 0, 1]))
    assert choice.node == 0


def test_a_second_visit_goes_where_the_first_was_though_nothing_is_kept_yet() -> None:
    for home in range(4):
        assert ours(fresh_nodes(4, visits=np.arange(4) == home)).node == home
    assert ours(fresh_nodes(4, visits=[0, 1, 0, 0], queue_ms=[0, 50, 0, 0])).node != 1


def test_rows_decide_between_nodes_that_are_alike_otherwise() -> None:
    rng = np.random.default_rng(0)
    mine, others = rng.integers(0, 10**6, (4_000, 6)), rng.integers(10**7, 10**8, 20_000)
    asks = [request(user, sample=sample_rows(mine, mine[:500])) for user in range(300)]
    nodes = holding(fresh_nodes(4), {0: others, 1: others, 2: np.unique(mine), 3: others})
    chosen = np.bincount([ours(nodes, ask).node for ask in asks], minlength=4)
    assert chosen[2] > 2 * np.delete(chosen, 2).max()
    known = nodes._replace(visits=np.ones(4, np.int64), resident_tokens=np.full(4, 100))
    assert {ours(known, ask).node for ask in asks} == {2}


def test_an_empty_node_fills_though_it_has_no_rows() -> None:
    rng = np.random.default_rng(0)
    mine = rng.integers(0, 10**6, (4_000, 6))
    nodes = holding(fresh_nodes(4), {i: np.unique(mine) if i else np.empty(0, np.int64) for i in range(4)})
    sample = sample_rows(mine, mine[:500])
    taken = np.bincount([ours(nodes, request(user, sample=sample)).node for user in range(2_000)])
    fair = RouterSettings().cold_floor / (3 + RouterSettings().cold_floor)
    assert abs(taken[0] / 2_000 - fair) < 0.03


def test_cold_users_spread_and_move_only_to_a_node_that_joins() -> None:
    before, after = ([ours(fresh_nodes(n), request(user)).node for user in range(2_000)] for n in (8, 9))
    moved = [new for old, new in zip(before, after, strict=True) if new != old]
    assert set(moved) == {8}
    assert abs(len(moved) - 2_000 / 9) < 4 * np.sqrt(2_000 / 9)
    assert np.bincount(before).min() > 0.8 * 2_000 / 8


def test_without_reports_users_go_by_load_and_hash() -> None:
    nodes = blank_nodes(np.arange(6), NUM_BITS // 64)
    choices = [ours(nodes, request(user)) for user in range(600)]
    assert min(np.bincount([choice.node for choice in choices])) > 60
    busy = nodes._replace(queue_ms=np.array([0.0, 0.0, 0.0, 0.0, 0.0, 99.0]))
    assert all(ours(busy, request(user)).node != 5 for user in range(600))


def test_what_a_stale_node_said_is_not_used() -> None:
    rng = np.random.default_rng(0)
    mine = rng.integers(0, 10**6, (4_000, 6))
    nodes = holding(fresh_nodes(3), {0: np.unique(mine)})._replace(row_hit_rate=np.array([1.0, 0.3, 0.5]))
    ask, weighing = request(sample=sample_rows(mine, mine[:500])), Weighing(COST, 8.0, 0.5)
    stale = nodes._replace(is_fresh=np.array([False, True, True]))
    assert price(weighing, ask, nodes).absent_rows[0] == 0
    absent = price(weighing, ask, stale).absent_rows
    assert absent[0] == pytest.approx(4_500 * 6 * (1 - 0.4)), "as the average of the others"


def test_of_some_nodes_by_hash_a_cold_user_takes_the_shortest_queue() -> None:
    nodes = fresh_nodes(16, queue_ms=[float(place % 7) for place in range(16)])
    one, many = (EmbKVAware(COST, RouterSettings(cold_choices=num, load_factor=100.0)) for num in (1, 16))
    by_hash = [ours(nodes, request(user), policy=one).node for user in range(200)]
    assert len(set(by_hash)) == 16
    assert {ours(nodes, request(user), policy=many).node for user in range(200)} <= {0, 7, 14}
    idle = fresh_nodes(16)
    assert [ours(idle, request(u), policy=many).node for u in range(200)] == [
        ours(idle, request(u), policy=one).node for u in range(200)
    ], "of equal queues the first by hash"
