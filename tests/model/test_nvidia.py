"""Import of ranking models of NVIDIA's recsys-examples.

Its layers need a card and Megatron, so no output of the original is compared. The expected scores are computed anew
here from the published description, in float64 and from the published layout, not from the importer under test.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from helmrec.cli.main import app
from helmrec.config import EngineConfig
from helmrec.engine.engine import Engine
from helmrec.engine.model_check import check_model
from helmrec.errors import ModelError
from helmrec.model import load_model
from helmrec.model.nvidia import NvidiaOptions, import_nvidia, read_dump
from helmrec.types import RankRequest
from tests.reference import layer_norm, silu

NUM_LAYERS, HEADS, CHANNELS, DIM, POSITIONS, SCALING, TASKS = 2, 3, 4, 10, 40, 64, 3
NUM_ITEMS, NUM_ACTIONS, NUM_USERS = 50, 6, 9
LAYER = "_hstu_block._attention_layers."
POSITION = "_hstu_block._preprocessor._positional_encoder._position_embeddings_weight"
OPTIONS = NvidiaOptions(
    num_heads=HEADS, scaling_seqlen=SCALING, item="video", action="act", context=("user",), is_context_causal=True
)


def weights(*, is_fused: bool = False, is_learned: bool = True) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * (0.5 if len(shape) == 1 else shape[-1] ** -0.5)

    width = HEADS * CHANNELS
    made = {POSITION: noise(POSITIONS, DIM)}
    made |= {"_mlp._mlp.0.weight": noise(7, DIM), "_mlp._mlp.0.bias": noise(7)}
    made |= {"_mlp._mlp.2.weight": noise(TASKS, 7), "_mlp._mlp.2.bias": noise(TASKS)}
    for i in range(NUM_LAYERS):
        native = {
            "_input_layernorm_weight": 1 + noise(DIM),
            "_input_layernorm_bias": noise(DIM),
            "_linear_uvqk.weight": noise(4 * width, DIM),
            "_linear_uvqk.bias": noise(4 * width),
            "_output_ln_dropout_mul.weight": 1 + noise(width),
            "_output_ln_dropout_mul.bias": noise(width),
            "_linear_proj.weight": noise(DIM, width),
        }
        if not is_learned:
            native = {
                name: value for name, value in native.items() if name in {"_linear_uvqk.weight", "_linear_proj.weight"}
            }
        made |= {f"{LAYER}{i}.{name}": value for name, value in (fused(native) if is_fused else native).items()}
    return made


def fused(native: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same layer in the layout of the fused one: in x out, part by part."""
    by_part = torch.arange(4 * HEADS * CHANNELS).reshape(HEADS, 4, CHANNELS).transpose(0, 1).flatten()
    return {
        "_input_layernorm_weight": native["_input_layernorm_weight"],
        "_input_layernorm_bias": native["_input_layernorm_bias"],
        "_linear_uvqk_weight": native["_linear_uvqk.weight"][by_part].T.contiguous(),
        "_linear_uvqk_bias": native["_linear_uvqk.bias"][by_part],
        "_output_layernorm_weight": native["_output_ln_dropout_mul.weight"],
        "_output_layernorm_bias": native["_output_ln_dropout_mul.bias"],
        "_linear_proj_weight": native["_linear_proj.weight"].T.contiguous(),
    }


def tables() -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    rng = np.random.default_rng(1)
    sizes = {"video": NUM_ITEMS, "act": NUM_ACTIONS, "user": NUM_USERS}
    return {name: rng.standard_normal((num, DIM)).astype(np.float32) for name, num in sizes.items()}


def write(folder: Path, values: Mapping[str, Tensor]) -> None:
    """Dense weights beside what the trainer saves too; tables in two dumps each, ids in any order."""
    (folder / "tables" / "model").mkdir(parents=True)
    others = {f"{LAYER}0._linear_uvqk._extra_state": torch.zeros(4, dtype=torch.uint8)}
    torch.save({"model_state_dict": {**values, **others}, "optimizer_state_dict": None}, folder / "model.0.pth")
    for name, rows in tables().items():
        ids = np.random.default_rng(2).permutation(len(rows))
        for rank, part in enumerate((ids[:3], ids[3:])):
            place = folder / "tables" / "model" / f"{name}_emb_keys.rank_{rank}.world_size_2"
            part.astype(np.int64).tofile(place)
            rows[part].tofile(place.with_name(place.name.replace("keys", "values")))


def expected(w: Mapping[str, Tensor], user: int, history: list[tuple[int, int]], candidates: list[int]) -> Any:
    """Scores of the published arithmetic: items and actions alternate, candidates stand at the next position."""
    rows, n = tables(), {name: value.double().numpy() for name, value in w.items()}
    tokens = [rows["user"][user], *(rows[t][i] for item, act in history for t, i in (("video", item), ("act", act)))]
    first = len(tokens)
    x = np.array([*tokens, *(rows["video"][item] for item in candidates)], np.float64) * np.sqrt(DIM)
    x += n[POSITION][np.minimum(np.arange(len(x)), first)]
    seen = np.tril(np.ones((len(x), len(x))))
    seen[first:, first:] = np.eye(len(candidates))
    for i in range(NUM_LAYERS):
        layer = {
            name.removeprefix(f"{LAYER}{i}."): value for name, value in n.items() if name.startswith(f"{LAYER}{i}.")
        }
        normed = layer_norm(x, layer["_input_layernorm_weight"], layer["_input_layernorm_bias"], 1e-5)
        mixed = silu(normed @ layer["_linear_uvqk.weight"].T + layer["_linear_uvqk.bias"])
        u, v, q, k = np.split(mixed.reshape(len(x), HEADS, 4 * CHANNELS), 4, axis=2)
        scores = silu(np.einsum("nhd,mhd->hnm", q, k) / np.sqrt(CHANNELS)) / SCALING * seen
        out = np.einsum("hnm,mhd->nhd", scores, v).reshape(len(x), -1)
        normed = layer_norm(out, layer["_output_ln_dropout_mul.weight"], layer["_output_ln_dropout_mul.bias"], 1e-5)
        x = x + (u.reshape(len(x), -1) * normed) @ layer["_linear_proj.weight"].T
    top = x[first:] / np.linalg.norm(x[first:], axis=1, keepdims=True)
    hidden = np.maximum(top @ n["_mlp._mlp.0.weight"].T + n["_mlp._mlp.0.bias"], 0)
    return hidden @ n["_mlp._mlp.2.weight"].T + n["_mlp._mlp.2.bias"]


def request(user: int, history: list[tuple[int, int]], candidates: list[int]) -> RankRequest:
    """Actions follow the items in one table."""
    ids = [each for item, action in history for each in (item, NUM_ITEMS + action)]
    return RankRequest(user, ids, [0] * len(ids), [0] * len(ids), candidates, context={"user": user})


@pytest.mark.parametrize("is_fused", [False, True])
def test_an_imported_model_scores_as_computed_anew_and_reuses_its_history(is_fused: bool, tmp_path: Path) -> None:
    write(tmp_path, weights(is_fused=is_fused))
    config = import_nvidia(tmp_path / "model.0.pth", tmp_path / "tables", tmp_path / "out", OPTIONS)
    assert (config.window, config.num_tasks, config.features[0].num_rows) == (38, TASKS, NUM_ITEMS + NUM_ACTIONS)
    rng, settings = np.random.default_rng(3), EngineConfig(pool_bytes="256KiB", page_tokens=4, device="cpu")
    history = [(int(rng.integers(NUM_ITEMS)), int(rng.integers(NUM_ACTIONS))) for _ in range(19)]
    with Engine.from_model(tmp_path / "out", settings.model_copy(update={"kv_admission": "always"})) as engine:
        for num in (0, 1, 7, 19):
            candidates = rng.integers(0, NUM_ITEMS, 5).tolist()
            result = engine.rank([request(4, history[:num], candidates)])[0]
            assert np.abs(result.scores - expected(weights(), 4, history[:num], candidates)).max() <= 1e-5
        assert result.reused_tokens == 1 + 2 * 7
    assert check_model(load_model(tmp_path / "out")).is_equal


def test_parts_that_are_switched_off_are_ones_and_zeros(tmp_path: Path) -> None:
    write(tmp_path, weights(is_learned=False))
    import_nvidia(tmp_path / "model.0.pth", tmp_path / "tables", tmp_path / "out", OPTIONS)
    dense = load_model(tmp_path / "out").dense
    assert dense["layers.1.uvqk_beta"].abs().sum() == 0
    assert bool((dense["layers.1.input_norm_weight"] == 1).all())
    assert dense["layers.1.output_norm_bias"].abs().sum() == 0


def test_the_command_imports(tmp_path: Path) -> None:
    write(tmp_path, weights())
    arguments = [str(tmp_path / "model.0.pth"), str(tmp_path / "out"), "--tables", str(tmp_path / "tables")]
    arguments += ["--heads", "3", "--scaling-seqlen", "64", "--item", "video", "--action", "act", "--context", "user"]
    refused = CliRunner().invoke(app, ["import", "nvidia", *arguments])
    assert refused.exit_code == 2
    assert "disable_contextual_mask" in refused.output
    done = CliRunner().invoke(app, ["import", "nvidia", *arguments, "--causal-context"])
    assert done.exit_code == 0, done.output


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({f"{LAYER}1._linear_proj.weight": None}, {}, r"weight '.*1\._linear_proj\.weight' is missing"),
    ({"_hstu_block._preprocessor._item_mlp._mlp.0.weight": torch.zeros(2)}, {}, "_item_mlp.* is no weight of such"),
    ({f"{LAYER}1._linear_uvqk.bias": torch.zeros(7)}, {}, r"'layers.1.uvqk_beta' must be \(48,\), got \(7,\)"),
    ({}, {"num_heads": 5}, "5 heads do not divide a projection of 48 columns"),
    ({}, {"window": 39}, "a window of 39 tokens needs more than the 40 positions"),
    ({}, {"item": "nothing"}, "no file nothing_emb_keys"),
]


@pytest.mark.parametrize(("changes", "options", "message"), WRONG)
def test_what_does_not_fit_is_named(
    changes: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, {name: value for name, value in (weights() | changes).items() if value is not None})
    with pytest.raises(ModelError, match=message):
        import_nvidia(
            tmp_path / "model.0.pth", tmp_path / "tables", tmp_path / "out", OPTIONS.model_copy(update=options)
        )
    assert not (tmp_path / "out").exists()


def test_dumps_that_make_no_table_are_refused(tmp_path: Path) -> None:
    write(tmp_path, weights())
    folder = tmp_path / "tables" / "model"
    assert np.array_equal(read_dump(folder, "video").numpy(), tables()["video"])
    (folder / "video_emb_values.rank_0.world_size_2").write_bytes(b"1234")
    with pytest.raises(ModelError, match="make no rows"):
        read_dump(folder, "video")
    np.zeros(3, np.int64).tofile(folder / "act_emb_keys.rank_0.world_size_2")
    with pytest.raises(ModelError, match="ids of table 'act' must be distinct"):
        read_dump(folder, "act")
    (folder / "user_emb_keys.rank_1.world_size_2").unlink()
    with pytest.raises(ModelError, match="of table 'user', 2 files of ids are needed, found 1"):
        read_dump(folder, "user")
