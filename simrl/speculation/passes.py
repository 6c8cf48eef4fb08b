"""The passes that recorded runs and a window rule make of each response, and what the hits among them look like.

Invariant: a response is decoded from its first to its last token, each token once: accepted from a draft, or yielded by a pass
besides. Its first token comes with its prompt, so decoding begins at the second. A window sees what it would see in an engine.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from simrl.speculation.drafter import AcceptRuns
from simrl.speculation.matching import Ints
from simrl.speculation.windows import WindowRule, next_window

Bytes = NDArray[np.uint8]


class Passes(NamedTuple):
    """What decoding took, row by row; arrays (rows,). `tokens` are those decoded: all but the first of a response."""

    tokens: Ints
    passes: Ints
    verifications: Ints  # passes that had a draft
    drafted: Ints
    accepted: Ints

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens of those drafted; NaN where none was."""
        return _share(self.accepted, self.drafted)

    @property
    def speculation_rate(self) -> float:
        """Tokens that came from drafts, of all that were decoded."""
        return _share(self.accepted, self.tokens)

    @property
    def accept_length(self) -> float:
        """Tokens that a pass yields, those without a draft included."""
        return _share(self.tokens, self.passes)

    def of(self, rows: NDArray[np.bool_]) -> Passes:
        """Those of some rows."""
        return Passes(*(column[rows] for column in self))


def _share(part: Ints, whole: Ints) -> float:
    total = int(whole.sum())
    return int(part.sum()) / total if total else float("nan")


def run_passes(runs: AcceptRuns, response_tokens: Ints, rule: WindowRule) -> Passes:
    """Decodes every response alone, drafting in every pass as far as its window goes."""
    return Passes(*_run_passes(*runs, response_tokens.astype(np.int64), rule))


@njit(cache=True)
def _run_passes(
    first: Ints, drafted: Bytes, accepted: Bytes, response_tokens: Ints, rule: WindowRule
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    rows = response_tokens.shape[0]
    out = np.zeros((5, rows), dtype=np.int64)
    for row in range(rows):
        p, end = 1, response_tokens[row]
        out[0, row] = end - 1
        window = rule.start_tokens
        while p < end:
            d, a = 0, 0
            if first[row] >= 0:
                d = min(int(drafted[first[row] + p]), window)
                a = min(int(accepted[first[row] + p]), d)
                window = next_window(rule, window, d, a)
            out[1, row] += 1
            out[2, row] += d > 0
            out[3, row] += d
            out[4, row] += a
            p += a + 1
    return out[0], out[1], out[2], out[3], out[4]


class Stretches(NamedTuple):
    """Each response as stretches that its drafter knows and gaps that it does not, in turn; arrays (stretches,).

    `hit[i]` tokens are what the drafts give, `gap[i]` tokens before them are generated. A stretch is followed as long as whole
    drafts are accepted and the next one hits, so it may be longer than a draft; the token that follows it was drafted wrong, or
    not at all, and is the first of the next gap. The last of a row has `hit` 0 where the response ends with a gap.
    """

    row: Ints
    gap: Ints
    hit: Ints


def stretches(runs: AcceptRuns, response_tokens: Ints) -> Stretches:
    """The stretches and gaps of the rows for which there are drafts, as a window without limits would see them."""
    return Stretches(*_stretches(*runs, response_tokens.astype(np.int64)))


@njit(cache=True)
def _stretches(first: Ints, drafted: Bytes, accepted: Bytes, response_tokens: Ints) -> tuple[Ints, Ints, Ints]:
    number = 0
    for row in range(response_tokens.shape[0]):
        number += response_tokens[row] // 2 + 1  # a stretch and the token after it are at least two
    rows, gaps, hits = np.empty(number, np.int64), np.empty(number, np.int64), np.empty(number, np.int64)
    n = 0
    for row in range(response_tokens.shape[0]):
        at, p, end = first[row], 1, response_tokens[row]
        gap = 0
        while at >= 0 and p < end:
            hit = 0
            while p + hit < end and accepted[at + p + hit] > 0:
                a = int(accepted[at + p + hit])
                whole = a == drafted[at + p + hit]
                hit += a
                if not whole:
                    break
            if hit:
                rows[n], gaps[n], hits[n] = row, gap, hit
                n += 1
                p += hit + 1
                gap = 1
            else:
                p += 1
                gap += 1
        if at >= 0 and gap > (p > end):
            rows[n], gaps[n], hits[n] = row, gap - (p > end), 0
            n += 1
    return rows[:n], gaps[:n], hits[:n]
