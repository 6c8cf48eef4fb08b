"""Compiled kernels for arguments of given types, looked up once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import config, typeof

from simrl.errors import InputError


class Like:
    """Arguments of a kernel, equal to others that a kernel compiled for these takes."""

    def __init__(self, *values: Any) -> None:
        self.values = values
        self._key = self._key_of(values)

    def _key_of(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return type(value), *map(self._key_of, value)
        return (
            (value.dtype, value.ndim, value.flags.num)
            if isinstance(value, np.ndarray)
            else type(value)
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Like) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


@cache
def resolved_for(kernel: Any, arguments: Like) -> Callable[..., Any]:
    """Return a compiled kernel for arguments like these. It takes no others: it does not look at
    their types, which takes numba 7 µs a call, longer than a run to the next stop."""
    # Without numba, records of numpy lack the attributes that it gives them.
    if config.DISABLE_JIT:  # type: ignore[attr-defined]
        raise InputError("NUMBA_DISABLE_JIT is set, and engines run only compiled; unset it")
    types = tuple(typeof(value) for value in arguments.values)  # type: ignore[no-untyped-call]
    compiled: Callable[..., Any] = kernel.compile(types)
    return compiled


def resolved(kernel: Any, *arguments: Any) -> Callable[..., Any]:
    """Return a compiled kernel for arguments like these."""
    return resolved_for(kernel, Like(*arguments))
