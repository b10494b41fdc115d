"""How the layers of a decision are compiled."""

from functools import partial

import numba

# For functions that allocate nothing: they are handed many views of one array, and counting references to them at every
# call takes longer than what is done with them. The option is numba's own, unnamed in its manual.
inner = partial(numba.njit, cache=True, _nrt=False)()
