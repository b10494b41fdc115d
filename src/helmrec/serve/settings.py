"""Settings of a server, and where each came from: flags win over the environment, the environment over a file."""

from typing import Annotated, Literal

from pydantic import ByteSize, Field, SecretStr

from helmrec.config import Frozen


class ServeConfig(Frozen):
    """Settings of the HTTP front. Sizes take units: max_body_bytes="16MiB"."""

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on; loopback unless told otherwise")
    port: int = Field(8000, ge=0, le=65_535, description="0 takes any free port")
    max_body_bytes: Annotated[ByteSize, Field(gt=0)] = Field(ByteSize(16 << 20), description="of one request")
    admin_token: SecretStr | None = Field(None, min_length=8, description="bearer token of admin calls; none, no calls")
    drain_s: float = Field(30.0, ge=0, description="how long running requests may take once told to stop")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="debug shows every request")
