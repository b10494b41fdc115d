"""Log lines that people read and programs split: one line per event, key=value (logfmt)."""

import json
import logging
import re
import time
from collections.abc import Iterable

from helmrec.redaction import HIDDEN, is_secret_name, redact

_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}
_BARE = re.compile(r"[^\s\"=\\]+")


class Logfmt(logging.Formatter):
    """`time=… level=info logger=helmrec.serve event=ready model=demo`: what a call passed as `extra` follows.

    Libraries mark records, too (Ray does, once it is imported); such marks begin with an underscore. Secrets are
    hidden, in tracebacks too.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        """`secrets` are hidden wherever they appear; passwords in addresses are hidden without being known."""
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
    """Send all logs of this process there, in this form."""
    handler = logging.StreamHandler()
    handler.setFormatter(Logfmt(secrets))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # it tells of its own life at length
