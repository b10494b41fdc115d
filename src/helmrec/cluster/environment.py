"""What Ray reads from the environment when it is imported; so this comes before, and imports nothing of Ray."""

import os

from helmrec.cluster.config import ClusterConfig

_ALWAYS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is told to anybody
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_HERE = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's name for: this machine alone, reached by loopback
    "RAY_worker_niceness": "0",  # 15 without: engines would wait for whatever else the machine does
}


def prepare_environment(cluster: ClusterConfig) -> None:
    """A Ray that is started here listens on loopback only. What was set before stays."""
    for name, value in (_ALWAYS if cluster.address else _ALWAYS | _HERE).items():
        os.environ.setdefault(name, value)
