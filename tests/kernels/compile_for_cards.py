"""Compiles the attention and append kernels for a card that is not here.

python -m tests.kernels.compile_for_cards 90

Prints a line for each kernel with the shared memory it needs. Nothing is run.

python -m tests.kernels.compile_for_cards variants

Prints how often the kernels on eight-bit floats are compiled for batches of several sizes on Hopper.
"""

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from helmrec.kernels import hopper_attention, hopper_fp8_attention, triton_append, triton_attention, triton_fp8_project
from helmrec.kernels.attention_plan import AttentionInputs, plan_for
from helmrec.kernels.coded_tokens import encode_tokens
from tests.kernels.fp8_project_cases import Product
from tests.kernels.ragged_cases import Heads, Lengths, coded, random_case

HOPPER = 90
CODES = (None, torch.float8_e4m3fn, torch.int8)


class AbsentCard:
    """What the compiler asks a driver."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class CompileOnly:
    """Stands in for a kernel: a launch compiles it."""

    def __init__(self, kernel: Any, label: str) -> None:
        self._kernel, self._label = kernel, label
        self.variants: set[str] = set()

    def __getitem__(self, grid: Any) -> Any:
        def compile_it(*args: Any, **constants: Any) -> None:
            compiled = self._kernel.warmup(*args, grid=(1,), **constants)
            self.variants.add(compiled.hash)
            text = compiled.asm["ptx"]
            uses = ", ".join(name for name in ("wgmma", "mma.sync", "cp.async.bulk") if name in text)
            print(  # noqa: T201 - the test reads it
                f"{self._label} {self._kernel.__name__}: {compiled.metadata.shared} bytes; {uses}", flush=True
            )

        return compile_it


def as_on_hopper(like: torch.Tensor) -> bool:
    """Stands in for `is_native`, which asks the card."""
    return True


FOR_HOPPER = [
    (module, name, getattr(module, name))
    for module, name in (
        (hopper_attention, "_attention_kernel"),
        (hopper_fp8_attention, "_attention_kernel"),
        (triton_fp8_project, "_project_kernel"),
    )
]


def compile_for_hopper(width: int, page_tokens: int) -> None:
    """The kernels that only Hopper runs. Pages of fewer tokens have smaller blocks, so rings of more slots."""
    heads = Heads(4, width, width)
    plain = random_case(np.random.default_rng(0), [Lengths(130, 40, 5)], heads, page_tokens, torch.bfloat16)
    case = coded(plain, torch.float8_e4m3fn, transposed=True)
    out, plan = torch.empty_like(plain.v), plan_for(*plain[:3:2], plain.batch)
    for module, name, kernel in FOR_HOPPER:
        setattr(module, name, CompileOnly(kernel, f"hopper {width}, pages of {page_tokens}"))
    hopper_attention.launch(AttentionInputs(*plain[:5]), plain.batch, out, plan, 0.1, 10.0)
    tokens, plan = encode_tokens(*case), plan_for(*plain[:3:2], plain.batch, "codes")
    hopper_fp8_attention.launch(tokens, (case.k_pages, case.v_pages), case.batch, out, plan, (0.1, 10.0))
    product = Product(width, page_tokens, heads=4, depth=4 * width)
    product.together("concat", product.pages())


def num_variants() -> int:
    """Compile attention and projection for batches whose sizes differ in everything the compiler may look at."""
    driver.set_active(AbsentCard(HOPPER))
    setattr(triton_fp8_project, "is_native", as_on_hopper)  # noqa: B010 - the module only imports it
    kernels = [CompileOnly(kernel, "variants") for _, _, kernel in FOR_HOPPER]
    for (module, name, _), kernel in zip(FOR_HOPPER, kernels, strict=True):
        setattr(module, name, kernel)
    for num_context, num_new in ((0, 36), (1, 35), (3, 40)):  # in all, with seven dead rows: 48, 48 and 55 tokens
        lengths = [Lengths(130 * (1 + num_context), num_new, 5)]
        plain = random_case(np.random.default_rng(0), lengths, Heads(4, 64, 64), 64, torch.bfloat16, num_context)
        case = coded(plain, torch.float8_e4m3fn, transposed=True)
        starts = torch.cat([torch.zeros(num_context, dtype=torch.int32), case.batch.cu_tokens])[num_context:]
        case = case._replace(batch=replace(case.batch, cu_tokens=starts))  # at any address
        out = torch.empty(plain.v.shape, dtype=plain.v.dtype)
        apart = [
            pages.repeat(1, 1 + num_context, 1, 1)[:, : pages.shape[1]] for pages in (plain.k_pages, plain.v_pages)
        ]
        sources, plan = AttentionInputs(*plain[:3], *apart), plan_for(*plain[:3:2], plain.batch)
        hopper_attention.launch(sources, case.batch, out, plan, 0.1, 10.0)
        tokens, plan = encode_tokens(*case), plan_for(*plain[:3:2], plain.batch, "codes")
        pages = (case.k_pages, case.v_pages)
        hopper_fp8_attention.launch(tokens, pages, case.batch, out, plan, (0.1, 10.0))
        product = Product(64, 64, heads=4, lengths=lengths)
        product.batch = replace(product.batch, cu_tokens=case.batch.cu_tokens)
        product.together("concat", product.pages())
    return sum(len(kernel.variants) for kernel in kernels)


def main(capability: int) -> None:
    driver.set_active(AbsentCard(capability))
    places = [(triton_append, "_append_kernel"), (triton_append, "_append_codes_kernel")]
    places.append((triton_attention, "_attention_kernel"))
    kernels = [(module, name, getattr(module, name)) for module, name in places]
    widths = (128, 256) if capability >= 90 else (128,)  # wider codes are refused before Hopper
    for heads in (Heads(4, width, width) for width in widths):
        for codes in CODES:
            case = random_case(np.random.default_rng(0), [Lengths(130, 40, 5)], heads, 128, torch.bfloat16)
            case = case if codes is None else coded(case, codes)
            for module, name, kernel in kernels:
                setattr(module, name, CompileOnly(kernel, f"{heads.qk} {codes or 'as they are'}"))
            triton_append.append_kv(*case[1:])
            triton_attention.attend(*case, scale=0.1, normaliser=10.0)
    if capability == HOPPER:
        setattr(triton_fp8_project, "is_native", as_on_hopper)  # noqa: B010 - the module only imports it
        for width in (64, 128, 256):
            for page_tokens in (32, 64, 128):
                compile_for_hopper(width, page_tokens)


if __name__ == "__main__":
    if sys.argv[1] == "variants":
        print(num_variants(), "variants")  # noqa: T201 - the test reads it
    else:
        main(int(sys.argv[1]))
