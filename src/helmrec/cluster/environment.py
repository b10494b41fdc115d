"""Environment variables that Ray reads at import. Call before Ray is imported; does not import Ray itself."""

import os

from helmrec.cluster.config import ClusterConfig

_ALWAYS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no telemetry
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_HERE = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # makes Ray listen on loopback only
    "RAY_worker_niceness": "0",  # default 15: engines would yield to all other processes of the machine
}


def prepare_environment(cluster: ClusterConfig) -> None:
    """Set the variables that are not set yet. If Ray is started on this machine, it listens on loopback only."""
    for name, value in (_ALWAYS if cluster.address else _ALWAYS | _HERE).items():
        os.environ.setdefault(name, value)
