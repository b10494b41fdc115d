"""Calls to replicas through a handle of Ray Serve. Errors of Ray are translated into HelmRec's."""

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from helmrec.cluster.port import ReplicaLost
from helmrec.cluster.remote_clock import Stamp
from helmrec.cluster.replica import ReplicaReply
from helmrec.errors import QueueFull


class RayFleet:
    """The engines of one Ray Serve deployment."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def send(self, method: str, hint: bytes, stamp: Stamp, payload: bytes) -> ReplicaReply:
        try:
            return ReplicaReply(*await getattr(self._handle, method).remote(hint, tuple(stamp), payload))
        except BackPressureError as error:
            raise QueueFull(str(error)) from None
        except (RayError, DeploymentUnavailableError) as error:
            if _is_failure(error):
                raise
            raise ReplicaLost(_line(error)) from None

    async def call_all(self, stamp: Stamp, payload: bytes) -> list[ReplicaReply]:
        try:
            answers = await self._handle.broadcast("call", tuple(stamp), payload).results_async(return_exceptions=True)
        except DeploymentUnavailableError:
            return []
        for answer in answers:
            if isinstance(answer, Exception) and _is_failure(answer):
                raise answer
        return [ReplicaReply(*answer) for answer in answers if not isinstance(answer, Exception)]


def _is_failure(error: Exception) -> bool:
    """Return whether HelmRec's code in the replica raised. Other errors of Ray mean that the replica is lost."""
    if isinstance(error, RayTaskError):
        return not isinstance(error.cause, RayError)
    return not isinstance(error, RayError | DeploymentUnavailableError)


def _line(error: RayError | Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
