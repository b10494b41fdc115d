"""Write the layer goldens in tests/data with the float64 reference: `python -m tests.make_golden`.

The JSON files there hold outputs of Meta's own classes (generative-recommenders, commit db1bf8f) and say of which. They
ran on a CPU in their plain PyTorch path in double precision, with made-up weights that the tests make again from a
seed: `DlrmHSTU.main_forward`, `HSTU.encode` and `pytorch_hstu_mha`. Three operators of fbgemm were replaced: complete
cumulative sums, and conversion between jagged and padded tensors. torchrec's classes are imported there but not used.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.reference import Shape, hstu_layer, layer_weights

CASES: tuple[dict[str, Any], ...] = (
    {"num_layers": 2, "dim": 24, "num_heads": 2, "qk_dim": 8, "v_dim": 12, "normaliser": 32, "output_form": "concat"},
    {"num_layers": 2, "dim": 24, "num_heads": 2, "qk_dim": 8, "v_dim": 12, "normaliser": 32, "output_form": "gated"},
)
LENGTHS, NUM_CANDIDATES = [0, 1, 5, 33, 12], [0, 1, 2, 8, 0]


def main() -> None:
    for case in CASES:
        rng = np.random.default_rng(7)
        width, qk_width = case["num_heads"] * case["v_dim"], case["num_heads"] * case["qk_dim"]
        shapes = {
            "uvqk_weight": (case["dim"], 2 * width + 2 * qk_width),
            "uvqk_beta": (2 * width + 2 * qk_width,),
            "input_norm_weight": (case["dim"],),
            "input_norm_bias": (case["dim"],),
            "output_weight": (width * (3 if case["output_form"] == "concat" else 1), case["dim"]),
            "output_norm_weight": (width,),
            "output_norm_bias": (width,),
        }
        tensors = {
            f"layers.{i}.{name}": 0.3 * rng.standard_normal(shape) + (1.0 if name.endswith("norm_weight") else 0.0)
            for i in range(case["num_layers"])
            for name, shape in shapes.items()
        }
        shape = Shape(case["num_heads"], case["qk_dim"], case["v_dim"], case["normaliser"], case["output_form"])
        x = rng.standard_normal((sum(LENGTHS), case["dim"]))
        y = []
        for start, length, candidates in zip(np.cumsum([0, *LENGTHS]), LENGTHS, NUM_CANDIDATES, strict=False):
            part = x[start : start + length]
            for i in range(case["num_layers"]):
                part = hstu_layer(part, candidates, layer_weights(tensors, i), shape)
            y.append(part)
        tensors |= {
            "x": x,
            "y": np.concatenate(y),
            "lengths": np.array(LENGTHS),
            "num_candidates": np.array(NUM_CANDIDATES),
        }
        path = Path("tests/data") / f"layers-{case['output_form']}.safetensors"
        save_file(tensors, path, {"case": json.dumps(case)})
        print(path)


if __name__ == "__main__":
    main()
