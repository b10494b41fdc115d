"""Time all cases of a profile: make the engine, run the cases, report progress."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from helmrec.calibrate.cases import STEP_REQUESTS, Case, make_cases
from helmrec.calibrate.probe import Probe
from helmrec.calibrate.timed import Measured, Timed
from helmrec.config import EngineConfig
from helmrec.engine.engine import Engine
from helmrec.model.config import ModelConfig
from helmrec.model.profiles import profile
from helmrec.model.weights import LoadedModel, random_dense, total_table_bytes

Progress = Callable[[str, int, int], None]  # called with the current task, the number done and the total

_UNIT_ROWS = 1_000_000
_HIT_ROWS, _HIT_SLOTS = 65_536, 1 << 19
_REPEATS, _QUICK_REPEATS = 5, 2


@dataclass(frozen=True, slots=True)
class MeasurePlan:
    """Settings of a measurement."""

    device: str
    table_bytes: int
    pool_bytes: int
    host_kv_bytes: int
    is_quick: bool
    made: dict[str, str]


def measure(name: str, plan: MeasurePlan, progress: Progress) -> Measured:
    """Time every case on new engines of this profile, and close them."""
    model = sized_profile(name, plan.table_bytes)
    cases = make_cases(model, is_quick=plan.is_quick)
    timed: list[Timed] = []
    probes: list[Probe] = []
    for with_tier in (False, True):  # saving pages to the host tier would delay all other steps
        with make_engine(model, plan, partial(progress, f"{name}: engine"), with_tier=with_tier) as engine:
            probes.append(Probe(engine, waiter(plan.device)))
            progress(f"{name}: warming up", 0, 1)
            probes[-1].warm_up()
            timed += _run_cases(probes[-1], [case for case in cases if case.is_reloaded == with_tier], plan, progress)
            engine.check()
    row_bytes = model.row_stride
    return Measured(
        device=device_name(plan.device),
        profile=name,
        rows_per_token=len(model.features),
        row_bytes=row_bytes,
        overlaps=any(probe.overlaps for probe in probes),
        sorted_from_rows=0,
        hit_gb_per_s=time_hits(plan.device, row_bytes),
        intake_ms=float(np.median([ms for probe in probes for ms in probe.intake_ms])),
        made=plan.made,
        timed=tuple(timed),
    )


def _run_cases(probe: Probe, cases: Sequence[Case], plan: MeasurePlan, progress: Progress) -> list[Timed]:
    repeats = _QUICK_REPEATS if plan.is_quick else _REPEATS
    timed: list[Timed] = []
    for i, case in enumerate(cases):
        progress(case.name, i, len(cases))
        timed += probe.run(case, repeats if case.num_steps == 1 else 1)
    return timed


def sized_profile(name: str, table_bytes: int) -> ModelConfig:
    """Return the profile with tables of about `table_bytes` in total."""
    unit = total_table_bytes(profile(name, _UNIT_ROWS))
    return profile(name, max(1_024, int(_UNIT_ROWS * table_bytes / unit)))


def make_model(model: ModelConfig, device: str) -> LoadedModel:
    """Make a model with random weights. All rows of a table are equal: quick to make, and the timing is the same."""
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(model.row_dim, generator=generator).to(getattr(torch, model.row_dtype))
    tables = {table.name: row.expand(table.num_rows, model.row_dim) for table in model.tables}
    if device == "cpu":  # for a GPU, the engine copies them anyway
        tables = {table: rows.contiguous() for table, rows in tables.items()}
    return LoadedModel(model, 1, random_dense(model, generator), tables)


def make_engine(
    model: ModelConfig, plan: MeasurePlan, progress: Callable[[int, int], None], *, with_tier: bool
) -> Engine:
    config = EngineConfig(
        pool_bytes=plan.pool_bytes,
        alpha=0.3,
        device=plan.device,
        max_batch_requests=STEP_REQUESTS,
        host_kv_bytes=plan.host_kv_bytes if with_tier else 0,
        kv_reload="always",
        save_bytes_per_step=1 << 30,  # pages are saved to the host before they are evicted
        refill_bytes_per_step=0,  # the bus carries only what the steps need
    )
    return Engine(make_model(model, plan.device), config, progress=progress)


def time_hits(device: str, row_bytes: int) -> float:
    """Return the speed of reading resident rows in GB/s: the median of a few reads in random order."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.zeros((_HIT_SLOTS, row_bytes // 2), dtype=torch.float16, device=device)
    chosen = torch.randint(_HIT_SLOTS, (_HIT_ROWS,), generator=generator).to(device)
    wait = waiter(device)
    times_s = []
    for _ in range(12):
        wait()
        begin_s = time.perf_counter()
        for _ in range(8):
            rows.index_select(0, chosen)
        wait()
        times_s.append((time.perf_counter() - begin_s) / 8)
    return _HIT_ROWS * row_bytes / float(np.median(times_s)) / 1e9


def waiter(device: str) -> Callable[[], None]:
    """Return a function that waits until the device is idle."""
    return torch.cuda.synchronize if device == "cuda" else (lambda: None)


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} threads"
