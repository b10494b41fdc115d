"""Model folders: what is written is what is read, and every way a folder can be wrong is named."""

import hashlib
import json
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from helmrec import Engine, EngineConfig
from helmrec.errors import ModelError
from helmrec.model import HstuRanker, weights
from helmrec.model.config import EncoderConfig
from helmrec.model.folder import DENSE, read_manifest, table_file
from helmrec.model.hstu import dense_shapes
from helmrec.model.weights import (
    LoadedModel,
    init_model,
    load_model,
    random_dense,
    save_model,
    stream_model,
    total_table_bytes,
)
from tests.helpers import tiny_config, tiny_model

ITEMS = table_file("item")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    model = tiny_model()
    save_model(path, model.config, model.dense, model.tables)
    return path


def fails(folder: Path, *parts: str) -> None:
    """Loading names all these parts, and so does starting an engine."""
    with pytest.raises(ModelError) as caught:
        load_model(folder)
    for part in parts:
        assert part in str(caught.value)
    with pytest.raises(ModelError):
        Engine.from_model(folder, EngineConfig(pool_bytes="1MiB"))


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads((folder / "config.json").read_text())
    edit(content)
    (folder / "config.json").write_text(json.dumps(content))


def damage(folder: Path, **dense: torch.Tensor | None) -> Path:
    """Replace dense weights in a valid folder, or (None) take them out, and make its manifest vouch for the result."""
    kept = {name: tensor for name, tensor in (tiny_model().dense | dense).items() if tensor is not None}
    save_file(kept, folder / DENSE)
    sign(folder, DENSE)
    return folder


def test_a_saved_model_is_read_back_as_it_was(folder: Path) -> None:
    model, loaded = tiny_model(), load_model(folder)
    assert loaded.config == model.config
    assert loaded.dense.keys() == model.dense.keys()
    assert all(torch.equal(loaded.dense[name], tensor) for name, tensor in model.dense.items())
    assert all(torch.equal(loaded.tables[name], tensor) for name, tensor in model.tables.items())


def test_every_file_of_a_model_may_be_read_by_whom_the_umask_allows(folder: Path) -> None:
    marker = folder.parent / "marker"
    marker.touch()
    assert {path.stat().st_mode for path in folder.rglob("*") if path.is_file()} == {marker.stat().st_mode}


def test_tables_are_read_in_id_space_order(folder: Path) -> None:
    assert list(load_model(folder).tables) == ["item", "category", "country", "hour"]


def test_the_version_is_that_of_the_content(folder: Path, tmp_path: Path) -> None:
    model = tiny_model(seed=1)
    save_model(tmp_path / "same", model.config, tiny_model().dense, tiny_model().tables)
    save_model(tmp_path / "changed", model.config, model.dense, model.tables)
    version = read_manifest(folder).version
    assert read_manifest(tmp_path / "same").version == version
    assert read_manifest(tmp_path / "changed").version != version
    assert 0 <= version < 2**63


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_an_initialised_model_loads_and_reports_its_bytes(tmp_path: Path, dtype: str) -> None:
    config = tiny_config(dtype=dtype, row_dtype=dtype)
    done: list[int] = []
    init_model(tmp_path / "new", config, progress=done.append)
    loaded = load_model(tmp_path / "new", verify=True)
    assert loaded.tables["item"].shape == (300, 16)
    assert loaded.tables["item"].dtype == loaded.dense["output_norm.weight"].dtype == getattr(torch, dtype)
    assert 0.9 < loaded.tables["item"].float().std() < 1.1
    assert sum(done) >= total_table_bytes(config)


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        init_model(tmp_path / name, tiny_config(), seed=seed)
    a, b, c = ((tmp_path / name / ITEMS).read_bytes() for name in "abc")
    assert a == b != c


@pytest.mark.parametrize("form", ["gated", "concat"])
def test_random_weights_have_every_name_and_shape(form: str) -> None:
    config = tiny_config(form=form, v_dim=12)
    dense = random_dense(config, torch.Generator())
    assert {name: tuple(tensor.shape) for name, tensor in dense.items()} == dense_shapes(config)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    fails(tmp_path / "nowhere", str(tmp_path / "nowhere"), "does not exist")


def test_a_file_in_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("hello")
    fails(tmp_path / "file", str(tmp_path / "file"), "is a file")


def test_a_folder_without_config_is_named(folder: Path) -> None:
    (folder / "config.json").unlink()
    fails(folder, str(folder), "no config.json")


@pytest.mark.parametrize("name", ["model.pt", "model.pth", "pytorch_model.bin", "last.ckpt", "weights.pkl"])
def test_a_folder_with_pickled_weights_only_is_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(pickle.dumps({"a": 1}))
    fails(tmp_path, repr(name), "pickled weights are never loaded")


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("a pickle ran code",))


@pytest.mark.parametrize("name", [DENSE, ITEMS])
def test_pickle_bytes_under_a_safetensors_name_are_refused_and_never_run(folder: Path, name: str) -> None:
    (folder / name).write_bytes(pickle.dumps(Bomb()))
    fails(folder, str(folder / name), "pickled weights")


def test_a_torch_archive_under_a_safetensors_name_is_refused(folder: Path) -> None:
    torch.save({"a": torch.ones(1)}, folder / DENSE)
    fails(folder, str(folder / DENSE), "pickled weights")


def test_no_valid_model_is_taken_for_a_pickle(tmp_path: Path) -> None:
    for length in range(1, 40):
        encoder = EncoderConfig(name="x" * length, tables=("item",))
        model = tiny_model(encoders=(encoder,))
        save_model(tmp_path / str(length), model.config, model.dense, model.tables)
        load_model(tmp_path / str(length))


@pytest.mark.parametrize("content", ["{", "", "[]", "null", "3", "\x00\x01", '{"model": 3, "files": {}}'])
def test_a_config_that_is_no_manifest_is_named(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    fails(folder, str(folder / "config.json"))


def test_a_config_that_is_no_text_is_named(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\xff\xfe\x00")
    fails(folder, str(folder / "config.json"))


def test_an_unknown_key_is_named_with_its_value(folder: Path) -> None:
    edit_config(folder, lambda content: content["model"].update(dropout=0.25))
    fails(folder, "config.json", "dropout is not a known setting, got 0.25")


def test_a_missing_key_is_named(folder: Path) -> None:
    edit_config(folder, lambda content: content["model"].pop("window"))
    fails(folder, "config.json", "window is required")


def test_a_bad_value_is_named(folder: Path) -> None:
    edit_config(folder, lambda content: content["model"].update(num_heads=0))
    fails(folder, "config.json", "num_heads must be at least 1, got 0")


def test_a_bad_value_is_named_without_repeating_the_whole_config(folder: Path) -> None:
    edit_config(folder, lambda content: content["model"].update(num_heads=0))
    fails(folder, "model.num_heads must be at least 1, got 0")


def test_a_manifest_that_lists_no_table_is_named(folder: Path) -> None:
    edit_config(folder, lambda content: content["files"].pop(ITEMS))
    fails(folder, "config.json", repr(ITEMS))


@pytest.mark.parametrize("name", [DENSE, ITEMS])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    fails(folder, str(folder / name), "is missing")


@pytest.mark.parametrize("name", [DENSE, ITEMS])
@pytest.mark.parametrize("keep", [0, 3, 100, -1])
def test_a_truncated_file_is_named_with_both_sizes(folder: Path, name: str, keep: int) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:keep])
    fails(folder, str(folder / name), "truncated", str(len(content)), f"got {len(content[:keep])}")


@pytest.mark.parametrize("name", [DENSE, ITEMS])
@pytest.mark.parametrize("at", [0, 20, -1])
def test_a_flipped_bit_is_named_as_corrupt(folder: Path, name: str, at: int) -> None:
    content = bytearray((folder / name).read_bytes())
    content[at] ^= 1
    (folder / name).write_bytes(content)
    fails(folder, str(folder / name), "corrupt", read_manifest(folder).files[name].blake2b)


def sign(folder: Path, name: str) -> None:
    """Make the manifest vouch for whatever the file now holds."""
    content = (folder / name).read_bytes()
    record = {"bytes": len(content), "blake2b": hashlib.blake2b(content, digest_size=16).hexdigest()}
    edit_config(folder, lambda content: content["files"].update({name: record}))


@pytest.mark.parametrize("content", [b"", b"hello", b"\x08" + bytes(7) + b"{}      ", b"\xff" * 64])
def test_a_signed_file_that_is_no_safetensors_is_named(folder: Path, content: bytes) -> None:
    (folder / DENSE).write_bytes(content)
    sign(folder, DENSE)
    fails(folder, str(folder / DENSE))


def test_a_weight_of_another_shape_is_named_with_both_shapes(folder: Path) -> None:
    other = damage(folder, **{"layers.1.uvqk_weight": torch.zeros(16, 3)})
    fails(other, DENSE, "'layers.1.uvqk_weight' must be float32 (16, 64), got float32 (16, 3)")


def test_a_weight_of_another_dtype_is_named_with_both_dtypes(folder: Path) -> None:
    other = damage(folder, **{"output_norm.bias": torch.zeros(16, dtype=torch.float16)})
    fails(other, DENSE, "'output_norm.bias' must be float32 (16,), got float16 (16,)")


def test_a_missing_weight_is_named(folder: Path) -> None:
    fails(damage(folder, **{"head.2.bias": None}), DENSE, "weight 'head.2.bias' is missing")


def test_a_weight_too_many_is_named(folder: Path) -> None:
    fails(damage(folder, surprise=torch.zeros(1)), DENSE, "weight 'surprise' is not part of this model")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(folder: Path, value: float) -> None:
    fails(damage(folder, **{"head.2.bias": torch.tensor([0.0, value])}), DENSE, "'head.2.bias'", "not finite")


def test_a_table_of_another_size_is_named(folder: Path) -> None:
    save_file({"rows": torch.zeros(23, 16)}, folder / table_file("hour"))
    sign(folder, table_file("hour"))
    fails(folder, table_file("hour"), "(24, 16)", "(23, 16)")


def test_all_wrong_weights_of_a_folder_are_named_at_once(folder: Path) -> None:
    damaged = damage(folder, **{"head.2.bias": None, "surprise": torch.zeros(1)})
    fails(damaged, "2 weights and tables are wrong", "'head.2.bias' is missing", "'surprise' is not part of this model")


BAD_DENSE: dict[str, dict[str, torch.Tensor | None]] = {
    "weight 'head.2.bias' is missing": {"head.2.bias": None},
    "weight 'surprise' is not part of this model": {"surprise": torch.zeros(1)},
    "weight 'output_norm.bias' must be float32 (16,), got float32 (3,)": {"output_norm.bias": torch.zeros(3)},
    "weight 'context.bias' must be float32 (2, 16), got float64 (2, 16)": {"context.bias": torch.zeros(2, 16).double()},
    "weight 'head.0.bias' holds values that are not finite": {"head.0.bias": torch.full((16,), torch.nan)},
}
BAD_TABLES: dict[str, dict[str, torch.Tensor | None]] = {
    "table 'category' is missing": {"category": None},
    "table 'shoes' is not part of this model": {"shoes": torch.zeros(3, 16)},
    "table 'hour' must be float32 (24, 16), got float32 (23, 16)": {"hour": torch.zeros(23, 16)},
    "table 'country' must be float32 (5, 16), got float16 (5, 16)": {"country": torch.zeros(5, 16).half()},
    "table 'item': row 0 holds values that are not finite": {"item": torch.full((300, 16), torch.inf)},
}


def replaced(
    tensors: dict[str, torch.Tensor], changes: Iterable[dict[str, torch.Tensor | None]]
) -> dict[str, torch.Tensor]:
    for change in changes:
        tensors = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
    return tensors


@pytest.mark.parametrize("message", [*BAD_DENSE, *BAD_TABLES])
def test_saving_names_a_wrong_weight_and_writes_nothing(tmp_path: Path, message: str) -> None:
    model = tiny_model()
    dense = replaced(model.dense, [BAD_DENSE[message]] if message in BAD_DENSE else [])
    tables = replaced(model.tables, [BAD_TABLES[message]] if message in BAD_TABLES else [])
    with pytest.raises(ModelError) as caught:
        save_model(tmp_path / "model", model.config, dense, tables)
    assert str(caught.value) == message
    assert not (tmp_path / "model").exists()


def test_saving_names_all_wrong_weights_at_once(tmp_path: Path) -> None:
    model = tiny_model()
    dense, tables = replaced(model.dense, BAD_DENSE.values()), replaced(model.tables, BAD_TABLES.values())
    with pytest.raises(ModelError, match="10 weights and tables are wrong") as caught:
        save_model(tmp_path / "model", model.config, dense, tables)
    assert all(message in str(caught.value) for message in (*BAD_DENSE, *BAD_TABLES))


def test_a_few_of_many_weights_are_not_a_model(tmp_path: Path) -> None:
    model = tiny_model()
    few = dict(list(model.dense.items())[:4])
    with pytest.raises(ModelError) as caught:
        save_model(tmp_path / "model", model.config, few, model.tables)
    assert str(caught.value).count("is missing") == len(model.dense) - 4


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_module_is_saved_in_the_dtypes_of_its_configuration_and_read_back(tmp_path: Path, dtype: str) -> None:
    ranker = HstuRanker(tiny_config(dtype=dtype, row_dtype=dtype), seed=3)
    save_model(tmp_path / "model", ranker)
    loaded, again = load_model(tmp_path / "model"), HstuRanker.from_model(load_model(tmp_path / "model"))
    assert loaded.config == ranker.config
    for name, weight in ranker.named_parameters():
        stored = loaded.tables[name.split(".")[1]] if name.startswith("tables.") else loaded.dense[name]
        assert torch.equal(stored, weight.detach().to(getattr(torch, dtype)))
        assert torch.equal(again.get_parameter(name), stored.float())


def test_weights_of_a_module_that_overflow_its_dtype_are_named(tmp_path: Path) -> None:
    ranker = HstuRanker(tiny_config(dtype="float16"))
    with torch.no_grad():
        ranker.get_parameter("head.2.bias").fill_(1e6)
    with pytest.raises(ModelError, match=r"weight 'head.2.bias' holds values that are not finite"):
        save_model(tmp_path / "model", ranker)


def test_a_module_with_tables_of_its_own_kind_needs_them_given(tmp_path: Path) -> None:
    model = tiny_model()
    ranker = HstuRanker(model.config, tables=lambda ids: {name: model.tables[name][each] for name, each in ids.items()})
    with pytest.raises(ModelError, match="table 'item' is missing"):
        save_model(tmp_path / "model", ranker)
    save_model(tmp_path / "model", ranker.config, ranker.dense(), model.tables)
    assert torch.equal(load_model(tmp_path / "model").tables["item"], model.tables["item"])


def test_tied_weights_are_saved(tmp_path: Path) -> None:
    model = tiny_model()
    model.dense["layers.1.uvqk_weight"] = model.dense["layers.0.uvqk_weight"]
    save_model(tmp_path / "model", model.config, model.dense, model.tables)
    dense = load_model(tmp_path / "model").dense
    assert torch.equal(dense["layers.1.uvqk_weight"], dense["layers.0.uvqk_weight"])


def test_a_shape_that_does_not_fit_the_weights_is_named(folder: Path) -> None:
    edit_config(folder, lambda content: content["model"].update(num_layers=3))
    fails(folder, DENSE, "weight 'layers.2.", "is missing")


def test_a_folder_that_is_not_empty_is_never_written_to(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    model = tiny_model()
    with pytest.raises(ModelError, match=f"{tmp_path} exists and is not empty"):
        init_model(tmp_path, model.config)
    with pytest.raises(ModelError, match=f"{tmp_path} exists and is not empty"):
        save_model(tmp_path, model.config, model.dense, model.tables)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_save_that_broke_off_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_off(*_: object) -> None:
        raise OSError("no space left on device")

    model = tiny_model()
    monkeypatch.setattr(weights, "_write_manifest", break_off)
    with pytest.raises(OSError, match="no space"):
        save_model(tmp_path / "broken", model.config, model.dense, model.tables)
    fails(tmp_path / "broken", "no config.json")


def test_a_config_made_to_hang_the_loader_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model": ' + "[" * 200_000)
    with pytest.raises(ModelError, match="nested too deeply"):
        read_manifest(tmp_path)
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelError, match="bytes are read, got 1099511627776"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_a_table_that_is_not_finite_is_refused_with_its_row(folder: Path, tmp_path: Path, value: float) -> None:
    path, model = folder / table_file("item"), tiny_model()
    content = bytearray(path.read_bytes())
    at = len(content) - model.tables["item"].nbytes + (37 * 16 + 5) * 4
    content[at : at + 4] = np.float32(value).tobytes()
    path.write_bytes(content)
    sign(folder, table_file("item"))
    fails(folder, f"{path}: row 37 holds values that are not finite")
    model.tables["item"][37, 5] = value
    with pytest.raises(ModelError, match="table 'item': row 37 holds values that are not finite"):
        save_model(tmp_path / "other", model.config, model.dense, model.tables)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_streamed_table_that_is_not_finite_is_refused_wherever_its_parts_break_off(
    tmp_path: Path, dtype: str
) -> None:
    model = tiny_model(row_dtype=dtype)
    model.tables["item"][37, 5] = torch.inf
    parts = {name: _parts(rows, 13) for name, rows in model.tables.items()}
    with pytest.raises(ModelError, match="row 37 holds values that are not finite"):
        stream_model(tmp_path / "model", model.config, model.dense, parts)
    fails(tmp_path / "model", "no config.json")


def _parts(rows: torch.Tensor, size: int) -> list[bytes]:
    whole = rows.view(torch.uint8).numpy().tobytes()
    return [whole[start : start + size] for start in range(0, len(whole), size)]


@pytest.mark.parametrize(("dtype", "num_more"), [(torch.float16, 0), (torch.float32, 1)])
def test_tables_that_are_not_what_the_configuration_says_are_refused(dtype: torch.dtype, num_more: int) -> None:
    model = tiny_model()
    assert model.config.row_dtype == "float32"
    tables = {
        name: torch.zeros(len(rows) + num_more, rows.shape[1], dtype=dtype) for name, rows in model.tables.items()
    }
    with pytest.raises(ModelError, match=r"must be \(.*\) of float32, got "):
        LoadedModel(model.config, model.version, model.dense, tables)
