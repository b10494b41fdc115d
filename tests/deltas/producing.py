"""A trainer in a process of its own, to be killed: pushes rows that follow from their sequence number, without end."""

import numpy as np
from numpy.typing import NDArray

from helmrec.deltas.producer import DeltaProducer

NUM_ROWS, ROW_DIM = 8, 16


def ids_of(sequence: int) -> NDArray[np.int64]:
    return np.random.default_rng(sequence).choice(300, NUM_ROWS, replace=False).astype(np.int64)


def values_of(sequence: int) -> NDArray[np.float32]:
    return np.random.default_rng(-sequence % 2**32).standard_normal((NUM_ROWS, ROW_DIM)).astype(np.float32)


def push_next(producer: DeltaProducer) -> int:
    sequence = producer.newest + 1
    return producer.push("item", ids_of(sequence), values_of(sequence), step=sequence)


def push_without_end(place: str) -> None:
    with DeltaProducer(place) as producer:
        while True:
            push_next(producer)
