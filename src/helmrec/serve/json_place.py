"""What stands at a path of a JSON text, found without decoding the text.

A decoder that refuses a text says where; this says what was there, for a message. It takes a bounded number of looks at
brackets and strings, and runs of numbers take one look however long they are, so that no text costs much more than
being read once. Knows nothing of types or requests.
"""

import re

import msgspec
import numpy as np

_MOST_LOOKS = 10_000
_MAX_SCALAR = 40  # bytes; no number that can be decoded takes more to write down sensibly
_SPACE = re.compile(rb"[ \t\n\r]*+")
_SCALAR = re.compile(rb"[^,\]}\s]++")
_STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")
_COMMA, _QUOTE, _OPEN, _CLOSE = ord(","), ord('"'), b"[{", b"]}"
_MARKS = (b'"', b"[", b"]", b"{", b"}")


def value_at(path: str, text: bytes, max_shown: int) -> str | int | float | bool | None:
    """A scalar as its value, anything else as the beginning of its text; None where the path leads to no one value.

    The path is one of msgspec's messages, such as `items[1]`; a step `[...]` stands for some key of an object.
    """
    if "[...]" in path:
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
    """A position in a text. Every call raises LookupError where the text does not go on as it should, or goes on too
    long."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._at = 0
        self._num_looks = 0
        self._next = dict.fromkeys(_MARKS, -1)  # where each mark stands next, as far as it was looked for

    def enter_object(self, name: str) -> None:
        """From an object to the first value of this name."""
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
        """From an array to its element of this index."""
        self._expect(b"[")
        left = index  # commas to go past that are the array's own
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
        except LookupError:  # it is too long to look for its end, or has none
            string = self._text[start:]
        is_long = len(string) > 8 * max_shown
        return _cut(_plain(string[1 : 4 * max_shown]) if is_long else str(_decoded(string)), max_shown)

    def _text_from(self, start: int, max_shown: int) -> str:
        """The text of an array or object, as far as it is shown."""
        try:
            self._skip_value()
            end = self._at
        except LookupError:  # it is too long to look for its end, or has none
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
        """Go past a string; with its quotes. Quotes in it follow an odd number of backslashes."""
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
        """Where the next bracket or quote is. Over all calls each of them is looked for once along the text."""
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
