"""Fixtures shared by all tests: a clock that tests own, seeded chance, and an engine checked at teardown."""

import logging
import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():  # before anything imports triton: its kernels then run on the CPU
    os.environ.setdefault("TRITON_INTERPRET", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # it sets both: a console made at import would keep them for ever
    os.environ.pop("COLUMNS", None)
    os.environ.pop("LINES", None)

from helmrec.clock import ManualClock
from helmrec.engine.engine import Engine
from helmrec.model.weights import LoadedModel
from tests.helpers import tiny_engine, tiny_model

# Numba compiles inside the first example, so no deadline; the same tests run the same examples everywhere.
settings.register_profile("helmrec", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("helmrec")


@pytest.fixture(autouse=True)
def log_handlers_do_not_outlive_their_test() -> Iterator[None]:
    """A command that a test runs in this process sends its logs to a stream that is closed when the test is over."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def model() -> LoadedModel:
    """Shared: a test that updates rows builds its own."""
    return tiny_model()


@pytest.fixture
def engine(model: LoadedModel, clock: ManualClock) -> Iterator[Engine]:
    with tiny_engine(model, clock) as engine:
        yield engine
        engine.check()
