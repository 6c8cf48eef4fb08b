"""N-gram drafting, or prompt lookup: what followed the last tokens when they stood in the response's own text before.

Invariant: a draft is read from the prompt and from what the response has, and never from beyond.

The longest of the last `longest` … `shortest` tokens that stands in the text before is looked up. Where it stands there more
than once, `match="earliest"` (vLLM's `ngram` method) leaves more to draft where a response repeats itself; "latest" follows
what it did last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from numba import njit
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from simrl.errors import InputError
from simrl.speculation.drafter import MOST_DRAFT_TOKENS, AcceptRuns, Tokens
from simrl.speculation.matching import Ints, Ints32, common_tokens, hashed, same, token_ids
from simrl.trace import Trace

_NO_TOKENS: Tokens = np.empty(0, dtype=np.int32)


class NgramRule(BaseModel):
    """Which earlier place is followed. The prefixes are HistoSpec's, to compare; vLLM's own default is 5 and 5."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shortest: Annotated[int, Field(ge=1, le=64)] = 3
    longest: Annotated[int, Field(ge=1, le=64)] = 7
    match: Literal["earliest", "latest"] = "earliest"

    @model_validator(mode="after")
    def _in_order(self) -> NgramRule:
        if self.shortest > self.longest:
            raise ValueError(f"shortest {self.shortest} is more than longest {self.longest}; let it be at most that")
        return self


DEFAULT = NgramRule()


def ngram_runs(trace: Trace, rule: NgramRule = DEFAULT, most_tokens: int = MOST_DRAFT_TOKENS) -> AcceptRuns:
    """What n-gram drafting would do at every position of a trace's responses. A trace has no prompt texts: only the response's
    own is looked up. Raises `InputError` for a trace without token ids, and a `most_tokens` that is not from 1 to 255."""
    if not 1 <= most_tokens <= 255:
        raise InputError(f"n-gram: most_tokens {most_tokens}; it must be from 1 to 255")
    ids, first = token_ids(trace)
    drafted, accepted = _runs(ids, first, rule.shortest, rule.longest, rule.match == "earliest", most_tokens)
    return AcceptRuns(first[:-1].copy(), drafted, accepted)


@njit(cache=True)
def _slot(ids: Ints32, table: Ints32, mask: int, here: int, count: int) -> int:
    """Where the table has, or would have, the `count` tokens before `here`."""
    slot = hashed(ids, here, count) & mask
    while table[slot] >= 0 and not same(ids, table[slot], here, count):
        slot = (slot + 1) & mask
    return slot


@njit(cache=True)
def _best(
    ids: Ints32, begin: int, here: int, shortest: int, longest: int, earliest: bool, place: int, before: Ints32
) -> int:
    """The place with the longest match of the tokens before `here`, -1 for none; `place` is the latest one that agrees in
    `shortest` tokens, `before[p - begin]` the one before p."""
    best, best_length = -1, 0
    while place >= 0:
        length, furthest = shortest, min(longest, place - begin)
        while length < furthest and ids[place - length - 1] == ids[here - length - 1]:
            length += 1
        if length > best_length or (earliest and length == best_length):
            best, best_length = place, length
        place = before[place - begin]
    return best


@njit(cache=True)
def _runs(
    ids: Ints32, first: Ints, shortest: int, longest: int, earliest: bool, most_tokens: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    drafted = np.zeros(ids.shape[0], dtype=np.uint8)
    accepted = np.zeros(ids.shape[0], dtype=np.uint8)
    most = 0
    for row in range(first.shape[0] - 1):
        most = max(most, first[row + 1] - first[row])
    size = 16
    while size < 2 * most:
        size *= 2
    short = np.empty(size, dtype=np.int32)  # the latest place of `shortest` tokens
    before = np.empty(most, dtype=np.int32)  # the place before it
    # The place to follow of `longest` tokens: where a response repeats itself for long, nothing is searched.
    whole = np.empty(size, dtype=np.int32)
    for row in range(first.shape[0] - 1):
        begin, end = first[row], first[row + 1]
        size = 16
        while size < 2 * (end - begin):
            size *= 2
        mask = size - 1
        short[:size] = -1
        whole[:size] = -1
        for here in range(begin + shortest, end):
            slot = _slot(ids, short, mask, here, shortest)
            place = -1
            if here - begin >= longest:
                whole_slot = _slot(ids, whole, mask, here, longest)
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


class NgramDrafter:
    """Drafts each response from its prompt and its own text, see the top of the module. A `Drafter`."""

    def __init__(self, rule: NgramRule = DEFAULT) -> None:
        self._rule = rule
        self._texts: dict[int, list[int]] = {}
        self._places: dict[int, dict[tuple[int, ...], list[int]]] = {}

    def start_request(self, request: int, prompt_id: int, prompt_ids: Tokens | None = None) -> None:
        self._texts[request], self._places[request] = [], {}
        if prompt_ids is not None:
            self.observe(request, prompt_ids)

    def propose(self, requests: Sequence[int], most_tokens: Sequence[int]) -> list[Tokens]:
        return [self._draft(request, most) for request, most in zip(requests, most_tokens, strict=True)]

    def observe(self, request: int, token_ids: Tokens) -> None:
        text, places, shortest = self._texts[request], self._places[request], self._rule.shortest
        for token in token_ids.tolist():
            if len(text) >= shortest:  # something stands after them now
                places.setdefault(tuple(text[-shortest:]), []).append(len(text))
            text.append(token)

    def stop_request(self, request: int) -> None:
        del self._texts[request], self._places[request]

    def _draft(self, request: int, most_tokens: int) -> Tokens:
        text, rule = self._texts[request], self._rule
        here = len(text)
        if here < rule.shortest:
            return _NO_TOKENS
        places = self._places[request].get(tuple(text[-rule.shortest :]), [])
        best, best_length = here, 0
        for place in places if rule.match == "earliest" else reversed(places):
            length, furthest = rule.shortest, min(rule.longest, place)
            while length < furthest and text[place - length - 1] == text[here - length - 1]:
                length += 1
            if length > best_length:
                best, best_length = place, length
            if best_length == rule.longest:
                break
        return np.array(text[best : best + most_tokens], dtype=np.int32)
