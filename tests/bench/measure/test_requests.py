"""Made-up users: the same seed gives the same requests, and histories only grow."""

import numpy as np

from helmrec.engine.warm_up import make_request
from helmrec.model.profiles import profile
from helmrec_bench.measure.requests import NEW_EVENTS, Crowd, Visitors, popular_items

MODEL = profile("demo", 500)
CROWD = Crowd(num_hot=3, shortest=20, longest=40, num_candidates=8)


def test_the_same_seed_gives_the_same_requests() -> None:
    one, other = Visitors(MODEL, CROWD, 7), Visitors(MODEL, CROWD, 7)
    for _ in range(20):
        a, b = one.next(0.5), other.next(0.5)
        assert a.user_id == b.user_id
        assert np.array_equal(a.items, b.items)
        assert np.array_equal(a.candidates, b.candidates)


def test_a_hot_user_returns_with_more_events_after_the_same_history() -> None:
    visitors = Visitors(MODEL, CROWD)
    (user, first, _), (again, second, _) = visitors.hot(1), visitors.hot(1)
    assert user == again == 1
    assert second.size == first.size + NEW_EVENTS
    assert np.array_equal(first, second[: first.size])


def test_new_users_have_ids_of_their_own_and_kept_histories_if_asked() -> None:
    visitors = Visitors(MODEL, CROWD._replace(num_kept=1))
    (one, items, _), (other, same, _) = visitors.new(), visitors.new()
    assert one != other
    assert np.array_equal(items, same)
    assert visitors.new(num_events=33)[1].size == 33


def test_a_request_names_every_feature_and_context_of_the_model() -> None:
    items = popular_items(np.random.default_rng(0), 30, MODEL.features[0].num_rows)
    request = make_request(MODEL, 5, items, items[:4])
    assert request.features.keys() == {table.name for table in MODEL.features[1:]}
    assert request.context.keys() == {table.name for table in (*MODEL.user_context, *MODEL.request_context)}
