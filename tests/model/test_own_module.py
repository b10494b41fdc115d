"""A ranking model as a user writes it, with own names and nn.Linear layouts, is imported by a map and served exactly.

The module is written from docs/own-model.md alone: what each token is the sum of, and what it sees.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helmrec import Engine, EngineConfig, RankRequest
from helmrec.errors import ModelError
from helmrec.model.weight_map import import_mapped

HEADS, QK, V, DIM, ROW, NORMALISER, WINDOW, BUCKETS = 2, 8, 12, 24, 16, 100, 48, 30
MAP = """
[model]
name = "own"
form = "gated"
num_layers = 2
num_heads = 2
qk_dim = 8
v_dim = 12
dim = 24
hidden_dim = 20
num_tasks = 2
output_bias = true
normaliser = 100
window = 48
max_candidates = 8
num_actions = 3
time_buckets = 30
row_dim = 16
features = [{name = "item", num_rows = 300}, {name = "category", num_rows = 12}]
user_context = [{name = "country", num_rows = 6}]
request_context = [{name = "hour", num_rows = 24}]
encoders = [{name = "event", tables = ["item", "category"]}]
candidate_encoder = {name = "candidate", tables = ["item", "category"]}

[weights]
"tables.item.rows" = "item.weight"
"tables.category.rows" = "category.weight"
"tables.country.rows" = "country.weight"
"tables.hour.rows" = "hour.weight"
"action_embedding.weight" = "action.weight"
"position_embedding.weight" = "position.weight"
"time_embedding.weight" = "time.weight"
"context.weight" = {stack = ["from_country.weight", "from_hour.weight"], transpose = true}
"context.bias" = {stack = ["from_country.bias", "from_hour.bias"]}
"output_norm.weight" = "norm.weight"
"output_norm.bias" = "norm.bias"
"layers.*.input_norm_weight" = "blocks.*.norm.weight"
"layers.*.input_norm_bias" = "blocks.*.norm.bias"
"layers.*.output_norm_weight" = "blocks.*.out_norm.weight"
"layers.*.output_norm_bias" = "blocks.*.out_norm.bias"
"layers.*.output_weight" = {from = "blocks.*.out.weight", transpose = true}
"layers.*.output_bias" = "blocks.*.out.bias"

[weights."layers.*.uvqk_weight"]
concat = ["blocks.*.u.weight", "blocks.*.v.weight", "blocks.*.q.weight", "blocks.*.k.weight"]
transpose = true

[weights."layers.*.uvqk_beta"]
concat = ["blocks.*.u.bias", "blocks.*.v.bias", "blocks.*.q.bias", "blocks.*.k.bias"]
"""
MLPS = {"encoders.event": "encoder", "candidate_encoder": "item_side", "head": "head"}
PARTS = ("first", "first_norm", "second", "second_norm")


def whole_map() -> str:
    """The map above, with a line for each weight of the three MLPs."""
    lines = [
        f'"{ours}.{i}.{kind}" = "{theirs}.{part}.{kind}"'
        for ours, theirs in MLPS.items()
        for i, part in enumerate(PARTS[: 3 if ours == "head" else 4])
        for kind in ("weight", "bias")
    ]
    return MAP.replace("[weights]\n", "\n".join(["[weights]", *lines, ""]))


class Mlp(nn.Module):
    def __init__(self, width: int, out: int, has_norm: bool = True) -> None:
        super().__init__()
        self.first, self.first_norm, self.second = nn.Linear(width, 20), nn.LayerNorm(20), nn.Linear(20, out)
        self.second_norm = nn.LayerNorm(out) if has_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.second_norm(self.second(hidden * torch.sigmoid(self.first_norm(hidden))))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out_norm = nn.LayerNorm(DIM, eps=1e-6), nn.LayerNorm(HEADS * V, eps=1e-6)
        self.u, self.v = nn.Linear(DIM, HEADS * V), nn.Linear(DIM, HEADS * V)
        self.q, self.k = nn.Linear(DIM, HEADS * QK), nn.Linear(DIM, HEADS * QK)
        self.out = nn.Linear(HEADS * V, DIM)

    def forward(self, x: Tensor, sees: Tensor) -> Tensor:
        u, v, q, k = (F.silu(each(self.norm(x))) for each in (self.u, self.v, self.q, self.k))
        v, q, k = (each.unflatten(1, (HEADS, -1)).transpose(0, 1) for each in (v, q, k))
        weights = F.silu(q @ k.transpose(1, 2) / QK**0.5) / NORMALISER * sees
        return x + self.out(u * self.out_norm((weights @ v).transpose(0, 1).flatten(1)))


class OwnHstu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.item, self.category = nn.Embedding(300, ROW), nn.Embedding(12, ROW)
        self.country, self.hour = nn.Embedding(6, ROW), nn.Embedding(24, ROW)
        self.action, self.position = nn.Embedding(4, DIM), nn.Embedding(WINDOW + 1, DIM)
        self.time = nn.Embedding(BUCKETS, DIM)
        self.from_country, self.from_hour = nn.Linear(ROW, DIM), nn.Linear(ROW, DIM)
        self.encoder, self.item_side = Mlp(2 * ROW, DIM), Mlp(2 * ROW, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(DIM), Mlp(DIM, 2, has_norm=False)

    def forward(self, request: RankRequest) -> Tensor:
        num, num_candidates = len(request.items), len(request.candidates)
        items, categories = torch.tensor(request.items), torch.tensor(request.features["category"])
        events = self.encoder(torch.cat([self.item(items), self.category(categories)], 1))
        waits = np.diff(request.timestamps, prepend=request.timestamps[:1])
        events = events + self.action(torch.tensor(request.actions)) + self.position.weight[:num] + self.times(waits)
        items, categories = torch.tensor(request.candidates), torch.tensor(request.candidate_features["category"])
        rows = torch.cat([self.item(items), self.category(categories)], 1)
        wait = (request.request_time or 0) - int(request.timestamps[-1])
        candidates = self.encoder(rows) + self.action.weight[3] + self.position.weight[num] + self.times([wait])
        before = self.from_country(self.country.weight[request.context["country"]])
        after = self.from_hour(self.hour.weight[request.context["hour"]])
        x, prefix = torch.cat([before[None], events, after[None], candidates]), num + 2
        sees = torch.ones(len(x), len(x)).tril()
        sees[prefix:, prefix:] = torch.eye(num_candidates)
        for block in self.blocks:
            x = block(x, sees)
        return self.head(self.norm(x[prefix:]) * self.item_side(rows))

    def times(self, waits: np.ndarray | list[int]) -> Tensor:
        return self.time(torch.tensor([time_bucket(int(wait)) for wait in waits]))


def time_bucket(seconds: int) -> int:
    octave = max(seconds.bit_length() - 1, 0)
    upper = seconds >> (octave - 1) & 1 if octave else 0
    return min(1 + 2 * octave + upper, BUCKETS - 1) if seconds else 0


@pytest.fixture(scope="module")
def own() -> OwnHstu:
    torch.manual_seed(0)
    module = OwnHstu()
    for weight in module.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    return module


def request_of(rng: np.random.Generator, num: int) -> RankRequest:
    """The first `num` events of one long history; the same generator state gives the same history."""
    times = np.cumsum(rng.integers(0, 3_000, 40))
    columns = [rng.integers(0, limit, 40) for limit in (300, 12, 3)]
    return RankRequest(
        user_id="mine",
        items=columns[0][:num],
        features={"category": columns[1][:num]},
        actions=columns[2][:num],
        timestamps=times[:num],
        candidates=rng.integers(0, 300, 5),
        candidate_features={"category": rng.integers(0, 12, 5)},
        context={"country": 4, "hour": num % 24},
        request_time=int(times[num - 1]) + 100,
    )


def test_a_users_own_module_is_imported_by_a_map_and_scores_as_it_does(own: OwnHstu, tmp_path: Path) -> None:
    torch.save(own.state_dict(), tmp_path / "own.pt")
    (tmp_path / "map.toml").write_text(whole_map())
    import_mapped(tmp_path / "own.pt", tmp_path / "model", tmp_path / "map.toml")
    reused = []
    with Engine.from_model(tmp_path / "model", EngineConfig(pool_bytes="4MiB")) as engine:
        for num in (5, 6, 20, 40):
            request = request_of(np.random.default_rng(3), num)
            with torch.no_grad():
                theirs = own(request).numpy()
            result = engine.rank([request])[0]
            assert np.abs(result.scores - theirs).max() <= 1e-5
            reused.append(result.reused_tokens)
        engine.check()
    assert reused == [0, 6, 7, 21]  # the country and the events before


def test_a_weight_that_lacks_a_dimension_is_named_with_the_key_that_adds_it(own: OwnHstu, tmp_path: Path) -> None:
    torch.save(own.state_dict(), tmp_path / "own.pt")
    wrong = whole_map().replace('{stack = ["from_country.bias", "from_hour.bias"]}', '"from_country.bias"')
    (tmp_path / "map.toml").write_text(wrong)
    with pytest.raises(
        ModelError, match=r"'context.bias' .* must be \(2, 24\), got \(24,\); stack adds a first dimension"
    ):
        import_mapped(tmp_path / "own.pt", tmp_path / "model", tmp_path / "map.toml")


def test_a_pickled_module_is_refused_with_what_to_save_instead(own: OwnHstu, tmp_path: Path) -> None:
    torch.save(own, tmp_path / "own.pt")
    (tmp_path / "map.toml").write_text(whole_map())
    with pytest.raises(ModelError, match=r"refused: .*OwnHstu.*nothing was loaded.*state_dict"):
        import_mapped(tmp_path / "own.pt", tmp_path / "model", tmp_path / "map.toml")
    assert not (tmp_path / "model").exists()
