"""The row stage of a card, its Triton kernels in the interpreter: every step reads the rounded rows of the master."""

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("with a GPU, tests/gpu runs the same kernels compiled", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when Triton and each kernel is imported, so before that
pytest.importorskip("triton", reason="Triton is not installed here")

from helmrec.config import FixedRowDtype
from helmrec.engine.row_stage import DeviceRowStage
from helmrec.engine.row_values import stored
from helmrec.kernels.row_codec import Recoding
from helmrec.kernels.row_kernels import row_kernels
from helmrec.kernels.row_table import Admission
from helmrec.memory.arena import Arena
from helmrec.memory.device_rows import DeviceRows, RowPolicy
from helmrec.memory.row_master import RowMaster
from helmrec.model.shared_tables import row_codec
from tests.helpers import tiny_model

NUM_PAGES = 8


@pytest.mark.parametrize(
    ("here", "host"),
    [("model", "model"), ("int8", "int8"), ("fp8_e4m3", "model"), ("model", "fp8_e4m3"), ("int8", "model")],
)
def test_steps_read_the_rows_of_the_master_through_updates_moves_and_refills(
    here: FixedRowDtype, host: FixedRowDtype
) -> None:
    model, rng = tiny_model(row_dtype="float16", row_dim=20), np.random.default_rng(0)
    codec, geometry = row_codec(model.config, here), model.config.page_geometry(4, "model", here, host)
    master = RowMaster.copied(model.tables, code=None if host == "model" else host)
    kernels = row_kernels("triton", None if master.codec == codec else Recoding(master.codec, codec))
    arena = Arena(NUM_PAGES, geometry, torch.float32, codec.stored_dtype, "cpu")
    policy = RowPolicy(is_lru=True, admission=Admission.ALWAYS)
    rows = DeviceRows(model.config.num_rows, arena.rows, geometry.rows_per_page, policy, kernels)
    rows.add_pages(range(NUM_PAGES))
    stage = DeviceRowStage(rows, arena, master, kernels)
    for i in range(12):
        if i % 3 == 1:
            ids = rng.choice(model.config.num_rows, 15, replace=False)
            values = rng.standard_normal((15, 20)).astype(np.float32)
            stage.write(stage.send(ids, stored(values, master.codec)))
        if i in {3, 7}:
            pages = rows.give_up_pages(6)
        if i in {4, 8}:
            rows.add_pages(pages)
            stage.refill(4_096)
        wanted = rng.zipf(1.3, 60) % model.config.num_rows
        step: Any = SimpleNamespace(rows=wanted, count_by_request=lambda missed: missed)
        reading = stage.read(step)
        reading.count_misses()
        expected = codec.decode(master.codec.recode(master.gather(wanted), codec), torch.float32)
        assert torch.equal(codec.decode(reading.values, torch.float32), expected)
        rows.check()
    assert rows.hits > 0
    assert rows.refills > 0
    assert rows.moves > 0
