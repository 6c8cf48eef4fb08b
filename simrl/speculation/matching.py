"""Recorded tokens for compiled code, and hash tables that look a few tokens up among many.

Invariant: what a hash finds is compared token by token; a collision costs time and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from simrl.errors import InputError
from simrl.profile.compiled import part
from simrl.trace.trace import Trace

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Ints32 = NDArray[np.int32]
SHORTEST, LONGEST = 3, 7  # tokens that are looked up: HistoSpec's prefixes (RhymeRL §5.4)


def has_token_ids(trace: Trace) -> bool:
    """Return whether the trace has the tokens of its responses."""
    return "response_ids" in trace.table.column_names


def token_ids(trace: Trace, some: bool = False) -> tuple[Ints32, Ints]:
    """Return the tokens of all responses one after the other, and where each row begins; shapes
    (tokens,), (rows + 1,). Raise `InputError` for a trace without them, and for a row without
    unless `some` rows are enough."""
    if not has_token_ids(trace):
        raise InputError(
            f"trace {trace.metadata.name!r}: no column 'response_ids'; import the run with --tokenizer, so that it keeps them"
        )
    lists = trace.table.column("response_ids").combine_chunks()
    known = lists.is_valid().to_numpy(zero_copy_only=False)
    if not some and not known.all():
        raise InputError(
            f"trace {trace.metadata.name!r}: row {int(np.argmin(known))}, column 'response_ids' is empty; keep the rows that "
            "have token ids"
        )
    ids = np.ascontiguousarray(lists.flatten().to_numpy(zero_copy_only=False), dtype=np.int32)
    lengths = np.where(known, trace.column("response_tokens"), 0)
    return ids, np.r_[0, np.cumsum(lengths, dtype=np.int64)]


def epoch_keys(trace: Trace) -> tuple[Ints, int]:
    """Return a key for the prompt and epoch of each row, and the number of epochs: prompt k has in
    epoch e the key k × epochs + e."""
    epoch = trace.column("epoch").astype(np.int64)
    epochs = int(epoch.max()) + 1
    return np.unique(trace.column("prompt_id"), return_inverse=True)[1] * epochs + epoch, epochs


def joined(responses: Sequence[Ints32]) -> tuple[Ints32, Ints]:
    """Return responses as one text, a -1 after each, and where each begins in it, with the end of
    the text."""
    begins = np.cumsum([0, *(len(response) + 1 for response in responses)], dtype=np.int64)
    text = np.full(begins[-1], -1, dtype=np.int32)
    for response, begin in zip(responses, begins.tolist(), strict=False):
        text[begin : begin + len(response)] = response
    return text, begins


@part
def table_size(entries: int) -> int:
    """Return the size of a hash table, a power of two that at most half of it fill."""
    size = 16
    while size < 2 * entries:
        size *= 2
    return size


@part
def hashed(ids: Ints32, end: int, count: int) -> int:
    """Return a hash, not negative, of the `count` tokens before `end`."""
    h = np.uint64(1469598103934665603)
    for i in range(end - count, end):
        h = (h ^ np.uint64(ids[i])) * np.uint64(0x9E3779B97F4A7C15)
        h ^= h >> np.uint64(29)
    return int(np.int64(h >> np.uint64(1)))


@part
def common_tokens(ids: Ints32, a: int, b: int, most: int) -> int:
    """Return how many tokens from a on and from b on are equal, at most `most`."""
    common = 0
    while common < most and ids[a + common] == ids[b + common]:
        common += 1
    return common


@part
def slot_of(ids: Ints32, table: Ints32, size: int, end: int, count: int) -> int:
    """Return the slot where the table of places in `ids` has, or would have, the `count` tokens
    before `end`."""
    slot = hashed(ids, end, count) & (size - 1)
    while table[slot] >= 0 and common_tokens(ids, table[slot] - count, end - count, count) < count:
        slot = (slot + 1) & (size - 1)
    return slot
