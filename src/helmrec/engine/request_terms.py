"""What some models read of each request besides its tokens, at fixed addresses, so that graphs can read it.

It knows places and lengths, not the arithmetic: `model/hstu.py` and the kernels use the values.
"""

from typing import Any

import torch
from torch import Tensor

from helmrec.engine.assemble import ModelTerms
from helmrec.engine.layout import Lengths
from helmrec.engine.staging import HostArrays, StagedField, Staging
from helmrec.model.config import ModelConfig
from helmrec.model.hstu import QueryTerms


class RequestTerms:
    """The terms of one step: of its queries, of a tail of full attention, of a bias by time. Most models have none.

    Context tokens have one place per context table and sequence, those of a table together.
    """

    def __init__(self, num_sequences: int, staging: Staging) -> None:
        """staging: has the arrays of `term_fields`, possibly among others."""
        self._num_sequences = num_sequences
        found = staging.device
        self.ragged: dict[str, Any] = {name: found.get(name) for name in ("num_full", "times", "cu_times")}
        self._query = {name: found[name] for name in ("gaps", "kept", "clocks", "scale", "ends") if name in found}

    @property
    def of_context(self) -> QueryTerms | None:
        """Terms for context tokens; `of_candidates` has those for candidates."""
        query = self._query
        return QueryTerms(query["gaps"], query["kept"], query["clocks"]) if query else None

    def of_candidates(self, at: Tensor) -> QueryTerms | None:
        """Terms for candidates whose tokens are at these flat positions; may be captured."""
        query = self._query
        return QueryTerms(query["gaps"], query["kept"], query["clocks"][self._owners(at)]) if query else None

    def v_scale(self, num_tokens: int) -> Tensor | None:  # (num_tokens, 1, 1)
        """Factors of the values of all tokens, padding included; may be captured."""
        if not self._query:
            return None
        at = torch.arange(num_tokens, dtype=self._query["ends"].dtype, device=self._query["ends"].device)
        return self._query["scale"][self._owners(at)][:, None, None]

    def load(self, host: HostArrays, terms: ModelTerms, cu_tokens: Lengths) -> None:
        """Fill in a step. Other places keep values of an earlier step, which nothing uses."""
        num = len(cu_tokens) - 1
        if (query := terms.query) is not None:
            by_table = (-1, self._num_sequences)
            host["gaps"].reshape(by_table)[:, :num] = query.context_gaps
            host["kept"].reshape(by_table)[:, :num] = query.context_kept.T
            host["clocks"][:num] = query.clocks
            host["scale"][:num] = 1 / query.lengths
            host["ends"][:num] = cu_tokens[1:]
            host["ends"][num:] = cu_tokens[-1]
        if terms.num_full is not None:
            host["num_full"][:num] = terms.num_full
        if terms.times is not None and terms.cu_times is not None:
            host["times"][: terms.times.size] = terms.times
            host["cu_times"][: num + 1] = terms.cu_times
            host["cu_times"][num + 1 :] = terms.cu_times[-1]

    def _owners(self, at: Tensor) -> Tensor:
        """Return the sequence of each flat position; positions after the last token belong to the last sequence."""
        owners = torch.bucketize(at, self._query["ends"], right=True)
        return owners.clamp_(max=self._num_sequences - 1)


def term_fields(config: ModelConfig, num_sequences: int) -> list[StagedField]:
    """Arrays that requests of this model need."""
    fields: list[StagedField] = []
    if (frame := config.query_frame) is not None:
        num_context = len(config.user_context) * num_sequences
        fields += [
            StagedField("gaps", (num_context,), torch.int64),
            StagedField("kept", (num_context, 1), torch.float32),
            StagedField("clocks", (num_sequences, 2 * len(frame.cycles)), torch.float32),
            StagedField("scale", (num_sequences,), torch.float32),
            StagedField("ends", (num_sequences,), torch.int32),  # the flat position after the last token
        ]
    if config.full_attn_tail:
        fields.append(StagedField("num_full", (num_sequences,), torch.int32))
    if config.attention_bias is not None:
        fields += [
            StagedField("times", (num_sequences * (config.window + 1),), torch.int64),
            StagedField("cu_times", (num_sequences + 1,), torch.int32),
        ]
    return fields
