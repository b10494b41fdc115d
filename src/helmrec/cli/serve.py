"""`helmrec serve`: serve a model over HTTP."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from helmrec.cli.console import exit_on_error, out
from helmrec.cluster.config import ClusterConfig
from helmrec.errors import ConfigError
from helmrec.serve.settings import Given, field_of, resolve


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
        from helmrec.cli import serving  # errors of settings come before this slow import

        if cluster or replicas is not None or cluster_config is not None:
            serving.serve_cluster(model, settings, cluster_config, {} if replicas is None else {"replicas": replicas})
        else:
            serving.serve_node(model, settings)


def _parsed(others: list[str]) -> dict[str, Given]:
    for each in others:
        if "=" not in each:
            raise ConfigError(f"--set must be NAME=VALUE, got {each!r}")
    return {name: Given(value, "flag --set") for name, _, value in (each.partition("=") for each in others)}
