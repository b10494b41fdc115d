"""`helmrec serve`: serve a model over HTTP."""

import logging
import os
import signal
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from helmrec.cli.console import err, exit_on_error, out
from helmrec.cluster.config import ClusterConfig, check_protocols, read_cluster_config
from helmrec.cluster.engines import make_engines
from helmrec.cluster.environment import prepare_environment
from helmrec.errors import ConfigError
from helmrec.serve.app import make_app
from helmrec.serve.histories import StoredHistories
from helmrec.serve.logs import log_to_stderr
from helmrec.serve.node import make_port
from helmrec.serve.server import check_grpc, listen, serve_until_stopped
from helmrec.serve.settings import Given, Settings, field_of, resolve

log = logging.getLogger("helmrec.serve")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _setting(name: str, *short: str) -> Any:
    """Make the flag of a setting: it has the setting's name, description and default."""
    field = field_of(name)
    about = field.description or ""
    shown = "unset" if field.default is None else str(field.default)
    return typer.Option(_flag(name), *short, help=f"{about[:1].upper()}{about[1:]}.", show_default=shown)


def serve(  # noqa: PLR0913, PLR0917 - one parameter per flag
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A model folder.")],
    pool_bytes: Annotated[str | None, _setting("pool_bytes", "--pool")] = None,
    alpha: Annotated[float | None, _setting("alpha")] = None,
    device: Annotated[str | None, _setting("device")] = None,
    deadline_ms: Annotated[float | None, _setting("deadline_ms", "--deadline")] = None,
    host: Annotated[str | None, _setting("host")] = None,
    history_path: Annotated[str | None, _setting("history_path", "--history")] = None,
    row_deltas: Annotated[str | None, _setting("row_deltas")] = None,
    row_snapshots: Annotated[str | None, _setting("row_snapshots")] = None,
    policy: Annotated[str | None, _setting("policy")] = None,
    port: Annotated[int | None, _setting("port")] = None,
    grpc_port: Annotated[int | None, _setting("grpc_port")] = None,
    engines: Annotated[int | None, _setting("engines", "--gpus")] = None,
    others: Annotated[
        list[str] | None, typer.Option("--set", help="Any other setting, as NAME=VALUE.", show_default="none")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file of settings.", show_default="none")] = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help=r"Many engines on Ray Serve; needs helmrec\[cluster].")
    ] = False,
    replicas: Annotated[
        int | None,
        typer.Option(help="Engines of a cluster.", show_default=str(ClusterConfig.model_fields["replicas"].default)),
    ] = None,
    cluster_config: Annotated[
        Path | None, typer.Option(help="A TOML file of the cluster's own settings.", show_default="none")
    ] = None,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print all settings and exit.")] = False,
) -> None:
    """Serve a model over HTTP, and over gRPC with --grpc-port.

    Flags override HELMREC_* variables, which override the file of --config.

    Set the token of admin calls as HELMREC_ADMIN_TOKEN, and the address of a Redis with a password as
    HELMREC_HISTORY_PATH: every user of a machine can see flags.
    """
    with exit_on_error():
        flags = {
            "pool_bytes": pool_bytes,
            "deadline_ms": deadline_ms,
            "history_path": history_path,
            "row_deltas": row_deltas,
            "row_snapshots": row_snapshots,
            "alpha": alpha,
            "device": device,
            "policy": policy,
            "host": host,
            "port": port,
            "grpc_port": grpc_port,
            "engines": engines,
        }
        given = {name: Given(value, f"flag {_flag(name)}") for name, value in flags.items() if value is not None}
        settings = resolve(given | _parsed(others or []), os.environ, config)
        if print_config:
            for line in settings.lines():
                out.print(line, highlight=False, markup=False, soft_wrap=True)
            return
        if cluster or replicas is not None or cluster_config is not None:
            _serve_cluster(model, settings, cluster_config, {} if replicas is None else {"replicas": replicas})
        else:
            _serve(model, settings)


def _parsed(others: list[str]) -> dict[str, Given]:
    for each in others:
        if "=" not in each:
            raise ConfigError(f"--set must be NAME=VALUE, got {each!r}")
    return {name: Given(value, "flag --set") for name, _, value in (each.partition("=") for each in others)}


def _serve_cluster(model: Path, settings: Settings, file: Path | None, given: dict[str, Any]) -> None:
    """Serve until a signal to stop; on an existing Ray cluster, deploy and exit."""
    log_to_stderr(settings.serve.log_level, settings.secrets)
    config = read_cluster_config(file, **given)
    check_protocols(settings.serve)
    prepare_environment(config)
    try:
        from helmrec.cluster.deploy import deploy, ray_of  # noqa: PLC0415 - Ray is an extra, and slow to import
    except ModuleNotFoundError as error:
        raise ConfigError(f"--cluster needs Ray: pip install 'helmrec[cluster]' ({error})") from None
    over = threading.Event()
    with ray_of(config) as is_ours:
        if is_ours:  # after Ray has installed its own handlers, which would abort
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: over.set())
        with err.status(f"starting {config.replicas} replicas"):
            deploy(model, settings, config)
        address = f"http://{settings.serve.host}:{settings.serve.port}"
        logging.getLogger("helmrec.cluster").info("serving", extra={"address": address})
        if is_ours:
            over.wait()


def _serve(model: Path, settings: Settings) -> None:
    log_to_stderr(settings.serve.log_level, settings.secrets)
    for name in settings.ignored:
        log.warning("not a setting", extra={"variable": name})
    with listen(settings.serve) as listener:  # before the model is loaded, so that a port in use is reported at once
        check_grpc(settings.serve)
        with err.status("loading the model"):
            make = make_port if settings.serve.engines == 1 else make_engines
            port = make(model, settings.engine, settings.serve)
            path = settings.serve.history_path
            histories = None if path is None else StoredHistories.open(path, port.model, settings.history)
        app = make_app(port, settings.serve, histories)
        serve_until_stopped(app, settings.serve, listener, on_stop=app.state.begin_to_stop)
