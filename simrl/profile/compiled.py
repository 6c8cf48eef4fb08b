"""Decorators of compiled functions: `kernel` for those that Python calls, `part` for those that only kernels call, `inlined`
for those that are compiled as a piece of each caller.

numba compiles a function, with all that it calls, anew for every caller, and gives it a wrapper for Python and one for C, which
take as long as the function where it has dozens of arrays. So a function that one other calls is `inlined`, and Python must not
call a `part`: it has no wrapper, and the process ends. numba also compiles a function anew for each integer constant that it
is called with, unless it is one of numpy's.
"""

from __future__ import annotations

from typing import Any

from numba import njit

_njit: Any = njit  # whose types lack options
kernel = _njit(cache=True, no_cfunc_wrapper=True)
part = _njit(cache=True, no_cfunc_wrapper=True, no_cpython_wrapper=True)
inlined = _njit(cache=True, no_cfunc_wrapper=True, inline="always")
