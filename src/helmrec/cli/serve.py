"""`helmrec serve`: one model behind HTTP."""

import logging
import os
import signal
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from helmrec.cli.console import err, out, told_plainly
from helmrec.cluster.config import read_cluster_config
from helmrec.cluster.environment import prepare_environment
from helmrec.errors import ConfigError
from helmrec.serve.app import make_app
from helmrec.serve.histories import StoredHistories
from helmrec.serve.logs import log_to_stderr
from helmrec.serve.node import make_port
from helmrec.serve.server import listen, serve_until_stopped
from helmrec.serve.settings import Given, Settings, resolve

log = logging.getLogger("helmrec.serve")


def serve(  # noqa: PLR0913, PLR0917 - one parameter per flag
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A model folder.")],
    pool: Annotated[str | None, typer.Option(help="Memory both caches share, such as 24GiB.")] = None,
    alpha: Annotated[float | None, typer.Option(help="Embedding share of the pool.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    deadline_ms: Annotated[float | None, typer.Option("--deadline", help="Milliseconds a request may wait.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; 127.0.0.1 by default.")] = None,
    history: Annotated[str | None, typer.Option(help="Folder of stored histories; none are kept without.")] = None,
    policy: Annotated[
        str | None, typer.Option(help="Who moves the boundary: helm (the default), static:ALPHA, or none.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="8000 by default; 0 takes any free one.")] = None,
    others: Annotated[list[str] | None, typer.Option("--set", help="Any other setting, as NAME=VALUE.")] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file of settings.")] = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Many engines on Ray Serve; needs helmrec[cluster].")
    ] = False,
    replicas: Annotated[int | None, typer.Option(help="Engines of a cluster.")] = None,
    cluster_config: Annotated[Path | None, typer.Option(help="A TOML file of the cluster's own settings.")] = None,
    print_config: Annotated[bool, typer.Option("--print-config", help="Show all settings, and stop.")] = False,
) -> None:
    """Serve a model over HTTP. Flags win over HELMREC_* variables, those over the file of --config.

    The token of admin calls is best given as HELMREC_ADMIN_TOKEN, and the address of a Redis with a password as
    HELMREC_HISTORY_PATH: flags are seen by every user of a machine.
    """
    with told_plainly():
        flags = {
            "pool_bytes": ("--pool", pool),
            "deadline_ms": ("--deadline", deadline_ms),
            "history_path": ("--history", history),
            "alpha": ("--alpha", alpha),
            "device": ("--device", device),
            "policy": ("--policy", policy),
            "host": ("--host", host),
            "port": ("--port", port),
        }
        settings = resolve(_given(flags) | _parsed(others or []), os.environ, config)
        if print_config:
            for line in settings.lines():
                out.print(line, highlight=False, markup=False, soft_wrap=True)
            return
        if cluster or replicas is not None or cluster_config is not None:
            _serve_cluster(model, settings, cluster_config, {} if replicas is None else {"replicas": replicas})
        else:
            _serve(model, settings)


def _given(flags: dict[str, tuple[str, Any]]) -> dict[str, Given]:
    return {name: Given(value, f"flag {flag}") for name, (flag, value) in flags.items() if value is not None}


def _parsed(others: list[str]) -> dict[str, Given]:
    for each in others:
        if "=" not in each:
            raise ConfigError(f"--set: NAME=VALUE is needed, got {each!r}")
    return {name: Given(value, "flag --set") for name, _, value in (each.partition("=") for each in others)}


def _serve_cluster(model: Path, settings: Settings, file: Path | None, given: dict[str, Any]) -> None:
    """Serve until told to stop; on a Ray cluster that was there before, deploy and leave it serving."""
    log_to_stderr(settings.serve.log_level, settings.secrets)
    config = read_cluster_config(file, **given)
    prepare_environment(config)
    try:
        from helmrec.cluster.deploy import deploy, ray_of  # noqa: PLC0415 - Ray is an extra, and slow to import
    except ModuleNotFoundError as error:
        raise ConfigError(f"--cluster needs helmrec[cluster] to be installed ({error})") from None
    over = threading.Event()
    with ray_of(config) as is_ours:
        if is_ours:  # after Ray has set its own: it would abort
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
    with listen(settings.serve) as listener:  # before the model is loaded: a taken port is told at once
        with err.status("getting the model ready"):
            port = make_port(model, settings.engine, settings.serve)
            path = settings.serve.history_path
            histories = None if path is None else StoredHistories.open(path, port.model, settings.history)
        app = make_app(port, settings.serve, histories)
        serve_until_stopped(app, settings.serve, listener, on_stop=app.state.front.bodies.stop)
