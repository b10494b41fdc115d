"""New values of rows as a master keeps them."""

import numpy as np
import torch

from helmrec.engine.intake import RowUpdate
from helmrec.errors import RequestError
from helmrec.memory.row_master import HostRows, first_non_finite


def new_values(master: HostRows, update: RowUpdate) -> torch.Tensor:  # (rows, row_dim)
    """Convert an update, and add its differences to the present rows; RequestError if a sum is not finite."""
    values = update.values if update.values.flags.writeable else update.values.copy()
    new = torch.from_numpy(values)
    if update.is_added is not None:
        if not master.dtype.is_floating_point:
            raise RequestError("values", "differences", f"rows of {master.dtype} take new values only")
        added = torch.from_numpy(np.flatnonzero(update.is_added))
        new = new.float().index_add(0, added, master.gather(update.rows[update.is_added]).float())
    converted = new.to(master.dtype)
    if update.is_added is not None and (at := first_non_finite(converted)) is not None:
        raise RequestError("values", f"a difference to row {update.rows[at]}", "the sum must be finite")
    return converted
