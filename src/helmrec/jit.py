"""How functions are compiled that the engine, the simulator and the estimates of other splits share.

A rule is a plain function of few numbers. The engine calls it as it is; compiled loops compile it into themselves. So
a rule is written once and costs the engine no call into compiled code.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numba
from numba.core import caching
from numba.extending import register_jitable

NONE = -1  # no slot, prefix or page

Rule = TypeVar("Rule", bound=Callable[..., object])


def rule(function: Rule) -> Rule:
    """Let compiled code call a plain function, which stays one for Python."""
    register_jitable(function)
    return function


# For functions that only compiled code calls and that allocate nothing: they compile in half the time and run twice as
# fast. Most of them take a whole simulated node, about eighty arrays, which an entry point for Python would unpack, and
# counting references to them at each call would take longer than the call itself. A function that they call is compiled
# with the last option too (undocumented in Numba), unless it was compiled before; so a callee that allocates must be
# compiled first, which `sim/node/node.py` does.
inner = partial(numba.njit, cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, _nrt=False)()


def ignore_outdated_code() -> None:
    """Make Numba ignore kept code that names modules or classes of HelmRec which are gone, and compile again.

    Numba looks whether kept code is of the present source only after it has read it, so an update that moves a class
    would end every command with an error. Numba calls this before it compiles (entry point `numba_extensions`).
    """
    kept: Any = caching.IndexDataCacheFile
    read_index, read_code = kept._load_index, kept._load_data

    def index(self: Any) -> dict[Any, str]:
        try:
            found: dict[Any, str] = read_index(self)
            return found
        except (ImportError, AttributeError) as error:
            _raise_unless_ours(error)
            return {}

    def code(self: Any, name: str) -> Any:
        try:
            return read_code(self, name)
        except (ImportError, AttributeError) as error:
            _raise_unless_ours(error)
            raise FileNotFoundError(name) from None  # which Numba takes as absent

    kept._load_index, kept._load_data = index, code


def _raise_unless_ours(error: Exception) -> None:
    if "helmrec" not in str(error):
        raise error
