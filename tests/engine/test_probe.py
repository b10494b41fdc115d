"""An engine opened for measurements: prepared requests, emptied caches, exchanged parts."""

import numpy as np

from helmrec.clock import ManualClock
from helmrec.config import RelayConfig
from helmrec.engine.probe import EngineProbe
from helmrec.types import PrefillRequest
from tests.helpers import random_request, tiny_engine

RNG = np.random.default_rng(0)


def test_a_prepared_request_scores_as_one_that_is_ranked() -> None:
    with tiny_engine() as engine:
        probe, request = EngineProbe(engine), random_request(RNG, engine.model_config, 1, 12)
        future = probe.submit(probe.prepare(request))
        while engine.step():
            pass
        assert np.allclose(
            future.result(timeout=0).scores, probe.score_without_caches(probe.prepare(request)), atol=1e-5
        )
        assert probe.num_ended == 1


def test_a_withdrawn_request_is_cancelled() -> None:
    with tiny_engine() as engine:
        probe = EngineProbe(engine)
        future = probe.submit(probe.prepare(random_request(RNG, engine.model_config, 1, 12)))
        probe.withdraw([future])
        assert future.cancelled()
        assert not engine.step()


def test_cleared_caches_hold_nothing_and_the_boundary_is_where_it_was_set() -> None:
    with tiny_engine(kv_admission="always") as engine:
        probe, request = EngineProbe(engine), random_request(RNG, engine.model_config, 1, 12)
        engine.rank([request])
        probe.clear(0.5)
        assert engine.stats().pool.resident_users == 0
        assert abs(engine.stats().pool.alpha - 0.5) < 0.2
        assert engine.rank([request])[0].reused_tokens == 0
        assert engine.rank([request])[0].reused_tokens > 0


def test_prefixes_are_cleared_alone() -> None:
    with tiny_engine(kv_admission="always") as engine:
        probe, request = EngineProbe(engine), random_request(RNG, engine.model_config, 1, 12)
        engine.rank([request, request])
        hits = engine.stats().pool.row_hits
        probe.clear_prefixes()
        assert engine.rank([request])[0].reused_tokens == 0
        assert engine.stats().pool.row_hits > hits


def test_another_relay_decides_by_its_own_settings() -> None:
    with tiny_engine() as engine:
        probe, request = EngineProbe(engine), random_request(RNG, engine.model_config, 1, 12)
        probe.set_relay(RelayConfig(risk=0.0, max_held=1.0, max_compute=1.0))
        probe.signal(PrefillRequest(1, (), (), (), num_candidates=1), probe.prepare(request))
        while engine.step():
            pass
        assert sum(engine.stats().relay.verdicts.values()) == 1


def test_limits_and_parts_are_switched() -> None:
    with tiny_engine(miss_curves=True) as engine:
        probe = EngineProbe(engine)
        probe.set_limit("save_bytes_per_step", 123)
        assert engine.config.save_bytes_per_step == 123
        probe.set_overlap(is_on=True)
        probe.set_curves(is_on=False)
        assert engine.settled_curves() is None
        engine.rank([random_request(RNG, engine.model_config, 1, 12)])
        engine.check()


def test_ages_of_prefixes_are_spread_over_the_lag_before_now() -> None:
    clock = ManualClock()
    with tiny_engine(clock=clock, kv_admission="always") as engine:
        probe = EngineProbe(engine)
        engine.rank([random_request(RNG, engine.model_config, user, 12) for user in range(3)])
        clock.advance(1_000.0)
        probe.spread_checks(RNG, 300.0)
        ages = [clock.now() - prefix.verified_s for prefix in probe.pool.kv._order.values()]
        assert len(ages) == 3
        assert all(0.0 <= age <= 300.0 for age in ages)
        assert len(set(ages)) == 3
