"""The Numba options for the functions of a simulated node.

Most of these functions take the whole node, about eighty arrays. An entry point for Python would unpack them all, and
counting references to them at each call would take longer than the call itself.
"""

from functools import partial

import numba

NONE = -1  # no slot, prefix or page

# For functions that only compiled code calls and that allocate nothing: they compile in half the time and run twice as
# fast. A function that they call is compiled with the last option too (undocumented in Numba), unless it was compiled
# before; so a callee that allocates must be compiled first, which `node.py` does.
inner = partial(numba.njit, cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, _nrt=False)()
