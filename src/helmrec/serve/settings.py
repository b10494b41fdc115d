"""Settings of a server and their sources: flags take precedence over the environment, that over a file.

The environment and the command line are passed in as values: this module reads only the settings file.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ByteSize, Field, SecretStr, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from helmrec.config import EngineConfig, Frozen
from helmrec.errors import ConfigError
from helmrec.history.config import HistoryConfig
from helmrec.redaction import HIDDEN, redact, secrets_in_url

T = TypeVar("T", bound=Frozen)
ENVIRONMENT_PREFIX = "HELMREC_"
_LEAST_TOKEN = 8  # characters


class ServeConfig(Frozen):
    """Settings of the HTTP front. Sizes take units: max_body_bytes="16MiB"."""

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on; by default loopback only")
    port: int = Field(8000, ge=0, le=65_535, description="port to listen on; 0 takes any free port")
    grpc_port: int | None = Field(
        None, ge=0, le=65_535, description="port of the Open Inference Protocol over gRPC; 0 takes any; unset: no gRPC"
    )
    node_name: str = Field("local", min_length=1, description="name of this node in leases")
    max_body_bytes: Annotated[ByteSize, Field(gt=0)] = Field(
        ByteSize(16 << 20), description="largest body of one request"
    )
    max_bodies_bytes: Annotated[ByteSize, Field(gt=0)] = Field(
        ByteSize(128 << 20),
        description="largest sum of the bodies of all requests in memory; at least twice max_body_bytes",
        validate_default=True,
    )
    body_timeout_s: float = Field(30.0, gt=0, description="how long the body of a request may take to arrive")
    admin_token: SecretStr | None = Field(None, description="bearer token of admin calls; unset: they are refused")
    engine_process: bool = Field(False, description="run the engine in its own process, restarted if it ends")
    engines: int = Field(
        1,
        ge=1,
        description="engines on this host, each in its own process, with its own pool and, if any, card",
    )
    engine_socket: str | None = Field(
        None,
        min_length=1,
        description="Unix socket at which more fronts join the engine; needs engine_process; unset: none can",
    )
    joined_engine: str | None = Field(
        None,
        min_length=1,
        description="engine_socket of a server here: be one more front of its engine; unset: an engine of one's own",
    )
    ring_bytes: Annotated[ByteSize, Field(ge=1 << 20)] = Field(
        ByteSize(64 << 20),
        description="ring shared with the engine's process, in each direction; as much again for arrays of requests",
    )
    replay_bytes: Annotated[ByteSize, Field(ge=0)] = Field(
        ByteSize(256 << 20), description="memory for row updates, to apply them again to a restarted engine"
    )
    models_path: str | None = Field(
        None, min_length=1, description="folder of models that an admin call may swap in by name; unset: no swaps"
    )
    drain_s: int = Field(30, ge=0, description="how long running requests may take when the server stops")
    history_path: str | None = Field(
        None, min_length=1, repr=False, description="folder or Redis of stored histories; unset: none are stored"
    )
    policy: str = Field(
        "helm", min_length=1, description="policy that moves the boundary: helm, ppo, static:ALPHA, or none"
    )
    slo_ms: float = Field(80.0, gt=0, description="latency objective of a ranking call, shown on the dashboard")
    tick_s: float = Field(1.0, gt=0, description="time between two decisions of the policy")
    snapshot_path: str | None = Field(
        None, min_length=1, description="file that keeps hot rows and the controller's state over a restart"
    )
    snapshot_every_s: float = Field(
        60.0, gt=0, description="time between two snapshots; one more is written at the end"
    )
    row_deltas: str | None = Field(
        None, min_length=1, repr=False, description="folder or Redis of row deltas from training to follow; unset: none"
    )
    row_snapshots: str | None = Field(
        None, min_length=1, description="folder of table snapshots: the newest one of the model is served instead of it"
    )
    row_snapshot_every_s: float | None = Field(
        None, gt=0, description="time between two snapshots that the server writes to row_snapshots; unset: none"
    )
    row_snapshots_kept: int = Field(2, ge=2, description="newest snapshots that stay when the server writes one")
    row_deltas_trimmed: bool = Field(
        False, description="remove deltas that all kept snapshots include; every server must start from a snapshot then"
    )
    row_slice: int = Field(16_384, ge=1, description="most rows of a delta written between two steps")
    row_rate: float | None = Field(
        None, gt=0, description="most rows of deltas written per second; unset: as many as come"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe log line that is written; debug logs every request"
    )

    @field_validator("admin_token")
    @classmethod
    def _is_long(cls, token: SecretStr | None) -> SecretStr | None:
        if token is not None and len(token.get_secret_value()) < _LEAST_TOKEN:
            raise ValueError(f"at least {_LEAST_TOKEN} characters are needed")
        return token

    @field_validator("max_bodies_bytes")
    @classmethod
    def _holds_two_bodies(cls, value: ByteSize, given: ValidationInfo) -> ByteSize:
        of_one = given.data.get("max_body_bytes")  # absent if it is itself wrong
        if of_one is not None and value < 2 * of_one:
            raise ValueError(f"at least twice max_body_bytes is needed, which is {of_one}")
        return value


_HISTORY_PREFIX = "history_"
_FIELDS: dict[type[Frozen], dict[str, str]] = {  # setting -> field of the configuration it belongs to
    ServeConfig: {name: name for name in ServeConfig.model_fields},
    EngineConfig: {name: name for name in EngineConfig.model_fields},
    HistoryConfig: {_HISTORY_PREFIX + name: name for name in HistoryConfig.model_fields},
}
_NAMES = [name for fields in _FIELDS.values() for name in fields]
assert len(set(_NAMES)) == len(_NAMES), "one name, one setting"
_SECRETS = [name for kind, fields in _FIELDS.items() for name in fields if fields[name] in kind.secret_names()]
_FRONT_ONLY = frozenset({"admin_token", "history_path"})  # not passed to engine processes


def field_of(name: str) -> FieldInfo:
    """Return the type, default and description of a setting."""
    return next(kind.model_fields[fields[name]] for kind, fields in _FIELDS.items() if name in fields)


@dataclass(frozen=True, slots=True)
class Given:
    """The value of a setting, and its source."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of a server, checked."""

    engine: EngineConfig
    serve: ServeConfig
    history: HistoryConfig
    sources: Mapping[str, str]  # by name; a setting that is not here has its default
    ignored: tuple[str, ...]  # environment variables with our prefix that name no setting

    def lines(self) -> Iterator[str]:
        """Yield every setting as a line of TOML with the source of its value. Secrets are hidden."""
        history = {_HISTORY_PREFIX + name: value for name, value in self.history.model_dump().items()}
        for name, value in {**self.serve.model_dump(), **history, **self.engine.model_dump()}.items():
            source = self.sources.get(name, "default")
            if value is None or isinstance(value, SecretStr):
                yield f"# {name} is {'unset' if value is None else 'set'}  # {source}"
            elif (shown := redact(_toml(value))) != _toml(value):
                yield f"# {name} = {shown}  # {source}; a password is hidden"
            else:
                yield f"{name} = {_toml(value)}  # {source}"

    @property
    def secrets(self) -> tuple[str, ...]:
        """Values that must not appear in logs."""
        configs = (self.engine, self.serve, self.history)
        values = [getattr(config, name) for config in configs for name in type(config).model_fields]
        secrets = [value.get_secret_value() for value in values if isinstance(value, SecretStr)]
        urls = (self.serve.history_path or "", self.serve.row_deltas or "")
        return (*secrets, *(secret for url in urls for secret in secrets_in_url(url)))


def _toml(value: Any) -> str:
    """Format a value: text, numbers and flags as in JSON, groups of settings as inline tables without unset ones."""
    if not isinstance(value, dict):
        return json.dumps(value)
    return f"{{{', '.join(f'{name} = {_toml(each)}' for name, each in value.items() if each is not None)}}}"


def resolve(flags: Mapping[str, Given], environment: Mapping[str, str], file: Path | None) -> Settings:
    """Merge defaults, file, environment and flags; ConfigError names the wrong value."""
    variables = {name: ENVIRONMENT_PREFIX + name.upper() for name in _NAMES}
    named = {name for name in environment if name.startswith(ENVIRONMENT_PREFIX)}
    given = {
        **(_read(file) if file else {}),
        **{n: Given(environment[v], f"environment {v}") for n, v in variables.items() if v in environment},
        **flags,
    }
    if unknown := given.keys() - variables.keys():
        name = min(unknown)
        is_misspelt_secret = bool(get_close_matches(name, _SECRETS))
        seen = HIDDEN if is_misspelt_secret else repr(given[name].value)
        raise ConfigError(redact(f"{name} is not a known setting ({given[name].source}), got {seen}"))
    return Settings(
        engine=_made(EngineConfig, given),
        serve=_made(ServeConfig, given),
        history=_made(HistoryConfig, given),
        sources={name: each.source for name, each in given.items()},
        ignored=tuple(sorted(named - set(variables.values()))),
    )


def _made(kind: type[T], given: Mapping[str, Given]) -> T:
    """Make one configuration from its settings; ConfigError names the wrong setting."""
    fields = _FIELDS[kind]
    try:
        return kind(**{fields[name]: each.value for name, each in given.items() if name in fields})
    except ConfigError as error:
        raise ConfigError(f"{_HISTORY_PREFIX if kind is HistoryConfig else ''}{error}") from None


def revealed(config: Frozen) -> dict[str, Any]:
    """Return the settings as plain values with secrets in clear, for other processes of this server only."""
    values = config.model_dump(mode="json")
    given = {name: getattr(config, name) for name in values}
    return values | {name: each.get_secret_value() for name, each in given.items() if isinstance(each, SecretStr)}


def for_engine(serve: ServeConfig) -> dict[str, Any]:
    """Return the settings for an engine process: without those that only the front needs."""
    return {name: value for name, value in revealed(serve).items() if name not in _FRONT_ONLY}


def _read(file: Path) -> dict[str, Given]:
    try:
        values = tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"the settings file cannot be read ({error}), got {str(file)!r}") from None
    return {name: Given(value, f"file {file}") for name, value in values.items()}
