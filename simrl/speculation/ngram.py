"""N-gram drafting, or prompt lookup: the draft is what followed an earlier occurrence of the
response's last tokens.

Invariant: a draft is read from the prompt and from the response so far, and never from beyond.

The longest of the last `LONGEST` … `SHORTEST` tokens with an earlier occurrence is looked up, for
comparison with HistoSpec (vLLM's own default is 5 and 5). The earliest of several occurrences is
followed, as by vLLM's `ngram` method: it leaves more to draft where a response repeats itself.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simrl.profile.compiled import kernel, part
from simrl.speculation.drafter import MOST_DRAFT_TOKENS, AcceptRuns
from simrl.speculation.matching import (
    LONGEST,
    SHORTEST,
    Ints,
    Ints32,
    common_tokens,
    slot_of,
    table_size,
    token_ids,
)
from simrl.trace.trace import Trace


def ngram_runs(trace: Trace, most_tokens: int = MOST_DRAFT_TOKENS) -> AcceptRuns:
    """Return the drafts at every position of a trace's responses, up to `most_tokens` (at most
    255), from the response's own text: a trace has no prompt texts. Raise `InputError` for a trace
    without token ids."""
    ids, first = token_ids(trace)
    drafted, accepted = _runs(ids, first, most_tokens)
    return AcceptRuns(first[:-1].copy(), drafted, accepted)


@part
def _best(ids: Ints32, begin: int, here: int, place: int, before: Ints32) -> int:
    """Return the earliest place with the longest match of the tokens before `here`, -1 for none;
    `place` is the latest one that agrees in `SHORTEST` tokens, `before[p - begin]` the one before
    p."""
    best, best_length = -1, 0
    while place >= 0:
        length, furthest = SHORTEST, min(LONGEST, place - begin)
        while length < furthest and ids[place - length - 1] == ids[here - length - 1]:
            length += 1
        if length >= best_length:
            best, best_length = place, length
        place = before[place - begin]
    return best


@kernel
def _runs(
    ids: Ints32, first: Ints, most_tokens: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    drafted = np.zeros(ids.shape[0], dtype=np.uint8)
    accepted = np.zeros(ids.shape[0], dtype=np.uint8)
    most = 0
    for row in range(first.shape[0] - 1):
        most = max(most, first[row + 1] - first[row])
    short = np.empty(table_size(most), dtype=np.int32)  # the latest place of `SHORTEST` tokens
    before = np.empty(most, dtype=np.int32)  # the place before it
    # The place to follow of `LONGEST` tokens: where a response repeats itself for long, nothing is
    # searched.
    whole = np.empty_like(short)
    for row in range(first.shape[0] - 1):
        begin, end = first[row], first[row + 1]
        size = table_size(end - begin)
        short[:size] = -1
        whole[:size] = -1
        for here in range(begin + SHORTEST, end):
            slot = slot_of(ids, short, size, here, SHORTEST)
            place = -1
            if here - begin >= LONGEST:
                whole_slot = slot_of(ids, whole, size, here, LONGEST)
                place = whole[whole_slot]
                if place < 0:
                    whole[whole_slot] = here
            if place < 0:
                place = _best(ids, begin, here, short[slot], before)
            before[here - begin] = short[slot]
            short[slot] = here
            if place >= 0:
                drafted[here] = min(most_tokens, here - place)
                accepted[here] = common_tokens(
                    ids, place, here, min(int(drafted[here]), end - here)
                )
    return drafted, accepted
