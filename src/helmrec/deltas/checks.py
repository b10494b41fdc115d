"""Checks deltas against a model before they are staged."""

import numpy as np
import torch

from helmrec.deltas.delta import Delta, TablePart, decode, encode
from helmrec.engine.id_checks import has_infinite
from helmrec.engine.intake import RowUpdate, prepare_rows
from helmrec.engine.row_values import converted
from helmrec.model.config import ModelConfig


def compile_checks() -> None:
    """Compile what checks and converts deltas before the first one, since compiling holds the interpreter lock."""
    for dtype in (np.float16, np.float32):
        part = TablePart("any", np.zeros(1, np.int64), np.zeros((1, 1), dtype))
        (read,) = decode(encode(Delta("any", 1, 0, 0.0, (part,))), "a delta").parts
        has_infinite(read.values, np.inf)
        for kind in (torch.bfloat16, torch.float16):
            converted(read.values, kind)


def check_delta(model: ModelConfig, delta: Delta) -> RowUpdate:
    """Check a whole delta against a model; RequestError names what does not fit."""
    updates = [prepare_rows(model, part.table, part.ids, part.values, are_distinct=True) for part in delta.parts]
    if not updates:
        return RowUpdate(np.zeros(0, np.int64), np.zeros((0, model.row_dim), np.float32))
    first, *others = updates
    rows = np.concatenate([each.rows for each in updates]) if others else first.rows
    values = np.concatenate([each.values for each in updates]) if others else first.values
    added = None
    if any(part.is_difference for part in delta.parts):
        added = np.concatenate([np.full(part.ids.size, part.is_difference) for part in delta.parts])
    return RowUpdate(rows, values, added)
