"""After the warm-up nothing is compiled any more, whatever is asked of an engine."""

import gc
import importlib
import pkgutil
from typing import Any

import numpy as np
import pytest
from numba.core.registry import CPUDispatcher

import helmrec.engine
import helmrec.kernels
import helmrec.memory
from helmrec.clock import MonotonicClock
from helmrec.engine import id_checks, intake, row_values
from helmrec.engine import warm_up as warm_up_module
from helmrec.engine.engine import Engine
from helmrec.engine.intake import Intake
from helmrec.engine.warm_up import compile_ahead, made_up_request, warm_up
from helmrec.memory import row_codes
from helmrec.types import PrefillRequest, RankRequest
from tests.helpers import random_request, tiny_config, tiny_engine, tiny_geometry, tiny_model

PACKAGES = (helmrec.engine, helmrec.kernels, helmrec.memory)


def compiled() -> dict[str, int]:
    """How many types of arguments each compiled loop of the serving packages has met."""
    found = {}
    for package in PACKAGES:
        for info in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            if ".triton_" in info.name or "hopper" in info.name:
                continue
            for name, value in vars(importlib.import_module(info.name)).items():
                if isinstance(value, CPUDispatcher):
                    found[f"{info.name}.{name}"] = len(value.overloads)
    return found


def edited(request: RankRequest, where: int) -> RankRequest:
    items = np.array(request.items)
    items[where:] = (items[where:] + 1) % 300
    return RankRequest(**{name: getattr(request, name) for name in request.__dataclass_fields__} | {"items": items})


def use_everything(engine: Engine) -> None:
    rng, config = np.random.default_rng(0), engine.model_config
    for turn in range(60):
        request = random_request(rng, config, int(rng.integers(8)), int(rng.integers(1, 16)))
        engine.rank([request, edited(request, len(np.asarray(request.items)) // 2)])
        engine.rank([edited(request, len(np.asarray(request.items)) - 1)])
        if turn % 10 == 0:
            engine.update_rows("item", rng.choice(300, 3, replace=False), rng.standard_normal((3, config.row_dim)))
        if turn % 15 == 0:
            engine.move_alpha(float(rng.uniform(0.1, 0.5)))
        if turn % 20 == 0:
            engine.forget(int(rng.integers(8)))
            columns = {name: getattr(request, name) for name in ("items", "actions", "timestamps", "features")}
            engine.prefill(PrefillRequest(user_id=1, **columns, context={"country": 1}, budget_ms=1e-9))
            while engine.step():
                pass
            engine.settled_curves()
            engine.warm(engine.hot_rows())


SETTINGS: list[dict[str, Any]] = [
    {},
    {"miss_curves": True},
    {"row_order": "frequency", "row_admission": "always", "kv_admission": "always"},
    {"row_index": "device"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: ",".join(settings) or "as they come")
def test_nothing_is_compiled_after_the_warm_up(settings: dict[str, Any]) -> None:
    model = tiny_model()
    host_kv_bytes = 20 * tiny_geometry(tiny_config()).page_bytes
    with tiny_engine(model, MonotonicClock(), host_kv_bytes=host_kv_bytes, kv_reload="always", **settings) as engine:
        warm_up(engine)
        before = compiled()
        use_everything(engine)
        assert compiled() == before


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that updates of rows call has been compiled in this process."""
    monkeypatch.setattr(warm_up_module, "_COMPILED", set())
    for module in (row_values, row_codes, id_checks):
        for each in vars(module).values():
            if isinstance(each, CPUDispatcher):
                each._reset_overloads()  # type: ignore[attr-defined]


def of_updates(compiled: dict[str, int]) -> dict[str, int]:
    return {
        name: num for name, num in compiled.items() if name.split(".")[2] in {"row_values", "row_codes", "id_checks"}
    }


def update_in_every_form(engine: Engine) -> None:
    """Update rows with float32, float16 and lists, in memory that may be read-only."""
    values = np.random.default_rng(0).standard_normal((3, engine.model_config.row_dim))
    engine.update_rows("item", [5, 7, 9], values.tolist())
    for dtype in (np.float16, np.float32):
        given = values.astype(dtype)
        for _ in range(2):
            engine.update_rows("item", np.array([1, 2, 3]), given)
            given.flags.writeable = False


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("host_row_dtype", ["model", "int8", "fp8_e4m3"])
@pytest.mark.parametrize("row_dtype", ["bfloat16", "float16", "float32"])
def test_no_update_of_rows_compiles_anything(row_dtype: str, host_row_dtype: str) -> None:
    with tiny_engine(tiny_model(row_dtype=row_dtype), MonotonicClock(), host_row_dtype=host_row_dtype) as engine:
        warm_up(engine)
        before = compiled()
        update_in_every_form(engine)
        assert compiled() == before


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("row_dtype", ["bfloat16", "float16"])
def test_updates_are_compiled_ahead_for_all_types_of_host_rows(row_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(row_dtype=row_dtype)
    monkeypatch.setattr(warm_up_module, "_use_scratch_engine", lambda *_: None)  # takes minutes, without these types
    compile_ahead(model.config)
    before = compiled()
    for code in ("model", "int8", "fp8_e4m3"):
        with tiny_engine(model, host_row_dtype=code) as engine:
            update_in_every_form(engine)
    assert of_updates(compiled()) == of_updates(before)


def test_the_warm_up_leaves_nothing_of_its_own_behind() -> None:
    with tiny_engine(clock=MonotonicClock()) as engine:
        warm_up(engine)
        gc.collect()
        assert sum(type(each) is Engine and each.model_config.dim == 8 for each in gc.get_objects()) == 0
        assert engine.stats().pool.resident_users <= 1
        engine.check()


def test_a_made_up_request_is_valid_for_any_model() -> None:
    for model in (tiny_model(), tiny_model(user_context=(), request_context=())):
        with tiny_engine(model) as engine:
            engine.validate(made_up_request(model.config, 3))


def test_a_made_up_request_has_a_time_whose_gap_fronts_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    gaps = []

    def note(gap: int, num_buckets: int) -> int:
        gaps.append(gap)
        return 0

    monkeypatch.setattr(intake, "gap_bucket", note)
    config = tiny_config()
    Intake(config, version=0, max_history=100).prepare(made_up_request(config, 2))
    assert gaps == [60]
