"""The value at a path is the one a decoder would find there, and finding it takes a bounded number of looks."""

import json
from typing import Any

import numpy as np
import pytest

from helmrec.serve import json_place
from helmrec.serve.json_place import value_at

WORDS = ["a", "b", "items", 'with "quotes"', "back\\slash", "]}", "é", ""]


def random_value(rng: np.random.Generator, depth: int) -> Any:
    kind = rng.integers(0, 7 if depth else 5)
    if kind == 5:
        return [random_value(rng, depth - 1) for _ in range(rng.integers(0, 5))]
    if kind == 6:
        names = rng.choice(["a", "b", "items", "user_id", "}"], size=rng.integers(0, 4), replace=False)
        return {str(name): random_value(rng, depth - 1) for name in names}
    scalars = [int(rng.integers(-99, 99)), float(rng.normal()), bool(rng.integers(2)), None, WORDS[rng.integers(8)]]
    return scalars[kind]


def places(value: Any, path: str = "") -> Any:
    """Every path of a value as msgspec writes it, with what is there."""
    yield path, value
    if isinstance(value, list):
        for i, each in enumerate(value):
            yield from places(each, f"{path}[{i}]")
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from places(each, f"{path}.{name}" if path else name)


@pytest.mark.parametrize("indent", [None, 2])
def test_it_finds_what_decoding_and_walking_finds(indent: int | None) -> None:
    rng = np.random.default_rng(0)
    num_found = 0
    for _ in range(1_000):
        document = random_value(rng, 4)
        text = json.dumps(document, indent=indent, ensure_ascii=bool(rng.integers(2))).encode()
        for path, expected in places(document):
            found = value_at(path, text, max_shown=10_000)
            if isinstance(expected, list | dict):
                assert isinstance(found, str)
                found = json.loads(found)
            assert found == expected, (path, text)
            assert type(found) is type(expected)
            num_found += 1
    assert num_found > 1_000


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("a[3]", b'{"a": [1, 2]}'),
        ("a[1]", b'{"a": {"b": 1}}'),
        ("b", b'{"a": 1}'),
        ("a.b", b'{"a": [1]}'),
        ("a", b""),
        ("", b"  "),
        ("a", b'{"a'),
        ("a[2]", b'{"a": [1, "no end'),
        ("features[...][1]", b'{"features": {"a": [1, null]}}'),
    ],
)
def test_where_there_is_nothing_it_finds_nothing(path: str, text: bytes) -> None:
    assert value_at(path, text, 100) is None


def test_long_values_are_cut_and_values_beyond_many_brackets_are_not_looked_for() -> None:
    assert value_at("a", b'{"a": "' + b"x" * 5_000 + b'"}', 10) == "x" * 10 + "…"
    assert value_at("a", b'{"a": ' + b"[" * 5_000, 10) == "[" * 10 + "…"
    assert value_at("a[1]", b'{"a": [' + b"[]," * 10 + b"]}", 10) == "[]"
    assert value_at("a[40000]", b'{"a": [' + b"[]," * 50_000 + b"]}", 10) is None
    assert value_at("a[40000]", b'{"a": [' + b"1," * 50_000 + b"1]}", 10) == 1, "numbers cost no looks"


def test_bytes_that_are_no_text_are_shown_as_far_as_they_can_be() -> None:
    assert value_at("a", b'{"a": "x\xab"}', 100) == '"x\N{REPLACEMENT CHARACTER}"'
    assert value_at("a", b'{"a": \xab}', 100) == "\N{REPLACEMENT CHARACTER}"
    assert value_at("a", b'{"a": [\xab]}', 100) == "[\N{REPLACEMENT CHARACTER}]"


def test_no_text_takes_more_looks_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_place, "_MOST_LOOKS", 50)
    for text in (b"[" * 1_000, b'{"a": "' + b'\\"' * 1_000 + b'"}', b'{"b": ' + b'["x"],' * 1_000):
        place = json_place._Place(text)
        with pytest.raises(LookupError):
            while True:
                place._skip_value()
        assert place._num_looks <= 51
