"""Measurements by name, beside the experiments of the evaluation; `helmrec_bench.registry` lists them."""
