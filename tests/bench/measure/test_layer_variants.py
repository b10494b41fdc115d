"""Layers of the variants run over small batches in the interpreter: what a card would time is sound."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed here")

from helmrec.model.profiles import profile
from helmrec_bench.measure.cards import layer_variants
from helmrec_bench.measure.cards.kernels import KernelRow, Sequence
from helmrec_bench.measure.cards.layer_variants import TIMED, VARIANTS, LayerRun

ROW = KernelRow("small", "demo", [Sequence(130, 20, 5), Sequence(0, 40, 3)])


@pytest.mark.parametrize("name", ["bf16", "fp8-products", "fp8-layers"])
def test_layers_of_a_variant_run_over_resident_and_new_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_variants, "DEVICE", "cpu")
    out = LayerRun(ROW, VARIANTS[name].precision).run()
    assert out.shape == (68, profile("demo", 1_000).dim)
    assert out.isfinite().all()


def test_a_variant_that_failed_is_named_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    layer_variants.print_times({"bf16": [{"work": TIMED[0], "ms": 12.5}], "small tiles": [{"failure": "status 1"}]})
    first = capsys.readouterr().out.splitlines()[2]
    assert first.split("|")[2:4] == [" 12.5 ", " failed "]


def test_every_variant_changes_settings_that_exist() -> None:
    from importlib import import_module  # noqa: PLC0415 - modules of kernels

    for variant in VARIANTS.values():
        for place, _ in variant.settings:
            module, name = place.rsplit(".", 1)
            assert hasattr(import_module(module), name), place
