"""The replicas through a handle of Ray Serve: errors of Ray become ours."""

from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from helmrec.cluster.port import ReplicaLost
from helmrec.cluster.remote_clock import Stamp
from helmrec.cluster.replica import Reply
from helmrec.errors import QueueFull


class RayFleet:
    """Engines of one deployment."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def send(self, method: str, hint: bytes, stamp: Stamp, payload: bytes) -> Reply:
        try:
            return Reply(*await getattr(self._handle, method).remote(hint, tuple(stamp), payload))
        except BackPressureError as error:
            raise QueueFull(str(error)) from None
        except (RayActorError, DeploymentUnavailableError) as error:
            raise ReplicaLost(_line(error)) from None
        except RayTaskError as error:
            if isinstance(error.cause, RayActorError):
                raise ReplicaLost(_line(error.cause)) from None
            raise

    async def call_all(self, stamp: Stamp, payload: bytes) -> list[Reply]:
        try:
            answers = await self._handle.broadcast("call", tuple(stamp), payload).results_async(return_exceptions=True)
        except DeploymentUnavailableError:
            return []
        for answer in answers:
            if isinstance(answer, Exception) and not isinstance(answer, RayActorError):
                raise answer
        return [Reply(*answer) for answer in answers if not isinstance(answer, Exception)]


def _line(error: RayError | Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
