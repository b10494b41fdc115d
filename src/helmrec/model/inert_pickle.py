"""What a pickle says, without doing any of it: the tree of its values, in which every call is only written down.

A pickle is a small program that may call anything. Here its instructions are read one by one; where it names a class
or function that is not among those expected, it is refused, and nothing it names is ever imported or called.
"""

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from helmrec.errors import ModelError

MAX_BYTES = 256 << 20  # of a pickle: those of checkpoints hold names and shapes, not weights


class Named(NamedTuple):
    """A class or function that the pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False, slots=True)
class Made:
    """What a call would have returned: who was to be called, with what, and the state it was to be given."""

    maker: Named
    args: tuple[Any, ...]
    state: Any = None


@dataclass(frozen=True, eq=False, slots=True)
class Outside:
    """A reference to something beside the pickle."""

    id: Any


def read_pickle(data: bytes, source: str, is_expected: Callable[[Named], bool]) -> Any:
    """The values of a pickle: plain ones as they are, all others as `Named`, `Made` and `Outside`.

    Raises ModelError, which begins with `source`, if it names anything but what is expected, or is no pickle.
    """
    if len(data) > MAX_BYTES:
        raise ModelError(f"{source}: a pickle of {len(data)} bytes is more than a checkpoint's; at most {MAX_BYTES}")
    reader = _Reader(source, is_expected)
    try:
        for opcode, argument, _ in pickletools.genops(data):
            reader.step(opcode.name, argument)
    except (IndexError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{source}: the pickle inside is damaged ({error})") from None
    return reader.result()


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


class _Reader:
    """A stack, a memo, and a rule per instruction."""

    def __init__(self, source: str, is_expected: Callable[[Named], bool]) -> None:
        self._source = source
        self._is_expected = is_expected
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._rules: dict[str, Callable[[Any], None]] = {
            "MARK": lambda _: self._marks.append(len(self._stack)),
            "TUPLE": lambda _: self._push(tuple(self._since_mark())),
            "FROZENSET": lambda _: self._push(frozenset(self._since_mark())),
            "APPEND": lambda _: self._add(list.append, self._stack.pop()),
            "APPENDS": lambda _: self._add(list.extend, self._since_mark()),
            "ADDITEMS": lambda _: self._add(set.update, self._since_mark()),
            "SETITEM": lambda _: self._set_items([self._stack.pop(-2), self._stack.pop()]),
            "SETITEMS": lambda _: self._set_items(self._since_mark()),
            "BINPUT": self._remember,
            "LONG_BINPUT": self._remember,
            "MEMOIZE": lambda _: self._remember(len(self._memo)),
            "BINGET": lambda key: self._push(self._memo[key]),
            "LONG_BINGET": lambda key: self._push(self._memo[key]),
            "GLOBAL": lambda both: self._name(*both.split(" ", 1)),
            "STACK_GLOBAL": lambda _: self._name(self._stack.pop(-2), self._stack.pop()),
            "REDUCE": lambda _: self._make(),
            "NEWOBJ": lambda _: self._make(),
            "BUILD": lambda _: self._build(),
            "BINPERSID": lambda _: self._push(Outside(self._stack.pop())),
            "STOP": lambda _: None,
        }

    def step(self, opcode: str, argument: Any) -> None:
        if opcode in _LITERALS:
            self._push(argument)
        elif opcode in _CONSTANTS:
            self._push(_CONSTANTS[opcode]())
        elif opcode in _TUPLES:
            first = len(self._stack) - _TUPLES[opcode]
            if first < 0:
                raise IndexError("a tuple of more than there is")
            self._stack[first:] = [tuple(self._stack[first:])]
        elif opcode in self._rules:
            self._rules[opcode](argument)
        elif opcode not in _IGNORED:
            raise ModelError(f"{self._source}: refused: the pickle inside uses {opcode}, which no checkpoint needs")

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
        if isinstance(target, Made):  # an ordered dictionary, made by a call
            target.state = target.state or {}
            target = target.state
        if not isinstance(target, dict):
            raise TypeError("items are set of what is no dictionary")
        target.update(zip(flat[::2], flat[1::2], strict=True))

    def _remember(self, key: int) -> None:
        self._memo[key] = self._stack[-1]

    def _name(self, module: str, name: str) -> None:
        named = Named(module, name)
        if not self._is_expected(named):
            raise ModelError(
                f"{self._source}: refused: the pickle inside names {named}, which no checkpoint of weights needs; "
                "a pickle can run code, so nothing was loaded"
            )
        self._push(named)

    def _make(self) -> None:
        args, maker = self._stack.pop(), self._stack.pop()
        if not isinstance(maker, Named) or not isinstance(args, tuple):
            raise TypeError("something that is no name is called")
        self._push(Made(maker, args))

    def _build(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if not isinstance(target, Made):
            raise TypeError("state is given to what was not made")
        target.state = state
