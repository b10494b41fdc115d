"""Device and pool where the settings say auto: what fits the machine, with the reason."""

import logging
from typing import Any

import pytest

from helmrec.config import EngineConfig
from helmrec.engine import choose
from helmrec.engine.choose import CPU_POOL_BYTES, MARGIN, CardMemory, choose_device, choose_pool
from helmrec.engine.engine import Engine
from helmrec.engine.setup import page_geometry
from helmrec.errors import ConfigError, PoolTooSmall
from helmrec.model.config import ModelConfig
from helmrec.model.profiles import profile
from tests.helpers import tiny_engine, tiny_model

GIB = 1 << 30


def pool_on_card(
    monkeypatch: pytest.MonkeyPatch, free_gib: float, model: ModelConfig, **settings: Any
) -> choose.Chosen:
    monkeypatch.setattr(choose, "card_memory", lambda: CardMemory(int(free_gib * GIB), 140 * GIB))
    config = EngineConfig(device="cuda", **settings)
    return choose_pool(config, model, page_geometry(model, config))


@pytest.mark.parametrize(("has_card", "device"), [(True, "cuda"), (False, "cpu")])
def test_the_card_is_chosen_if_there_is_one(monkeypatch: pytest.MonkeyPatch, has_card: bool, device: str) -> None:
    monkeypatch.setattr(choose, "has_card", lambda: has_card)
    chosen = choose_device(EngineConfig())
    assert chosen.config.device == device
    assert chosen.reason.startswith(f"device: {device}, chosen since CUDA finds")


def test_a_device_that_is_set_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "has_card", lambda: True)
    assert choose_device(EngineConfig(device="cpu")) == (EngineConfig(device="cpu"), "device: cpu, as set")


def test_on_a_card_the_pool_takes_what_model_graphs_and_margin_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = pool_on_card(monkeypatch, 130, profile("dlrmv3"))
    taken = chosen.config.sized_pool_bytes / GIB
    assert 110 < taken < 130 - MARGIN * 140
    assert "of 130.00 GiB that the model leaves" in chosen.reason
    assert "7.00 margin (5% of the card)" in chosen.reason
    wider = pool_on_card(monkeypatch, 130, profile("dlrmv3"), max_batch_tokens=1 << 18)
    assert wider.config.sized_pool_bytes < chosen.config.sized_pool_bytes, "graphs of larger steps need more"


def test_a_full_card_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PoolTooSmall, match=r"pool_bytes: nothing is left of 5\.00 GiB .* got 'auto'"):
        pool_on_card(monkeypatch, 5, profile("dlrmv3"))


def test_a_chosen_pool_holds_no_more_rows_than_a_pool_can(monkeypatch: pytest.MonkeyPatch) -> None:
    model = profile("demo", 500)
    chosen = pool_on_card(monkeypatch, 2_000, model).config
    geometry = page_geometry(model, chosen)
    assert chosen.sized_pool_bytes // geometry.page_bytes * geometry.rows_per_page < 1 << 31


def test_a_pool_that_is_set_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = pool_on_card(monkeypatch, 5, profile("dlrmv3"), pool_bytes="2GiB")
    assert (chosen.config.sized_pool_bytes, chosen.reason) == (2 * GIB, "pool_bytes: 2.00 GiB, as set")


def test_an_engine_starts_without_settings_and_says_what_it_chose(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choose, "has_card", lambda: False)
    with caplog.at_level(logging.INFO, "helmrec.engine"), Engine(tiny_model(), EngineConfig()) as engine:
        assert (engine.config.device, engine.config.pool_bytes) == ("cpu", CPU_POOL_BYTES)
    assert "device: cpu, chosen since CUDA finds no card" in caplog.text
    assert "pool_bytes: 0.25 GiB, the default on a CPU" in caplog.text


def test_a_card_that_is_not_there_stays_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device is available, got 'cuda'"):
        tiny_engine(device="cuda")


def test_a_simulation_needs_a_size() -> None:
    with pytest.raises(ConfigError, match="pool_bytes must be a size here, got 'auto'"):
        _ = EngineConfig().sized_pool_bytes


def test_engines_that_share_a_card_take_their_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    model, whole = profile("dlrmv3"), EngineConfig(device="cuda")
    for free_gib, own_gib, left in ((130, 2, "68.00"), (60, 2, "60.00")):  # the first engine, and one after others
        memory = CardMemory(free_gib * GIB, 140 * GIB, own_gib * GIB)
        monkeypatch.setattr(choose, "card_memory", lambda memory=memory: memory)
        config = EngineConfig(device="cuda", card_share=0.5)
        chosen = choose_pool(config, model, page_geometry(model, config))
        assert f"of {left} GiB that the model leaves on 50% of the card" in chosen.reason
        assert "3.50 margin (5% of 50% of the card)" in chosen.reason
        assert chosen.config.sized_pool_bytes < 70 * GIB
        alone = choose_pool(whole, model, page_geometry(model, whole)).config.sized_pool_bytes
        assert chosen.config.sized_pool_bytes < alone or free_gib == 60
