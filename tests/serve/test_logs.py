"""Log lines."""

import logging
import sys

from helmrec.serve.logs import Logfmt


def line(message: str, **fields: object) -> str:
    record = logging.makeLogRecord(
        {"name": "helmrec.serve", "msg": message, "levelname": "INFO", "created": 0, **fields}
    )
    return Logfmt().format(record)


def test_fields_follow_the_event_and_are_quoted_if_they_must_be() -> None:
    seen = line("request", id="a-1", path='/x y"\n', ms=1.5)
    assert seen.startswith("time=1970-01-01T00:00:00.")
    assert seen.endswith('level=info logger=helmrec.serve event=request id=a-1 path="/x y\\"\\n" ms=1.5')


def test_a_traceback_stays_on_the_line_of_its_event() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        seen = line("it failed", exc_info=sys.exc_info())
    assert "\n" not in seen
    assert 'event="it failed"' in seen
    assert "ValueError: two" in seen


def test_marks_of_libraries_are_left_out() -> None:
    assert "_mark" not in line("request", _mark=1)


def test_passwords_and_known_secrets_are_hidden_in_every_part_of_a_line() -> None:
    address = "redis://:hunter2secret@127.0.0.1:6379/0"
    try:
        try:
            raise ConnectionError(f"cannot reach {address}")
        except ConnectionError as cause:
            raise ValueError("open sesame") from cause
    except ValueError:
        fields = {"exc_info": sys.exc_info(), "reason": address, "admin_token": "abc", "value": "open sesame"}
    record = logging.makeLogRecord({"name": "x", "msg": "at %s", "args": (address,), "levelname": "INFO", **fields})
    seen = Logfmt(["open sesame"]).format(record)
    assert "hunter2secret" not in seen
    assert "sesame" not in seen
    assert "admin_token=***" in seen
    assert seen.count("redis://***@127.0.0.1:6379/0") == 3
