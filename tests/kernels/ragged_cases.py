"""Random ragged batches over scattered pages, with NaN wherever a kernel has no business to look."""

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from helmrec.kernels import attention, kv_rounding
from helmrec.kernels.kv_rounding import Pages, ScaledPages
from helmrec.kernels.layer import LayerWeights, RelativeBias
from helmrec.kernels.ragged import RaggedBatch
from helmrec.types import AttentionWindow


class Lengths(NamedTuple):
    """One sequence: history already in pages, history this step appends, candidates."""

    resident: int
    new: int
    candidates: int


@dataclass(frozen=True)
class Heads:
    num: int
    qk: int
    v: int


class Case(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    k_pages: Any  # Pages
    v_pages: Any
    batch: RaggedBatch

    @property
    def num_live(self) -> int:
        """Rows that belong to a sequence; the rest is dead."""
        return int(self.batch.cu_tokens[-1])

    def append(self) -> None:
        attention.append_kv(self.k, self.v, self.k_pages, self.v_pages, self.batch)

    def reference(self, scale: float, normaliser: float, bias: RelativeBias | None = None) -> Tensor:
        """The twin in float64; needs the new tokens in their pages."""
        q, k, v = (t.double() for t in self[:3])
        k_pages, v_pages = (in_double(pages) for pages in (self.k_pages, self.v_pages))
        out = attention.attend(q, k, v, k_pages, v_pages, self.batch, scale=scale, normaliser=normaliser, bias=bias)
        return out[: self.num_live]


def layout(
    lengths: list[Lengths], page_tokens: int, num_context: int, num_dead: int, rng: np.random.Generator
) -> RaggedBatch:
    """Pages are dealt in random order; a sequence without history and candidates has no context either."""
    num_pages = [-(-(n.resident + n.new) // page_tokens) for n in lengths]
    rows = [n.new + n.candidates + (num_context if sum(n) else 0) for n in lengths]
    cu_tokens = np.concatenate([[0], np.cumsum(rows)])
    pages = iter(rng.permutation(sum(num_pages) + 1)[1:])
    table = np.zeros((len(lengths), max(num_pages) + 1), np.int32)
    slots = np.full(cu_tokens[-1] + num_dead, -1, np.int64)
    for i, n in enumerate(lengths):
        table[i, : num_pages[i]] = [next(pages) for _ in range(num_pages[i])]
        tokens = np.arange(n.resident, n.resident + n.new)
        slots[cu_tokens[i] : cu_tokens[i] + n.new] = (
            table[i, tokens // page_tokens].astype(np.int64) * page_tokens + tokens % page_tokens
        )
    return RaggedBatch(
        cu_tokens=torch.tensor(cu_tokens, dtype=torch.int32),
        num_resident=torch.tensor([n.resident for n in lengths], dtype=torch.int32),
        num_new=torch.tensor([n.new for n in lengths], dtype=torch.int32),
        page_table=torch.tensor(table),
        write_slots=torch.tensor(slots),
        num_context=num_context,
        page_tokens=page_tokens,
    )


def on(device: str, batch: RaggedBatch) -> RaggedBatch:
    names = ("cu_tokens", "num_resident", "num_new", "page_table", "write_slots")
    return replace(batch, **{name: getattr(batch, name).to(device) for name in names})


def random_case(  # noqa: PLR0917 - a batch has this many free choices
    rng: np.random.Generator,
    lengths: list[Lengths],
    heads: Heads,
    page_tokens: int,
    dtype: torch.dtype,
    num_context: int = 0,
    device: str = "cpu",
) -> Case:
    """q, k and v are views into one projection, as the engine has them; resident K/V lies in its pages."""
    batch = on(device, layout(lengths, page_tokens, num_context, 7, rng))
    generator = torch.Generator(device).manual_seed(int(rng.integers(2**62)))

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    widths = [heads.num * dim for dim in (heads.v, heads.qk, heads.qk)]
    projection = noise(len(batch.write_slots), sum(widths))
    projection[-7:] = torch.nan
    v, q, k = (t.unflatten(1, (heads.num, -1)) for t in projection.split(widths, dim=1))
    num_pages = int(batch.page_table.max()) + 2
    k_pages = torch.full((num_pages, page_tokens, heads.num, heads.qk), torch.nan, dtype=dtype, device=device)
    v_pages = torch.full((num_pages, page_tokens, heads.num, heads.v), torch.nan, dtype=dtype, device=device)
    for i, n in enumerate(lengths):
        tokens = torch.arange(n.resident, device=device)
        pages, offsets = batch.page_table[i].long()[tokens // page_tokens], tokens % page_tokens
        k_pages[pages, offsets] = noise(n.resident, heads.num, heads.qk)
        v_pages[pages, offsets] = noise(n.resident, heads.num, heads.v)
    return Case(q, k, v, k_pages, v_pages, batch)


def in_double(pages: Pages) -> Tensor:
    if isinstance(pages, Tensor):
        return pages.double()
    return pages.read(torch.arange(pages.shape[0], device=pages.codes.device), torch.float64)


def coded(case: Case, dtype: torch.dtype, *, transposed: bool = False) -> Case:
    """The case with pages of codes; NaN where nothing is kept. `transposed`: as attention on codes reads values."""

    def encoded(pages: Tensor, transposed: bool) -> ScaledPages:
        empty = kv_rounding.empty_pages(tuple(pages.shape), dtype, pages.device, transposed=transposed)
        assert isinstance(empty, ScaledPages)
        empty.codes.view(torch.uint8).fill_(0x7F)  # NaN of eight-bit floats
        every = torch.cartesian_prod(*(torch.arange(size, device=pages.device) for size in pages.shape[:2]))
        empty.write(every[:, 0], every[:, 1], pages.flatten(0, 1))
        return empty

    return case._replace(k_pages=encoded(case.k_pages, False), v_pages=encoded(case.v_pages, transposed))


def relative_error(out: Tensor, expected: Tensor) -> float:
    """NaN in `out` gives NaN, which no bound passes."""
    return float((out.double() - expected).norm() / expected.norm())


def spoil(case: Case, wrong: str, sequences: list[int]) -> list[int]:
    """Make one value of a key, a value or both infinite or NaN, in the middle of what each sequence adds.

    Returns the flat rows of those tokens.
    """
    starts = case.batch.cu_tokens.tolist()
    tokens = [(starts[i] + starts[i + 1]) // 2 for i in sequences]
    for number, token in enumerate(tokens):
        for name, each in (("key", case.k), ("value", case.v)):
            if wrong in {name, "both"}:
                each[token, -1, number] = (torch.inf, -torch.inf, torch.nan)[number % 3]
    return tokens


def harmed_by(case: Case, tokens: list[int]) -> Tensor:  # (live rows,)
    """Which rows see one of these tokens."""
    harmed = torch.zeros(case.num_live, dtype=torch.bool, device=case.q.device)
    starts, num_new = case.batch.cu_tokens.tolist(), case.batch.num_new.tolist()
    for token in tokens:
        i = next(i for i in range(len(num_new)) if starts[i] <= token < starts[i + 1])
        is_candidate = token >= starts[i] + num_new[i] + case.batch.num_context
        harmed[token : token + 1 if is_candidate else starts[i + 1]] = True
    return harmed


def with_bias(case: Case, rng: np.random.Generator, num_edges: int = 21) -> tuple[Case, RelativeBias]:
    """Give a case without candidates times of its tokens, and random biases by distance and time."""
    batch, device = case.batch, case.q.device
    lengths = (batch.num_resident + batch.num_new + 1).tolist()
    times = np.concatenate([1_000 + np.cumsum(rng.integers(0, 1 << rng.integers(1, 20), num)) for num in lengths])
    edges = np.sort(rng.integers(1, 1 << 20, num_edges))
    position, time = (torch.randn(num, device=device).to(case.q.dtype) for num in (max(lengths), num_edges + 1))
    timed = replace(
        batch,
        times=torch.tensor(times, device=device),
        cu_times=torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=device),
    )
    return case._replace(batch=timed), RelativeBias(position, time, torch.tensor(edges, device=device))


def in_window(case: Case, window: AttentionWindow) -> Case:
    """Give a case local attention; of every second sequence no token before the candidates sees all."""
    num_full = None
    if window.tail:
        num_full = torch.zeros_like(case.batch.num_new)
        num_full[::2] = window.tail
    return case._replace(batch=replace(case.batch, window=window, num_full=num_full))


def cast(weights: LayerWeights, dtype: torch.dtype) -> LayerWeights:
    """The weights of a layer in another type."""
    values = {field.name: getattr(weights, field.name) for field in fields(weights)}
    changed: dict[str, Any] = {name: each.to(dtype) for name, each in values.items() if isinstance(each, Tensor)}
    return replace(weights, **changed)
