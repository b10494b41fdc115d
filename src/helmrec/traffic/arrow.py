"""Arrow, which reads and writes Parquet: an extra that serving does not need."""

from typing import Any

from helmrec.errors import ConfigError


def pyarrow(purpose: str, otherwise: str = "") -> tuple[Any, Any]:
    """Import Arrow and its Parquet module; an error begins and ends with the arguments."""
    try:
        import pyarrow as pa  # noqa: PLC0415
        from pyarrow import parquet  # noqa: PLC0415
    except ImportError:
        raise ConfigError(f"{purpose} pyarrow: pip install 'helmrec[parquet]'{otherwise}") from None
    return pa, parquet
