"""Users by number and by string: no form that stores or verifies gives two users the same value."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helmrec.errors import RequestError
from helmrec.types import UserId
from helmrec.user_ids import (
    MAX_NUMBER,
    MAX_USER_BYTES,
    check_user_id,
    path_text,
    routing_number,
    seed_words,
    store_key,
    user_of_key,
    user_of_path,
)

TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=64)
USERS = st.one_of(st.integers(0, MAX_NUMBER), TEXTS, TEXTS.map(lambda text: text[:8] + "\0"))
NEAR: list[UserId] = [
    0,
    7,
    MAX_NUMBER,
    "7",
    "07",
    "a",
    "a\0",
    "a\0\0\0\0\0\0\0",
    "aaaaaaaa",
    "aaaaaaaaa",
    "ä",
    "a\u0308",
    " a",
    "A",
]


@given(st.lists(USERS, min_size=2, max_size=2, unique_by=lambda user: (type(user), user)))
def test_two_users_never_share_words_or_keys_nor_does_one_begin_the_other(users: list[UserId]) -> None:
    one, other = users
    for form in (seed_words, store_key):
        a, b = form(one), form(other)
        assert a[: len(b)] != b[: len(a)]


def test_users_that_look_alike_are_told_apart() -> None:
    for one, other in combinations(NEAR, 2):
        assert seed_words(one) != seed_words(other)
        assert store_key(one) != store_key(other)
        assert path_text(one) != path_text(other)


@given(USERS)
def test_keys_and_paths_lead_back_to_their_user(user: UserId) -> None:
    for found in (user_of_key(store_key(user)), user_of_path(path_text(user))):
        assert (type(found), found) == (type(user), user)


@given(USERS)
def test_words_are_of_64_bits_and_routing_numbers_of_63(user: UserId) -> None:
    assert np.array(seed_words(user), np.int64).tolist() == list(seed_words(user))
    assert 0 <= routing_number(user) <= MAX_NUMBER


def test_numbers_stand_for_themselves_as_ever() -> None:
    assert (seed_words(7), store_key(7), routing_number(7)) == ((7,), bytes(7) + b"\7", 7)


def test_a_string_is_routed_by_the_same_number_in_every_process() -> None:
    assert routing_number("ann") == 0x25F323BF6ADF3A8D


@pytest.mark.parametrize(
    "key", [b"", b"\0" * 7, b"\0" * 9, b"\x80", b"\x80\0\1", b"\x80\0\2a", b"\x81\0\1a", b"\x80\0\1\xff"]
)
def test_other_bytes_are_no_key(key: bytes) -> None:
    assert user_of_key(key) is None


@pytest.mark.parametrize("text", ["", '"', '"7', str(MAX_NUMBER + 1), "9" * 5_000, "x" * 257, '""'])
def test_other_paths_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match="user_id"):
        user_of_path(text)


def test_the_longest_string_is_counted_in_bytes() -> None:
    assert check_user_id("ä" * (MAX_USER_BYTES // 2))
    with pytest.raises(RequestError, match="string of 1 to 256 bytes in UTF-8 is needed, not one of 258 bytes"):
        check_user_id("ä" * (MAX_USER_BYTES // 2 + 1))


def test_numpy_values_become_plain_ones() -> None:
    for given_, plain in ((np.int32(4), 4), (np.str_("ann"), "ann")):
        found = check_user_id(given_)
        assert (found, type(found)) == (plain, type(plain))
