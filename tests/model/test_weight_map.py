"""Any checkpoint that is a rename and a change of layout away is imported; what does not fit is named with its line."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner

from helmrec.cli.main import app
from helmrec.errors import ConfigError, ModelError
from helmrec.model import HstuRanker, ModelConfig, load_model
from helmrec.model.checkpoint import read_checkpoint
from helmrec.model.weight_map import import_mapped, read_map, reorder_parts
from tests.helpers import random_request, tiny_config

MODEL = """
[model]
name = "mine"
form = "gated"
num_layers = 2
num_heads = 2
qk_dim = 4
v_dim = 6
dim = 8
hidden_dim = 8
output_bias = true
normaliser = 16
window = 16
max_candidates = 8
num_actions = 3
time_buckets = 8
row_dim = 8
features = [{name = "item", num_rows = 50}]
encoders = [{name = "event", tables = ["item"], kind = "linear"}]
candidate_encoder = {name = "candidate", tables = ["item"], kind = "linear"}
retrieval = {item_norm = "l2"}
"""
WEIGHTS = """
[weights]
"tables.item.rows" = "emb.weight"
"action_embedding.weight" = {fill = 0.0}
"position_embedding.weight" = {from = "pos.weight", slice = [1, 18]}
"time_embedding.weight" = "time.weight"
"encoders.event.0.weight" = {eye = 3.0}
"encoders.event.0.bias" = {fill = 0.5}
"candidate_encoder.0.weight" = "out.weight"
"candidate_encoder.0.bias" = "out.bias"
"layers.*.uvqk_weight" = {from = "blocks.*.proj.weight", transpose = true, parts = "qkvu", per_head = true}
"layers.*.uvqk_beta" = {concat = ["blocks.*.u", "blocks.*.v", "blocks.*.q", "blocks.*.k"]}
"layers.*.input_norm_weight" = {fill = 1.0}
"layers.*.input_norm_bias" = {fill = 0.0}
"layers.*.output_weight" = {from = "blocks.*.o.weight", transpose = true}
"layers.*.output_bias" = "blocks.*.o.bias"
"layers.*.output_norm_weight" = {fill = 1.0}
"layers.*.output_norm_bias" = {fill = 0.0}
"""
HEADS, QK, V, DIM = 2, 4, 6, 8


def checkpoint() -> dict[str, Tensor]:
    torch.manual_seed(0)
    weights = {
        "emb.weight": torch.randn(50, 8),
        "pos.weight": torch.randn(20, 8),
        "time.weight": torch.randn(8, 8),
        "out.weight": torch.randn(8, 8),
        "out.bias": torch.randn(8),
    }
    for i in range(2):
        widths = {"u": HEADS * V, "v": HEADS * V, "q": HEADS * QK, "k": HEADS * QK}
        weights |= {f"blocks.{i}.{part}": torch.randn(width) for part, width in widths.items()}
        weights[f"blocks.{i}.proj.weight"] = torch.randn(2 * HEADS * (QK + V), DIM)
        weights |= {f"blocks.{i}.o.weight": torch.randn(DIM, HEADS * V), f"blocks.{i}.o.bias": torch.randn(DIM)}
    return weights


def write_map(folder: Path, extra: str = "", model: str = MODEL, weights: str = WEIGHTS) -> Path:
    path = folder / "map.toml"
    path.write_text(extra + model + weights)
    return path


def expected(weights: dict[str, Tensor], config: ModelConfig) -> HstuRanker:
    """The same model, filled by hand."""
    ranker = HstuRanker(config)
    state = {
        "tables.item.rows": weights["emb.weight"],
        "action_embedding.weight": torch.zeros(4, 8),
        "position_embedding.weight": weights["pos.weight"][1:18],
        "time_embedding.weight": weights["time.weight"],
        "encoders.event.0.weight": 3 * torch.eye(8),
        "encoders.event.0.bias": torch.full((8,), 0.5),
        "candidate_encoder.0.weight": weights["out.weight"],
        "candidate_encoder.0.bias": weights["out.bias"],
    }
    for i in range(2):
        columns: dict[str, list[Tensor]] = {part: [] for part in "uvqk"}
        theirs, at = weights[f"blocks.{i}.proj.weight"], 0
        for _ in range(HEADS):
            for part in "qkvu":
                width = V if part in "uv" else QK
                columns[part].append(theirs[at : at + width].T)
                at += width
        state |= {
            f"layers.{i}.uvqk_weight": torch.cat([torch.cat(columns[part], 1) for part in "uvqk"], 1),
            f"layers.{i}.uvqk_beta": torch.cat([weights[f"blocks.{i}.{part}"] for part in "uvqk"]),
            f"layers.{i}.input_norm_weight": torch.ones(DIM),
            f"layers.{i}.input_norm_bias": torch.zeros(DIM),
            f"layers.{i}.output_weight": weights[f"blocks.{i}.o.weight"].T,
            f"layers.{i}.output_bias": weights[f"blocks.{i}.o.bias"],
            f"layers.{i}.output_norm_weight": torch.ones(HEADS * V),
            f"layers.{i}.output_norm_bias": torch.zeros(HEADS * V),
        }
    ranker.load_state_dict(state)
    return ranker


@pytest.mark.parametrize("kind", ["torch", "nested", "safetensors", "folder"])
def test_an_imported_model_scores_as_the_one_filled_by_hand(kind: str, tmp_path: Path) -> None:
    weights, extra = checkpoint(), ""
    source = tmp_path / ("weights.pt" if kind in {"torch", "nested"} else "weights.safetensors")
    if kind == "torch":
        torch.save(weights, source)
    elif kind == "nested":
        torch.save({"epoch": 3, "trained": {"model": weights}}, source)
        extra = 'keys = ["trained", "model"]\n'
    elif kind == "safetensors":
        save_file(weights, source)
    else:
        source = tmp_path / "shards"
        source.mkdir()
        names = sorted(weights)
        for i in range(2):
            save_file({name: weights[name] for name in names[i::2]}, source / f"{i}.safetensors")
    done: list[int] = []
    config = import_mapped(source, tmp_path / "out", write_map(tmp_path, extra), done.append)
    request = random_request(np.random.default_rng(0), config, num_events=9)
    with torch.no_grad():
        ours = HstuRanker.from_model(load_model(tmp_path / "out"))([request])
        assert torch.equal(ours, expected(weights, config)([request]))
    assert sum(done) > 0


def test_the_command_imports_lists_names_and_the_check_passes(tmp_path: Path) -> None:
    torch.save(checkpoint(), tmp_path / "w.pt")
    run = CliRunner().invoke
    listed = run(app, ["import", "names", str(tmp_path / "w.pt")])
    assert "blocks.1.proj.weight (40, 8) float32" in listed.output
    arguments = [str(tmp_path / "w.pt"), str(tmp_path / "out"), "--map", str(write_map(tmp_path))]
    assert run(app, ["import", "hstu", *arguments]).exit_code == 0
    assert run(app, ["model", "check", str(tmp_path / "out")]).exit_code == 0
    again = run(app, ["import", "hstu", *arguments])
    assert again.exit_code == 2
    assert "is not empty" in again.output


def test_every_weight_that_does_not_fit_is_named(tmp_path: Path) -> None:
    weights = checkpoint()
    del weights["blocks.1.o.bias"]
    weights |= {"blocks.0.o.weight": torch.zeros(8, 11), "extra": torch.zeros(3), "ema.decay": torch.zeros(1)}
    torch.save(weights, tmp_path / "w.pt")
    map_file = write_map(tmp_path, 'ignore = ["ema.*"]\n', weights=WEIGHTS.replace('"time_embedding.weight"', "#"))
    line = next(i for i, text in enumerate(map_file.read_text().splitlines(), 1) if "o.bias" in text)
    with pytest.raises(ModelError) as caught:
        import_mapped(tmp_path / "w.pt", tmp_path / "out", map_file)
    message = str(caught.value)
    assert "5 weights do not fit" in message
    assert f"weight 'time_embedding.weight' (8, 8) has no source in {map_file}" in message
    assert (
        f"weight 'layers.1.output_bias' ({map_file}, line {line}): the checkpoint has no 'blocks.1.o.bias'" in message
    )
    assert "'layers.0.output_weight'" in message
    assert "must be (12, 8), got (11, 8)" in message
    assert "'extra' (3,) of the checkpoint is neither used" in message
    assert "'time.weight' (8, 8) of the checkpoint is neither used" in message
    assert "ema" not in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("num_layers = 2", "num_layers = 0"), "line 5: model.num_layers must be at least 1, got 0"),
        (("\ndim = 8\n", "\ndim = 8\ndepth = 3\n"), r"line 10: model.depth is not a known setting, got 3"),
        (('= "time.weight"', "= 3"), r"line \d+: weights.time_embedding.weight: a text or a table is needed, got 3"),
        (
            ("{fill = 0.5}", "{fill = 0.5, from = 'x'}"),
            "weights.encoders.event.0.bias: .*one of from, concat, stack, fill and eye",
        ),
        (('"qkvu"', '"qkv"'), r"line \d+: weights.layers.\*.uvqk_weight: .*an order of 'uvqk'"),
        (('"layers.*.output_bias"', '"layer.*.b"'), r"line \d+: weights.layer.\*.b: \* stands for the number"),
        (('"layers.*.output_bias"', '"layers.*.b"'), r"line \d+: weights.layers.\*.b: the model has no weight"),
        (('"out.bias"', '{from = "out.bias", per_head = true}'), "only a projection has parts"),
        (("{fill = 0.5}", "{eye = 2.0}"), "only a matrix has a diagonal"),
        (("[weights]", "[weigths]"), r"line \d+: weigths is not a known key"),
        (("[weights]", "[weights"), r"map.toml: .*line 23"),
    ],
)
def test_errors_of_a_map_name_the_key_and_its_line(change: tuple[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_map(write_map(tmp_path, model=MODEL.replace(*change), weights=WEIGHTS.replace(*change)))


def test_parts_in_any_order_are_put_in_ours() -> None:
    config = tiny_config(num_heads=3, qk_dim=2, v_dim=5)
    parts = {part: torch.randn(7, 3, 5 if part in "uv" else 2) for part in "uvqk"}
    ours = torch.cat([parts[part].flatten(1) for part in "uvqk"], 1)
    for order in ("uvqk", "qkvu", "kuqv"):
        by_part = torch.cat([parts[part].flatten(1) for part in order], 1)
        by_head = torch.cat([parts[part] for part in order], 2).flatten(1)
        assert torch.equal(reorder_parts(by_part, order, per_head=False, config=config), ours)
        assert torch.equal(reorder_parts(by_head, order, per_head=True, config=config), ours)


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"state": {"w": torch.zeros(2)}}, "'state' is no tensor .*perhaps the weights are under this key"),
        ([torch.zeros(2)], "a dictionary of weights is needed, in it is a list"),
        ({3: torch.zeros(2)}, "a key is no name"),
    ],
)
def test_an_archive_without_weights_by_name_is_refused(saved: Any, message: str, tmp_path: Path) -> None:
    torch.save(saved, tmp_path / "w.pt")
    with pytest.raises(ModelError, match=message):
        read_checkpoint(tmp_path / "w.pt")


def test_the_state_dict_of_a_module_is_read_as_it_is(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
    torch.save(module.state_dict(), tmp_path / "w.pt")
    found = read_checkpoint(tmp_path / "w.pt")
    assert {name: value.tolist() for name, value in found.items()} == {
        name: value.tolist() for name, value in module.state_dict().items()
    }


def test_files_that_are_no_checkpoint_are_refused(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"nothing")
    for path, message in ((tmp_path / "w.safetensors", "not a valid"), (tmp_path / "none.pt", "is no file")):
        with pytest.raises(ModelError, match=message):
            read_checkpoint(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="no safetensors file"):
        read_checkpoint(tmp_path / "empty")
