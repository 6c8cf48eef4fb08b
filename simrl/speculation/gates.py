"""When a worker speculates at all: HistoSpec's batch gate from a profile, and TLT's elastic threshold.

Invariant: a gate looks at the running batch and at what became of earlier drafts, never at a clock or at what is to come.

HistoSpec (RhymeRL, arXiv 2508.18588, §5.4) profiles beforehand up to which batch speculating pays at each acceptance rate, and
stops while the batch is larger. Its acceptance rate is accepted over drafted tokens, so a pass yields 1 + rate × drafted tokens
of each response, whatever the distribution behind it; how many are drafted follows from the window's rule. While the gate is
shut nothing is learnt, and what was is forgotten pass by pass: a smaller batch opens the gate again, or that too little is
remembered to keep it shut, and then it tries anew. (The paper does not say how a worker that has stopped finds out.)

TLT (arXiv 2511.16665, §5.1; code fastrl) speculates once few requests are left, and then to the end of the rollout.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from simrl.errors import InputError
from simrl.interpolation import interpolate4
from simrl.profile import TableProfile
from simrl.speculation.draft_times import DraftTimes
from simrl.speculation.windows import WindowRule, next_window

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

RATES = 101  # acceptance rates that a gate's table knows: 0, 1, … 100 %
ELASTIC_OFF, ELASTIC_ON = 0, -1


def batch_gate(
    profile: TableProfile,
    draft_times: DraftTimes,
    rule: WindowRule,
    kv_tokens: float,
    most_sequences: int,
    most_query_tokens: int | None = None,
    gain: float = 1.0,
) -> Ints:
    """The largest batch at which speculating yields more than `gain` times the tokens per second of plain decoding, for
    acceptance rates of 0, 1, … 100 %; 0 where no batch does. Shape (101,).

    Drafts have the mean length of `typical_drafts`; sequences are `kv_tokens` long, a typical number; every sequence of the
    batch drafts. Batches go up to `most_sequences`, verified tokens up to `most_query_tokens` (default: what the profile
    covers). Where speculation pays at some batches but not at smaller ones (the cache of many long sequences is read once for
    several tokens), the smaller ones count as paying: a gate has one threshold. Raises `InputError` where the profile or the
    draft times do not cover `most_sequences` or `kv_tokens`.
    """
    profile.require_covers(most_sequences, most_sequences, int(kv_tokens))
    if most_sequences < 1 or most_sequences > draft_times.sequences[-1]:
        raise InputError(
            f"batch gate: up to {most_sequences} sequences, draft times are given for 1 to {draft_times.sequences[-1]:.0f}"
        )
    t = profile.tables
    covered = min(t.dense_tokens[-1], t.sampled_sequences[-1])
    most_tokens = covered if most_query_tokens is None else min(covered, most_query_tokens)
    batches = np.arange(1.0, most_sequences + 1)
    attention_s = np.array([interpolate4(*t[4:9], (0.0, 0.0, b, float(kv_tokens))) for b in batches])
    round_s, step_s = (np.interp(batches, draft_times.sequences, s) for s in (draft_times.round_s, draft_times.step_s))

    def pass_s(positions: Floats) -> Floats:
        dense_s = np.interp(positions, t.dense_tokens, t.dense_s)
        sampled_s = np.interp(positions, t.sampled_sequences, t.sampled_s)
        return np.maximum(dense_s + sampled_s + attention_s, t.least_pass_s) + t.between_passes_s

    plain_s = pass_s(batches)
    thresholds = np.zeros(RATES, dtype=np.int64)
    for percent, drafted in enumerate(typical_drafts(rule)):
        positions = batches * (drafted + 1.0)
        round_trip_s = pass_s(positions) + round_s + drafted * step_s
        tokens = 1.0 + percent / 100.0 * drafted
        pays = (tokens * plain_s > gain * round_trip_s) & (positions <= most_tokens)
        thresholds[percent] = int(batches[pays].max()) if pays.any() else 0
    return thresholds


def typical_drafts(rule: WindowRule) -> Floats:
    """The mean length of drafts, in tokens, that a window settles at where 0, 1, … 100 % of the drafted tokens are accepted.

    Found for tokens that are each accepted with a probability p if all before them are: the window is then a Markov chain whose
    stationary distribution gives the mean length and the acceptance rate; p is what gives the rate asked for. Shape (101,).
    """
    p = np.linspace(0.0, 1.0, 2001)
    drafted, accepted = _stationary(rule, p)
    rates = np.maximum.accumulate(accepted / drafted)
    first = np.r_[True, np.diff(rates) > 0]
    return np.interp(np.arange(RATES) / (RATES - 1), rates[first], drafted[first])


def _stationary(rule: WindowRule, p: Floats) -> tuple[Floats, Floats]:
    """Mean tokens drafted and accepted in a pass where each token is accepted with probability p; drafts fill the window."""
    windows = [rule.start_tokens]
    for window in windows:  # grows while it is walked
        for accepted in (window, window - 1):
            following = int(next_window(rule, window, window, accepted))
            if following not in windows:
                windows.append(following)
    # Each row of the system: what leaves a window is what comes to it; the last row: the shares sum to one.
    system = np.zeros((p.size, len(windows), len(windows)))
    for i, window in enumerate(windows):
        system[:, windows.index(int(next_window(rule, window, window, window))), i] += p**window
        system[:, windows.index(int(next_window(rule, window, window, window - 1))), i] += 1.0 - p**window
        system[:, i, i] -= 1.0
    system[:, -1, :] = 1.0
    ones = np.zeros((p.size, len(windows), 1))
    ones[:, -1] = 1.0
    share = np.linalg.solve(system, ones)[:, :, 0]
    accepted_by_window = np.stack([(p[:, None] ** np.arange(1, w + 1)).sum(axis=1) for w in windows], axis=1)
    drafted, accepted_tokens = share @ np.array(windows, dtype=np.float64), (share * accepted_by_window).sum(axis=1)
    return np.asarray(drafted, dtype=np.float64), np.asarray(accepted_tokens, dtype=np.float64)


@njit(cache=True)
def gate_allows(thresholds: Ints, late_drafted: float, late_accepted: float, batch: int) -> bool:
    """Whether a pass over `batch` running requests speculates, by `batch_gate` and the tokens drafted and accepted of late
    (counts that fade, so floats). With less than one draft token of late, acceptance counts as perfect: without a try nothing
    is learnt."""
    rate = late_accepted / late_drafted if late_drafted >= 1.0 else 1.0
    return batch <= thresholds[int(rate * (RATES - 1) + 0.5)]


class Elastic(BaseModel):
    """TLT's elastic threshold; see `next_elastic`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    threshold: int = Field(default=32, ge=1, description="running requests at most (paper §5.1, code bs_threshold)")
    patience: int = Field(default=10, ge=1, description="consecutive decode passes so small before it starts (code)")


@njit(cache=True)
def next_elastic(state: int, running: int, threshold: int, patience: int) -> int:
    """The state after a pass that only decodes `running` requests: `ELASTIC_ON`, or how many such passes in a row were small.

    Speculation begins after the pass that makes it `ELASTIC_ON`: that one was still plain, and after it the drafter has to
    compute the caches of all that runs (TLT §6.4: at most 3 s). A larger batch starts the count anew; a pass that prefills is
    not counted and changes nothing. Once on, it stays on, however many requests come, until its owner sets `ELASTIC_OFF` for
    the next rollout (fastrl's eagle_worker).
    """
    if state == ELASTIC_ON:
        return ELASTIC_ON
    if running > threshold:
        return ELASTIC_OFF
    return ELASTIC_ON if state + 1 >= patience else state + 1
