"""What users of a card are told of the fast paths that an engine cannot take."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from helmrec.config import EngineConfig
from helmrec.engine import fast_paths
from helmrec.engine.fast_paths import other_slower_paths, slower_paths, why_portable
from helmrec.engine.setup import has_transposed_values, page_geometry
from helmrec.kernels.attention_plan import multiplies_codes
from helmrec.kernels.kv_rounding import CODE_DTYPES, ScaledPages, by_layer
from helmrec.memory.arena import Arena
from helmrec.memory.geometry import PageGeometry
from helmrec.model.config import ModelConfig
from helmrec.model.precision import FULL_PRECISION, LOW_PRECISIONS, Precision
from helmrec.model.profiles import profile
from helmrec.model.shared_tables import row_codec
from tests.helpers import tiny_config

AMPERE, HOPPER, BLACKWELL = 8, 9, 10
IN_CODES: dict[str, Any] = {"kv_dtype": "fp8_e4m3", "compute_dtype": "fp8_e4m3"}


def on_card(**settings: Any) -> EngineConfig:
    return EngineConfig(device="cuda", **settings)


def reason(shape: ModelConfig, generation: int = HOPPER, **settings: Any) -> str:
    config = on_card(**settings)
    return why_portable(shape, config, page_geometry(shape, config), generation)


def test_the_reason_is_the_first_condition_that_fails() -> None:
    shape = profile("dlrmv3", 1_000)
    assert reason(shape, AMPERE) == "the fast one is for compute capability 9, this card has 8"
    assert reason(shape, BLACKWELL).endswith("this card has 10")
    assert reason(shape, kv_dtype="int8") == "the fast one cannot read kv_dtype int8"
    assert reason(shape, kv_dtype="fp8_e4m3").endswith("kv_dtype fp8_e4m3 only with compute_dtype fp8_e4m3")
    assert reason(profile("paper", 1_000)).endswith("heads of 64, 128 or 256 values, this model has 64 and 192")
    assert reason(tiny_config()).endswith("needs bfloat16 or float16, this model has float32")
    half = shape.model_copy(update={"dtype": "float16"})
    assert reason(half, **IN_CODES).endswith("needs bfloat16, this model has float16")
    assert reason(shape.model_copy(update={"dim": 200}), **IN_CODES).endswith("a dim that is a multiple of 16, got 200")
    assert reason(shape, page_tokens=48).endswith("cannot read pages of 48 tokens in a pool of this size")


def test_pages_that_end_within_a_key_are_a_reason() -> None:
    odd = tiny_config(dtype="bfloat16", num_heads=3, qk_dim=64, v_dim=64, row_dim=104, num_layers=1)
    config = on_card(row_dtype="int8", page_tokens=16)
    geometry = page_geometry(odd, config)
    assert not geometry.is_tma_aligned
    assert reason(odd, row_dtype="int8", page_tokens=16) == "the size of a page of 16 tokens is no multiple of a key's"


def test_an_engine_with_plain_kernels_needs_no_triton_to_report() -> None:
    shape, config = profile("dlrmv3", 1_000), on_card(kernels="torch")
    geometry = page_geometry(shape, config)
    assert slower_paths(shape, config, geometry, small_arena(shape, config, geometry)) == ()


def test_settings_that_are_slower_everywhere_are_named() -> None:
    shape = profile("dlrmv3", 1_000)
    assert other_slower_paths(shape, on_card(), HOPPER) == ()
    assert other_slower_paths(shape, on_card(**IN_CODES), HOPPER) == ()
    (line,) = other_slower_paths(shape, on_card(**IN_CODES), AMPERE)
    assert line.startswith("products: compute_dtype fp8_e4m3 needs a bfloat16 model and compute capability 9")
    (line,) = other_slower_paths(shape.model_copy(update={"dtype": "float16"}), on_card(**IN_CODES), HOPPER)
    assert line.endswith("it is slower than model here")
    (line,) = other_slower_paths(shape, on_card(row_index="host"), HOPPER)
    assert line.endswith("since row_index is host")


def small_arena(shape: ModelConfig, config: EngineConfig, geometry: PageGeometry) -> Arena:
    kept_as = CODE_DTYPES.get(config.kv_dtype, getattr(torch, shape.dtype))
    codec = row_codec(shape, config.fixed_row_dtype)
    return Arena(2, geometry, kept_as, codec.stored_dtype, "cpu", has_transposed_values(config, geometry))


@pytest.mark.parametrize("page_tokens", [32, 64, 128, 256, 384, 512])
@pytest.mark.parametrize("precision", [FULL_PRECISION, *LOW_PRECISIONS.values()])
@pytest.mark.parametrize("name", ["dlrmv3", "wide", "nvidia-bench", "kuairand"])
def test_attention_of_hopper_reads_the_pages_of_every_profile(
    name: str, precision: Precision, page_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real conditions over the real strides; only the card is made up."""
    pytest.importorskip("triton", reason="Triton is not installed here")
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (HOPPER, 0))
    monkeypatch.setattr(fast_paths, "DEVICE", "cpu")
    shape = profile(name, 1_000)
    config = on_card(page_tokens=page_tokens, **precision._asdict())
    geometry = page_geometry(shape, config)
    lines = slower_paths(shape, config, geometry, small_arena(shape, config, geometry))
    reads_codes_slowly = config.kv_dtype == "int8" or (config.kv_dtype != "model" and config.compute_dtype == "model")
    assert (lines == ()) == (not reads_codes_slowly), lines


class _ManyPages:
    """Stands in for the codes of more pages than this machine has memory for."""

    def __init__(self, codes: torch.Tensor, num_pages: int) -> None:
        self._codes = codes
        self.shape, self.dtype = (num_pages, *codes.shape[1:]), codes.dtype

    def stride(self) -> tuple[int, ...]:
        return self._codes.stride()

    def data_ptr(self) -> int:
        return 0

    def numel(self) -> int:
        return math.prod(self.shape)


def test_rows_of_pages_are_counted_in_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (HOPPER, 0))
    shape, config = profile("dlrmv3", 1_000), on_card(page_tokens=32, **IN_CODES)
    geometry = page_geometry(shape, config)
    arena = small_arena(shape, config, geometry)
    q = torch.empty((1, shape.num_heads, shape.qk_dim), dtype=torch.bfloat16)
    most = np.iinfo(np.int32).max // (geometry.page_bytes // geometry.page_tokens)
    for num_pages, is_readable in ((2, True), (most, True), (most + 1, False)):
        k, v = next(by_layer(arena.k)), next(by_layer(arena.v))
        for pages in (k, v):
            assert isinstance(pages, ScaledPages)
            object.__setattr__(pages, "codes", _ManyPages(pages.codes, num_pages))
        assert multiplies_codes(q, q, k, v, shape.dim) is is_readable
