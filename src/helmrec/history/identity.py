"""The identity of a store: its format, the fields of its events, and the key that seals its pages.

A store without a configured secret keeps a random key with its data, so any process that opens the store has it. A
store with a secret keeps only the key's fingerprint. It knows no database.
"""

import hashlib
import json
from typing import NamedTuple

from pydantic import SecretStr

from helmrec.errors import HistoryError
from helmrec.history.events import EventSchema
from helmrec.memory.prefix_hash import SECRET_BYTES, HashKey

_FORMAT = 2


class Found(NamedTuple):
    """The identity found in a store; None where an entry is missing."""

    description: bytes | None
    own_secret: bytes | None


def make_key(where: object, secret: SecretStr | None, own_secret: bytes | None) -> HashKey:
    """Derive the key from the configured secret, or from the one kept in the store."""
    if secret is not None:
        return HashKey(hashlib.sha256(secret.get_secret_value().encode(errors="surrogatepass")).digest())
    if own_secret is None or len(own_secret) != SECRET_BYTES:
        raise HistoryError(f"{where} is damaged: the key of its own is missing")
    return HashKey(own_secret)


def describe(schema: EventSchema, key: HashKey, secret: SecretStr | None) -> bytes:
    """Return the description of a new store."""
    described = {
        "format": _FORMAT,
        "features": list(schema.feature_names),
        "sealed_with": "own key" if secret is None else "history_secret",
        "key": key.fingerprint,
    }
    return json.dumps(described).encode()


def check_identity(where: object, found: Found, schema: EventSchema, secret: SecretStr | None) -> HashKey:
    """Return the key of an existing store; raise HistoryError if it does not match these settings."""
    described = _parsed(found.description)
    wanted = {"format": _FORMAT, "features": list(schema.feature_names)}
    if {name: described.get(name) for name in wanted} != wanted:
        raise HistoryError(
            f"{where} was made for {found.description!r}; this model and release need {json.dumps(wanted)}"
        )
    has_own = described.get("sealed_with") == "own key"
    if has_own and secret is not None:
        raise HistoryError(f"{where} was made without history_secret and keeps a key of its own: leave it unset")
    if not has_own and secret is None:
        raise HistoryError(f"{where} was made with history_secret: set it to the same value")
    key = make_key(where, secret, found.own_secret)
    if key.fingerprint != described.get("key"):
        problem = "is damaged: its key is another" if has_own else "was made with another history_secret"
        raise HistoryError(f"{where} {problem}")
    return key


def _parsed(description: bytes | None) -> dict[str, object]:
    try:
        described = json.loads(description or b"")
    except ValueError:
        return {}
    return described if isinstance(described, dict) else {}
