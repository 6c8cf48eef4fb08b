"""Decorators of compiled functions: `kernel` for functions that Python calls, `threaded` for
functions that several threads call at once, `part` for functions that only kernels call, `lean` and
`lean_kernel` for functions that allocate nothing, `inlined` for functions that are compiled as a
piece of each caller.

numba compiles a function, with all that it calls, anew for every caller, and gives it a wrapper for
Python and one for C, which take as long as the function where it has dozens of arrays. So a
function that one other calls is `inlined`, and Python must not call a `part` or a `lean` one: it
has no wrapper, and the process ends. numba also compiles a function anew for each integer constant
that it is called with, unless it is one of numpy's. Kernels are kept on disk
(`simrl.profile.kernel_cache`), with the parts that they call. A division by zero does not raise: it
gives infinity, NaN, or among integers 0.

What is `lean` counts no references: with tuples of dozens of arrays, counting takes longer than the
work itself. It may use and slice arrays, which its callers hold; it must not make one. What it
calls says for itself whether it counts.
"""

from __future__ import annotations

from typing import Any

from numba import njit
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler

from simrl.profile.kernel_cache import cached

_njit: Any = njit  # whose types lack options


class _Unlinked:
    """numba's code generator, for a function that no process runs by itself: it has no environment
    there."""

    def __init__(self, codegen: Any) -> None:
        self._codegen = codegen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codegen, name)

    def set_env(self, name: str, environment: Any) -> None:
        """Leave out what only functions with a wrapper use."""


class _PartLibrary(JITCodeLibrary):
    """The code of a part: kept as it is, and optimized and translated only in the kernels that it
    goes into. numba does both for every function, with all that it calls, so again on each level of
    calls."""

    @property
    def codegen(self) -> Any:
        return _Unlinked(self._codegen)

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()  # type: ignore[no-untyped-call]
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """Return 0: a part has no wrapper to point to."""
        self._ensure_finalized()  # type: ignore[no-untyped-call]
        return 0


class _PartCompiler(Compiler):
    """numba's compiler, for parts."""

    def __init__(self, typing: Any, target: Any, library: Any, *rest: Any) -> None:
        code = library or _PartLibrary(target.codegen(), "part")  # type: ignore[no-untyped-call]
        super().__init__(typing, target, code, *rest)  # type: ignore[no-untyped-call]


# numba's own, which other versions may lack: parts are then compiled as any function is.
_INTERNALS = (
    "_optimize_final_module",
    "_finalize_final_module",
    "_finalize_dynamic_globals",
    "_ensure_finalized",
)
_AS_PARTS = (
    {"pipeline_class": _PartCompiler}
    if all(hasattr(JITCodeLibrary, name) for name in _INTERNALS)
    else {}
)


def _decorator(**options: Any) -> Any:
    compiled = _njit(no_cfunc_wrapper=True, error_model="numpy", **{"_nrt": True, **options})
    return compiled if "pipeline_class" in options else lambda function: cached(compiled(function))


kernel = _decorator()
threaded = _decorator(nogil=True)
lean_kernel = _decorator(_nrt=False)
part = _decorator(no_cpython_wrapper=True, **_AS_PARTS)
lean = _decorator(no_cpython_wrapper=True, _nrt=False, **_AS_PARTS)
inlined = _decorator(inline="always")
