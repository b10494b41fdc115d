import numpy as np
import pytest
import torch

from helmrec.engine.engine import Engine
from helmrec.engine.runner import Running
from helmrec.kernels.row_index import ABSENT
from helmrec.memory.device_rows import DeviceRows
from tests.helpers import host_rows, random_request, tiny_engine


def run_one(engine: Engine, rng: np.random.Generator, user_id: int) -> Running:
    """A step without what follows it."""
    engine.submit(random_request(rng, engine.model_config, user_id))
    batch = engine._scheduler.next_batch(0.0)
    assert batch is not None
    running = engine._runner.launch(batch)
    engine._runner.finish(running)
    engine._scheduler.abort(batch)
    return running


@pytest.mark.parametrize("row_index", ["host", "device"])
def test_admitted_rows_are_what_the_step_read(rng: np.random.Generator, row_index: str) -> None:
    with tiny_engine(row_admission="always", row_index=row_index) as engine:
        engine._runner.admit(run_one(engine, rng, 1))
        rows = engine._pool.rows
        if isinstance(rows, DeviceRows):
            slots = (rows.table.row_of != ABSENT).nonzero().flatten().numpy()
            resident = rows.table.row_of[slots].numpy().astype(np.int64)
        else:
            resident = host_rows(engine._pool).by_heat()
            slots = host_rows(engine._pool).peek(resident)
        assert resident.size > 0
        assert torch.equal(engine._arena.rows[torch.from_numpy(slots).long()], engine._master.gather(resident))
        engine.check()


def test_rows_whose_values_changed_since_are_not_admitted(rng: np.random.Generator) -> None:
    with tiny_engine(row_admission="always") as engine:
        running = run_one(engine, rng, 1)
        engine._pool.row_epochs.mark(np.array([0]))
        engine._runner.admit(running)
        assert engine._pool.rows.num_resident == 0
