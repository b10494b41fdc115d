"""Listening. How a server ends is seen in tests/test_serve_cli.py, where it is a process."""

import socket

import pytest

from helmrec.errors import ConfigError
from helmrec.serve.server import listen
from helmrec.serve.settings import ServeConfig


def test_any_free_port_can_be_asked_for() -> None:
    with listen(ServeConfig(port=0)) as listener:
        host, port = listener.getsockname()
        assert host == "127.0.0.1"
        assert port > 0


def test_an_address_that_is_taken_or_foreign_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen .* got 127.0.0.1:{port}"):
            listen(ServeConfig(port=port))
    with pytest.raises(ConfigError, match="cannot listen"):
        listen(ServeConfig(host="192.0.2.1", port=0))
