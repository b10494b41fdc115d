"""Find the value at a path of a JSON text without decoding the text, for error messages.

A decoder that refuses a text reports the path; this returns the value there. The number of search steps over brackets
and strings is bounded, and a run of numbers takes one step, so the cost is about that of reading the text once. Does
not know types or requests.
"""

import re
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np

_MOST_LOOKS = 10_000
_MAX_SCALAR = 40  # bytes; no number that can be decoded takes more to write down sensibly
_SPACE = re.compile(rb"[ \t\n\r]*+")
_SCALAR = re.compile(rb"[^,\]}\s]++")
_STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")
_COMMA, _QUOTE, _OPEN, _CLOSE = ord(","), ord('"'), b"[{", b"]}"
_MARKS = (b'"', b"[", b"]", b"{", b"}")


_ANY_KEY = "[...]"  # a step of a path: any key of an object
_MOST_DECODED = 1 << 16  # bytes of a text that is decoded to find such a key
_KINDS = dict[type, str](
    [
        (str, "str"),
        (bool, "bool"),
        (int, "int"),
        (float, "float"),
        (type(None), "null"),
        (list, "array"),
        (dict, "object"),
    ]
)


def with_key(path: str, text: bytes, kind: str) -> str | None:
    """Replace the step `[...]` by the first key with a value of this kind there; None: no key.

    kind: as msgspec names it.
    """
    before, *after = path.split(_ANY_KEY)
    if len(after) != 1 or len(text) > _MOST_DECODED:
        return None
    with suppress(LookupError, TypeError, ValueError, msgspec.DecodeError):
        for key, value in _walk(msgspec.json.decode(text), before).items():
            with suppress(LookupError, TypeError):
                if _KINDS[type(_walk(value, after[0]))] == kind:
                    return f"{before}.{key}{after[0]}"
    return None


def _walk(value: Any, path: str) -> Any:
    for index, name in _STEP.findall(path):
        value = value[int(index) if index else name]
    return value


def value_at(path: str, text: bytes, max_shown: int) -> str | int | float | bool | None:
    """Return a scalar as its value, anything else as the beginning of its text; None if there is no single value.

    The path is in the form of msgspec's messages, such as `items[1]`; a step `[...]` means any key of an object.
    """
    if _ANY_KEY in path:
        return None
    place = _Place(text)
    try:
        place.skip_space()
        for index, name in _STEP.findall(path):
            if index:
                place.enter_array(int(index))
            else:
                place.enter_object(name)
        return place.shown(max_shown)
    except LookupError:
        return None


class _Place:
    """A position in a text. All methods raise LookupError if the text is malformed or the step limit is reached."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._at = 0
        self._num_looks = 0
        self._next = dict.fromkeys(_MARKS, -1)  # next position of each mark, where it was searched

    def enter_object(self, name: str) -> None:
        """Move from an object to its first value of this name."""
        self._expect(b"{")
        while True:
            self.skip_space()
            key = self._string()
            self.skip_space()
            self._expect(b":")
            self.skip_space()
            if key == f'"{name}"'.encode():
                return
            self._skip_value()
            self.skip_space()
            self._expect(b",")

    def enter_array(self, index: int) -> None:
        """Move from an array to its element of this index."""
        self._expect(b"[")
        left = index  # commas of this array still to pass
        while left:
            mark = self._search_mark()
            is_comma = np.frombuffer(self._text, np.uint8, mark - self._at, self._at) == _COMMA
            num_commas = int(np.count_nonzero(is_comma))
            if num_commas >= left:
                self._at += int(np.flatnonzero(is_comma)[left - 1]) + 1
                break
            left -= num_commas
            self._at = mark
            if self._text[mark] in _CLOSE:
                raise LookupError
            self._skip_value()
        self.skip_space()

    def shown(self, max_shown: int) -> str | int | float | bool | None:
        start = self._at
        first = self._text[start]
        if first in _OPEN:
            return self._text_from(start, max_shown)
        if first == _QUOTE:
            return self._shown_string(start, max_shown)
        scalar = self._match(_SCALAR)
        return _decoded(scalar) if len(scalar) <= _MAX_SCALAR else _cut(_plain(scalar[: 4 * max_shown]), max_shown)

    def _shown_string(self, start: int, max_shown: int) -> str:
        try:
            string = self._string()
        except LookupError:  # too long to search for its end, or without one
            string = self._text[start:]
        is_long = len(string) > 8 * max_shown
        return _cut(_plain(string[1 : 4 * max_shown]) if is_long else str(_decoded(string)), max_shown)

    def _text_from(self, start: int, max_shown: int) -> str:
        """Return the text of an array or object, as far as it is shown."""
        try:
            self._skip_value()
            end = self._at
        except LookupError:  # too long to search for its end, or without one
            end = len(self._text)
        return _cut(_plain(self._text[start : min(end, start + 4 * max_shown + 4)]), max_shown)

    def skip_space(self) -> None:
        self._match(_SPACE)

    def _skip_value(self) -> None:
        first = self._text[self._at]
        if first == _QUOTE:
            self._string()
        elif first not in _OPEN:
            self._match(_SCALAR)
        else:
            depth = 0
            while True:
                self._at = self._search_mark()
                mark = self._text[self._at]
                if mark == _QUOTE:
                    self._string()
                    continue
                depth += 1 if mark in _OPEN else -1
                self._at += 1
                if not depth:
                    return

    def _string(self) -> bytes:
        """Move past a string and return it with its quotes. A quote after an odd number of backslashes is escaped."""
        start = self._at
        self._expect(b'"')
        is_escaped = True
        while is_escaped:
            self._look()
            quote = self._text.find(b'"', self._at)
            if quote < 0:
                raise LookupError
            before = self._text[self._at : quote]
            is_escaped = (len(before) - len(before.rstrip(b"\\"))) % 2 == 1
            self._at = quote + 1
        return self._text[start : self._at]

    def _search_mark(self) -> int:
        """Return the position of the next bracket or quote. Over all calls, the text is searched once for each mark."""
        self._look()
        for mark, place in self._next.items():
            if place < self._at:
                found = self._text.find(mark, self._at)
                self._next[mark] = len(self._text) if found < 0 else found
        nearest = min(self._next.values())
        if nearest == len(self._text):
            raise LookupError
        return nearest

    def _expect(self, mark: bytes) -> None:
        if self._text[self._at : self._at + 1] != mark:
            raise LookupError
        self._at += 1

    def _match(self, pattern: re.Pattern[bytes]) -> bytes:
        self._look()
        found = pattern.match(self._text, self._at)
        if found is None:
            raise LookupError
        self._at = found.end()
        return found[0]

    def _look(self) -> None:
        self._num_looks += 1
        if self._num_looks > _MOST_LOOKS:
            raise LookupError


def _decoded(text: bytes) -> str | int | float | bool | None:
    try:
        value: str | int | float | bool | None = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):  # a number that fits no type, or bytes that are no text
        return _plain(text)
    return value


def _plain(text: bytes) -> str:
    return text.decode("utf-8", "replace")


def _cut(text: str, max_shown: int) -> str:
    return text if len(text) <= max_shown else f"{text[:max_shown]}…"
