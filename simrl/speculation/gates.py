"""Gates decide when a worker speculates at all: HistoSpec's batch gate from a profile, and TLT's
elastic threshold.

Invariant: a gate looks at the running batch and at the outcome of earlier drafts, never at a clock
or at the future.

HistoSpec (RhymeRL, arXiv 2508.18588, §5.4) profiles beforehand up to which batch speculating pays
at each acceptance rate (accepted over drafted tokens), and stops while the batch is larger. While
the gate is shut earlier passes are forgotten one by one: it opens again for a smaller batch, or
when too little is remembered to keep it shut. (The paper does not say how a worker that has stopped
resumes.)

TLT (arXiv 2511.16665, §5.1; code fastrl) speculates once few requests are left, and then to the end
of the rollout.
"""

from __future__ import annotations

import numpy as np

from simrl.errors import InputError
from simrl.profile.compiled import kernel
from simrl.profile.interpolation import interpolate4
from simrl.profile.profile import TableProfile
from simrl.speculation.draft_times import DraftTimes
from simrl.speculation.matching import Floats, Ints
from simrl.speculation.passes import next_window
from simrl.speculation.windows import WindowRule

RATES = 101  # acceptance rates that a gate's table knows: 0, 1, … 100 %
ELASTIC_OFF, ELASTIC_ON = 0, -1


def batch_gate(
    profile: TableProfile,
    draft_times: DraftTimes,
    rule: WindowRule,
    kv_tokens: float,
    most_sequences: int,
    most_tokens: int,
) -> Ints:
    """Return the largest batch at which speculating yields more tokens per second than plain
    decoding, for acceptance rates of 0, 1, … 100 %; 0 where no batch does. Shape (101,).

    Every sequence of the batch, `kv_tokens` long, drafts the mean length of `typical_drafts`.
    Batches go up to `most_sequences`. A pass has room for `most_tokens` (fewer, if the profile
    ends there): of a batch whose drafts do not fit, those that fit are verified and the others
    wait, as in vLLM's scheduler. Where speculation pays at some batches but not at smaller ones
    (the cache of many long sequences is read once for several tokens), the smaller ones count as
    paying: a gate has one threshold. Raise `InputError` where the profile or the draft times do
    not cover `most_sequences` or `kv_tokens`.
    """
    profile.require_covers(most_sequences, most_sequences, int(kv_tokens))
    if most_sequences < 1 or most_sequences > draft_times.sequences[-1]:
        raise InputError(
            f"batch gate: up to {most_sequences} sequences, draft times are given for 1 to {draft_times.sequences[-1]:.0f}"
        )
    t = profile.even
    room = min(most_tokens, t.dense_tokens[-1], t.sampled_sequences[-1])
    batches = np.arange(1.0, most_sequences + 1)
    attention_s = np.array(
        [interpolate4(*t[4:9], (0.0, 0.0, b, float(kv_tokens))) for b in batches]
    )
    round_s, step_s = (
        np.interp(batches, draft_times.sequences, s)
        for s in (draft_times.round_s, draft_times.step_s)
    )

    def pass_s(sequences: Floats, positions: Floats) -> Floats:
        dense_s = np.interp(positions, t.dense_tokens, t.dense_s)
        sampled_s = np.interp(positions, t.sampled_sequences, t.sampled_s)
        kernels_s = dense_s + sampled_s + np.interp(sequences, batches, attention_s)
        launched_s = t.least_pass_s + t.least_sequence_s * sequences
        return np.maximum(kernels_s, launched_s) + t.between_passes_s

    plain_s = pass_s(batches, batches)
    thresholds = np.zeros(RATES, dtype=np.int64)
    for percent, drafted in enumerate(typical_drafts(rule)):
        verified = np.minimum(batches, max(room // (drafted + 1.0), 1.0))
        round_trip_s = pass_s(verified, verified * (drafted + 1.0)) + round_s + drafted * step_s
        tokens = verified * (1.0 + percent / 100.0 * drafted)
        pays = tokens * plain_s > batches * round_trip_s
        thresholds[percent] = int(batches[pays].max()) if pays.any() else 0
    return thresholds


def typical_drafts(rule: WindowRule) -> Floats:
    """Return the mean length of drafts, in tokens, that a window settles at where 0, 1, … 100 % of
    drafted tokens are accepted.

    Tokens are each accepted with a probability p if all before them are: the window is then a
    Markov chain whose stationary distribution gives the mean length and the acceptance rate; p is
    chosen to give each rate. Shape (101,)."""
    p = np.linspace(0.0, 1.0, 2001)
    drafted, accepted = _stationary(rule, p)
    rates = np.maximum.accumulate(accepted / drafted)
    first = np.r_[True, np.diff(rates) > 0]
    return np.interp(np.arange(RATES) / (RATES - 1), rates[first], drafted[first])


def _stationary(rule: WindowRule, p: Floats) -> tuple[Floats, Floats]:
    """Return the mean tokens drafted and accepted in a pass where each token is accepted with
    probability p; drafts fill the window."""
    windows, following = [rule.start_tokens], []
    for window in windows:  # grows while it is walked
        after = [
            int(next_window(rule, window, window, accepted)) for accepted in (window, window - 1)
        ]
        windows += [w for w in dict.fromkeys(after) if w not in windows]
        following.append([windows.index(w) for w in after])
    # Each row of the system: the flow out of a window equals the flow into it; the last row: the
    # shares sum to one.
    system = np.zeros((p.size, len(windows), len(windows)))
    for i, (grown, reset) in enumerate(following):
        system[:, grown, i] += p ** windows[i]
        system[:, reset, i] += 1.0 - p ** windows[i]
        system[:, i, i] -= 1.0
    system[:, -1, :] = 1.0
    ones = np.zeros((p.size, len(windows), 1))
    ones[:, -1] = 1.0
    share = np.linalg.solve(system, ones)[:, :, 0].astype(np.float64)
    accepted = np.stack([(p[:, None] ** np.arange(1, w + 1)).sum(axis=1) for w in windows], axis=1)
    return share @ np.array(windows, dtype=np.float64), (share * accepted).sum(axis=1)


@kernel
def gate_allows(
    thresholds: Ints, recently_drafted: float, recently_accepted: float, batch: int
) -> bool:
    """Return whether a pass over `batch` running requests speculates, by `batch_gate` and the
    recently drafted and accepted tokens (counts that fade, so floats). With less than one recent
    draft token, acceptance counts as perfect: without a try nothing is learnt."""
    rate = recently_accepted / recently_drafted if recently_drafted >= 1.0 else 1.0
    return batch <= thresholds[int(rate * (RATES - 1) + 0.5)]


@kernel
def next_elastic(state: int, running: int, threshold: int, patience: int) -> int:
    """Return the state after a pass that only decodes `running` requests: `ELASTIC_ON`, or the
    number of consecutive small passes. Speculation begins after the pass that makes it
    `ELASTIC_ON`, when the drafter has computed the caches of all running requests (TLT §6.4: at
    most 3 s). A pass that prefills is not counted. Once on, it stays on, however many requests
    come, until its owner sets `ELASTIC_OFF` for the next rollout (fastrl's eagle_worker)."""
    if state == ELASTIC_ON:
        return ELASTIC_ON
    if running > threshold:
        return ELASTIC_OFF
    return ELASTIC_ON if state + 1 >= patience else state + 1
