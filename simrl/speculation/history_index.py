"""Index of one prompt's old responses, which finds the tokens that followed a few others
(HistoSpec, RhymeRL §5.3).

Invariant: an index is one self-contained array of int32: it can be saved, mapped from disk or sent
as it is.

    sizes | text | order | weights | directory

`text` is the responses, a -1 after each, so that no match and no draft crosses from one into
another. `order` is its suffix array: the places of the text, sorted by the `SORTED_TOKENS` tokens
that begin there. A node of the paper's suffix tree is an interval of `order`; the count of its
branch is its length, and the sum of the rewards is a difference of two `weights` (cumulative,
modulo 2³²). `directory` is a hash table from a run of three tokens to its first place in `order`.
12 bytes a token (8 where rewards are equal), and 5⅓ for each distinct run of three.

Sorting is by prefix doubling (Manber and Myers; groups of one are left alone, as in Larsson and
Sadakane), from as many tokens as fit into 63 bits: three for a vocabulary of up to 2 M.

A draft is the tokens after the longest match of the response's last tokens that has a continuation,
greedily down the tree: a place in the text and a length.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simrl.errors import InputError, refuse
from simrl.profile.compiled import threaded
from simrl.speculation.choices import LARGEST_TOKEN_ID, RUN_TOKENS, SORTED_TOKENS, HistoryRule
from simrl.speculation.drafter import Tokens
from simrl.speculation.matching import joined

_SIZES = 3  # text tokens (with the ends), slots of the directory, 1 if there are weights
_ENDS = -1
_MODULO = 0xFFFFFFFF


PAPER = HistoryRule()
# verl recipe specRL/histoSpec
PUBLIC_CODE = HistoryRule(
    shortest_match_tokens=4, branch="count", least_probability=0.1, prompt_tail_tokens=5
)


def build_index(responses: Sequence[Tokens], rewards: ArrayLike | None = None) -> Tokens:
    """Return the index of these responses: one array of int32.

    If a reward is below 0, all rewards of the prompt are shifted so that the lowest is 0: raw sums
    would prefer a rare branch to one that often failed and often succeeded. An unknown reward (NaN)
    counts as 0. Where all rewards are equal, counts decide. Raise `InputError` for ids that are
    negative or beyond `LARGEST_TOKEN_ID`, and if rewards and responses differ in number.
    """
    text, begins = joined(responses)
    largest = int(text.max(initial=0))
    if largest > LARGEST_TOKEN_ID or np.count_nonzero(text < 0) > len(responses):
        raise InputError(
            f"history: a response holds a token id below 0 or above {LARGEST_TOKEN_ID}; give vocabulary ids"
        )
    weights = _weights(rewards, len(responses), len(text))
    bits = (largest + 1).bit_length()
    width = min(63 // bits, SORTED_TOKENS)
    keys = _keys(text, bits, width)
    # Equal keys are sorted deeper, by place in the end, unless the keys are that deep already.
    order = np.argsort(keys, kind="stable" if width == SORTED_TOKENS else "quicksort")
    return _build(text, begins[1:], weights, keys[order], order.astype(np.int32), bits, width)


def text_of(index: Tokens) -> Tokens:
    """Return the responses in an index, a -1 after each; a view."""
    return index[_SIZES : _SIZES + index[0]]


def _weights(rewards: ArrayLike | None, responses: int, tokens: int) -> NDArray[np.int64]:
    """Return whole numbers in proportion to the rewards; none where all are equal."""
    if rewards is None:
        return np.empty(0, dtype=np.int64)
    values = np.asarray(rewards, dtype=np.float64)
    if values.shape != (responses,):
        raise InputError(
            f"history: {values.size} rewards for {responses} responses; give one for each"
        )
    values = np.where(np.isnan(values), 0.0, values)
    refuse((not np.isfinite(values).all(), "history: a reward is infinite; give finite ones"))
    if responses == 0 or values.min() == values.max():
        return np.empty(0, dtype=np.int64)
    values = values - min(0.0, float(values.min()))
    levels = min(65_535, _MODULO // max(tokens, 1))
    return np.rint(values / values.max() * levels).astype(np.int64)


@threaded
def _keys(text: Tokens, bits: int, width: int) -> NDArray[np.int64]:
    """Return for each place of the text the `width` tokens that begin there, as one number of
    `bits` a token."""
    keys = np.empty(text.shape[0], np.int64)
    key = np.int64(0)
    for i in range(text.shape[0] - 1, -1, -1):
        key = (key >> bits) | (np.int64(text[i] + 1) << (bits * (width - 1)))
        keys[i] = key
    return keys


@threaded
def _build(
    text: Tokens,
    ends: NDArray[np.int64],
    weights: NDArray[np.int64],
    keys: NDArray[np.int64],
    order: Tokens,
    bits: int,
    width: int,
) -> Tokens:
    """Return the index of a text whose places are sorted by their `keys`."""
    n = text.shape[0]
    runs = _sort_suffixes(order, keys, bits, width)
    slots = runs.shape[0] * 4 // 3 + 1
    weighted = weights.shape[0] > 0
    index = np.empty(_SIZES + 2 * n + (n + 1 if weighted else 0) + slots, np.int32)
    index[0], index[1], index[2] = n, slots, weighted
    index[_SIZES : _SIZES + n] = text
    index[_SIZES + n : _SIZES + 2 * n] = order
    if weighted:
        of_place = np.empty(n, np.int32)
        begin = 0
        for r in range(ends.shape[0]):
            of_place[begin : ends[r]] = weights[r]
            begin = ends[r]
        total = 0
        cumulative = index[_SIZES + 2 * n : _SIZES + 3 * n + 1]
        for j in range(n):
            cumulative[j] = np.int32(total)
            total += of_place[order[j]]
        cumulative[n] = np.int32(total)
    directory = index[index.shape[0] - slots :]
    directory[:] = -1
    for j in runs:
        i = order[j]
        slot = _slot(text[i], text[i + 1], text[i + 2], slots)
        while directory[slot] >= 0:
            slot = slot + 1 if slot + 1 < slots else 0
        directory[slot] = j
    return index


@threaded
def _sort_suffixes(order: Tokens, keys: NDArray[np.int64], bits: int, width: int) -> Tokens:
    """Sort places, which are in the order of their `keys`, by their suffixes; return where each run
    of three tokens begins."""
    n = order.shape[0]
    # The groups of equal keys; `rank` of a place is where its group begins, and past the text less
    # than any.
    rank = np.full(n + SORTED_TOKENS, -1, np.int32)
    begins, ends = np.empty(n // 2 + 1, np.int32), np.empty(n // 2 + 1, np.int32)
    runs = np.empty(n, np.int32)
    groups, number = 0, 0
    low_bits = (1 << bits) - 1
    run_shift = bits * (width - RUN_TOKENS)
    begin = 0
    for j in range(n):
        if j > 0 and keys[j] != keys[j - 1]:
            if j - begin > 1:
                begins[groups], ends[groups] = begin, j
                groups += 1
            begin = j
        rank[order[j]] = begin
        run = keys[j] >> run_shift
        whole = (
            run & low_bits and (run >> bits) & low_bits and run >> (2 * bits)
        )  # no response ends in it
        if whole and (j == 0 or run != keys[j - 1] >> run_shift):
            runs[number] = j
            number += 1
    if n - begin > 1:
        begins[groups], ends[groups] = begin, n
        groups += 1
    _sort_deeper(order, rank, begins, ends, groups, width, keys)
    return runs[:number]


@threaded
def _sort_deeper(
    order: Tokens,
    rank: Tokens,
    begins: Tokens,
    ends: Tokens,
    groups: int,
    depth: int,
    scratch: NDArray[np.int64],
) -> None:
    """Sort within the groups, which are equal to `depth` tokens, until they are sorted to
    `SORTED_TOKENS`."""
    more_begins, more_ends = np.empty_like(begins), np.empty_like(ends)
    while depth < SORTED_TOKENS and groups > 0:
        more = 0
        for g in range(groups):
            begin, end = begins[g], ends[g]
            size = end - begin
            for j in range(size):
                i = order[begin + j]
                scratch[j] = (np.int64(rank[i + depth]) << 32) | np.int64(i)
            if size <= 24:
                for a in range(1, size):
                    x = scratch[a]
                    b = a
                    while b > 0 and scratch[b - 1] > x:
                        scratch[b] = scratch[b - 1]
                        b -= 1
                    scratch[b] = x
            else:
                scratch[:size].sort()
            part = 0
            for j in range(size):
                if j > 0 and scratch[j] >> 32 != scratch[j - 1] >> 32:
                    if j - part > 1:
                        more_begins[more], more_ends[more] = begin + part, begin + j
                        more += 1
                    part = j
                i = np.int32(scratch[j] & _MODULO)
                order[begin + j] = i
                rank[i] = begin + part
            if size - part > 1:
                more_begins[more], more_ends[more] = begin + part, end
                more += 1
        begins, more_begins = more_begins, begins
        ends, more_ends = more_ends, ends
        groups = more
        depth *= 2


@threaded
def _slot(a: int, b: int, c: int, slots: int) -> int:
    """Return the slot where the directory begins to look for these three tokens."""
    z = np.uint64(a) * np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64(b) * np.uint64(0xC2B2AE3D27D4EB4F)
    z += np.uint64(c) * np.uint64(0x165667B19E3779F9)
    z ^= z >> np.uint64(32)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    return int(np.int64(((z >> np.uint64(32)) * np.uint64(slots)) >> np.uint64(32)))


@threaded
def find_draft(
    index: Tokens,
    tokens: Tokens,
    begin: int,
    end: int,
    most_tokens: int,
    rule: tuple[int, int, bool, float],
) -> tuple[int, int]:
    """Return the place in `index` of the draft after tokens[begin:end], and its length."""
    longest, shortest, by_reward, least_probability = rule
    for length in range(min(longest, end - begin), shortest - 1, -1):
        first, last = _node(index, tokens, end - length, length)
        if first < last:
            return _path(index, first, last, length, most_tokens, by_reward, least_probability)
    return 0, 0


@threaded
def _node(index: Tokens, tokens: Tokens, q: int, length: int) -> tuple[int, int]:
    """Return the interval of `order` that begins with tokens[q : q + length] and has a
    continuation; else an empty one."""
    n, slots = index[0], index[1]
    text, order = index[_SIZES : _SIZES + n], index[_SIZES + n : _SIZES + 2 * n]
    directory = index[index.shape[0] - slots :]
    a, b, c = tokens[q], tokens[q + 1], tokens[q + 2]
    slot = _slot(a, b, c, slots)
    while True:
        first = int(directory[slot])
        if first < 0:
            return 0, 0
        i = order[first]
        if text[i] == a and text[i + 1] == b and text[i + 2] == c:
            break
        slot = slot + 1 if slot + 1 < slots else 0
    first = _first_beyond(text, order, first, n, 0, tokens, q, length, 0)
    if first == n or _compared(text, order[first], tokens, q, length) != 0:
        return 0, 0
    last = _first_beyond(text, order, first, n, 0, tokens, q, length, 1)
    if text[order[last - 1] + length] == _ENDS:  # ends sort first: nothing follows anywhere
        return 0, 0
    return first, last


@threaded
def _first_beyond(
    text: Tokens,
    order: Tokens,
    first: int,
    last: int,
    depth: int,
    tokens: Tokens,
    q: int,
    length: int,
    least: int,
) -> int:
    """Return the first j of first … last - 1 where the suffix order[j], from its token `depth` on,
    compares at `least`, 0 or 1, or above, else `last`: by doubling, then halving steps."""
    if _compared(text, order[first] + depth, tokens, q, length) >= least:
        return first
    below, step = first, 1
    while (
        below + step < last
        and _compared(text, order[below + step] + depth, tokens, q, length) < least
    ):
        below += step
        step *= 2
    beyond = min(below + step, last)
    while beyond - below > 1:
        middle = (below + beyond) // 2
        if _compared(text, order[middle] + depth, tokens, q, length) < least:
            below = middle
        else:
            beyond = middle
    return beyond


@threaded
def _compared(text: Tokens, i: int, tokens: Tokens, q: int, length: int) -> int:
    """Compare the suffix at i with `length` tokens from q on: -1 if less, 0 if equal, 1 if more. An
    end differs from any token, so the comparison stays in the text."""
    for k in range(length):
        if text[i + k] != tokens[q + k]:
            return 1 if text[i + k] > tokens[q + k] else -1
    return 0


@threaded
def _path(
    index: Tokens,
    first: int,
    last: int,
    depth: int,
    most_tokens: int,
    by_reward: bool,
    least_probability: float,
) -> tuple[int, int]:
    """Return the way down from order[first:last], whose first `depth` tokens agree: its place in
    `index`, and its length."""
    n = index[0]
    text, order = index[_SIZES : _SIZES + n], index[_SIZES + n : _SIZES + 2 * n]
    weighted = by_reward and index[2] == 1
    cumulative = _SIZES + 2 * n
    probability, most = 1.0, depth + most_tokens
    at = depth
    while at < most:
        low, high = text[order[first] + at], text[order[last - 1] + at]
        if high == _ENDS:
            break
        if low != high:
            all_of_them = last - first
            best_weight, best_count, best = np.int64(-1), 0, first
            part = (
                first
                if low != _ENDS
                else _first_beyond(text, order, first, last, at, text, order[first] + at, 1, 1)
            )
            while part < last:
                end = _first_beyond(text, order, part, last, at, text, order[part] + at, 1, 1)
                weight = np.int64(0)
                if weighted:
                    weight = (
                        np.int64(index[cumulative + end]) - np.int64(index[cumulative + part])
                    ) & _MODULO
                if weight > best_weight or (weight == best_weight and end - part > best_count):
                    best_weight, best_count, best = weight, end - part, part
                part = end
            probability *= best_count / all_of_them
            if probability < least_probability:
                break
            first, last = best, best + best_count
        at += 1
    return _SIZES + int(order[first]) + depth, at - depth


@threaded
def accept_runs_of(
    index: Tokens,
    tokens: Tokens,
    rows: NDArray[np.int64],
    most_tokens: int,
    rule: tuple[int, int, bool, float],
    drafted: NDArray[np.uint8],
    accepted: NDArray[np.uint8],
    tail_tokens: int = 0,
) -> None:
    """Fill `drafted` and `accepted` for responses to the prompt of `index`: rows of (begin in
    `tokens`, end, begin in `drafted`); see `AcceptRuns`. The `tail_tokens` before a response are
    matched, too."""
    for r in range(rows.shape[0]):
        begin, end, out = rows[r, 0], rows[r, 1], rows[r, 2]
        for p in range(begin, end):
            start, size = find_draft(index, tokens, begin - tail_tokens, p, most_tokens, rule)
            right = 0
            while right < size and p + right < end and index[start + right] == tokens[p + right]:
                right += 1
            drafted[out + p - begin] = size
            accepted[out + p - begin] = right
