"""Drafts from the other responses to a prompt, also from responses that are still running.

Invariant: a draft is read from what the siblings have generated so far at the worker, and from
nothing else; how long a sibling will be, or how it goes on, changes no draft.

TLT's model-free drafter (Taming the Long Tail, arXiv 2511.16665, n-grams over the prompt's own
group) and SRT's tree (arXiv 2601.09083), which is updated online from running siblings, are this
rule with different parts of it. The last `shortest` tokens of a response are looked up in each
sibling. A sibling offers its latest `LOOKS_BACK` occurrences with something after them; the one
that agrees furthest back wins (up to `longest` tokens; then the later one in a sibling, then the
first sibling), and the tokens after it are the draft. `sibling_index` lists in advance where any
`shortest` tokens occur in a group. `replay/simrl_replay/sibling_drafter.py` is the drafter over
tokens as they come.

Without token ids, drafts are drawn from a run model, and a second draw places the text that a draft
repeats: in one of the group's other responses, at most as far as the response itself has come. The
draft is made if that sibling has generated the text at the worker (`drawn_source`). Both draws
hold for `SOURCE_TOKENS` places of the response. So a worker with a part of the group has an equal
part of the drafts: a lower bound, as several siblings may have a text.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simrl.profile.compiled import kernel
from simrl.speculation.acceptance import ModelAcceptance
from simrl.speculation.drafter import MOST_DRAFT_TOKENS, AcceptRuns
from simrl.speculation.draws import mixed, uniform
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
from simrl.speculation.run_model import sample_keys
from simrl.trace.trace import Trace

LOOKS_BACK = 8  # places of a sibling that are compared; bounds the time of a draft
SOURCE_TOKENS = MOST_DRAFT_TOKENS
_SOURCE = (
    -3
)  # the place, under a sample's key, of the key of these draws; -1 and -2 are of its runs


class SiblingIndex(NamedTuple):
    """The places of equal tokens in the responses of a group; 16 bytes a token.

    Row r has the tokens `ids[first[r]:first[r + 1]]`; its group is the rows `group_first[r]` to
    `group_end[r]` (exclusive). `key[first[r] + p]` numbers the `shortest` tokens before position p,
    -1 where there are fewer. The places with the number k are `places[key_first[k]:key_first[k +
    1]]`, rising: sibling by sibling.

    Of a trace without token ids, there are no ids, keys and places; `sample_key[r]` is the key of
    the row's draws.
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
    sample_key: Ints


def sibling_index(trace: Trace, shortest: int = SHORTEST, longest: int = LONGEST) -> SiblingIndex:
    """Return the index of a trace. Raise `InputError` for a trace without token ids of all
    responses."""
    ids, first = token_ids(trace)
    starts, ends = _groups(trace)
    key, key_first, places = _list_places(ids, first, starts, ends, shortest)
    return SiblingIndex(
        ids,
        first,
        *_of_rows(starts, ends),
        key,
        key_first,
        places,
        shortest,
        longest,
        np.zeros(0, dtype=np.int64),
    )


def drawn_sibling_index(trace: Trace, seed: int) -> SiblingIndex:
    """Return the index of a trace without token ids."""
    none, first = (
        np.zeros(0, dtype=np.int32),
        np.r_[0, np.cumsum(trace.column("response_tokens"))].astype(np.int64),
    )
    return SiblingIndex(
        none,
        first,
        *_of_rows(*_groups(trace)),
        none,
        none,
        none,
        SHORTEST,
        LONGEST,
        sample_keys(trace, seed),
    )


def _groups(trace: Trace) -> tuple[Ints, Ints]:
    """Return the first row of each group, and the row after its last."""
    return trace.group_starts, np.r_[trace.group_starts[1:], len(trace)].astype(np.int64)


def _of_rows(starts: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Return the start and the end of the group of each row."""
    return np.repeat(starts, ends - starts), np.repeat(ends, ends - starts)


@kernel
def _list_places(
    ids: Ints32, first: Ints, starts: Ints, ends: Ints, shortest: int
) -> tuple[Ints32, Ints32, Ints32]:
    """Return `key`, `key_first` and `places` of a `SiblingIndex`."""
    key = np.full(ids.shape[0], -1, dtype=np.int32)
    count = np.zeros(ids.shape[0] + 1, dtype=np.int32)  # of key k at k + 1
    most = 0
    for g in range(starts.shape[0]):
        most = max(most, first[ends[g]] - first[starts[g]])
    table = np.empty(table_size(most), dtype=np.int32)  # a place that has the key
    keys = 0
    for g in range(starts.shape[0]):
        size = table_size(first[ends[g]] - first[starts[g]])
        table[:size] = -1
        for row in range(starts[g], ends[g]):
            for place in range(first[row] + shortest, first[row + 1]):
                slot = slot_of(ids, table, size, place, shortest)
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


@kernel
def sibling_draft(
    index: SiblingIndex, row: int, generated: int, known: Ints, most_tokens: int
) -> tuple[int, int]:
    """Return (drafted, accepted) tokens of the draft for a row of the trace that has `generated`
    tokens, 0 <= generated < its length.

    `known[i]` is how many tokens of row `group_first[row] + i` may be read: those that the sibling
    has generated so far at this engine. The row's own entry bounds its own text likewise: 0 for
    siblings alone, at most `generated`. At most `most_tokens` are drafted, and at most what the
    sibling has; the recorded response goes on with `accepted` of them. Allocates nothing.
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
            while (
                length < furthest and index.ids[place - length - 1] == index.ids[here - length - 1]
            ):
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


@kernel
def drawn_source(index: SiblingIndex, row: int, generated: int, reads_own: bool) -> tuple[int, int]:
    """Return the member of its group that a row would draft from, by draws, and the tokens that this
    must have more than; -1 if there is none. The row's own text counts where it may be read."""
    first, members = index.group_first[row], index.group_end[row] - index.group_first[row]
    member_of_row = row - first
    others = members - (not reads_own)
    if others == 0:
        return -1, 0
    key, place = mixed(index.sample_key[row], _SOURCE), 2 * (generated // SOURCE_TOKENS)
    member = int(uniform(key, place) * others)
    if others < members and member >= member_of_row:
        member += 1
    length = index.first[first + member + 1] - index.first[first + member]
    return member, min(int(uniform(key, place + 1) * generated), length - 1)


Known = Literal["lockstep", "finished"]


def sibling_runs(trace: Trace, known: Known = "lockstep") -> AcceptRuns:
    """Return what siblings would draft at every position of every response, without an engine and
    its progress.

    "lockstep": all responses of a group began together and have equally many tokens, or are over.
    "finished": all others are over, an upper bound. A response without siblings has no drafts.
    Raise `InputError` for a trace without token ids."""
    index = sibling_index(trace)
    drafted, accepted = _runs(index, known == "lockstep")
    alone = index.group_end - index.group_first == 1
    return AcceptRuns(np.where(alone, -1, index.first[:-1]), drafted, accepted)


@kernel
def _runs(index: SiblingIndex, lockstep: bool) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
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
            known[row - index.group_first[row]] = 0
            drafted[begin + p], accepted[begin + p] = sibling_draft(
                index, row, p, known, MOST_DRAFT_TOKENS
            )
    return drafted, accepted


@kernel
def _common(ids: Ints32, first: Ints, old: Ints) -> Ints:
    """Return how many tokens each row has in common with row `old[row]` from the beginning; 0 where
    `old[row]` is -1."""
    common = np.zeros(old.shape[0], dtype=np.int64)
    for row in range(old.shape[0]):
        if old[row] >= 0:
            a, b = first[row], first[old[row]]
            common[row] = common_tokens(ids, a, b, min(first[row + 1] - a, first[old[row] + 1] - b))
    return common


class WholeResponseRuns(NamedTuple):
    """SPEC-RL on recorded responses: arrays (rows,), the first two in tokens; all are 0 where a row
    has no old response."""

    old_tokens: Ints  # to verify in one pass
    accepted: Ints  # from the beginning; the response goes on after them
    epochs_ago: Ints  # how many epochs before the old response was generated


def whole_response_runs(
    trace: Trace, kept: ModelAcceptance | None = None, seed: int = 0
) -> WholeResponseRuns:
    """Return what verification of the whole old response accepts (SPEC-RL, arXiv 2509.23232): by
    exact match (lenience 0, lossless), or as drawn from the rates `kept`. The old response has the
    row's prompt and sample number, in the latest earlier epoch that has one. Raise `InputError` for
    a trace without token ids if there are no rates."""
    tokens = trace.column("response_tokens").astype(np.int64)
    old = np.full(len(trace), -1, dtype=np.int64)
    epoch, prompt, sample = (
        trace.column(name).astype(np.int64) for name in ("epoch", "prompt_id", "sample")
    )
    order = np.lexsort((epoch, sample, prompt))
    before, after = order[:-1], order[1:]
    same = (
        (prompt[after] == prompt[before])
        & (sample[after] == sample[before])
        & (epoch[after] > epoch[before])
    )
    old[after[same]] = before[same]
    lengths, ago = (np.where(old >= 0, values, 0) for values in (tokens[old], epoch - epoch[old]))
    if kept is None:
        return WholeResponseRuns(lengths, _common(*token_ids(trace), old), ago)
    luck = [-np.log(uniform(key, 0)) for key in sample_keys(trace, seed)]
    drawn = np.searchsorted(kept.log_acceptances(int(lengths.max(initial=1))), luck)
    return WholeResponseRuns(lengths, np.minimum(drawn, np.minimum(lengths, tokens)), ago)


def old_lengths(trace: Trace, steps: int, step: int) -> Ints:
    """Return the tokens of the old responses to a step's prompts, each with its prompt; none after
    the last of a run's `steps`."""
    _, first, end = trace.step_slices[step % len(trace.step_slices)]
    rates = ModelAcceptance(by_position=(0.5,))  # the lengths do not depend on them
    old = trace.once("old lengths", lambda: whole_response_runs(trace, rates)).old_tokens
    whole = old + trace.column("prompt_tokens").astype(np.int64)
    return whole[first:end][(old[first:end] > 0) & (step < steps)]
