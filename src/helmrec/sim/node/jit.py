"""How the parts of a simulated node are compiled.

Most functions see all of a node, some eighty arrays. A way in from Python would unpack them all, and counting
references to them at every call takes longer than what is done with them.
"""

from functools import partial

import numba

# For functions that only compiled code calls and that allocate nothing: half the time to compile, twice the speed. What
# they call inherits the last option (numba's own, unnamed in its manual) if it is compiled for them; so a callee that
# does allocate must have been compiled before (`node.py` sees to it).
inner = partial(numba.njit, cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, _nrt=False)()
