"""Start Ray or find it, and put the application on it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
from ray import serve

from helmrec.cluster.app import application
from helmrec.cluster.config import ClusterConfig
from helmrec.serve.settings import Settings


@contextmanager
def ray_of(cluster: ClusterConfig) -> Iterator[bool]:
    """A Ray cluster to talk to; True if it was started here, and then it ends here.

    Whoever imports this has called `prepare_environment` before.
    """
    if cluster.address is not None:
        ray.init(address=cluster.address, namespace="helmrec", log_to_driver=False)
        try:
            yield False
        finally:
            ray.shutdown()
        return
    most = cluster.replicas if cluster.scaling is None else cluster.scaling.max_replicas
    ray.init(
        address="local",  # without it, Ray would join another that happens to run on this machine
        namespace="helmrec",
        num_cpus=max(1, round(most * cluster.cpus_per_replica + cluster.ingresses * cluster.cpus_per_ingress + 0.5)),
        include_dashboard=False,
        object_store_memory=int(cluster.object_store_bytes),
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    try:
        yield True
    finally:
        serve.shutdown()
        ray.shutdown()


def deploy(model: Path, settings: Settings, cluster: ClusterConfig) -> None:
    """Put the application on the Ray cluster that is there, or change the one that runs to it, replica by replica."""
    made = application(model.resolve(), settings, cluster)
    serve.start(
        proxy_location="EveryNode" if cluster.address else "HeadOnly",
        http_options={"host": settings.serve.host, "port": settings.serve.port},
    )
    serve.run(made, name=cluster.app, route_prefix="/")
