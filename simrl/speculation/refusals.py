"""Fewer drafts accepted than were counted or drawn: what `speculation.acceptance_factor` below 1 does to drafts from texts.

Some tokens of a response are refused wherever they are drafted: each with a probability of 1 - factor, drawn for its place. So
a draft stands up to the first of them. Invariant: a draw belongs to (seed, prompt, epoch, sample, place), whatever drafts; and
what stands at one factor stands at every larger one.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from simrl.speculation.drafter import AcceptRuns
from simrl.speculation.draws import mixed, uniform
from simrl.speculation.matching import Ints
from simrl.speculation.run_model import sample_keys
from simrl.trace import Trace

_REFUSED = -2  # the place, under a sample's key, of the key of these draws; -1 is a run model's


def with_refusals(runs: AcceptRuns, trace: Trace, seed: int, factor: float) -> AcceptRuns:
    """The runs of a trace with a token accepted with this probability where it would have been."""
    if factor >= 1.0:
        return runs
    keys = _keys_of(trace, seed)
    tokens = trace.column("response_tokens").astype(np.int64)
    return runs._replace(accepted=_cut_short(runs.first, runs.accepted, tokens, keys, factor))


def accepted_prefixes(accepted: Ints, trace: Trace, seed: int, factor: float) -> Ints:
    """The same for drafts of a whole response, of which so many tokens were accepted; shape (rows,)."""
    if factor >= 1.0:
        return accepted
    return _prefixes(accepted, _keys_of(trace, seed), factor)


def _keys_of(trace: Trace, seed: int) -> Ints:
    prompt, epoch, sample = (trace.column(name).astype(np.int64) for name in ("prompt_id", "epoch", "sample"))
    return sample_keys(seed, prompt, epoch, sample)


@njit(cache=True)
def _cut_short(first: Ints, accepted: NDArray[np.uint8], tokens: Ints, keys: Ints, factor: float) -> NDArray[np.uint8]:
    out = accepted.copy()
    for row in range(first.shape[0]):
        if first[row] < 0:
            continue
        key, refused = mixed(keys[row], _REFUSED), tokens[row]
        for p in range(tokens[row] - 1, -1, -1):
            if uniform(key, p) >= factor:
                refused = p
            out[first[row] + p] = min(int(out[first[row] + p]), refused - p)
    return out


@njit(cache=True)
def _prefixes(accepted: Ints, keys: Ints, factor: float) -> Ints:
    out = accepted.copy()
    for row in range(accepted.shape[0]):
        key, p = mixed(keys[row], _REFUSED), 0
        while p < accepted[row] and uniform(key, p) < factor:
            p += 1
        out[row] = p
    return out
