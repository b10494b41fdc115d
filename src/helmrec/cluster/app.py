"""The Ray Serve application: HTTP fronts, and engines behind HelmRec's request router.

A Serve config file names `build` (`import_path: helmrec.cluster.app:build`); the command line builds the same
application from the same settings.
"""

from pathlib import Path
from typing import Any

import msgspec
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from helmrec.cluster.config import ClusterConfig, check_cards, check_protocols, with_card_share
from helmrec.cluster.dispatch import warm_up
from helmrec.cluster.fleet import RayFleet
from helmrec.cluster.port import ClusterPort
from helmrec.cluster.replica import EngineReplica, ReplicaSettings
from helmrec.cluster.request_router import REPORT, HelmRequestRouter, make_policy
from helmrec.collector import PROCESS
from helmrec.costs.calibrated import load_cost
from helmrec.costs.routing import RouterCost
from helmrec.errors import ConfigError
from helmrec.model.config import ModelConfig
from helmrec.model.folder import read_manifest
from helmrec.redaction import redact
from helmrec.serve.app import make_app
from helmrec.serve.control import Steering
from helmrec.serve.histories import StoredHistories
from helmrec.serve.logs import log_to_stderr
from helmrec.serve.settings import Given, Settings, for_engine, resolve, revealed
from helmrec.serve.wire import Begin

ENGINES, INGRESS = "engines", "ingress"
_STATS_TIMEOUT_PERIODS = 4  # report periods after which Ray stops waiting for a replica's report


class _Engines(EngineReplica):
    """A replica as Ray Serve calls it."""

    def __init__(self, begin: bytes, settings: bytes) -> None:
        PROCESS.take_over()
        super().__init__(begin, settings, serve.get_replica_context().replica_id.unique_id)

    async def record_routing_stats(self) -> dict[str, Any]:
        return {REPORT: await self.report()}

    async def __del__(self) -> None:
        await self.close()


@serve.ingress()
class _Ingress:
    """The HTTP API of a single node, in front of all engines."""

    def __init__(
        self, engines: DeploymentHandle, model: str, settings: dict[str, Any], cluster: dict[str, Any]
    ) -> None:
        given, chosen = _settings(settings), ClusterConfig(**cluster)
        log_to_stderr(given.serve.log_level, given.secrets)
        shape = read_manifest(Path(model)).model
        policy = make_policy(chosen.router, router_cost(chosen, shape), chosen.routing.model_dump())
        warm_up(policy, chosen.memory)  # Ray constructs the router itself, in this process
        self._port = ClusterPort(RayFleet(engines), shape, given.engine.max_history, chosen.patience_s)
        path = given.serve.history_path
        histories = None if path is None else StoredHistories.open(path, shape, given.history)
        self._app = make_app(self._port, given.serve, histories)
        PROCESS.take_over()
        PROCESS.settle()

    def __serve_build_asgi_app__(self) -> Starlette:
        return self._app


def build(arguments: dict[str, Any]) -> Application:
    """Build the application from plain values: `model`, a folder every machine can read, `settings`, `cluster`."""
    if unknown := arguments.keys() - {"model", "settings", "cluster"}:
        raise ConfigError(redact(f"{min(unknown)} is not a known argument, got {arguments[min(unknown)]!r}"))
    if "model" not in arguments:
        raise ConfigError("model is required")
    cluster = ClusterConfig(**arguments.get("cluster") or {})
    return application(Path(arguments["model"]), _settings(arguments.get("settings") or {}), cluster)


def application(model: Path, settings: Settings, cluster: ClusterConfig) -> Application:
    """Build the application. Raises before anything starts if the settings or the model's folder are wrong."""
    shape = read_manifest(model).model
    Steering.of(settings.serve)
    _check_histories(settings.serve.history_path)
    check_cards(cluster, settings.engine)
    check_protocols(settings.serve)
    begin = Begin(str(model), revealed(with_card_share(cluster, settings.engine)), for_engine(settings.serve))
    keeps_all = settings.engine.kv_admission == "always"
    replica = ReplicaSettings(cluster.memory.sketch_bits, 1 if keeps_all else cluster.memory.kept_from_visit)
    engines = serve.deployment(_Engines, name=ENGINES).options(**_engine_options(cluster, settings, shape))
    front = serve.deployment(_Ingress, name=INGRESS).options(
        num_replicas=cluster.ingresses,
        max_ongoing_requests=cluster.max_waiting * max(cluster.replicas, _most(cluster)),
        ray_actor_options={"num_cpus": cluster.cpus_per_ingress},
        graceful_shutdown_timeout_s=cluster.drain_s,
        health_check_period_s=cluster.health_every_s,
    )
    bound = engines.bind(msgspec.msgpack.encode(begin), msgspec.msgpack.encode(replica))
    return front.bind(bound, str(model), _plain(settings), cluster.model_dump(mode="json", exclude_none=True))


def _most(cluster: ClusterConfig) -> int:
    return 0 if cluster.scaling is None else cluster.scaling.max_replicas


def _engine_options(cluster: ClusterConfig, settings: Settings, model: ModelConfig) -> dict[str, Any]:
    routing = RequestRouterConfig(
        request_router_class=HelmRequestRouter,
        request_router_kwargs={
            "router": cluster.router,
            "cost": router_cost(cluster, model),
            "routing": cluster.routing.model_dump(),
            "memory": cluster.memory.model_dump(),
        },
        request_routing_stats_period_s=cluster.report_every_s,
        request_routing_stats_timeout_s=cluster.report_every_s * _STATS_TIMEOUT_PERIODS,
    )
    options: dict[str, Any] = {
        "request_router_config": routing,
        "max_ongoing_requests": cluster.max_waiting,
        "ray_actor_options": {"num_cpus": cluster.cpus_per_replica, "num_gpus": cluster.gpus_per_replica},
        "graceful_shutdown_wait_loop_s": 0.2,
        "graceful_shutdown_timeout_s": cluster.drain_s,
        "health_check_period_s": cluster.health_every_s,
        "health_check_timeout_s": max(10.0, 5 * cluster.health_every_s),
    }
    if cluster.scaling is None:
        return options | {"num_replicas": cluster.replicas}
    scaling = AutoscalingConfig(
        min_replicas=cluster.scaling.min_replicas,
        max_replicas=cluster.scaling.max_replicas,
        target_ongoing_requests=cluster.scaling.waiting_per_replica,
        upscale_delay_s=cluster.scaling.up_after_s,
        downscale_delay_s=cluster.scaling.down_after_s,
    )
    return options | {"autoscaling_config": scaling}


def router_cost(cluster: ClusterConfig, model: ModelConfig) -> dict[str, Any] | None:
    """Return the costs of the calibration that the router predicts with; None: those that replicas learn."""
    if cluster.calibration is None:
        return None
    terms = load_cost(Path(cluster.calibration)).terms()
    return RouterCost.from_calibration(terms, len(model.features), model.row_stride)._asdict()


def _check_histories(path: str | None) -> None:
    if path is not None and not path.startswith(("redis://", "rediss://", "unix://")):
        raise ConfigError(f"history_path must be the address of a Redis that all nodes share, got {redact(path)!r}")


def _plain(settings: Settings) -> dict[str, Any]:
    """Return all settings by name, for `_settings`. Secrets are in clear: for the fronts only."""
    values: dict[str, Any] = {
        **revealed(settings.serve),
        **revealed(settings.engine),
        **{f"history_{name}": value for name, value in revealed(settings.history).items()},
    }
    return {name: value for name, value in values.items() if value is not None}


def _settings(values: dict[str, Any]) -> Settings:
    return resolve({name: Given(value, "the cluster's settings") for name, value in values.items()}, {}, None)
