"""A policy that steers a served engine, and what may be seen of it."""

import re
import sys
from collections.abc import Callable
from dataclasses import fields
from importlib.resources import files
from typing import Any

import pytest
from numba import typeof
from numba.core.registry import CPUDispatcher

from helmrec.clock import MonotonicClock
from helmrec.control.explain import Explanation
from helmrec.control.layers import Proposal
from helmrec.control.moves import MoveRecord
from helmrec.control.policy import Move, WindowStats
from helmrec.control.rebalancer import Decision
from helmrec.engine.engine import Engine
from helmrec.errors import ConfigError
from helmrec.policies import make_policy
from helmrec.serve.app import make_app
from helmrec.serve.control import ControlView, LayerView, Steering, with_curves
from helmrec.serve.port import InProcessPort
from helmrec.serve.settings import ServeConfig
from tests.control.bowl import Bowl
from tests.control.served import Served, driven
from tests.helpers import tiny_engine
from tests.serve.asgi import Caller, wait_for
from tests.serve.cases import rank_body, rank_requests
from tests.serve.conftest import TOKEN
from tests.serve.test_users import plain

ADMIN = {"authorization": f"Bearer {TOKEN}"}


class Wants:
    """A policy that asks for one split."""

    def __init__(self, alpha: float) -> None:
        self._alpha = alpha
        self.num_requests = 0

    def decide(self, stats: WindowStats) -> Move | None:
        self.num_requests += stats.traffic.num_requests
        return None if stats.alpha_target == pytest.approx(self._alpha) else Move(self._alpha, "asked for", 0.5)

    def reset(self) -> None: ...


def steered(policy: Wants) -> InProcessPort:
    steering = Steering("static:0.7", slo_ms=80, tick_s=0.02)
    steering._policy = policy
    return InProcessPort(tiny_engine(clock=MonotonicClock()), steering)


def test_a_policy_moves_the_boundary_sees_the_requests_and_is_shown() -> None:
    policy = Wants(0.2)
    with Caller(make_app(steered(policy), ServeConfig(admin_token=TOKEN))) as caller:
        caller.wait_until_ready()
        for _ in range(5):
            assert caller.post("/v1/rank", rank_body()).status == 200
        wait_for(lambda: caller.get("/v1/pool").json["pool"]["alpha"] == pytest.approx(0.2, abs=0.02))
        wait_for(lambda: policy.num_requests == 5)
        control = caller.get("/v1/live").json["control"]
        assert (control["policy"], control["mode"], control["layers"]) == ("static:0.7", "adaptive", [])
        (move,) = control["moves"]
        assert (move["start_alpha"], move["alpha"], move["reason"]) == (0.4, 0.2, "asked for")


def test_a_frozen_policy_leaves_the_boundary_to_the_operator() -> None:
    with Caller(make_app(steered(Wants(0.2)), ServeConfig(admin_token=TOKEN))) as caller:
        caller.wait_until_ready()
        wait_for(lambda: caller.get("/v1/pool").json["pool"]["alpha"] == pytest.approx(0.2, abs=0.02))
        assert caller.post("/v1/admin/mode", {"mode": "freeze"}, ADMIN).json == {"mode": "freeze"}
        caller.post("/v1/admin/alpha", {"alpha": 0.5}, ADMIN)
        wait_for(lambda: caller.get("/v1/pool").json["pool"]["alpha"] == pytest.approx(0.5, abs=0.02))
        control = caller.get("/v1/live").json["control"]
        assert (control["mode"], control["reason"]) == ("freeze", "frozen")
        caller.post("/v1/admin/mode", {"mode": "adaptive"}, ADMIN)
        wait_for(lambda: caller.get("/v1/pool").json["pool"]["alpha"] == pytest.approx(0.2, abs=0.02))
        assert caller.post("/v1/admin/mode", {"mode": "static"}, ADMIN).status == 200
        for wrong in ("off", None, 1):
            assert caller.post("/v1/admin/mode", {"mode": wrong}, ADMIN).status == 400
        assert caller.post("/v1/admin/mode", {"mode": "freeze"}).status == 401


class FailsAfter(Wants):
    """A policy that moves to one split, and fails from then on until it is reset."""

    def __init__(self, alpha: float) -> None:
        super().__init__(alpha)
        self.num_failures = self.num_resets = 0

    def decide(self, stats: WindowStats) -> Move | None:
        move = super().decide(stats)
        if move is None and not self.num_resets:
            self.num_failures += 1
            raise FloatingPointError("a mistake of the policy")
        return move

    def reset(self) -> None:
        self.num_resets += 1


def test_a_policy_that_fails_freezes_alpha_and_serving_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    policy = FailsAfter(0.2)
    port = steered(policy)
    with Caller(make_app(port, ServeConfig(admin_token=TOKEN))) as caller:
        caller.wait_until_ready()
        wait_for(lambda: caller.get("/v1/pool").json["controller_failures"] == 1)
        for _ in range(5):
            assert caller.post("/v1/rank", rank_body()).status == 200
        wait_for(lambda: caller.get("/v1/pool").json["pool"]["alpha"] == pytest.approx(0.2, abs=0.02))
        assert caller.get("/readyz").status == 200
        control = caller.get("/v1/live").json["control"]
        assert control["mode"] == "freeze"
        assert "FloatingPointError: a mistake of the policy" in control["reason"]
        assert "helmrec_controller_failures_total 1.0" in caller.get("/metrics").body.decode()
        assert policy.num_failures == 1, "it is not asked again"
        assert port._controller is not None
        assert not port._controller._rebalancer._answers, "answers do not pile up for a policy that is not asked"
        (record,) = [record for record in caplog.records if "alpha is frozen" in record.message]
        assert record.exc_info is not None
        assert caller.post("/v1/admin/mode", {"mode": "adaptive"}, ADMIN).status == 200
        before = policy.num_requests
        assert caller.post("/v1/rank", rank_body()).status == 200
        wait_for(lambda: policy.num_requests > before)
        assert policy.num_resets == 1
        assert caller.get("/v1/live").json["control"]["mode"] == "adaptive"


def test_a_policy_that_cannot_even_warm_up_does_not_keep_the_server_from_starting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("it does not compile")

    monkeypatch.setattr(Steering, "warm_up", fail)
    with Caller(make_app(steered(Wants(0.2)), ServeConfig())) as caller:
        caller.wait_until_ready()
        assert caller.post("/v1/rank", rank_body()).status == 200
        assert caller.get("/v1/pool").json["controller_failures"] == 1


def test_miss_curves_that_fail_leave_the_policy_without_them_and_unharmed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no curve")

    monkeypatch.setattr(Engine, "curves", fail)
    policy = Wants(0.2)
    with Caller(make_app(steered(policy), ServeConfig())) as caller:
        caller.wait_until_ready()
        wait_for(lambda: caller.get("/v1/pool").json["pool"]["alpha"] == pytest.approx(0.2, abs=0.02))
        stats = caller.get("/v1/pool").json
        assert stats["controller_failures"] == 0
        assert stats["background_failures"] > 0


def test_without_a_policy_there_is_no_mode(caller: Caller) -> None:
    reply = caller.post("/v1/admin/mode", {"mode": "freeze"}, ADMIN)
    assert (reply.status, reply.json["field"]) == (400, "mode")
    assert caller.get("/v1/live").json["control"] is None


def test_refusals_are_reported_to_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Wants(0.4)
    port = steered(policy)
    with Caller(make_app(port, ServeConfig())) as caller:
        caller.wait_until_ready()
        assert caller.post("/v1/rank", rank_body(deadline_ms=1e-6)).status == 503
        wait_for(lambda: policy.num_requests == 1)


TOLD = Explanation(
    time_s=12.0,
    alpha=0.4,
    measured_ms=21.5,
    predicted_ms=20.0,
    arrivals_per_s=430.0,
    proposals=[Proposal("base", 0.45, "predicts less", 1.5), Proposal("residual", 0.3, "predicts even less", 2.0)],
    last_move=MoveRecord(2.0, 0.5, 0.4, "residual", 1.25, 0.75),
)


def test_a_decision_is_shown_with_its_layers_its_prediction_and_the_last_move() -> None:
    steering = Steering("helm", slo_ms=80)
    window, move = Bowl().window(0.4), Move(0.3, "residual: predicts even less", 2.0)
    shown = steering.view(Decision(window, move, TOLD), "adaptive", now_s=1_000.0)
    assert shown.layers == [LayerView("base", 0.45, "predicts less"), LayerView("residual", 0.3, "predicts even less")]
    assert (shown.measured_ms, shown.predicted_ms) == (21.5, 20.0)
    assert shown.last_move is not None
    for words in ("0.500 -> 0.400 by residual", "+1.250 ms of stage time per request predicted", "+0.750 ms realised"):
        assert words in shown.last_move
    assert [(one.start_alpha, one.alpha) for one in shown.moves] == [(0.4, 0.3)]


def test_before_anything_is_known_nothing_is_made_up() -> None:
    shown = Steering("helm", slo_ms=80).view(None, "adaptive", now_s=1_000.0)
    assert (shown.measured_ms, shown.predicted_ms, shown.last_move, shown.layers) == (None, None, None, [])
    assert shown.reason == "no window has ended yet"


def served_until_it_predicts(policy: str) -> dict[str, Any]:
    """Serve an engine under a policy until it has predicted a latency; return what is shown of it."""
    engine = tiny_engine(clock=MonotonicClock(), miss_curves=True)
    steering = Steering.of(ServeConfig(policy=policy, tick_s=0.05))
    with Caller(make_app(InProcessPort(engine, steering), ServeConfig())) as caller:
        caller.wait_until_ready()
        seen = dict[str, Any]()

        def has_layers() -> bool:
            for request in rank_requests(6):
                assert caller.post("/v1/rank", plain(vars_of(request))).status == 200
            control = caller.get("/v1/live").json["control"]
            if control["layers"] and control["predicted_ms"] is not None:
                seen.update(control)
            return bool(seen)

        wait_for(has_layers)
        return seen


def test_helm_steers_a_served_engine_and_its_layers_are_shown() -> None:
    seen = served_until_it_predicts("helm")
    assert [layer["name"] for layer in seen["layers"]][:2] == ["base", "residual"]
    assert seen["measured_ms"] > 0
    assert seen["predicted_ms"] > 0


def vars_of(request: Any) -> dict[str, Any]:
    return {name: getattr(request, name) for name in request.__slots__ if getattr(request, name) is not None}


def test_policies_by_name_and_what_they_need() -> None:
    engine = tiny_engine()
    assert Steering.of(ServeConfig(policy="none")) is None
    for name in ("static:0.3", "helm"):
        assert Steering.of(ServeConfig(policy=name)) is not None
    assert not with_curves("none", engine.config).miss_curves
    assert not with_curves("static:0.3", engine.config).miss_curves
    assert with_curves("helm", engine.config).miss_curves
    for wrong in ("shoes", "hill", "argmin"):
        with pytest.raises(
            ConfigError, match=rf"policy must be helm.*, static:ALPHA or, of a server, none, got '{wrong}'"
        ):
            Steering.of(ServeConfig(policy=wrong))


def test_helm_steers_unless_the_settings_say_otherwise() -> None:
    assert ServeConfig().policy == "helm"
    assert Steering.of(ServeConfig()) is not None


def test_warming_up_moves_nothing_and_teaches_the_policy_nothing() -> None:
    engine = tiny_engine(clock=MonotonicClock())
    steering = Steering("helm", slo_ms=80)
    before, learned = engine.stats(), steering.learned
    steering.warm_up()
    assert engine.stats() == before
    assert steering.learned == learned


@pytest.mark.parametrize("name", ["helm", "ppo"])
def test_decisions_compile_nothing_that_the_warm_up_did_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called = set[tuple[str, ...]]()

    def noting(loop: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            called.add((loop.__name__, *(str(typeof(arg)) for arg in args)))  # type: ignore[no-untyped-call]
            return loop(*args)

        return call

    for module in [one for path, one in sys.modules.items() if path.startswith(("helmrec.control.", "helmrec.ppo."))]:
        for attribute, loop in list(vars(module).items()):
            if isinstance(loop, CPUDispatcher):
                monkeypatch.setattr(module, attribute, noting(loop))
    Steering(name, slo_ms=80).warm_up()
    warmed = called.copy()
    driven(make_policy(name), Served(Bowl()), 0.5, 20)
    served_until_it_predicts(name)
    assert len(warmed) >= 4
    assert called == warmed


def test_the_dashboard_reads_only_what_is_there_and_shows_all_of_it() -> None:
    page = (files("helmrec.serve") / "dashboard.html").read_text()
    assert set(re.findall(r"\bcontrol\.(\w+)", page)) == {field.name for field in fields(ControlView)}
