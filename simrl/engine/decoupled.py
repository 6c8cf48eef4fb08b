"""Decoupled drafting (SpecActor, arXiv 2511.16193, §4.1): the drafter on GPUs of its own, two loops that wait for each other.

The verifier is the engine; its passes go as ever, but a request that decodes takes part only when a window of drafted tokens is
there. The drafter works in passes of its own, one token for every request that may draft: a decoupled one while fewer than two
windows of its tokens are unverified, a coupled one until it has a window and only while none of its tokens is in verification.
A window that is right to the end yields its tokens (decoupled) or one more (coupled); otherwise the right ones and the
correction, and all that was drafted ahead is thrown away. That request drafts again from the drafter's next boundary on, which
is at once if the pass under way drafts for no request any more.

A token counts as drafted when the drafter's pass for it begins, so tokens that are thrown away count, and those of an abandoned
pass; the drafter's acceptance is learnt from verified windows alone.

Invariant: at one instant, the order is: a verification ends, a drafter pass ends, a verification starts, a drafter pass starts.
`tests/reference_decoupled.py` is the rule, an event at a time.

The verifier's passes are never scheduled ahead (`Limits.async_scheduling` is off here): a pass takes the windows that are ready
when it starts. So a verifier that has nothing to compute waits for a drafter pass that is under way, and for nothing else.

Not modelled: the drafter's own prefill, and the messages between the loops, which are small beside a pass.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from simrl.engine.passes import iterate
from simrl.engine.requests import Limits, Requests, Totals, Until, admissible, busy, known_tokens, stop
from simrl.profile.interpolation import interpolate
from simrl.profile.profile import Tables
from simrl.speculation.decoding import NONE, Decoding, Drafts, Records, draft, remember
from simrl.speculation.specactor import reconfigured, token_acceptance


@njit(cache=True)
def _end_draft(r: Requests, drafts: Drafts, t: Totals) -> None:
    """End the drafter's pass: the requests that it was for have one more token."""
    for i in range(t.n_running):
        slot = r[i].running
        drafts[slot].ahead += drafts[slot].drafting
        drafts[slot].drafting = 0
    t.draft_ends_s = np.inf


@njit(cache=True)
def _start_draft(r: Requests, drafts: Drafts, t: Totals, d: Decoding, now_s: float) -> None:
    """Start a drafter pass for the requests that may draft now, if there are any."""
    n = 0
    for i in range(t.n_running):
        slot = r[i].running
        window, unverified = drafts[slot].window, drafts[slot].in_verification + drafts[slot].ahead
        if drafts[slot].coupled == 1:
            may = drafts[slot].in_verification == 0 and unverified < window
        else:
            may = unverified < 2 * window
        may = may and drafts[slot].decodes == 1 and drafts[slot].source != NONE
        drafts[slot].drafting = may
        drafts[slot].drafted_total += may
        drafts[slot].unverified_total += may
        n += may
    if n > 0:
        t.draft_ends_s = now_s + t.slowdown * interpolate(d.draft_sequences, d.step_s[0], float(n))
        t.draft_tokens += n


@njit(cache=True)
def _abandon(r: Requests, drafts: Drafts, t: Totals) -> None:
    """End a drafter pass that drafts for no request any more."""
    if t.draft_ends_s == np.inf:
        return
    for i in range(t.n_running):
        if drafts[r[i].running].drafting == 1:
            return
    t.draft_ends_s = np.inf


@njit(cache=True)
def _take_windows(r: Requests, drafts: Drafts, t: Totals, limits: Limits, d: Decoding) -> bool:
    """Put the windows that are ready into the pass to come. Returns whether there is anything to compute."""
    works = admissible(r, drafts, t, limits, limits.max_num_batched_tokens) > 0
    for i in range(t.n_running):
        slot = r[i].running
        generated, computed = r[slot].generated, r[slot].computed
        decodes = generated > 0 and known_tokens(r[slot], drafts[slot]) - computed == 1
        drafts[slot].decodes = decodes
        drafts[slot].proposed = 0
        drafts[slot].drafted = 0
        drafts[slot].accepted = 0
        window = drafts[slot].window
        if not decodes or drafts[slot].source == NONE:
            works = True
        elif drafts[slot].ahead < window:
            drafts[slot].drafted = -1  # waits for its drafter
        else:
            works = True
            coupled = drafts[slot].coupled == 1
            hardness = drafts[slot].hardness * t.drift
            _, right = draft(
                drafts[slot].source, drafts[slot].at, generated, window, hardness, d.runs, d.log_acceptances[0]
            )
            # The token known last is computed with all drafted ones; decoupled, without the last, which nobody asks about.
            most = limits.kv_blocks * limits.block_size - computed - 1  # else it could not even run alone
            drafts[slot].drafted = min(window if coupled else window - 1, most)
            drafts[slot].accepted = min(right, drafts[slot].drafted)
            drafts[slot].proposed = 1
            drafts[slot].in_verification = window
            drafts[slot].right = right
            drafts[slot].left = r[slot].stop_at - generated
            drafts[slot].ahead -= window
            if coupled:  # what was drafted beyond may contradict the bonus token
                drafts[slot].ahead = 0
                drafts[slot].drafting = 0
    return works


@njit(cache=True)
def _put_back(r: Requests, drafts: Drafts, t: Totals) -> None:
    """Put back the windows for which the pass had no room: they wait for the next one."""
    for i in range(t.n_running):
        slot = r[i].running
        if drafts[slot].in_verification > 0 and drafts[slot].proposed == 0:
            drafts[slot].ahead += drafts[slot].in_verification
            drafts[slot].in_verification = 0


@njit(cache=True)
def _verified(r: Requests, drafts: Drafts, t: Totals, d: Decoding) -> None:
    """End a verification: throw away what was drafted after a miss, learn the acceptance, reconfigure where it is due."""
    drafted_of_pass, accepted_of_pass = 0, 0
    for i in range(t.n_running):
        slot = r[i].running
        window = drafts[slot].in_verification
        if window == 0:
            continue
        drafts[slot].in_verification = 0
        left = drafts[slot].left
        right = drafts[slot].right
        if drafts[slot].drafted < (window if drafts[slot].coupled == 1 else window - 1):  # the pass had room for a part
            right = min(right, drafts[slot].drafted)
        accepted = min(right, left)
        missed = right < min(window, left)
        drafts[slot].unverified_total -= window
        drafts[slot].accepted_total += accepted
        drafts[slot].misses_total += missed
        drafts[slot].verifications += 1
        drafts[slot].verified_total += r[slot].generated - (r[slot].stop_at - left)
        drafted_of_pass += window
        accepted_of_pass += accepted
        before, generated = r[slot].stop_at - left, r[slot].generated
        if missed or generated >= r[slot].stop_at:
            drafts[slot].ahead = 0
            drafts[slot].drafting = 0
        every = d.rule.reconfigure_every
        if every > 0 and before // every < generated // every:
            window, coupled = reconfigured(
                token_acceptance(drafts[slot].accepted_total, drafts[slot].misses_total),
                _mean_acceptance(r, drafts, t),
                d.rule.window.start_tokens,
                d.best_window,
                d.best_coupled,
            )
            drafts[slot].window = window
            drafts[slot].coupled = coupled
    if drafted_of_pass > 0:
        remember(t, drafted_of_pass, accepted_of_pass)


@njit(cache=True)
def _mean_acceptance(r: Requests, drafts: Drafts, t: Totals) -> float:
    """Return the mean acceptance of a token over the running requests whose acceptance is known."""
    total, known = 0.0, 0
    for i in range(t.n_running):
        slot = r[i].running
        acceptance = token_acceptance(drafts[slot].accepted_total, drafts[slot].misses_total)
        if not np.isnan(acceptance):
            total += acceptance
            known += 1
    return total / known if known > 0 else 0.0


@njit(cache=True)
def run_decoupled(
    r: Requests, drafts: Drafts, totals: Records, tables: Tables, limits: Limits, d: Decoding, until: Until
) -> float:
    """Do as `passes.run`, with decoupled drafting. A boundary is where a verification ends, or a drafter pass for which the
    verifier has waited."""
    t = totals[0]
    t.n_stopped = 0
    while t.now_s <= until.time_s and busy(t):
        _abandon(r, drafts, t)
        if t.draft_ends_s <= t.now_s:
            _end_draft(r, drafts, t)
        works = _take_windows(r, drafts, t, limits, d)
        _abandon(r, drafts, t)
        if t.draft_ends_s == np.inf:
            _start_draft(r, drafts, t, d, t.now_s)
        if not works:
            assert t.draft_ends_s < np.inf, "neither the verifier nor the drafter has anything to do"
            wait_s = t.draft_ends_s - t.now_s
            share = t.recent_accepted / t.recent_drafted if t.recent_drafted > 0 else 0.0
            t.drafts_accepted_s += share * wait_s
            t.drafts_rejected_s += (1.0 - share) * wait_s
            t.now_s = t.draft_ends_s
            continue
        iterate(r, drafts, t, tables, limits, 0.0)
        _put_back(r, drafts, t)
        while t.draft_ends_s < t.now_s:
            ended_s = t.draft_ends_s
            _end_draft(r, drafts, t)
            _start_draft(r, drafts, t, d, ended_s)
        _verified(r, drafts, t, d)
        stop(r, t, limits)
        if until.first_stop and t.n_stopped > 0:
            break
    return t.now_s
