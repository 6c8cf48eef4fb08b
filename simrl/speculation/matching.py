"""Recorded tokens as compiled code takes them, and how a few tokens are looked up among many.

Invariant: whatever is found by its hash is compared token by token; a collision costs time and changes nothing.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from simrl.errors import InputError
from simrl.trace import Trace

Ints = NDArray[np.int64]
Ints32 = NDArray[np.int32]


def token_ids(trace: Trace) -> tuple[Ints32, Ints]:
    """The tokens of all responses one after the other, and where each row begins among them; shapes (tokens,), (rows + 1,)."""
    if "response_ids" not in trace.table.column_names:
        raise InputError(
            f"trace {trace.metadata.name!r}: no column 'response_ids'; import the run with --tokenizer, so that it keeps them"
        )
    lists = trace.table.column("response_ids").combine_chunks()
    if lists.null_count:
        row = int(np.flatnonzero(lists.is_null().to_numpy(zero_copy_only=False))[0])
        raise InputError(
            f"trace {trace.metadata.name!r}: row {row}, column 'response_ids' is empty; keep the rows that have token ids"
        )
    ids = np.ascontiguousarray(lists.flatten().to_numpy(zero_copy_only=False), dtype=np.int32)
    first = np.r_[0, np.cumsum(trace.column("response_tokens"), dtype=np.int64)]
    return ids, first


@njit(cache=True)
def hashed(ids: Ints32, end: int, count: int) -> int:
    """A hash, not negative, of the `count` tokens before `end`."""
    h = np.uint64(1469598103934665603)
    for i in range(end - count, end):
        h = (h ^ np.uint64(ids[i])) * np.uint64(0x9E3779B97F4A7C15)
        h ^= h >> np.uint64(29)
    return int(np.int64(h >> np.uint64(1)))


@njit(cache=True)
def same(ids: Ints32, a: int, b: int, count: int) -> bool:
    """Whether the `count` tokens before a and before b are equal."""
    for i in range(1, count + 1):  # noqa: SIM110 (compiled: a generator is slower)
        if ids[a - i] != ids[b - i]:
            return False
    return True


@njit(cache=True)
def common_tokens(ids: Ints32, a: int, b: int, most: int) -> int:
    """How many tokens from a on and from b on are equal, at most `most`."""
    common = 0
    while common < most and ids[a + common] == ids[b + common]:
        common += 1
    return common
