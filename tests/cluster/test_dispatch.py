"""Named replicas under the router's decisions, with a clock that stands still unless told."""

import math
from typing import Any

from helmrec.cluster.dispatch import Dispatch, node_of
from helmrec.cluster.hint import Hint
from helmrec.costs.learned import StageCosts
from helmrec.costs.routing import RouterCost
from helmrec.router.policy import EmbKVAware
from helmrec.router.settings import StateSettings
from helmrec.router.state import ClusterState
from tests.cluster.cases import hint_of, make_dispatch, report_of, spread

NAMES = ["a", "b", "c"]
WRONG: list[dict[str, Any]] = [
    {"queue_ms": math.nan},
    {"queue_ms": math.inf},
    {"num_waiting": -1},
    {"alpha": 1.5},
    {"pool_tokens": -4},
    {"threshold": 5, "words": b"odd"},
    {"threshold": -5},
    {"fill": math.nan},
    {"users": [(-1, 5)]},
    {"costs": StageCosts(*[math.nan] * len(StageCosts._fields))},
]


def three(now_s: list[float]) -> Dispatch:
    dispatch = make_dispatch(now_s)
    dispatch.meet({name: report_of(now_s[0]) for name in NAMES})
    return dispatch


def send(dispatch: Dispatch, request: str, hint: Hint) -> str:
    name = dispatch.choose(request, hint)
    assert name is not None
    dispatch.sent(request, hint, name)
    return name


def test_without_replicas_there_is_no_choice() -> None:
    assert make_dispatch([0.0]).choose("1", hint_of(1)) is None


def test_a_user_returns_to_its_replica_and_many_are_spread() -> None:
    now_s = [100.0]
    dispatch = three(now_s)
    first = {user: send(dispatch, f"{user}", hint_of(user)) for user in range(300)}
    for user in range(300):
        dispatch.finished(str(user))
    now_s[0] += 1
    dispatch.meet({name: report_of(now_s[0]) for name in NAMES})
    assert all(send(dispatch, f"again {user}", hint_of(user)) == first[user] for user in range(5))
    assert min(spread(list(first.values())).values()) > 50
    dispatch.state.check()


def test_the_router_predicts_with_what_replicas_have_learned() -> None:
    now_s, policy = [100.0], EmbKVAware(RouterCost.unknown())
    dispatch = Dispatch(policy, ClusterState(StateSettings()), lambda: now_s[0])
    costs = StageCosts(**dict.fromkeys(StageCosts._fields, 0.0) | {"token_ms": 0.5})

    def expected_ms() -> float:
        request = hint_of(7).route_request()
        choice = policy.choose(request, dispatch.state.look(request.user, now_s[0]), now_s[0])
        assert choice is not None
        return choice.expected_ms

    dispatch.meet({"a": report_of(now_s[0]), "b": report_of(now_s[0])})
    dispatch.choose("1", hint_of(7))
    assert expected_ms() < 1e-3, "no device is assumed"
    dispatch.meet({"a": report_of(now_s[0], costs=costs), "b": report_of(now_s[0])})
    assert expected_ms() > 0.5, "half a millisecond a token"
    fixed = EmbKVAware(RouterCost.unknown())
    other = Dispatch(fixed, ClusterState(StateSettings()), lambda: now_s[0], learns=False)
    other.choose("1", hint_of(7))
    other.meet({"a": report_of(now_s[0], costs=costs)})
    request = hint_of(7).route_request()
    found = fixed.choose(request, other.state.look(request.user, now_s[0]), now_s[0])
    assert found is not None
    assert found.expected_ms < 1e-3, "a calibration that was given is kept"


def test_asking_twice_changes_nothing() -> None:
    dispatch = three([100.0])
    chosen = {dispatch.choose("1", hint_of(7)) for _ in range(5)}
    assert len(chosen) == 1
    assert dispatch.state.num_users == 0


def test_a_router_that_starts_anew_learns_from_reports_where_users_are() -> None:
    now_s = [100.0]
    elsewhere = next(name for name in NAMES if three(now_s).choose("1", hint_of(7)) != name)
    dispatch = make_dispatch(now_s)
    dispatch.meet({name: report_of(100.0, users=[(7, 500)] if name == elsewhere else []) for name in NAMES})
    assert dispatch.choose("1", hint_of(7)) == elsewhere


def test_the_replica_to_avoid_is_avoided_unless_it_is_the_only_one() -> None:
    dispatch = three([100.0])
    home = dispatch.choose("1", hint_of(7))
    assert home is not None
    assert dispatch.choose("1", hint_of(7, avoid=home)) not in {home, None}
    dispatch.meet({home: report_of(101.0)})
    assert dispatch.choose("1", hint_of(7, avoid=home)) == home


def test_lost_replicas_get_nothing_and_new_ones_get_their_share_of_new_users() -> None:
    now_s = [100.0]
    dispatch = three(now_s)
    dispatch.lose("b")
    assert "b" not in {dispatch.choose(str(user), hint_of(user)) for user in range(100)}
    dispatch.meet({name: report_of(now_s[0]) for name in ("a", "c", "d")})
    chosen = spread([str(dispatch.choose(str(user), hint_of(user))) for user in range(1_000, 1_300)])
    assert chosen["d"] > 60


def test_reports_that_make_no_sense_or_are_missing_are_done_without() -> None:
    dispatch = make_dispatch([100.0])
    odd = [report_of(1.0, **wrong) for wrong in WRONG]
    dispatch.meet(
        {"a": b"nonsense", "b": None, "c": 5, "d": report_of(1e9), **dict(zip("efghijklmn", odd, strict=True))}
    )
    assert dispatch.choose("1", hint_of(1)) is not None
    assert dispatch.state.look(0, 100.0).is_fresh.sum() == 1
    dispatch.state.check()


def test_stale_reports_leave_load_and_hash() -> None:
    now_s = [100.0]
    dispatch = three(now_s)
    now_s[0] = 200.0
    assert min(spread([str(dispatch.choose(str(u), hint_of(u))) for u in range(300)]).values()) > 60


def test_a_clock_that_steps_back_freezes_no_belief() -> None:
    now_s = [1e9]
    dispatch = make_dispatch(now_s)
    dispatch.meet({"a": report_of(now_s[0]), "b": report_of(now_s[0], queue_ms=500.0, num_waiting=100)})
    now_s[0] -= 3_600
    dispatch.meet({"a": report_of(now_s[0], queue_ms=5_000.0, num_waiting=500), "b": report_of(now_s[0])})
    assert spread([send(dispatch, str(u), hint_of(u)) for u in range(50)]) == {"b": 50}


def numbered(taken_s: float, sequence: int, num_waiting: int, incarnation: int = 1) -> bytes:
    return report_of(taken_s, sequence=sequence, incarnation=incarnation, num_waiting=num_waiting)


def waiting(dispatch: Dispatch, now_s: float) -> int:
    (num,) = dispatch.state.look(0, now_s).num_waiting.tolist()
    return int(num)


def test_reports_are_ordered_by_their_number_whatever_their_clock_shows() -> None:
    now_s = [50.0]
    dispatch = make_dispatch(now_s)
    dispatch.meet({"a": numbered(9_000.0, 5, 10)})
    dispatch.meet({"a": numbered(9_900.0, 4, 99)})
    assert waiting(dispatch, 50.0) == 10
    dispatch.meet({"a": numbered(8_999.5, 6, 20)})
    assert waiting(dispatch, 50.0) == 20


def test_a_replica_that_starts_again_may_count_from_one_and_late_reports_of_its_former_life_are_passed_over() -> None:
    now_s = [50.0]
    dispatch = make_dispatch(now_s)
    dispatch.meet({"a": numbered(9_000.0, 5, 10)})
    dispatch.sent("1", hint_of(7), "a")
    dispatch.sent("2", hint_of(7), "a")
    assert dispatch.state.look(7, 50.0).resident_tokens.tolist() == [500]
    dispatch.meet({"a": numbered(3.0, 1, 20, incarnation=2)})
    assert dispatch.state.look(7, 50.0).resident_tokens.tolist() == [0], "it came back empty"
    dispatch.meet({"a": numbered(9_001.0, 6, 30)})
    assert waiting(dispatch, 50.0) == 20
    dispatch.meet({"a": numbered(3.5, 2, 40, incarnation=2)})
    assert waiting(dispatch, 50.0) == 40
    dispatch.state.check()


def test_a_report_that_was_long_on_its_way_is_as_old_as_that_and_knows_no_later_send() -> None:
    now_s = [50.0]
    dispatch = make_dispatch(now_s)
    dispatch.meet({"a": numbered(9_000.0, 1, 0)})
    now_s[0] = 51.0
    dispatch.sent("1", hint_of(7), "a")
    now_s[0] = 51.9
    dispatch.meet({"a": numbered(9_000.5, 2, 10)})
    assert waiting(dispatch, 51.9) == 11, "the send is younger than the report"
    assert dispatch.state.look(0, 52.6).is_fresh.tolist() == [False]


def test_what_is_never_answered_is_forgotten_in_the_end() -> None:
    now_s = [100.0]
    dispatch = three(now_s)
    for i in range(50):
        now_s[0] += 1
        send(dispatch, str(i), hint_of(7))
    dispatch.meet({name: report_of(now_s[0]) for name in NAMES})
    assert dispatch.state.look(7, now_s[0]).num_waiting.sum() == 0


def test_a_replica_has_the_same_number_everywhere() -> None:
    assert node_of("2w3cgwl8") == node_of("2w3cgwl8") != node_of("6a9z4euk")
    assert 0 <= node_of("x") < 2**63
