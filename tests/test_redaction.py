"""Secrets in text: hidden wherever they stand, and nothing else is."""

import time

import pytest

from helmrec.redaction import redact, secrets_in_url

PASSWORD = "hunter2secret"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://:hunter2secret@127.0.0.1:6379/0", "redis://***@127.0.0.1:6379/0"),
        ("rediss://me:hunter2secret@a.b:1/0: refused", "rediss://***@a.b:1/0: refused"),
        ("redis://:hunter2/secret#1@a:1/0", "redis://***@a:1/0"),
        ("redis://:hunter2@secret@a:1/0", "redis://***@a:1/0"),
        ("got 'redis://:hunter2secret@a/0', 'x@y'", "got 'redis://***@a/0', 'x@y'"),
        ("unix:///run/redis.sock?db=0&password=hunter2secret", "unix:///run/redis.sock?db=0&password=***"),
        ("unix:///run/r.sock?password=hunter2secret&db=0", "unix:///run/r.sock?password=***&db=0"),
        ("{'admin_token': 'hunter2secret', 'port': 1}", "{'admin_token': ***, 'port': 1}"),
        ('{"prefix_secret": "hunter2secret"}', '{"prefix_secret": ***}'),
        ("--set: got 'admin_token:hunter2secret'", "--set: got 'admin_token:***'"),
        ("prefix_secret=hunter2secret", "prefix_secret=***"),
        ("authorization: Bearer hunter2secret", "authorization: Bearer ***"),
    ],
)
def test_secrets_are_known_by_where_they_stand(text: str, shown: str) -> None:
    assert redact(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "/var/lib/histories",
        "redis://redis.internal:6379/0: Error 111 connecting",
        "http://127.0.0.1:8000",
        "admin_token: String should have at least 8 characters",
        "max_batch_tokens=65536",
        "the admin token is needed",
        "user@host",
    ],
)
def test_what_holds_no_secret_stays_as_it_is(text: str) -> None:
    assert redact(text) == text


def test_secrets_that_are_known_are_hidden_anywhere_longest_first() -> None:
    assert redact("a hunter2secret and a hunter2", ("hunter2", PASSWORD)) == "a *** and a ***"
    assert redact("one a one", ("a", "")) == "one a one", "too short to look for"


@pytest.mark.parametrize(
    ("url", "secrets"),
    [
        ("redis://:hunter2secret@a:1/0", ("hunter2secret",)),
        ("redis://me:p%40ss@a:1/0", ("p%40ss", "p@ss")),
        ("unix:///r.sock?password=hunter2", ("hunter2",)),
        ("redis://a:1/0", ()),
        ("histories", ()),
    ],
)
def test_passwords_of_an_address_are_found_as_written_and_as_meant(url: str, secrets: tuple[str, ...]) -> None:
    assert secrets_in_url(url) == secrets


@pytest.mark.parametrize("unit", ["a.", "a://", "token=", '"', "a-token", "Bearer "])
def test_text_of_a_client_cannot_make_it_slow(unit: str) -> None:
    started_s = time.perf_counter()
    redact(unit * (200_000 // len(unit)))
    assert time.perf_counter() - started_s < 2
