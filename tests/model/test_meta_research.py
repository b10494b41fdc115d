"""Import of Meta's research HSTU, against scores of the original classes (see tests/data/research-golden.json)."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from helmrec.cli.main import app
from helmrec.config import EngineConfig
from helmrec.engine.engine import Engine
from helmrec.engine.model_check import check_model
from helmrec.errors import ModelError
from helmrec.model import HstuRanker, load_model
from helmrec.model.meta_research import ResearchOptions, import_research
from tests.model.research import HEADS, LAYERS, LENGTH, MAX_EVENTS, request, weights

OPTIONS = ResearchOptions(num_heads=HEADS, window=MAX_EVENTS)
GOLDEN = json.loads((Path(__file__).parent.parent / "data" / "research-golden.json").read_text())["cases"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Imported from a file as the trainer writes it, wrapped by distributed training and with its mask."""
    folder = tmp_path_factory.mktemp("research")
    wrapped = {f"module.{name}": value for name, value in weights().items()}
    wrapped["module._attn_mask"] = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    torch.save({"epoch": 3, "model_state_dict": wrapped, "optimizer_state_dict": {"state": {}}}, folder / "ckpt")
    import_research(folder / "ckpt", folder / "model", OPTIONS)
    return folder / "model"


def requests() -> list[Any]:
    rng = np.random.default_rng(0)
    return [request(rng, case["user"], case["num_events"]) for case in GOLDEN]


def test_an_imported_model_scores_as_metas_own_code(model: Path) -> None:
    with Engine.from_model(model, EngineConfig(pool_bytes="256KiB", page_tokens=4, device="cpu")) as engine:
        together = engine.rank(requests())
        alone = [engine.rank([each])[0] for each in requests()]
    ranker = HstuRanker.from_model(load_model(model))
    for case, each, first, second in zip(GOLDEN, requests(), together, alone, strict=True):
        assert np.abs(first.scores[:, 0] - case["scores"]).max() <= 1e-5
        assert np.abs(second.scores[:, 0] - case["scores"]).max() <= 1e-5
        with torch.no_grad():
            assert np.abs(ranker([each]).numpy()[:, 0] - case["scores"]).max() <= 1e-5


def test_all_events_but_the_last_are_reused_with_the_same_scores(model: Path) -> None:
    """A history grows event by event; each state depends on the time of the next event, which is known by then."""
    whole = requests()[-1]
    settings = EngineConfig(pool_bytes="256KiB", page_tokens=4, device="cpu", kv_admission="always")
    ranker = HstuRanker.from_model(load_model(model)).double()
    with Engine.from_model(model, settings) as engine:
        for num in range(1, MAX_EVENTS):
            history = {name: getattr(whole, name)[:num] for name in ("items", "actions", "timestamps")}
            each = replace(whole, **history, request_time=int(history["timestamps"][-1]) + 17 * num)
            result = engine.rank([each])[0]
            assert result.reused_tokens == max(0, num - 2), "events before the last of the request before"
            with torch.no_grad():
                assert np.abs(result.scores - ranker([each]).numpy()).max() <= 1e-5
    assert check_model(load_model(model)).is_equal


def test_another_time_of_the_next_event_is_not_reused(model: Path) -> None:
    whole = requests()[2]
    settings = EngineConfig(pool_bytes="256KiB", page_tokens=4, device="cpu", kv_admission="always")
    ranker = HstuRanker.from_model(load_model(model)).double()
    with Engine.from_model(model, settings) as engine:
        engine.rank([whole])
        times = whole.timestamps.copy()
        times[5:] += 10**6
        later = replace(whole, timestamps=times, request_time=int(times[-1]) + 1)
        result = engine.rank([later])[0]
        assert result.reused_tokens == 4, "event 4 has another next time"
        with torch.no_grad():
            assert np.abs(result.scores - ranker([later]).numpy()).max() <= 1e-5


def test_the_command_imports_a_plain_state_dict_and_safetensors(tmp_path: Path) -> None:
    torch.save(weights(), tmp_path / "w.pt")
    save_file(weights(), tmp_path / "w.safetensors")
    for name, more in (("w.pt", ["--key", ""]), ("w.safetensors", [])):
        out = tmp_path / f"model-{name}"
        arguments = ["import", "research", str(tmp_path / name), str(out), "--heads", "2", *more]
        done = CliRunner().invoke(app, [*arguments, "--no-item-l2-norm", "--temperature", "0.05"])
        assert done.exit_code == 0, done.output
        config = load_model(out).config
        assert config.window == LENGTH - 11
        assert config.retrieval is not None
        assert (config.retrieval.item_norm, config.retrieval.temperature) == ("none", 0.05)


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({f"{LAYERS}1._o.bias": None}, {}, r"weight '.*1\._o\.bias' is missing"),
    ({"_ndp_module.mol.weight": torch.zeros(3)}, {}, "'_ndp_module.mol.weight' is no weight of a research HSTU"),
    ({f"{LAYERS}1._uvqk": torch.zeros(16, 40)}, {}, r"'layers.1.uvqk_weight' must be \(16, 44\), got \(16, 40\)"),
    (
        {f"{LAYERS}2._rel_attn_bias._pos_w": torch.zeros(9)},
        {},
        r"2\._rel_attn_bias\._pos_w' must be \(53,\), got \(9,\)",
    ),
    ({f"{LAYERS}0._o.weight": torch.zeros(16, 36)}, {}, "heads do not divide widths"),
    ({"_embedding_module._item_emb.weight": torch.zeros(16)}, {}, "must have two dimensions"),
    ({}, {"num_heads": 5}, "5 heads do not divide widths of 12"),
    ({}, {"window": LENGTH}, "needs more than the 27 positions"),
]


@pytest.mark.parametrize(("changes", "options", "message"), WRONG)
def test_what_does_not_fit_is_named(
    changes: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    changed = {name: value for name, value in (weights() | changes).items() if value is not None}
    torch.save({"model_state_dict": changed}, tmp_path / "w.pt")
    with pytest.raises(ModelError, match=message):
        import_research(tmp_path / "w.pt", tmp_path / "out", OPTIONS.model_copy(update=options))
    assert not (tmp_path / "out").exists()
