"""Verification of prefixes: the keyed hash chain of a windowed history, and the epochs of the rows it reads.

The hash is a chain with one 64-bit state per token, which covers all tokens before it. Its seed covers everything
constant (user, model, window anchor, context); each event adds its features, action and timestamp. State i equals
state j only if everything before is equal too.

Two lanes with independent keys run side by side. In each, an event becomes one word (NH over the halves of its
fields), and words are the coefficients of a polynomial in a secret point (Horner's rule modulo 2^64 - 59). A state
joins both lanes. Without the key, two chosen histories have equal states with a probability of at most 2^-60, as long
as only equality is revealed; docs/decisions/0021-a-keyed-prefix-hash.md derives it.
"""

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from helmrec.types import IntArray, UserId

States = NDArray[np.uint64]
Epochs = NDArray[np.uint32]
MODULUS = (1 << 64) - 59
SECRET_BYTES = 32
_DOMAIN = b"helmrec prefix hash 1 "
_FIRST_FIELDS = 16  # field keys that are derived at once; more follow when an event has more fields

_GAP = np.uint64(59)  # 2^64 is 59 modulo MODULUS
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """The cacheable tokens of one request: user-context tokens, then the window's events."""

    user_id: UserId
    context_rows: IntArray  # (context,)
    event_rows: IntArray  # (features, events)
    states: States  # (context + events,) chain state after each token
    num_tokens: int = field(init=False)  # counted here and not for each step, whose host time is scarce

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", self.states.size)


class ChainState(NamedTuple):
    """Both lanes after some tokens, from which a chain continues. Secret; `HashKey.seal` makes a public value of it."""

    first: int
    second: int


class ChainKeys(NamedTuple):
    """The parts of a key that compiled loops use. Points are below 2^57, so that one correction reduces a product."""

    fields: NDArray[np.uint64]  # (fields, 4) 32 bits each: low and high half of a field in lane one, then in lane two
    points: NDArray[np.uint64]  # (2,) of the polynomials
    joins: NDArray[np.uint64]  # (4,) two numbers of 128 bits, low half first


class HashKey:
    """All secret parameters of a chain, derived from one secret."""

    def __init__(self, secret: bytes) -> None:
        assert len(secret) >= SECRET_BYTES, "a short secret can be guessed"
        self.secret = secret  # only for processes that hash histories for the same cache
        self.fingerprint = self._derive(b"fingerprint", 8).hex()  # identifies the key without revealing it
        self._fields = self._field_keys(_FIRST_FIELDS)
        numbers = np.frombuffer(self._derive(b"chain", 48), "<u8").astype(np.uint64)
        self._points, self._joins = numbers[:2] >> np.uint64(7), numbers[2:]

    @classmethod
    def random(cls) -> "HashKey":
        """Make a random key, for states that never leave this process."""
        return cls(secrets.token_bytes(SECRET_BYTES))

    def keys(self, num_fields: int) -> ChainKeys:
        if num_fields > len(self._fields):
            self._fields = self._field_keys(2 * num_fields)  # begins with the same keys
        return ChainKeys(self._fields, self._points, self._joins)

    def seal(self, state: ChainState) -> int:
        """Return 64 public bits: equal states have equal seals, and a seal reveals nothing else."""
        shown = hashlib.blake2b(
            state.first.to_bytes(8, "little") + state.second.to_bytes(8, "little"),
            key=self._derive(b"seal", 32),
            digest_size=8,
        )
        return int.from_bytes(shown.digest(), "little")

    def _field_keys(self, num_fields: int) -> NDArray[np.uint64]:
        derived = self._derive(b"fields", 16 * num_fields)
        return np.frombuffer(derived, "<u4").astype(np.uint64).reshape(num_fields, 4)

    def _derive(self, purpose: bytes, num_bytes: int) -> bytes:
        return hashlib.shake_256(_DOMAIN + purpose + b" " + self.secret).digest(num_bytes)

    def __repr__(self) -> str:
        return f"HashKey({self.fingerprint})"


def chain(key: HashKey, seed: tuple[int, ...], num_context: int, columns: IntArray) -> States:
    """Return the states after each of `num_context` context tokens and each event. columns: (fields, events)."""
    return _chain(key.keys(len(columns)), np.array(seed, np.int64), num_context, columns)


def begin_chain(key: HashKey, seed: tuple[int, ...]) -> ChainState:
    """Return the start of a chain with this seed."""
    first, second = _begin(key.keys(0).points, np.array(seed, np.int64))
    return ChainState(int(first), int(second))


def advance(key: HashKey, state: ChainState, columns: IntArray) -> ChainState:
    """Return the state after these events, which follow `state`. columns: (fields, events)."""
    first, second = advance_lanes(key.keys(len(columns)), np.uint64(state.first), np.uint64(state.second), columns)
    return ChainState(int(first), int(second))


def _type_multiply(typing_context: Any, x: Any, y: Any) -> Any:
    """Describe to Numba how `_multiply` is compiled."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide, word = ir.IntType(128), ir.IntType(64)
        product = builder.mul(*(builder.zext(argument, wide) for argument in arguments))
        high = builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), word)
        return context.make_tuple(builder, signature.return_type, [builder.trunc(product, word), high])

    return types.Tuple((types.uint64, types.uint64))(types.uint64, types.uint64), generate  # type: ignore[no-untyped-call]


# The product of two unsigned words: its low and its high word.
_multiply: Callable[[np.uint64, np.uint64], tuple[np.uint64, np.uint64]] = intrinsic(_type_multiply)  # type: ignore[assignment]


@numba.njit(cache=True, inline="always")
def _step(state: np.uint64, point: np.uint64, word: np.uint64) -> np.uint64:
    """`state * point + word` modulo MODULUS, as some number below 2^64."""
    low, high = _multiply(state, point)
    low += word
    high += np.uint64(low < word)
    folded = high * _GAP  # below 2^63, since points are below 2^57
    low += folded
    return low + _GAP * np.uint64(low < folded)


@numba.njit(cache=True, inline="always")
def _join(first: np.uint64, second: np.uint64, keys: NDArray[np.uint64]) -> np.uint64:
    """The high word of `(keys[0:2] + first) * (keys[2:4] + second)` modulo 2^128."""
    x = first + keys[0]
    y = second + keys[2]
    x_high = keys[1] + np.uint64(x < first)
    y_high = keys[3] + np.uint64(y < second)
    _, high = _multiply(x, y)
    return high + x * y_high + x_high * y


@numba.njit(cache=True, inline="always")
def mix_field(value: np.uint64, low_key: np.uint64, high_key: np.uint64) -> np.uint64:
    """Return a field's contribution to its event's word: the product of both halves of its value plus their keys."""
    return ((value + low_key) & _LOW) * (((value >> _HALF) + high_key) & _LOW)


@numba.njit(cache=True, nogil=True)
def _words(fields: NDArray[np.uint64], columns: IntArray) -> NDArray[np.uint64]:  # (2, events)
    """Return one word per event and lane, the sum over its fields."""
    num_fields, num_events = columns.shape
    words = np.zeros((2, num_events), np.uint64)
    first, second = words[0], words[1]
    for line in range(num_fields):  # field by field: these loops become vector instructions
        low_first, high_first = fields[line, 0], fields[line, 1]
        low_second, high_second = fields[line, 2], fields[line, 3]
        values = columns[line]
        for i in range(num_events):
            first[i] += mix_field(np.uint64(values[i]), low_first, high_first)
            second[i] += mix_field(np.uint64(values[i]), low_second, high_second)
    return words


@numba.njit(cache=True, nogil=True)
def _begin(points: NDArray[np.uint64], seed: IntArray) -> tuple[np.uint64, np.uint64]:
    """Fold the seed in as coefficients after a leading 1, which distinguishes seeds of different length."""
    first = second = np.uint64(1)
    for i in range(seed.size):
        first = _step(first, points[0], np.uint64(seed[i]))
        second = _step(second, points[1], np.uint64(seed[i]))
    return first, second


@numba.njit(cache=True, nogil=True)
def advance_lanes(
    keys: ChainKeys, first: np.uint64, second: np.uint64, columns: IntArray
) -> tuple[np.uint64, np.uint64]:
    """`advance` for compiled callers."""
    words = _words(keys.fields, columns)
    for i in range(words.shape[1]):
        first = _step(first, keys.points[0], words[0, i])
        second = _step(second, keys.points[1], words[1, i])
    return first, second


@numba.njit(cache=True, nogil=True)
def _chain(keys: ChainKeys, seed: IntArray, num_context: int, columns: IntArray) -> States:
    first, second = _begin(keys.points, seed)
    words = _words(keys.fields, columns)
    states = np.empty(num_context + words.shape[1], np.uint64)
    for i in range(states.size):
        at = i - num_context
        word_first = words[0, at] if at >= 0 else np.uint64(i)
        word_second = words[1, at] if at >= 0 else np.uint64(i)
        first = _step(first, keys.points[0], word_first)
        second = _step(second, keys.points[1], word_second)
        states[i] = _join(first, second, keys.joins)
    return states


def common_tokens(a: States, b: States) -> int:
    """Return the number of leading tokens two chains share. Equal states imply equal pasts, so bisection works."""
    low, high = 0, min(a.size, b.size)
    if high and a[high - 1] == b[high - 1]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


class RowEpochs:
    """The epoch at which each row last changed, so that KV computed from an older value is not reused.

    The array spans the id space, but only parts that were updated take physical memory.
    """

    def __init__(self, num_rows: int) -> None:
        self._changed = np.zeros(num_rows, np.uint32)
        self.current = 0

    def mark(self, rows: IntArray) -> None:
        """Begin a new epoch, in which these rows have changed."""
        self.current += 1
        self._changed[rows] = self.current

    def fresh_tokens(self, history: History, made_at: Epochs) -> int:
        """Count the leading tokens of `history` whose rows have not changed after `made_at` (one epoch per token)."""
        return int(_fresh(self._changed, history.context_rows, history.event_rows, made_at))


@numba.njit(cache=True)
def _fresh(changed: Epochs, context_rows: IntArray, event_rows: IntArray, made_at: Epochs) -> int:
    num_context = context_rows.size
    for token in range(made_at.size):
        if token < num_context:
            if changed[context_rows[token]] > made_at[token]:
                return token
        else:
            for field in range(event_rows.shape[0]):
                if changed[event_rows[field, token - num_context]] > made_at[token]:
                    return token
    return made_at.size
