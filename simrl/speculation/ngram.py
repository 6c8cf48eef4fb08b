"""N-gram drafting, or prompt lookup: the draft is what followed an earlier occurrence of the response's last tokens.

Invariant: a draft is read from the prompt and from the response so far, and never from beyond.

The longest of the last `longest` … `shortest` tokens with an earlier occurrence is looked up. With several occurrences,
`match="earliest"` (vLLM's `ngram` method) leaves more to draft where a response repeats itself; "latest" follows the last one.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from simrl.profile.compiled import kernel, part
from simrl.speculation.drafter import MOST_DRAFT_TOKENS, AcceptRuns
from simrl.speculation.matching import Ints, Ints32, common_tokens, slot_of, table_size, token_ids
from simrl.trace.trace import Trace
from simrl.validation import in_order


class NgramRule(BaseModel, frozen=True, extra="forbid"):
    """The earlier place that is followed. The prefixes are HistoSpec's, to compare; vLLM's own default is 5 and 5."""

    shortest: Annotated[int, Field(ge=1, le=64)] = 3
    longest: Annotated[int, Field(ge=1, le=64)] = 7
    match: Literal["earliest", "latest"] = "earliest"

    _checked = in_order("shortest", "longest")


DEFAULT = NgramRule()


def ngram_runs(trace: Trace, rule: NgramRule = DEFAULT, most_tokens: int = MOST_DRAFT_TOKENS) -> AcceptRuns:
    """Return the drafts at every position of a trace's responses, up to `most_tokens` (at most 255), from the response's own
    text: a trace has no prompt texts. Raise `InputError` for a trace without token ids."""
    ids, first = token_ids(trace)
    drafted, accepted = _runs(ids, first, rule.shortest, rule.longest, rule.match == "earliest", most_tokens)
    return AcceptRuns(first[:-1].copy(), drafted, accepted)


@part
def _best(
    ids: Ints32, begin: int, here: int, shortest: int, longest: int, earliest: bool, place: int, before: Ints32
) -> int:
    """Return the place with the longest match of the tokens before `here`, -1 for none; `place` is the latest one that agrees
    in `shortest` tokens, `before[p - begin]` the one before p."""
    best, best_length = -1, 0
    while place >= 0:
        length, furthest = shortest, min(longest, place - begin)
        while length < furthest and ids[place - length - 1] == ids[here - length - 1]:
            length += 1
        if length > best_length or (earliest and length == best_length):
            best, best_length = place, length
        place = before[place - begin]
    return best


@kernel
def _runs(
    ids: Ints32, first: Ints, shortest: int, longest: int, earliest: bool, most_tokens: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    drafted = np.zeros(ids.shape[0], dtype=np.uint8)
    accepted = np.zeros(ids.shape[0], dtype=np.uint8)
    most = 0
    for row in range(first.shape[0] - 1):
        most = max(most, first[row + 1] - first[row])
    short = np.empty(table_size(most), dtype=np.int32)  # the latest place of `shortest` tokens
    before = np.empty(most, dtype=np.int32)  # the place before it
    # The place to follow of `longest` tokens: where a response repeats itself for long, nothing is searched.
    whole = np.empty_like(short)
    for row in range(first.shape[0] - 1):
        begin, end = first[row], first[row + 1]
        size = table_size(end - begin)
        short[:size] = -1
        whole[:size] = -1
        for here in range(begin + shortest, end):
            slot = slot_of(ids, short, size, here, shortest)
            place = -1
            if here - begin >= longest:
                whole_slot = slot_of(ids, whole, size, here, longest)
                place = whole[whole_slot]
                if place < 0 or not earliest:
                    whole[whole_slot] = here
            if place < 0:
                place = _best(ids, begin, here, shortest, longest, earliest, short[slot], before)
            before[here - begin] = short[slot]
            short[slot] = here
            if place >= 0:
                drafted[here] = min(most_tokens, here - place)
                accepted[here] = common_tokens(ids, place, here, min(int(drafted[here]), end - here))
    return drafted, accepted
