"""Reads a pickle without executing it: the result is the tree of its values, with calls recorded as values.

A pickle is a program that may call anything. This reader interprets its instructions one by one; it refuses a pickle
that names an unexpected class or function, and never imports or calls what a pickle names.

Every pickle is bounded: in bytes, instructions, the size of a number or text, the depth of the tree, and the values in
it, with a shared value counted wherever it occurs. The tree can therefore be walked safely.
"""

import io
import pickletools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from helmrec.errors import ModelError

MAX_BYTES = 16 << 20  # of a pickle: those of checkpoints hold names and shapes, not weights
MAX_INSTRUCTIONS = 300_000  # a shard of a table takes 60, a weight 45
MAX_DEPTH = 100
MAX_VALUES = 300_000
_MAX_TEXT = 1 << 20
_MAX_NAME = 256
_MAX_KEY_PARTS = 8
_MAX_NUMBER_BITS = 64


class Named(NamedTuple):
    """A class or function that the pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False, slots=True)
class PickledCall:
    """A call that the pickle would have made: the callable, its arguments, and the state and items of the result."""

    maker: Named
    args: tuple[Any, ...]
    state: Any = None
    items: dict[Any, Any] | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Outside:
    """A reference to data outside the pickle."""

    id: Any


def read_pickle(data: bytes, source: str, is_expected: Callable[[Named], bool]) -> Any:
    """Return the values of a pickle: plain ones as they are, others as `Named`, `PickledCall` and `Outside`.

    Raises ModelError, whose message begins with `source`, if it names anything unexpected, exceeds a bound, or is no
    pickle.
    """
    if len(data) > MAX_BYTES:
        raise ModelError(f"{source}: a pickle of {len(data)} bytes is more than a checkpoint's; at most {MAX_BYTES}")
    reader = _Reader(source, is_expected)
    try:
        reader.run(io.BytesIO(data))
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ModelError(f"{source}: the pickle inside is damaged ({_short(error)})") from None
    result = reader.result()
    _check_size(result, source)
    return result


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _MAX_NAME else f"{text[:_MAX_NAME]}…"


def _check_size(tree: Any, source: str) -> None:
    """Raise ModelError unless the tree can be walked, also recursively, in bounded time."""
    level, num_values = [tree], 1
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            below.extend(_parts(value))
            if num_values + len(below) > MAX_VALUES:
                raise ModelError(f"{source}: refused: the pickle inside unfolds to more than {MAX_VALUES} values")
        if not below:
            return
        level, num_values = below, num_values + len(below)
    raise ModelError(f"{source}: refused: the pickle inside is more than {MAX_DEPTH} levels deep, or contains itself")


def _parts(value: Any) -> Iterable[Any]:
    """Return the parts of a value, at most as many as there were instructions."""
    if isinstance(value, dict):
        return (*value.keys(), *value.values())
    if isinstance(value, PickledCall):
        return (value.args, value.state, value.items)
    if isinstance(value, Outside):
        return (value.id,)
    return value if isinstance(value, list | tuple) and not isinstance(value, Named) else ()


_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": set,
}
_LITERALS = {
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "BINUNICODE8",
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "LONG4",
    "BINFLOAT",
    "BINBYTES",
    "SHORT_BINBYTES",
    "BINBYTES8",
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_IGNORED = {"PROTO", "FRAME"}
_KNOWN = {*_LITERALS, *_CONSTANTS, *_TUPLES, *_IGNORED}


def _two_lines(stream: io.BytesIO) -> tuple[str, str]:
    """Read module and name. Unlike the reader of `pickletools`, it does not decode escapes."""
    first, second = (stream.readline(_MAX_NAME + 1) for _ in range(2))
    if not (first.endswith(b"\n") and second.endswith(b"\n")):
        raise ValueError("a name without end")
    return first[:-1].decode(), second[:-1].decode()


_OPCODES = {opcode.code.encode("latin-1"): opcode for opcode in pickletools.opcodes}
_ARGUMENTS: dict[str, Callable[[io.BytesIO], Any] | None] = {
    **{opcode.name: opcode.arg.reader if opcode.arg else None for opcode in pickletools.opcodes},
    "GLOBAL": _two_lines,
}


def _checked_literal(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > _MAX_NUMBER_BITS:
        raise ValueError(f"a number of {value.bit_length()} bits")
    if isinstance(value, str | bytes) and len(value) > _MAX_TEXT:
        raise ValueError(f"a text of {len(value)} characters")
    return value


def _checked_keys(values: list[Any]) -> list[Any]:
    """Return keys of a dictionary or members of a set, after checking that each is hashed in bounded time."""
    for value in values:
        is_flat = isinstance(value, tuple) and len(value) <= _MAX_KEY_PARTS and all(map(is_hashed_fast, value))
        if not (is_flat or is_hashed_fast(value)):
            raise TypeError(f"a key or member of a set is a {type(value).__name__} that none has")
    return values


def is_hashed_fast(value: Any) -> bool:
    """Whether a value is plain, or hashed by identity."""
    return value is None or isinstance(value, str | bytes | int | float | Named | PickledCall | Outside)


class _Reader:
    """The interpreter: a stack, a memo, and a rule per instruction."""

    def __init__(self, source: str, is_expected: Callable[[Named], bool]) -> None:
        self._source = source
        self._is_expected = is_expected
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._rules: dict[str, Callable[[Any], None]] = {
            "MARK": lambda _: self._marks.append(len(self._stack)),
            "TUPLE": lambda _: self._push(tuple(self._since_mark())),
            "FROZENSET": lambda _: self._push(frozenset(_checked_keys(self._since_mark()))),
            "APPEND": lambda _: self._add(list.append, self._stack.pop()),
            "APPENDS": lambda _: self._add(list.extend, self._since_mark()),
            "ADDITEMS": lambda _: self._add(set.update, _checked_keys(self._since_mark())),
            "SETITEM": lambda _: self._set_items([self._stack.pop(-2), self._stack.pop()]),
            "SETITEMS": lambda _: self._set_items(self._since_mark()),
            "BINPUT": self._remember,
            "LONG_BINPUT": self._remember,
            "MEMOIZE": lambda _: self._remember(len(self._memo)),
            "BINGET": lambda key: self._push(self._memo[key]),
            "LONG_BINGET": lambda key: self._push(self._memo[key]),
            "GLOBAL": lambda both: self._name(*both),
            "STACK_GLOBAL": lambda _: self._name(self._stack.pop(-2), self._stack.pop()),
            "REDUCE": lambda _: self._make(),
            "NEWOBJ": lambda _: self._make(),
            "BUILD": lambda _: self._build(),
            "BINPERSID": lambda _: self._push(Outside(self._stack.pop())),
        }

    def run(self, stream: io.BytesIO) -> None:
        """Interpret all instructions up to the last. The argument of a refused instruction is not decoded."""
        for _ in range(MAX_INSTRUCTIONS):
            code = stream.read(1)
            if code not in _OPCODES:
                raise ValueError(f"there is no instruction {code!r}" if code else "it has no end")
            opcode = _OPCODES[code]
            if opcode.name == "STOP":
                return
            if opcode.name not in _KNOWN and opcode.name not in self._rules:
                raise ModelError(
                    f"{self._source}: refused: the pickle inside uses {opcode.name}, which no checkpoint needs"
                )
            read = _ARGUMENTS[opcode.name]
            self._step(opcode.name, None if read is None else read(stream))
        raise ModelError(f"{self._source}: refused: the pickle inside has more than {MAX_INSTRUCTIONS} instructions")

    def _step(self, opcode: str, argument: Any) -> None:
        if opcode in _LITERALS:
            self._push(_checked_literal(argument))
        elif opcode in _CONSTANTS:
            self._push(_CONSTANTS[opcode]())
        elif opcode in _TUPLES:
            first = len(self._stack) - _TUPLES[opcode]
            if first < 0:
                raise IndexError("a tuple of more than there is")
            self._stack[first:] = [tuple(self._stack[first:])]
        elif opcode not in _IGNORED:
            self._rules[opcode](argument)

    def result(self) -> Any:
        if len(self._stack) != 1 or self._marks:
            raise ModelError(f"{self._source}: the pickle inside is damaged (it ends with {len(self._stack)} values)")
        return self._stack[0]

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _since_mark(self) -> list[Any]:
        mark = self._marks.pop()
        values = self._stack[mark:]
        del self._stack[mark:]
        return values

    def _add(self, method: Callable[[Any, Any], None], value: Any) -> None:
        method(self._stack[-1], value)

    def _set_items(self, flat: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, PickledCall):  # an ordered dictionary, made by a call
            target.items = target.items or {}
            target = target.items
        if not isinstance(target, dict):
            raise TypeError("items are set of what is no dictionary")
        target.update(zip(_checked_keys(flat[::2]), flat[1::2], strict=True))

    def _remember(self, key: int) -> None:
        self._memo[key] = self._stack[-1]

    def _name(self, module: object, name: object) -> None:
        if not (isinstance(module, str) and isinstance(name, str) and len(module) + len(name) <= _MAX_NAME):
            raise TypeError("a name is none")
        named = Named(module, name)
        if not self._is_expected(named):
            raise ModelError(
                f"{self._source}: refused: the pickle inside names {named}, which no checkpoint of weights needs; "
                "a pickle can run code, so nothing was loaded; save weights alone: torch.save(model.state_dict(), ...)"
            )
        self._push(named)

    def _make(self) -> None:
        args, maker = self._stack.pop(), self._stack.pop()
        if not isinstance(maker, Named) or not isinstance(args, tuple):
            raise TypeError("something that is no name is called")
        self._push(PickledCall(maker, args))

    def _build(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if not isinstance(target, PickledCall):
            raise TypeError("state is given to what was not made")
        target.state = state
