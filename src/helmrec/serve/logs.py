"""Logging in logfmt: one line of key=value pairs per event."""

import json
import logging
import re
import time
from collections.abc import Iterable

from helmrec.redaction import HIDDEN, is_secret_name, redact

_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}
_BARE = re.compile(r"[^\s\"=\\]+")


class Logfmt(logging.Formatter):
    """Formats records as `time=… level=info logger=helmrec.serve event=ready model=demo`, then the fields of `extra`.

    Fields that begin with an underscore are left out: libraries such as Ray add them. Secrets are hidden, also in
    tracebacks.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        """`secrets` are hidden wherever they appear. Passwords in URLs are always hidden."""
        super().__init__()
        self._secrets = tuple(secrets)

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **{name: value for name, value in vars(record).items() if name not in _STANDARD and name[0] != "_"},
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return " ".join(f"{name}={self._quoted(name, value)}" for name, value in fields.items())

    def _quoted(self, name: str, value: object) -> str:
        text = HIDDEN if is_secret_name(name) else redact(str(value), self._secrets)  # quotes come after: they escape
        return text if _BARE.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def log_to_stderr(level: str, secrets: Iterable[str] = ()) -> None:
    """Write all logs of this process to stderr in logfmt."""
    handler = logging.StreamHandler()
    handler.setFormatter(Logfmt(secrets))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # its own start and stop messages are verbose
