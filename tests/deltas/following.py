"""A consumer with its engine in a process of its own, to be killed: starts from the newest snapshot and serves."""

import time
from pathlib import Path

import numpy as np

from helmrec.deltas.consumer import ConsumerLimits, RowConsumer
from helmrec.deltas.snapshot import newest_snapshot, read_start
from helmrec.deltas.source import open_source
from helmrec.model.weights import load_model
from tests.helpers import random_request, tiny_engine


def follow(folder: Path, target: int | None) -> None:
    """Follow `deltas` for good; with a target, up to it, and then write all rows of items and the position."""
    start = newest_snapshot(folder / "snapshots", folder / "tiny") or folder / "tiny"
    rng, source = np.random.default_rng(0), open_source(str(folder / "deltas"))
    with tiny_engine(load_model(start), overlap=True) as engine:
        consumer = RowConsumer(source, engine, read_start(start), ConsumerLimits(slice_rows=3))
        consumer.start()
        (folder / "started").touch()
        while target is None or consumer.stats().position < target:
            if not engine.queue_length:
                engine.submit(random_request(rng, engine.model_config, int(rng.integers(3))))
            engine.step()
            consumer.apply(time.monotonic())
        while engine.step():
            pass
        engine.check()
        consumer.close()
        rows = engine._master.gather(np.arange(300)).numpy()
        np.savez(folder / "found.npz", rows=rows, position=engine.row_position.sequence)
