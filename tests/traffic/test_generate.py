import numpy as np
import pytest

from helmrec.errors import ConfigError
from helmrec.traffic.epochs import lay_out, plan_epochs
from helmrec.traffic.families import FAMILIES, PRESETS, Shape, family, preset
from helmrec.traffic.generate import _assign_users, generate
from helmrec.traffic.trace import Trace, index_histories
from helmrec.traffic.workload import Phase, Users, Workload
from helmrec_bench.traces.describe import return_times
from tests.traffic.cases import small_trace, small_workload


def one_phase(users: Users | None = None, **phase: object) -> Trace:
    settings = {"name": "only", "duration_s": 200.0, "rate": 100.0, "hot_users": 200, "history": 50.0} | phase
    workload = Workload(name="one", num_items=50_000, num_lanes=16, users=users or Users(), phases=(Phase(**settings),))
    trace = generate(workload, 1)
    trace.check()
    return trace


def plain_users(time_s: list[float], hot: list[int], lag_s: list[float]) -> list[int]:
    numbers: dict[object, int] = {}
    cold: list[tuple[float, object]] = []
    users = []
    for r, now in enumerate(time_s):
        who: object = ("hot", hot[r])
        if hot[r] < 0:
            earlier = [user for at, user in cold if at <= now - lag_s[r]]
            who = earlier[-1] if earlier else ("cold", r)
            cold.append((now, who))
        users.append(numbers.setdefault(who, len(numbers)))
    return users


def test_who_asks_equals_its_plain_twin() -> None:
    rng = np.random.default_rng(0)
    time_s = np.sort(rng.random(400) * 100)
    hot = np.where(rng.random(400) < 0.5, rng.integers(0, 20, 400), -1)
    lag_s = np.where(rng.random(400) < 0.6, rng.random(400) * 60, np.inf)
    user, is_first = _assign_users(time_s, hot, lag_s)
    expected = plain_users(time_s.tolist(), hot.tolist(), lag_s.tolist())
    assert user.tolist() == expected
    assert np.flatnonzero(is_first).tolist() == np.unique(expected, return_index=True)[1].tolist()


def test_arrivals_are_poisson_at_the_asked_rate() -> None:
    gaps = np.diff(one_phase().time_s)
    assert gaps.size == pytest.approx(20_000, abs=4 * np.sqrt(20_000))
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)  # as exponential gaps have it


def test_a_rate_ramp_is_followed() -> None:
    time_s = one_phase(rate=(50.0, 150.0)).time_s
    counts, _ = np.histogram(time_s, 4, (0, 200))
    assert counts == pytest.approx([3_125, 4_375, 5_625, 6_875], rel=0.08)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_hot_users_make_their_share_of_the_requests(share: float) -> None:
    trace = one_phase(hot_share=share, users=Users(cold_return=0))
    visits = np.bincount(trace.user)
    by_hot = visits[visits > 1].sum() / trace.num_requests  # without returns, cold users come once
    assert by_hot == pytest.approx(share, abs=0.02)
    assert (visits > 1).sum() <= 200


def test_cold_users_return_after_the_asked_times() -> None:
    trace = one_phase(hot_share=0.0, users=Users(cold_return=0.5, return_median_s=5, return_sigma=0.5))
    known = (index_histories(trace).visit[trace.time_s > 50] > 0).mean()
    assert known == pytest.approx(0.5, abs=0.02)
    late = return_times(trace)
    assert 3 < np.median(late) < 6  # who was chosen may have come again since, so gaps are shorter than lags


def test_histories_have_the_asked_median_and_bounds() -> None:
    users = Users(history_sigma=0.8, min_history=20, max_history=150)
    backlog = one_phase(users=users, history=(40.0, 80.0), hot_share=0.1).backlog
    assert backlog.min() == 20
    assert backlog.max() == 150
    assert np.median(backlog[: backlog.size // 4]) == pytest.approx(45, rel=0.1)
    assert np.median(backlog[-backlog.size // 4 :]) == pytest.approx(75, rel=0.1)


def test_users_append_events_between_visits_and_none_at_the_first() -> None:
    trace = one_phase(users=Users(new_events=5))
    histories = index_histories(trace)
    is_first = histories.visit == 0
    assert np.array_equal(trace.num_new[is_first], trace.backlog[trace.user[is_first]])
    assert trace.num_new[~is_first].mean() == pytest.approx(5, rel=0.05)
    assert trace.num_new[~is_first].min() == 1


def test_events_lie_between_the_users_requests_in_time() -> None:
    trace = small_trace()
    wall = trace.catalogue.start_time_s + trace.time_s.astype(np.int64)
    at = index_histories(trace).own_start[:-1].copy()
    last = np.zeros(trace.num_users, np.int64)
    histories = index_histories(trace)
    for r, user in enumerate(trace.user.tolist()):
        count = int(trace.num_new[r]) if histories.visit[r] else 0
        times = trace.timestamp_s[at[user] : at[user] + count]
        assert ((times >= last[user]) & (times <= wall[r])).all()
        at[user] += count
        last[user] = wall[r]


def test_flash_items_are_others_in_every_flash() -> None:
    workload = small_workload()
    plan = plan_epochs(workload, lay_out(workload), seed=0)
    firsts = {epoch.flash_first for epoch in plan.epochs if epoch.flash_share}
    assert len(firsts) == 2  # the busy phase comes twice
    trace = small_trace(num_items=64_000)
    flash = next(e for e in trace.catalogue.epochs if e.flash_share)
    assert flash.flash_blocks == 2  # 30 items are two blocks of 16
    is_flash = np.isin(trace.item // 16, [flash.flash_first, flash.flash_first + 1])
    assert is_flash.sum() > 0.02 * trace.item.size


def test_epochs_follow_ramps_and_drift_and_the_first_is_as_it_was() -> None:
    workload = small_workload()
    plan = plan_epochs(workload, lay_out(workload), seed=0)
    assert plan.start_s.tolist() == [0, 10, 12, 14, 16, 18, 20, 30, 32, 34, 36, 38]
    assert plan.epoch[0] == plan.epochs.index(plan.epochs[0])
    exponents = [plan.laws[plan.epochs[e].law].exponent for e in plan.epoch[:7]]
    assert exponents == pytest.approx([1.2, 1.16, 1.08, 1.0, 0.92, 0.84, 1.2])
    drift = [plan.epochs[e].drift_blocks for e in plan.epoch]
    assert drift[:7] == [0, 0, 3, 6, 10, 13, 17]  # blocks of 16 of 27.8 items a second
    assert drift[7:] == [17, 20, 24, 27, 31]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("shape", PRESETS)
def test_every_family_is_a_trace_over_every_preset(name: str, shape: str) -> None:
    if shape == "meta-2021":  # the same code over far more items
        return
    workload = family(name, preset(shape).model_copy(update={"duration_s": 24.0, "rate": 10.0, "axis": "all"}))
    trace = generate(workload, 0)
    trace.check()
    assert trace.num_requests > 50
    assert {trace.phase_names[code] for code in np.unique(trace.phase)} == {p.name for p in workload.phases}


@pytest.mark.parametrize(
    ("axis", "changed"),
    [
        ("hot-share", {"hot_share"}),
        ("history", {"history", "hot_first"}),
        ("skew", {"item_exponent"}),
        ("rate", {"rate"}),
    ],
)
def test_bursts_change_what_the_axis_says_and_nothing_else(axis: str, changed: set[str]) -> None:
    calm, burst = family("burst", Shape(axis=axis)).phases[:2]
    different = {name for name in Phase.model_fields if getattr(calm, name) != getattr(burst, name)}
    assert different == changed | {"name", "duration_s"}


def test_request_bursts_have_the_asked_sizes() -> None:
    shape = Shape(num_items=5_000, history=10, min_history=1, rate=5, duration_s=30)
    trace = generate(family("request-bursts", shape), 0)
    sizes = dict(zip(trace.phase_names, np.bincount(trace.phase).tolist(), strict=True))
    assert sizes["burst of 100"] == pytest.approx(105, abs=45)
    assert sizes["burst of 1000"] == pytest.approx(1_005, abs=130)
    assert sizes["burst of 2000"] == pytest.approx(4_010, abs=260)  # by hot users, and by new users


@pytest.mark.parametrize(("call", "value"), [(preset, "ebay"), (lambda name: family(name, Shape()), "quiet")])
def test_errors_about_unknown_names_list_the_known_ones(call: object, value: str) -> None:
    assert callable(call)
    with pytest.raises(ConfigError, match=rf"must be one of .*(taobao|burst).* got '{value}'"):
        call(value)
