"""How the layers of a decision are compiled."""

from functools import partial

import numba

# For functions that allocate nothing: they are handed many views of one array, and counting references to them at every
# call takes longer than what is done with them. The last option is numba's own, unnamed in its manual. Divisions are
# NumPy's: looking whether one is by zero keeps loops from being compiled to wide instructions.
inner = partial(numba.njit, cache=True, error_model="numpy", _nrt=False)()
