"""User ids: numbers and strings, and the forms in which they are hashed, stored, routed and written in paths.

The number 7 and the string "7" are two users. No form but `routing_number` may give two users the same value: a prefix
or a history of one user must never be found for another. Routing may, since it decides only where a request goes.
"""

import hashlib
import json
import struct

import numpy as np

from helmrec.errors import RequestError
from helmrec.types import UserId

MAX_NUMBER = (1 << 63) - 1
MAX_USER_BYTES = 256  # of a string, in UTF-8
_STRING_WORD = -(1 << 63)  # plus the length in bytes: numbers are not negative
_STRING_KEY = b"\x80"  # keys of numbers begin with a smaller byte
_NUMBER = struct.Struct(">Q")  # big-endian: keys sort as their numbers do
_LENGTH = struct.Struct(">H")
_WORD_BYTES = 8
_PROBLEM = f"an integer from 0 to {MAX_NUMBER} or a string of 1 to {MAX_USER_BYTES} bytes in UTF-8 is needed"
_MAX_SHOWN = 100


def check_user_id(value: object) -> UserId:
    """Return a user id as a Python number or string; RequestError, with the value, for anything else."""
    if isinstance(value, str):
        try:
            num_bytes = len(value.encode())
        except UnicodeEncodeError:
            raise RequestError(
                "user_id", ascii(value)[:_MAX_SHOWN], "Unicode without lone surrogates is needed"
            ) from None
        if not 1 <= num_bytes <= MAX_USER_BYTES:
            problem = f"{_PROBLEM}, not one of {num_bytes} bytes"
            raise RequestError("user_id", value[:_MAX_SHOWN], problem)
        return str(value)
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value <= MAX_NUMBER:
        raise RequestError("user_id", value, _PROBLEM)
    return int(value)


def seed_words(user: UserId) -> tuple[int, ...]:
    """Return the words of 64 bits that stand for a user in the seed of a hash chain: a number, or the whole string.

    No sequence of words begins another one, so that whatever follows in a seed cannot make two users equal.
    """
    if isinstance(user, int):
        return (user,)
    text = user.encode()
    filled = text + bytes(-len(text) % _WORD_BYTES)
    return (_STRING_WORD + len(text), *np.frombuffer(filled, "<i8").tolist())


def store_key(user: UserId) -> bytes:
    """Return the key of a user in a store. No key begins another one; numbers come first, in order."""
    if isinstance(user, int):
        return _NUMBER.pack(user)
    text = user.encode()
    return _STRING_KEY + _LENGTH.pack(len(text)) + text


def user_of_key(key: bytes | memoryview) -> UserId | None:
    """Return the user of a store's key; None if these bytes are not one."""
    key = bytes(key)
    if key[:1] < _STRING_KEY:
        return int(_NUMBER.unpack(key)[0]) if len(key) == _NUMBER.size else None
    begin = len(_STRING_KEY) + _LENGTH.size
    if key[:1] != _STRING_KEY or len(key) <= begin or len(key) - begin != _LENGTH.unpack_from(key, 1)[0]:
        return None
    try:
        return key[begin:].decode()
    except UnicodeDecodeError:
        return None


def routing_number(user: UserId) -> int:
    """Return a number below 2^63 for routing, the same in every process. Two users may have the same."""
    if isinstance(user, int):
        return user & MAX_NUMBER
    digest = hashlib.blake2b(user.encode(errors="surrogatepass"), digest_size=_WORD_BYTES).digest()
    return int.from_bytes(digest, "little") & MAX_NUMBER


def path_text(user: UserId) -> str:
    """Return a user as it is written in a path, before percent-encoding: digits are a number, quotes a string."""
    if isinstance(user, int) or not (user.isdecimal() or user.startswith('"')):
        return str(user)
    return json.dumps(user, ensure_ascii=False)


def user_of_path(text: str) -> UserId:
    """Return the user of a part of a path; RequestError if it is none."""
    if text.isascii() and text.isdecimal():
        return check_user_id(int(text) if len(text) < _MAX_SHOWN else -1)
    if not text.startswith('"'):
        return check_user_id(text)
    try:
        quoted = json.loads(text)
    except ValueError:
        quoted = None
    if not isinstance(quoted, str):
        raise RequestError("user_id", text[:_MAX_SHOWN], "a string that begins with a quote must be a JSON string")
    return check_user_id(quoted)
