"""The row kernels compile for a card, here without one: Triton's interpreter takes more than its compiler does."""

import os
import subprocess
import sys
from textwrap import dedent

import pytest

pytest.importorskip("triton", reason="Triton is not installed here")

CHECK = dedent("""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from helmrec.kernels import triton_embed as embed, triton_row_lookup as lookup, triton_row_recode as recode
    from helmrec.kernels import triton_row_table as table, triton_row_write as write

    TYPES = {
        "heat": "*fp32", "claim_heat": "*fp32", "victim_heat": "*fp32", "control": "*fp64", "is_missed": "*i8",
        "touches": "*u8", "tally": "*i64", "victims": "*i64", "missed_places": "*i64", "repeat_places": "*i64",
        "row_ids": "*i64", "first": "i32", "num": "i32", "num_entries": "i32", "last_cell": "i32", "num_ghosts": "i32",
        "limit": "i32",
    }
    VALUES = {"BLOCK": 256, "SHIFT": 10, "MOST": 15, "SIZE": 65536, "WORDS": 1024}

    def build(kernel, kinds={}, **flags):
        values = {name: VALUES.get(name, flags.get(name)) for name in kernel.arg_names if name.isupper()}
        known = {**TYPES, **kinds, **dict.fromkeys(values, "constexpr")}
        types = {name: known.get(name, "*i32") for name in kernel.arg_names}
        constants = {(kernel.arg_names.index(name),): value for name, value in values.items()}
        source = ASTSource(fn=kernel, signature=types, constexprs=constants)
        assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]

    for flag in (True, False):
        sizes = {"VALUES_STRIDE": 256, "ARENA_STRIDE": 256, "MASTER_STRIDE": 256, "WIDTH": 256, "PADDED": 256}
        for buckets in (0, 10_000_001):
            build(lookup._find_kernel, IS_LRU=flag, INDEX_BUCKETS=buckets)
            build(table._claim_kernel, IS_FILTERED=flag, BUCKETS=buckets)
            build(table._publish_kernel, BY_HEAT=flag, BUCKETS=buckets)
            build(write._write_kernel, **sizes, ROWS=64, HAS_MASTER=flag, BUCKETS=buckets)
    build(lookup._begin_buckets_kernel, BUCKETS=8192)
    build(lookup._count_kernel, {"cu_events": "*i64", "counts": "*i64", "num_of_events": "i32", "num_events": "i32",
                                 "num_sequences": "i32"}, PADDED=16)
    for kernel in (lookup._enter_kernel, lookup._own_kernel, lookup._place_kernel):
        build(kernel)
    build(table._weigh_kernel)
    build(table._claim_hottest_first_kernel)
    kinds = {"pages": "*i64", "slots": "*i64", "slot_heat": "*fp32", "num_slots": "i32"}
    build(table._window_kernel, kinds, PER_PAGE=640)
    for source, target in ((0, 1), (0, 2), (1, 0), (2, 0)):  # formats: rows as they are, fp8_e4m3, int8
        of = {0: "*fp16", 1: "*u8", 2: "*u8"}
        kinds = {"master": of[source], "values": of[source], "arena": of[target], "out": of[target], "places": "*i64"}
        strides = {"MASTER_STRIDE": (512, 528, 528)[source], "VALUES_STRIDE": (512, 528, 528)[source]}
        strides |= {"ARENA_STRIDE": (512, 528, 528)[target], "OUT_STRIDE": (512, 528, 528)[target]}
        shape = {**strides, "DIM": 512, "PADDED": 512, "ROWS": 32, "SKIPPED": -(2**31)}
        shape |= {"SOURCE": source, "TARGET": target}
        build(recode._gather_kernel, kinds, **shape, HAS_PLACES=True, HAS_COUNT=True)
        build(recode._write_kernel, kinds, **shape, HAS_MASTER=True, BUCKETS=0)
    for form in (1, 2):
        kinds = {"rows": "*u8", "features": "*i64", "out": "*bf16"}
        kinds |= {name: "i32" for name in ("feature_stride", "row_stride", "num_rows")}
        build(embed._pool_kernel, kinds, NUM_FEATURES=3, WIDTH=512, PADDED=512, ROWS=8, FORMAT=form, IN_FLOAT16=True)
    print("compiled")
""")


def test_every_kernel_of_the_row_table_compiles_for_a_card() -> None:
    """In a process of its own: this one may have imported the kernels for the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", CHECK]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert found.stdout.strip() == "compiled", found.stderr[-2_000:]
