"""Settings of a cluster: how many replicas, on what, and how requests find them. Knows bounds, not Ray."""

import tomllib
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import ByteSize, Field, model_validator

from helmrec.config import Frozen
from helmrec.errors import ConfigError
from helmrec.extensions import ROUTERS, extensions
from helmrec.router.policy import RouterSettings
from helmrec.router.state import StateSettings

OURS = "emb-kv-aware"  # the router of the product; others come from packages that add them


class Scaling(Frozen):
    """Replicas come and go with the load."""

    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(ge=1)
    waiting_per_replica: float = Field(4.0, gt=0, description="requests on their way that one replica should have")
    up_after_s: float = Field(10.0, ge=0, description="more load must last this long")
    down_after_s: float = Field(120.0, ge=0, description="and less load this long: a new replica has cold caches")

    @model_validator(mode="after")
    def _has_room(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas must be at least min_replicas ({self.min_replicas}), not {self.max_replicas}"
            )
        return self


class ClusterConfig(Frozen):
    """A cluster on this machine, or on a Ray cluster that is there already."""

    app: str = Field("helmrec", min_length=1, description="name of the application on Ray Serve")
    address: str | None = Field(None, min_length=1, description="of a Ray cluster, or 'auto'; none, one starts here")
    replicas: int = Field(2, ge=1, description="engines, each with a pool and a controller of its own")
    scaling: Scaling | None = Field(None, description="instead of a fixed number of replicas")
    cpus_per_replica: float = Field(1.0, ge=0)
    gpus_per_replica: float = Field(0.0, ge=0)
    ingresses: int = Field(1, ge=1, description="HTTP fronts; each routes by what it knows and what replicas report")
    cpus_per_ingress: float = Field(0.5, ge=0)
    max_waiting: int = Field(256, ge=1, description="requests a replica takes at once; the engine queues and refuses")
    router: str = Field(OURS, description="who chooses a replica")
    routing: RouterSettings = RouterSettings()
    memory: StateSettings = Field(StateSettings(sketch_bits=1 << 15), description="what a router keeps in mind")
    calibration: str | None = Field(None, min_length=1, description="costs the router reckons with; else an H200's")
    report_every_s: float = Field(0.5, gt=0, description="between two reports of a replica")
    health_every_s: float = Field(1.0, gt=0, description="between two looks at whether a replica lives")
    drain_s: float = Field(30.0, gt=0, description="that a replica which is taken away may finish in")
    patience_s: float = Field(60.0, gt=0, description="with a replica, for requests without a deadline")
    object_store_bytes: Annotated[ByteSize, Field(ge=75 << 20)] = Field(
        ByteSize(256 << 20), description="shared memory of a Ray that is started here"
    )

    @model_validator(mode="after")
    def _knows_its_router(self) -> Self:
        if self.router != OURS and self.router not in (added := extensions(ROUTERS)):
            raise ValueError(f"router must be one of {', '.join((OURS, *added))}")
        return self


def read_cluster_config(file: Path | None, **given: Any) -> ClusterConfig:
    """From a TOML file, if there is one; what is given beside it wins."""
    try:
        settings = {} if file is None else tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"the cluster's settings cannot be read ({error}), got {str(file)!r}") from None
    return cluster_config(settings | given)


def cluster_config(settings: dict[str, Any]) -> ClusterConfig:
    """Groups of settings may be plain values."""
    kinds: dict[str, type[Frozen]] = {"scaling": Scaling, "routing": RouterSettings, "memory": StateSettings}
    made = {
        name: kinds[name](**value) if name in kinds and isinstance(value, dict) else value
        for name, value in settings.items()
    }
    return ClusterConfig(**made)
