"""The passes of each response for recorded runs and a window rule, and the hits among them.

Invariant: each token of a response is decoded once: accepted from a draft, or yielded by the pass
itself. The first comes with the prompt, so decoding begins at the second. A window sees what it
would see in an engine.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simrl.profile.compiled import kernel
from simrl.speculation.drafter import AcceptRuns
from simrl.speculation.matching import Ints
from simrl.speculation.windows import AIMD, MIMD, WindowRule


class Passes(NamedTuple):
    """The counts of decoding by row; arrays (rows,). `tokens` are the decoded ones: all but the
    first of a response."""

    tokens: Ints
    passes: Ints
    verifications: Ints  # passes that had a draft
    drafted: Ints
    accepted: Ints
    wrong: Ints  # passes whose draft had no accepted token
    wrong_tokens: Ints  # of these drafts

    @property
    def acceptance_rate(self) -> float:
        """Return accepted over drafted tokens; NaN where none was drafted."""
        return _share(self.accepted, self.drafted)

    @property
    def speculation_rate(self) -> float:
        """Return the share of decoded tokens that came from drafts."""
        return _share(self.accepted, self.tokens)

    @property
    def accept_length(self) -> float:
        """Return the tokens per pass, with the passes without a draft."""
        return _share(self.tokens, self.passes)

    def of(self, rows: NDArray[np.bool_]) -> Passes:
        """Return the counts of some rows."""
        return Passes(*(column[rows] for column in self))


def _share(part: Ints, whole: Ints) -> float:
    total = int(whole.sum())
    return int(part.sum()) / total if total else float("nan")


def run_passes(runs: AcceptRuns, response_tokens: Ints, rule: WindowRule) -> Passes:
    """Decode every response alone, drafting in every pass up to its window."""
    return Passes(*_run_passes(runs, response_tokens.astype(np.int64), rule))


@kernel
def next_window(rule: WindowRule, window: int, drafted: int, accepted: int) -> int:
    """Return the window after a pass that verified `drafted` tokens and accepted the first
    `accepted`; all in tokens, 0 <= accepted <= drafted <= window.

    AIMD (RhymeRL §5.4): additive increase, reset on a rejection. A fully accepted draft counts as
    success however short it was. The paper does not say what a pass without a draft does: the
    window stays. MIMD (HistoSpec's public code): multiplicative increase after a whole accepted
    window, decrease otherwise: after a rejection, a pass without a draft, and a fully accepted
    draft shorter than the window (the tree ended, or its path became improbable).
    """
    if rule.code == AIMD:
        if drafted == 0:
            return window
        return (
            rule.start_tokens if accepted < drafted else min(window + rule.step, rule.most_tokens)
        )
    if rule.code == MIMD:
        if accepted < window:
            return max(window // rule.step, rule.start_tokens)
        return min(window * rule.step, rule.most_tokens)
    return window


@kernel
def _run_passes(runs: AcceptRuns, response_tokens: Ints, rule: WindowRule) -> Ints:
    out = np.zeros((7, response_tokens.shape[0]), dtype=np.int64)
    for row in range(response_tokens.shape[0]):
        at, p, end = runs.first[row], 1, response_tokens[row]
        out[0, row] = end - 1
        window = rule.start_tokens
        while p < end:
            d, a = 0, 0
            if at >= 0:
                d = min(int(runs.drafted[at + p]), window)
                a = min(int(runs.accepted[at + p]), d)
                window = next_window(rule, window, d, a)
            out[1, row] += 1
            out[2, row] += d > 0
            out[3, row] += d
            out[4, row] += a
            if a == 0:
                out[5, row] += d > 0
                out[6, row] += d
            p += a + 1
    return out


class Stretches(NamedTuple):
    """Each response as gaps that its drafter does not know and stretches that it does, in turn;
    arrays (stretches,).

    `gap[i]` tokens are generated, then `hit[i]` tokens come from drafts. A stretch goes on as long
    as whole drafts are accepted and the next one hits; the token after it is the first of the next
    gap. `hit` is 0 where the response ends with a gap."""

    row: Ints
    gap: Ints
    hit: Ints


def stretches(runs: AcceptRuns, response_tokens: Ints) -> Stretches:
    """Return the stretches and gaps of the rows with drafts, as a window without limits would see
    them."""
    return Stretches(*_stretches(runs, response_tokens.astype(np.int64)))


@kernel
def _stretches(runs: AcceptRuns, response_tokens: Ints) -> Ints:
    # A stretch and the token after it are at least two.
    out = np.empty((3, np.sum(response_tokens // 2 + 1)), dtype=np.int64)
    n = 0
    for row in range(response_tokens.shape[0]):
        at, p, end = runs.first[row], 1, response_tokens[row]
        gap = 0
        while at >= 0 and p < end:
            hit, whole = 0, True
            while whole and p + hit < end and runs.accepted[at + p + hit] > 0:
                a = int(runs.accepted[at + p + hit])
                whole = a == runs.drafted[at + p + hit]
                hit += a
            if hit:
                out[0, n], out[1, n], out[2, n] = row, gap, hit
                n += 1
                gap = 0
            p += hit + 1
            gap += 1
        if at >= 0 and gap > (p > end):
            out[0, n], out[1, n], out[2, n] = row, gap - (p > end), 0
            n += 1
    return out[:, :n]
