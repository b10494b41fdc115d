"""Make the port of an engine from settings: in this process, or in a process of its own."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from helmrec.config import EngineConfig
from helmrec.deltas.consumer import ConsumerLimits, RowConsumer, StreamStart
from helmrec.deltas.snapshot import newest_snapshot, read_start
from helmrec.deltas.source import open_source
from helmrec.engine.engine import Engine
from helmrec.errors import ConfigError
from helmrec.model.folder import read_manifest
from helmrec.model.weights import load_dense
from helmrec.serve.control import Steering, with_curves
from helmrec.serve.joined_port import JoinedPort
from helmrec.serve.port import EnginePort, InProcessPort
from helmrec.serve.process_port import ProcessMemory, ProcessPort
from helmrec.serve.settings import ServeConfig, for_engine, revealed
from helmrec.serve.shared_rows import TableDoor
from helmrec.serve.snapshot import SnapshotKeeper
from helmrec.serve.swap import SwappingPort
from helmrec.serve.wire import Begin


def make_port(model: Path, engine: EngineConfig, serve: ServeConfig) -> EnginePort:
    """Make the port that the settings ask for. Raises if the settings or the model's folder are wrong."""
    if serve.joined_engine is not None:
        return JoinedPort(serve.joined_engine, serve.ring_bytes, read_manifest(model).model, engine.max_history)
    if not serve.engine_process:
        if serve.engine_socket is not None:
            raise ConfigError(f"engine_socket needs engine_process=true, got {serve.engine_socket!r} without it")
        return swapping(model, engine, serve)
    return process_port(model, engine, serve, environment={})


def process_port(
    model: Path,
    engine: EngineConfig,
    serve: ServeConfig,
    environment: Mapping[str, str],
    *,
    follows_log: bool = False,
) -> ProcessPort:
    """Make a port to an engine in a process of its own, with these variables added to the environment.

    follows_log: this process writes the log of row updates (`serve/host_log.py`).
    """
    manifest = read_manifest(model)
    Steering.of(serve)  # raises if the policy is unknown, before anything starts
    if serve.row_deltas is not None:
        open_source(serve.row_deltas).close()  # the same for a place that is none
    begin = Begin(str(model), revealed(engine), for_engine(serve), follows_log)
    memory = ProcessMemory(serve.ring_bytes, serve.replay_bytes)
    return ProcessPort(begin, manifest.model, engine.max_history, memory, environment)


def swapping(
    model: Path,
    engine: EngineConfig,
    serve: ServeConfig,
    *,
    door: TableDoor | None = None,
    follows_log: bool = False,
) -> SwappingPort:
    """Make a port whose engine runs in this process and can be swapped.

    Tables come through `door`, if there is one. follows_log: the front writes the log of row updates.
    """
    if door is None:
        make = partial(in_process, engine=engine, serve=serve, follows_log=follows_log)
        return SwappingPort(make(model), lambda other, start: make(other, start=start))
    return SwappingPort(
        with_shared_tables(model, engine, serve, door),
        lambda other, _: with_shared_tables(other, engine, serve, door),
    )


def with_shared_tables(model: Path, engine: EngineConfig, serve: ServeConfig, door: TableDoor) -> InProcessPort:
    """Make a port to one engine in this process, of tables that other processes read too."""
    steering = Steering.of(serve)
    rows = door.wait_for(model)
    try:
        made = Engine(load_dense(model, rows.tables), with_curves(serve.policy, engine))
    except BaseException:
        rows.close()
        raise
    rows.follow_with(made)
    return InProcessPort(made, steering, SnapshotKeeper.of(serve, made.model_config), rows)


def in_process(
    model: Path,
    engine: EngineConfig,
    serve: ServeConfig,
    start: StreamStart | None = None,
    *,
    follows_log: bool = False,
) -> InProcessPort:
    """Make a port to one engine in this process, of the model or of the newest snapshot of its tables.

    `start`: serve the model itself, whose rows have this place in the stream of row deltas. follows_log: another
    process writes the log of row updates.
    """
    steering = Steering.of(serve)
    source = None if serve.row_deltas is None else open_source(serve.row_deltas)
    snapshots = None if start is not None or serve.row_snapshots is None else Path(serve.row_snapshots)
    folder = model if snapshots is None else newest_snapshot(snapshots, model) or model
    made = Engine.from_model(folder, with_curves(serve.policy, engine), follows_log=follows_log)
    limits = ConsumerLimits(slice_rows=serve.row_slice, rows_per_s=serve.row_rate)
    rows = None if source is None else RowConsumer(source, made, start or read_start(folder), limits)
    return InProcessPort(made, steering, SnapshotKeeper.of(serve, made.model_config), rows)
