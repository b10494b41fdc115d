"""Where settings come from, and which wins."""

import tomllib
from pathlib import Path

import pytest

from helmrec.errors import ConfigError
from helmrec.serve.settings import Given, ServeConfig, for_engine, resolve, revealed


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "serve.toml"
    path.write_text('pool_bytes = "1GiB"\nalpha = 0.1\nport = 1000\n')
    return path


def test_flags_win_over_the_environment_and_that_over_the_file(file: Path) -> None:
    settings = resolve({"alpha": Given(0.3, "flag --alpha")}, {"HELMREC_ALPHA": "0.2", "HELMREC_PORT": "2000"}, file)
    assert (settings.engine.alpha, settings.serve.port, settings.engine.pool_bytes) == (0.3, 2000, 1 << 30)
    assert settings.sources == {
        "alpha": "flag --alpha",
        "port": "environment HELMREC_PORT",
        "pool_bytes": f"file {file}",
    }


def test_what_is_shown_can_be_read_back_and_hides_the_token(file: Path) -> None:
    settings = resolve({}, {"HELMREC_ADMIN_TOKEN": "open sesame"}, file)
    text = "\n".join(settings.lines())
    assert "sesame" not in text
    assert "# admin_token is set  # environment HELMREC_ADMIN_TOKEN" in text
    assert f"alpha = 0.1  # file {file}" in text
    assert 'host = "127.0.0.1"  # default' in text
    back = {name: Given(value, "shown") for name, value in tomllib.loads(text).items()}
    assert resolve(back, {}, None).engine == settings.engine
    assert resolve(back, {}, None).history == settings.history


def test_settings_of_stored_histories_have_a_name_of_their_own() -> None:
    given = {"HELMREC_HISTORY_PATH": "kept", "HELMREC_HISTORY_SYNC": "interval", "HELMREC_HISTORY_MAX_BYTES": "1GiB"}
    settings = resolve({"queue_limit": Given(8, "flag"), "history_queue_limit": Given(9, "flag")}, given, None)
    assert (settings.serve.history_path, settings.history.sync, settings.history.max_bytes) == (
        "kept",
        "interval",
        1 << 30,
    )
    assert (settings.engine.queue_limit, settings.history.queue_limit) == (8, 9)
    assert 'history_sync = "interval"  # environment HELMREC_HISTORY_SYNC' in list(settings.lines())


def test_by_default_only_loopback_is_bound_and_admin_calls_are_off() -> None:
    settings = resolve({}, {}, None)
    assert (settings.serve.host, settings.serve.admin_token) == ("127.0.0.1", None)


@pytest.mark.parametrize(
    ("environment", "content", "message"),
    [
        ({"HELMREC_ALPHA": "1.5"}, "", "alpha must be at most 1"),
        ({"HELMREC_PORT": "http"}, "", "port: .* got 'http'"),
        ({"HELMREC_HISTORY_SYNC": "never"}, "", "history_sync: .* got 'never'"),
        ({"HELMREC_ADMIN_TOKEN": "short"}, "", "admin_token: at least 8 characters"),
        ({}, "shoes = 4", r"shoes is not a known setting \(file .*\), got 4"),
        ({}, "alpha", "the settings file cannot be read"),
        ({}, None, "the settings file cannot be read"),
    ],
)
def test_a_wrong_setting_is_named(
    tmp_path: Path, environment: dict[str, str], content: str | None, message: str
) -> None:
    path = tmp_path / "wrong.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        resolve({}, environment, path)


def test_a_token_that_is_refused_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({}, {"HELMREC_ADMIN_TOKEN": "short"}, None)
    assert "short'" not in str(caught.value)


def test_the_password_of_a_redis_is_not_shown_and_its_line_is_not_read_back() -> None:
    address = "redis://:hunter2secret@127.0.0.1:6379/0"
    settings = resolve({"history_path": Given(address, "flag --history")}, {"HELMREC_ADMIN_TOKEN": "open sesame"}, None)
    text = "\n".join(settings.lines())
    assert "hunter2" not in text
    assert '# history_path = "redis://***@127.0.0.1:6379/0"  # flag --history; a password is hidden' in text
    assert "history_path" not in tomllib.loads(text)
    assert settings.secrets == ("open sesame", "hunter2secret")
    assert "hunter2" not in repr(settings)
    assert "sesame" not in repr(settings)


@pytest.mark.parametrize(
    "given",
    [
        {"admin_tokn": "open sesame"},
        {"admin_token": 12345678},
        {"history_pth": "redis://:open sesame@a/0".replace(" ", "")},
        {"history_sync": "redis://:opensesame@a/0"},
        {"port": "redis://:opensesame@a/0"},
    ],
)
def test_a_refused_setting_does_not_show_a_secret(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({name: Given(value, "flag --set") for name, value in given.items()}, {}, None)
    assert "sesame" not in str(caught.value)
    assert "12345678" not in str(caught.value)


def test_an_engine_gets_no_secret_of_the_front_and_fronts_get_all() -> None:
    given = {"HELMREC_ADMIN_TOKEN": "open sesame", "HELMREC_HISTORY_PATH": "redis://:hunter2secret@a/0"}
    serve = resolve({}, given, None).serve
    assert not {"admin_token", "history_path"} & for_engine(serve).keys()
    assert ServeConfig(**for_engine(serve)).slo_ms == serve.slo_ms
    assert revealed(serve)["admin_token"] == "open sesame"
    assert (
        resolve({name: Given(v, "x") for name, v in revealed(serve).items() if v is not None}, {}, None).serve == serve
    )


def test_variables_that_look_like_settings_are_listed() -> None:
    assert resolve({}, {"HELMREC_POLL": "1GiB", "HOME": "/"}, None).ignored == ("HELMREC_POLL",)
