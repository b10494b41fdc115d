"""Hides secrets in log lines, error messages and displayed settings.

It recognises secrets by their form, and takes the secrets of this process as values; it does not know where text goes.
"""

import re
from collections.abc import Iterable
from urllib.parse import unquote

HIDDEN = "***"
_MIN_LENGTH = 4  # a shorter secret would be found inside ordinary words
# Every repetition is bounded: clients choose parts of the text, and must not be able to make a match slow.
_USER_OF_URL = re.compile(r"(\b[a-z][a-z0-9+.-]{0,20}://)[^\s\"'<>]{0,1000}@", re.IGNORECASE)
_NAMED = re.compile(
    r"""\b([\w.-]{0,40}(?:token|secret|password))       # a name that says so
    (=|:(?=\S)|\\?["']\s{0,2}[:=]\s{0,2}|\s=\s)       # what stands between it and its value
    (\\?"[^"]{0,1000}"|\\?'[^']{0,1000}'|[^\s&"',;)}\]]+)""",
    re.IGNORECASE | re.VERBOSE,
)
_BEARER = re.compile(r"(\bBearer )[^\s\"']+")
_SECRET_NAME = re.compile(r"token$|secret$|password$", re.IGNORECASE)


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """Replace user and password of every URL, values of names like `admin_token`, and `secrets` by `***`."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _MIN_LENGTH:
            text = text.replace(secret, HIDDEN)
    text = _USER_OF_URL.sub(rf"\1{HIDDEN}@", text)
    text = _NAMED.sub(rf"\1\2{HIDDEN}", text)
    return _BEARER.sub(rf"\1{HIDDEN}", text)


def secrets_in_url(url: str) -> tuple[str, ...]:
    """Return the passwords in a URL, quoted and unquoted: before the `@`, or as `password` in its query."""
    found: list[str] = []
    if match := _USER_OF_URL.search(url):
        _, _, password = url[match.start() + len(match[1]) : match.end() - 1].partition(":")
        found.append(password)
    found += [match[3] for match in _NAMED.finditer(url) if match[2] == "="]
    return tuple(dict.fromkeys(form for each in found if each for form in (each, unquote(each))))


def is_secret_name(name: str) -> bool:
    """Whether a setting of this name holds a secret."""
    return _SECRET_NAME.search(name) is not None
