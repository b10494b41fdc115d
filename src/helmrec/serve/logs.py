"""Log lines that people read and programs split: one line per event, key=value (logfmt)."""

import json
import logging
import re
import time

_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}
_BARE = re.compile(r"[^\s\"=\\]+")


class Logfmt(logging.Formatter):
    """`time=… level=info logger=helmrec.serve event=ready model=demo`: what a call passed as `extra` follows.

    Libraries mark records, too (Ray does, once it is imported); such marks begin with an underscore.
    """

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
        return " ".join(f"{name}={_quoted(value)}" for name, value in fields.items())


def _quoted(value: object) -> str:
    text = str(value)
    return text if _BARE.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def log_to_stderr(level: str) -> None:
    """Send all logs of this process there, in this form."""
    handler = logging.StreamHandler()
    handler.setFormatter(Logfmt())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # it tells of its own life at length
