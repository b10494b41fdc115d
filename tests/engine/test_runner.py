import numpy as np
import torch

from helmrec.engine.engine import Engine
from helmrec.engine.runner import Missed
from tests.helpers import random_request, tiny_engine


def run_one(engine: Engine, rng: np.random.Generator, user_id: int) -> Missed:
    """A step without what follows it; returns what it missed."""
    engine.submit(random_request(rng, engine.model_config, user_id))
    batch = engine._scheduler.next_batch(0.0)
    assert batch is not None
    output = engine._runner.run(batch)
    engine._scheduler.abort(batch)
    return output.missed


def test_admitted_rows_are_what_the_step_read(rng: np.random.Generator) -> None:
    with tiny_engine(row_admission="always") as engine:
        missed = run_one(engine, rng, 1)
        engine._runner.admit(missed)
        rows = engine._pool.rows.resident_rows()
        slots = engine._pool.rows.peek(rows)
        assert rows.size > 0
        assert torch.equal(engine._arena.rows[torch.from_numpy(slots).long()], engine._master.gather(rows))
        engine.check()


def test_rows_a_later_step_may_have_written_over_are_not_admitted(rng: np.random.Generator) -> None:
    with tiny_engine(row_admission="always") as engine:
        missed = run_one(engine, rng, 1)
        run_one(engine, rng, 2)
        engine._runner.admit(missed)
        assert engine._pool.rows.num_resident == 0
