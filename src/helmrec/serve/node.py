"""Make the port of an engine from settings: in this process, or in a process of its own."""

from collections.abc import Mapping
from pathlib import Path

from helmrec.config import EngineConfig
from helmrec.engine.engine import Engine
from helmrec.model.weights import read_manifest
from helmrec.serve.control import Steering, with_curves
from helmrec.serve.port import EnginePort, InProcessPort
from helmrec.serve.process_port import ProcessMemory, ProcessPort
from helmrec.serve.settings import ServeConfig, for_engine, revealed
from helmrec.serve.snapshot import SnapshotKeeper
from helmrec.serve.swap import SwappingPort
from helmrec.serve.wire import Begin


def make_port(model: Path, engine: EngineConfig, serve: ServeConfig) -> EnginePort:
    """Make the port that the settings ask for. Raises if the settings or the model's folder are wrong."""
    if not serve.engine_process:
        return swapping(model, engine, serve)
    return process_port(model, engine, serve, environment={})


def process_port(model: Path, engine: EngineConfig, serve: ServeConfig, environment: Mapping[str, str]) -> ProcessPort:
    """Make a port to an engine in a process of its own, with these variables added to the environment."""
    manifest = read_manifest(model)
    Steering.of(serve)  # raises if the policy is unknown, before anything starts
    begin = Begin(str(model), revealed(engine), for_engine(serve))
    memory = ProcessMemory(serve.ring_bytes, serve.replay_bytes)
    return ProcessPort(begin, manifest.model, engine.max_history, memory, environment)


def swapping(model: Path, engine: EngineConfig, serve: ServeConfig) -> SwappingPort:
    """Make a port whose engine runs in this process and can be swapped."""
    return SwappingPort(in_process(model, engine, serve), lambda other: in_process(other, engine, serve))


def in_process(model: Path, engine: EngineConfig, serve: ServeConfig) -> InProcessPort:
    """Make a port to one engine in this process."""
    steering = Steering.of(serve)
    made = Engine.from_model(model, with_curves(serve.policy, engine))
    return InProcessPort(made, steering, SnapshotKeeper.of(serve, made.model_config))
