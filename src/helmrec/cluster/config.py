"""Settings of a cluster: replicas, their resources, and routing. Does not know Ray."""

import tomllib
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import ByteSize, Field, model_validator

from helmrec.config import EngineConfig, Frozen
from helmrec.errors import ConfigError
from helmrec.extensions import ROUTERS, extensions
from helmrec.router.settings import RouterSettings, StateSettings
from helmrec.serve.settings import ServeConfig

OURS = "emb-kv-aware"  # the router of the product; others come from packages that add them


class Scaling(Frozen):
    """Bounds of a number of replicas that follows the load."""

    min_replicas: int = Field(1, ge=1, description="fewest replicas")
    max_replicas: int = Field(ge=1, description="most replicas")
    waiting_per_replica: float = Field(4.0, gt=0, description="target number of unanswered requests per replica")
    up_after_s: float = Field(10.0, ge=0, description="how long a higher load must last")
    down_after_s: float = Field(
        120.0, ge=0, description="how long a lower load must last: new replicas have cold caches"
    )

    @model_validator(mode="after")
    def _has_room(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas must be at least min_replicas ({self.min_replicas}), not {self.max_replicas}"
            )
        return self


class ClusterConfig(Frozen):
    """A cluster on this machine, or on a running Ray cluster."""

    app: str = Field("helmrec", min_length=1, description="name of the application on Ray Serve")
    address: str | None = Field(
        None, min_length=1, description="address of a Ray cluster, or 'auto'; unset: Ray is started on this machine"
    )
    replicas: int = Field(2, ge=1, description="engines, each with its own pool and controller")
    scaling: Scaling | None = Field(
        None, description="bounds between which the number of replicas follows the load, instead of replicas"
    )
    cpus_per_replica: float = Field(1.0, ge=0, description="cores that Ray reserves for a replica")
    gpus_per_replica: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of a GPU that Ray reserves for a replica: 1, or a fraction if several share a card, which "
        'then also bounds pool_bytes = "auto"; 0: replicas run on the CPU',
    )
    ingresses: int = Field(1, ge=1, description="HTTP fronts; each routes by its own state and the reports of replicas")
    cpus_per_ingress: float = Field(0.5, ge=0, description="cores that Ray reserves for an HTTP front")
    max_waiting: int = Field(256, ge=1, description="requests a replica accepts at once; its engine queues and refuses")
    router: str = Field(OURS, description="policy that chooses a replica")
    routing: RouterSettings = Field(RouterSettings(), description="how the router weighs caches and queues")
    memory: StateSettings = Field(StateSettings(sketch_bits=1 << 15), description="bounds of a router's state")
    calibration: str | None = Field(
        None,
        min_length=1,
        description="file of device costs that the router predicts with; unset: what replicas learn from their steps",
    )
    report_every_s: float = Field(0.5, gt=0, description="time between two reports of a replica")
    health_every_s: float = Field(1.0, gt=0, description="time between two health checks of a replica")
    drain_s: float = Field(30.0, gt=0, description="time in which a replica that is removed may answer its requests")
    patience_s: float = Field(
        60.0, gt=0, description="time in which a replica must answer a request that has no deadline"
    )
    object_store_bytes: Annotated[ByteSize, Field(ge=75 << 20)] = Field(
        ByteSize(256 << 20), description="shared memory of Ray, where it is started on this machine"
    )

    @model_validator(mode="after")
    def _knows_its_router(self) -> Self:
        if self.router != OURS and self.router not in (added := extensions(ROUTERS)):
            raise ValueError(f"router must be one of {', '.join((OURS, *added))}")
        return self


def check_cards(cluster: ClusterConfig, engine: EngineConfig) -> None:
    """Raise ConfigError if replicas run elsewhere than on what Ray reserves for them."""
    if engine.device == "cuda" and not cluster.gpus_per_replica:
        raise ConfigError('gpus_per_replica must be more than 0 with device "cuda", got 0')
    if engine.device == "cpu" and cluster.gpus_per_replica:
        raise ConfigError(f'gpus_per_replica must be 0 with device "cpu", got {cluster.gpus_per_replica:g}')


def with_card_share(cluster: ClusterConfig, engine: EngineConfig) -> EngineConfig:
    """Return the settings of a replica that has a part of a card only, if it does."""
    if not 0 < cluster.gpus_per_replica < 1:
        return engine
    return engine.model_copy(update={"card_share": cluster.gpus_per_replica})


def check_protocols(serve: ServeConfig) -> None:
    """Raise ConfigError if the fronts of a cluster are asked for what they do not serve.

    Ray Serve forwards HTTP to them; a port of their own could be had by one front of a machine only.
    """
    if serve.grpc_port is not None:
        raise ConfigError(f"grpc_port: a cluster serves HTTP only; leave it unset, got {serve.grpc_port}")


def read_cluster_config(file: Path | None, **given: Any) -> ClusterConfig:
    """Read a TOML file, if there is one. Values in `given` take precedence."""
    try:
        settings = {} if file is None else tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"the cluster's settings cannot be read ({error}), got {str(file)!r}") from None
    return ClusterConfig(**settings | given)
