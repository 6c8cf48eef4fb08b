"""Decorators of compiled functions: `kernel` for those that Python calls, `threaded` for those that threads call at a time,
`part` for those that only kernels call, `lean` for parts that allocate nothing, `inlined` for those that are compiled as a
piece of each caller.

numba compiles a function, with all that it calls, anew for every caller, and gives it a wrapper for Python and one for C, which
take as long as the function where it has dozens of arrays. So a function that one other calls is `inlined`, and Python must not
call a `part` or a `lean` one: it has no wrapper, and the process ends. numba also compiles a function anew for each integer
constant that it is called with, unless it is one of numpy's. What was compiled is kept on disk
(`simrl.profile.kernel_cache`).

A `lean` part counts no references: with tuples of dozens of arrays, counting takes longer than the work itself. It may use and
slice arrays, which its callers hold; it must not make one. What it calls says for itself whether it counts.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from simrl.profile.kernel_cache import cached

_njit: Any = njit  # whose types lack options


def _decorator(**options: Any) -> Any:
    compiled = _njit(no_cfunc_wrapper=True, error_model="numpy", **{"_nrt": True, **options})
    return lambda function: cached(compiled(function))


kernel = _decorator()
threaded = _decorator(nogil=True)
lean_kernel = _decorator(_nrt=False)
part = _decorator(no_cpython_wrapper=True)
lean = _decorator(no_cpython_wrapper=True, _nrt=False)
inlined = _decorator(inline="always")
