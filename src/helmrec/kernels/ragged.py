"""The ragged batch of the kernels: flat tokens, lengths of sequences, page tables.

It does not know users, the meaning of candidates, or owners of pages.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from helmrec.types import AttentionWindow

if TYPE_CHECKING:
    from helmrec.kernels.attention_plan import AttentionPlan


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Token layout of one dense step.

    Tokens of all sequences lie flat, one after another. Inside a sequence come its new history
    tokens, then `num_context` per-request context tokens, then its candidates. Resident history
    tokens are read from pages, all others from the flat tensors. A new token need not be kept.
    """

    cu_tokens: Tensor  # (sequences + 1,) int32, flat offset of each sequence
    num_resident: Tensor  # (sequences,) int32, history tokens already in pages
    num_new: Tensor  # (sequences,) int32, history tokens this step appends
    page_table: Tensor  # (sequences, max_pages) int32, page of each run of history tokens
    write_slots: Tensor  # (tokens,) int64, page * page_tokens + offset, or -1: not kept
    num_context: int
    page_tokens: int
    plan: "AttentionPlan | None" = None  # the work list, if the step has made one
    v_scale: Tensor | None = None  # (tokens, 1, 1), factor of values before they are kept, if it differs by sequence

    window: AttentionWindow | None = None
    num_full: Tensor | None = None  # (sequences,) int32, last tokens before the candidates that see all; with a tail
    # For a relative bias of attention: the time of every history token of a sequence, resident ones too, and last the
    # time that follows them. A token's row has the time of the next entry.
    times: Tensor | None = None  # (history tokens + sequences,) int64, flat
    cu_times: Tensor | None = None  # (sequences + 1,) int32, where those of each sequence start

    @property
    def num_sequences(self) -> int:
        return self.num_new.shape[0]
