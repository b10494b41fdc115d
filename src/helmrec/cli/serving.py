"""What `helmrec serve` does once its settings are known."""

import logging
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

from helmrec.cli.console import err
from helmrec.cluster.config import check_protocols, read_cluster_config
from helmrec.cluster.engines import make_engines
from helmrec.cluster.environment import prepare_environment
from helmrec.deltas.schedule import SnapshotPlan, scheduled
from helmrec.errors import ConfigError
from helmrec.serve.app import make_app
from helmrec.serve.histories import StoredHistories
from helmrec.serve.logs import log_to_stderr
from helmrec.serve.node import make_port
from helmrec.serve.server import check_grpc, listen, serve_until_stopped
from helmrec.serve.settings import ServeConfig, Settings

log = logging.getLogger("helmrec.serve")


def serve_cluster(model: Path, settings: Settings, file: Path | None, given: dict[str, Any]) -> None:
    """Serve until a signal to stop; on an existing Ray cluster, deploy and exit."""
    log_to_stderr(settings.serve.log_level, settings.secrets)
    config = read_cluster_config(file, **given)
    check_protocols(settings.serve)
    prepare_environment(config)
    try:
        from helmrec.cluster.deploy import deploy, ray_of  # Ray is an extra
    except ModuleNotFoundError as error:
        raise ConfigError(f"--cluster needs Ray: pip install 'helmrec[cluster]' ({error})") from None
    over = threading.Event()
    is_deployed = False

    def stop(*_: object) -> None:
        over.set()
        if not is_deployed:  # else a start that hangs could not be ended
            raise SystemExit(0)

    with ray_of(config) as is_ours:
        if is_ours:  # after Ray has installed its own handlers, which would abort
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, stop)
        with err.status(f"starting {config.replicas} replicas"):
            deploy(model, settings, config)
        is_deployed = True
        address = f"http://{settings.serve.host}:{settings.serve.port}"
        logging.getLogger("helmrec.cluster").info("serving", extra={"address": address})
        if is_ours:
            over.wait()


def serve_node(model: Path, settings: Settings) -> None:
    """Serve until a signal to stop."""
    log_to_stderr(settings.serve.log_level, settings.secrets)
    for name in settings.ignored:
        log.warning("not a setting", extra={"variable": name})
    plan = _snapshot_plan(model, settings.serve)
    with listen(settings.serve) as listener:  # before the model is loaded, so that a port in use is reported at once
        check_grpc(settings.serve)
        with err.status("loading the model"):
            make = make_port if settings.serve.engines == 1 else make_engines
            port = make(model, settings.engine, settings.serve)
            path = settings.serve.history_path
            histories = None if path is None else StoredHistories.open(path, port.model, settings.history)
        app = make_app(port, settings.serve, histories)
        with scheduled(plan, partial(log_to_stderr, settings.serve.log_level, settings.secrets)):
            serve_until_stopped(app, settings.serve, listener, on_stop=app.state.begin_to_stop)


def _snapshot_plan(model: Path, serve: ServeConfig) -> SnapshotPlan | None:
    """Return the schedule of table snapshots; None if the settings have none."""
    if serve.row_snapshot_every_s is None:
        return None
    if serve.row_deltas is None or serve.row_snapshots is None:
        raise ConfigError("row_snapshot_every_s needs row_deltas and row_snapshots, got one of them unset")
    return SnapshotPlan(
        model=model,
        deltas=serve.row_deltas,
        folder=Path(serve.row_snapshots),
        keep=serve.row_snapshots_kept,
        trims=serve.row_deltas_trimmed,
        every_s=serve.row_snapshot_every_s,
    )
