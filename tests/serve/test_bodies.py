"""How a body that does not fit its type is explained."""

import msgspec
import pytest

from helmrec.errors import RequestError
from helmrec.serve.bodies import decode
from helmrec.serve.schema import AlphaBody, RankBody

RANK = msgspec.json.Decoder(RankBody)
ALPHA = msgspec.json.Decoder(AlphaBody)


@pytest.mark.parametrize(
    ("decoder", "body", "message"),
    [
        (ALPHA, b'{"alpha": "x"}', "alpha: float is needed, not str, got 'x'"),
        (ALPHA, b'{"alpha": 1.5}', "alpha: float <= 1.0 is needed, got 1.5"),
        (ALPHA, b'{"beta": 1}', "beta: not a known field, got None"),
        (ALPHA, b"[]", "body: object is needed, not array, got '[]'"),
        (ALPHA, b'{"alpha": {"deep": [1, 2]}}', "alpha: float is needed, not object, got \"{'deep': [1, 2]}\""),
        (RANK, b'{"user_id": -1}', "user_id: int >= 0 is needed, got -1"),
        (RANK, b'{"user_id": ' + b"9" * 5000 + b"}", "user_id: Integer value out of range, got None"),
        (RANK, b'{"user_id": 1, "features": {"a": [1, null]}}', "features[...][1]: int is needed, not null, got None"),
    ],
)
def test_field_and_value_are_named(decoder: msgspec.json.Decoder[object], body: bytes, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        decode(decoder, body)
    assert str(caught.value) == message


def test_what_is_shown_of_a_long_value_is_short() -> None:
    with pytest.raises(RequestError) as caught:
        decode(ALPHA, b'{"alpha": "' + b"x" * 100_000 + b'"}')
    assert len(str(caught.value)) < 200
