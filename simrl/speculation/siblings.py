"""Drafts from the other responses to the same prompt, also from those that are still running.

Invariant: a draft is read from what the siblings have generated so far and from nothing else; how long a sibling will be, or
how it goes on, changes no draft.

TLT's model-free drafter (Taming the Long Tail, arXiv 2511.16665, n-grams over the prompt's own group) and SRT's tree
(arXiv 2601.09083), which is updated online from running siblings, are this rule with different parts of it. The last
`shortest` tokens of a response are looked up in each sibling. A sibling offers its latest `LOOKS_BACK` places where they stand
with something after them; the place that agrees furthest back wins (up to `longest` tokens; then the later place of the same
sibling, then the sibling that comes first), and what follows there is the draft.

Two forms of it, which agree. `SiblingDrafter` sees tokens as they come. `sibling_draft` is compiled and has no state: what the
responses will be is recorded, so where any `shortest` tokens stand in a group can be listed before (`sibling_index`), and how
much of each response exists already is all it has to be told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from simrl.errors import InputError
from simrl.speculation.drafter import MOST_DRAFT_TOKENS, AcceptRuns, Tokens
from simrl.speculation.matching import Ints, Ints32, common_tokens, hashed, same, token_ids
from simrl.trace import Trace

SHORTEST, LONGEST = 3, 7  # HistoSpec's prefixes (RhymeRL §5.4)
LOOKS_BACK = 8  # places of a sibling that are compared; a bound on the time of a draft
_NO_TOKENS: Tokens = np.empty(0, dtype=np.int32)


class SiblingIndex(NamedTuple):
    """Where the same tokens stand in the responses of a group; arrays over all rows of a trace, 16 bytes a token.

    Row r has the tokens `ids[first[r]:first[r + 1]]`; its group is the rows `group_first[r]` to `group_end[r]` (not included).
    `key[first[r] + p]` numbers the `shortest` tokens before position p, -1 where there are fewer. The places with the number k
    are `places[key_first[k]:key_first[k + 1]]`, rising: sibling by sibling.
    """

    ids: Ints32
    first: Ints
    group_first: Ints
    group_end: Ints
    key: Ints32
    key_first: Ints32
    places: Ints32
    shortest: int
    longest: int


def sibling_index(trace: Trace, shortest: int = SHORTEST, longest: int = LONGEST) -> SiblingIndex:
    """The index of a trace. Raises `InputError` for a trace without token ids of all responses."""
    if not 1 <= shortest <= longest:
        raise InputError(f"siblings: shortest {shortest} and longest {longest}; let 1 <= shortest <= longest")
    ids, first = token_ids(trace)
    step, prompt = trace.column("step"), trace.column("prompt_id")
    starts = np.flatnonzero(np.r_[True, (step[1:] != step[:-1]) | (prompt[1:] != prompt[:-1])])
    ends = np.r_[starts[1:], len(trace)]
    group_first = np.repeat(starts, ends - starts).astype(np.int64)
    group_end = np.repeat(ends, ends - starts).astype(np.int64)
    key, key_first, places = _list_places(ids, first, starts.astype(np.int64), ends.astype(np.int64), shortest)
    return SiblingIndex(ids, first, group_first, group_end, key, key_first, places, shortest, longest)


@njit(cache=True)
def _list_places(ids: Ints32, first: Ints, starts: Ints, ends: Ints, shortest: int) -> tuple[Ints32, Ints32, Ints32]:
    """`key`, `key_first` and `places` of a `SiblingIndex`."""
    key = np.full(ids.shape[0], -1, dtype=np.int32)
    count = np.zeros(ids.shape[0] + 1, dtype=np.int32)  # of key k at k + 1
    most = 0
    for g in range(starts.shape[0]):
        most = max(most, first[ends[g]] - first[starts[g]])
    size = 16
    while size < 2 * most:
        size *= 2
    table = np.empty(size, dtype=np.int32)  # a place that has the key
    keys = 0
    for g in range(starts.shape[0]):
        size = 16
        while size < 2 * (first[ends[g]] - first[starts[g]]):
            size *= 2
        table[:size] = -1
        for row in range(starts[g], ends[g]):
            for place in range(first[row] + shortest, first[row + 1]):
                slot = hashed(ids, place, shortest) & (size - 1)
                while table[slot] >= 0 and not same(ids, table[slot], place, shortest):
                    slot = (slot + 1) & (size - 1)
                if table[slot] < 0:
                    table[slot] = place
                    key[place] = keys
                    keys += 1
                else:
                    key[place] = key[table[slot]]
                count[key[place] + 1] += 1
    key_first = np.cumsum(count[: keys + 1]).astype(np.int32)
    filled = key_first[:keys].copy()
    places = np.empty(key_first[keys], dtype=np.int32)
    for place in range(ids.shape[0]):
        if key[place] >= 0:
            places[filled[key[place]]] = place
            filled[key[place]] += 1
    return key, key_first, places


@njit(cache=True)
def sibling_draft(index: SiblingIndex, row: int, generated: int, known: Ints, most_tokens: int) -> tuple[int, int]:
    """(drafted, accepted) of the draft for a row of the trace that has `generated` tokens, 0 <= generated < its length.

    `known[i]` is how many tokens of row `group_first[row] + i` may be read: what that sibling has generated so far at the same
    engine; 0 for one that is elsewhere or has not begun. The row's own entry says how much of its own text may be drafted from:
    0 for siblings alone; more than `generated` counts as that. At most `most_tokens` are drafted, at most what the sibling
    has; `accepted` of them are what the recorded response goes on with. Allocates nothing.
    """
    begin = index.first[row]
    here = begin + generated
    if generated < index.shortest or here >= index.first[row + 1]:
        return 0, 0
    key = index.key[here]
    low, high = index.key_first[key], index.key_first[key + 1]
    best, best_length, best_end = -1, 0, 0
    for member in range(index.group_end[row] - index.group_first[row]):
        sibling = index.group_first[row] + member
        start = index.first[sibling]
        tokens = min(known[member], index.first[sibling + 1] - start)
        if sibling == row:
            tokens = min(tokens, generated)
        end = start + tokens
        if tokens <= index.shortest or low == high:
            continue
        a, b = low, high  # the first place at or after `end` is looked for
        while a < b:
            middle = (a + b) // 2
            if index.places[middle] < end:
                a = middle + 1
            else:
                b = middle
        for i in range(a - 1, max(a - 1 - LOOKS_BACK, low - 1), -1):
            place = index.places[i]
            if place < start:
                break
            length = index.shortest
            furthest = min(index.longest, place - start, generated)
            while length < furthest and index.ids[place - length - 1] == index.ids[here - length - 1]:
                length += 1
            if length > best_length:
                best, best_length, best_end = place, length, end
            if best_length == index.longest:
                break
        if best_length == index.longest:
            break
    if best < 0:
        return 0, 0
    drafted = min(most_tokens, best_end - best)
    return drafted, common_tokens(index.ids, best, here, min(drafted, index.first[row + 1] - here))


Known = Literal["lockstep", "finished"]


def sibling_runs(
    trace: Trace,
    known: Known = "lockstep",
    own: bool = False,
    most_tokens: int = MOST_DRAFT_TOKENS,
    shortest: int = SHORTEST,
    longest: int = LONGEST,
) -> AcceptRuns:
    """What siblings would draft at every position of every response, without an engine that says who is how far.

    "lockstep": all responses of a group began together and have equally many tokens, or are over. "finished": all the others
    are over, which is the most that a group's texts can give. `own` drafts from the response's own text too. A response
    without siblings has no drafts. Raises `InputError` for a trace without token ids.
    """
    if known not in ("lockstep", "finished"):
        raise InputError(f"siblings: known {known!r}; choose lockstep or finished")
    if not 1 <= most_tokens <= 255:
        raise InputError(f"siblings: most_tokens {most_tokens}; it must be from 1 to 255")
    index = sibling_index(trace, shortest, longest)
    drafted, accepted = _runs(index, known == "lockstep", own, most_tokens)
    alone = index.group_end - index.group_first == 1
    first = np.where(alone & (not own), -1, index.first[:-1])
    return AcceptRuns(first, drafted, accepted)


@njit(cache=True)
def _runs(
    index: SiblingIndex, lockstep: bool, own: bool, most_tokens: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    drafted = np.zeros(index.ids.shape[0], dtype=np.uint8)
    accepted = np.zeros(index.ids.shape[0], dtype=np.uint8)
    known = np.empty(np.max(index.group_end - index.group_first), dtype=np.int64)
    for row in range(index.first.shape[0] - 1):
        begin, members = index.first[row], index.group_end[row] - index.group_first[row]
        for p in range(index.first[row + 1] - begin):
            for member in range(members):
                sibling = index.group_first[row] + member
                whole = index.first[sibling + 1] - index.first[sibling]
                known[member] = min(p, whole) if lockstep else whole
                if sibling == row and not own:
                    known[member] = 0
            drafted[begin + p], accepted[begin + p] = sibling_draft(index, row, p, known, most_tokens)
    return drafted, accepted


@njit(cache=True)
def _common(ids: Ints32, first: Ints, old: Ints) -> Ints:
    """Tokens that each row begins with as the row `old[row]` does; 0 where that is -1."""
    common = np.zeros(old.shape[0], dtype=np.int64)
    for row in range(old.shape[0]):
        if old[row] >= 0:
            a, b = first[row], first[old[row]]
            common[row] = common_tokens(ids, a, b, min(first[row + 1] - a, first[old[row] + 1] - b))
    return common


class WholeResponseRuns(NamedTuple):
    """SPEC-RL on recorded responses: arrays (rows,), the first two in tokens. Where a row has no old response, all are 0."""

    old_tokens: Ints  # to verify in one pass
    accepted: Ints  # the first so many are kept, the response goes on from there
    epochs_ago: Ints  # how many epochs before the old response was generated


def whole_response_runs(trace: Trace) -> WholeResponseRuns:
    """What verifying the whole old response accepts (SPEC-RL, arXiv 2509.23232), by exact match: lenience 0, lossless.

    The old response is that of the same prompt and sample number in the latest epoch before in which there was one. Raises
    `InputError` for a trace without token ids.
    """
    ids, first = token_ids(trace)
    lengths = np.diff(first)
    old = np.full(len(trace), -1, dtype=np.int64)
    epoch, prompt, sample = (trace.column(name) for name in ("epoch", "prompt_id", "sample"))
    order = np.lexsort((np.arange(len(trace)), epoch, sample, prompt))
    same = (prompt[order][1:] == prompt[order][:-1]) & (sample[order][1:] == sample[order][:-1])
    same &= epoch[order][1:] > epoch[order][:-1]
    old[order[1:][same]] = order[:-1][same]
    ago = np.where(old >= 0, epoch - epoch[old], 0)
    return WholeResponseRuns(np.where(old >= 0, lengths[old], 0), _common(ids, first, old), ago.astype(np.int64))


@dataclass
class _Text:
    """A response as far as it is known."""

    ids: list[int] = field(default_factory=list)
    places: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def extend(self, ids: Sequence[int], shortest: int) -> None:
        for token in ids:
            if len(self.ids) >= shortest:  # something stands after them now
                self.places.setdefault(tuple(self.ids[-shortest:]), []).append(len(self.ids))
            self.ids.append(token)


class SiblingDrafter:
    """Drafts from the group's other responses, as far as they are known; see the top of the module. A `Drafter`.

    A prompt's group are its `group` latest requests, in the order in which they started: what is older is forgotten, as is
    everything of a prompt by `forget`. Responses that are over stay in it. `own` drafts from the response's own text too.
    """

    def __init__(self, group: int, own: bool = False, shortest: int = SHORTEST, longest: int = LONGEST) -> None:
        if group < 1 or not 1 <= shortest <= longest:
            raise InputError(
                f"siblings: group {group}, shortest {shortest}, longest {longest}; let 1 <= group and 1 <= shortest <= longest"
            )
        self._group, self._own, self._shortest, self._longest = group, own, shortest, longest
        self._texts: dict[int, list[_Text]] = {}  # by prompt
        self._running: dict[int, tuple[int, _Text]] = {}

    def start_request(self, request: int, prompt_id: int, prompt_ids: Tokens | None = None) -> None:
        text = _Text()
        self._running[request] = prompt_id, text
        texts = self._texts.setdefault(prompt_id, [])
        texts.append(text)
        del texts[: -self._group]

    def propose(self, requests: Sequence[int], most_tokens: Sequence[int]) -> list[Tokens]:
        return [self._draft(*self._running[r], most) for r, most in zip(requests, most_tokens, strict=True)]

    def observe(self, request: int, token_ids: Tokens) -> None:
        self._running[request][1].extend(token_ids.tolist(), self._shortest)

    def stop_request(self, request: int) -> None:
        del self._running[request]

    def forget(self, prompt_id: int) -> None:
        """Drops the prompt's responses, such as those of an epoch that is over; those that run draft from later ones."""
        self._texts.pop(prompt_id, None)

    def _draft(self, prompt_id: int, text: _Text, most_tokens: int) -> Tokens:
        ids = text.ids
        if len(ids) < self._shortest:
            return _NO_TOKENS
        key = tuple(ids[-self._shortest :])
        best, best_length, source = 0, 0, ids
        for sibling in self._texts.get(prompt_id, ()):
            if sibling is text and not self._own:
                continue
            for place in reversed(sibling.places.get(key, ())[-LOOKS_BACK:]):
                length = self._shortest
                furthest = min(self._longest, place, len(ids))
                while length < furthest and sibling.ids[place - length - 1] == ids[-length - 1]:
                    length += 1
                if length > best_length:
                    best, best_length, source = place, length, sibling.ids
        return np.array(source[best : best + most_tokens] if best_length else [], dtype=np.int32)
