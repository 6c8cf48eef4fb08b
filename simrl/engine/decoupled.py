"""Decoupled drafting (SpecActor, arXiv 2511.16193, §4.1): the drafter on GPUs of its own, two loops that wait for each other.

The verifier is the engine; its passes go as ever, but a request that decodes takes part only when a window of drafted tokens is
there. The drafter works in passes of its own, one token for every request that may draft: a decoupled one while fewer than two
windows of its tokens are unverified, a coupled one until it has a window and only while nothing of it is verified. A window
that is right to the end yields its tokens (decoupled) or one more (coupled); otherwise the right ones and the correction, and
all that was drafted ahead is thrown away. Whoever is thrown back drafts again from the drafter's next boundary on, which is at
once if the pass under way is for nobody any more.

A token counts as drafted from the beginning of the drafter's pass for it on, so what is thrown away counts, and a pass that is
abandoned; what is learnt of the drafter is of verified windows alone.

Invariant: of what falls on one instant, the order is: a verification ends, a drafter pass ends, a verification starts, a
drafter pass starts. `tests/reference_decoupled.py` is the same, an event at a time.

The verifier's passes are never scheduled ahead (`Limits.async_scheduling` is off here): a pass takes the windows that are ready
when it starts. So a verifier that has nothing to compute waits for a drafter pass that is under way, and for nothing else.

Not modelled: the drafter's own prefill, and the messages between the loops, which are small beside a pass.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from simrl.engine.passes import iterate
from simrl.engine.state import (
    ADMITTING,
    COMPUTED,
    GENERATED,
    HARDNESS,
    N_RUNNING,
    N_STOPPED,
    N_WAITING,
    RUNNING,
    STOOD_S,
    STOP_AT,
    WASTED_S,
    Floats,
    Ints,
    Limits,
    admissible,
    known_tokens,
    stop,
)
from simrl.interpolation import interpolate
from simrl.profile import Tables
from simrl.speculation.decoding import (
    ACCEPTED,
    ACCEPTED_TOTAL,
    AHEAD,
    AT,
    COUPLED,
    DECODES,
    DRAFT_ENDS_S,
    DRAFT_TOKENS,
    DRAFTED,
    DRAFTED_TOTAL,
    DRAFTING,
    DRIFT,
    IN_VERIFICATION,
    LATE_ACCEPTED,
    LATE_DRAFTED,
    LEFT,
    MISSES_TOTAL,
    NONE,
    PROPOSED,
    RECONFIGURE_EVERY,
    RIGHT,
    SOURCE,
    UNVERIFIED_TOTAL,
    VERIFICATIONS,
    VERIFIED_TOTAL,
    WINDOW,
    WINDOW_START,
    Decoding,
    draft,
    remember,
)
from simrl.speculation.specactor import reconfigured, token_acceptance


@njit(cache=True)
def _end_draft(slots: Ints, drafts: Ints, counters: Ints, gauges: Floats) -> None:
    """Whom the drafter's pass was for has a token more."""
    for i in range(counters[N_RUNNING]):
        slot = slots[RUNNING, i]
        drafts[AHEAD, slot] += drafts[DRAFTING, slot]
        drafts[DRAFTING, slot] = 0
    gauges[DRAFT_ENDS_S] = np.inf


@njit(cache=True)
def _start_draft(
    slots: Ints, drafts: Ints, counters: Ints, gauges: Floats, d: Decoding, slowdown: float, now_s: float
) -> None:
    """A drafter pass for all who may draft now, if there are any."""
    n = 0
    for i in range(counters[N_RUNNING]):
        slot = slots[RUNNING, i]
        window, unverified = drafts[WINDOW, slot], drafts[IN_VERIFICATION, slot] + drafts[AHEAD, slot]
        if drafts[COUPLED, slot] == 1:
            may = drafts[IN_VERIFICATION, slot] == 0 and unverified < window
        else:
            may = unverified < 2 * window
        may = may and drafts[DECODES, slot] == 1 and drafts[SOURCE, slot] != NONE
        drafts[DRAFTING, slot] = may
        drafts[DRAFTED_TOTAL, slot] += may
        drafts[UNVERIFIED_TOTAL, slot] += may
        n += may
    if n > 0:
        gauges[DRAFT_ENDS_S] = now_s + slowdown * interpolate(d.draft_sequences, d.step_s[0], float(n))
        gauges[DRAFT_TOKENS] += n


@njit(cache=True)
def _abandon(slots: Ints, drafts: Ints, counters: Ints, gauges: Floats) -> None:
    """A drafter pass that is for nobody any more ends."""
    if gauges[DRAFT_ENDS_S] == np.inf:
        return
    for i in range(counters[N_RUNNING]):
        if drafts[DRAFTING, slots[RUNNING, i]] == 1:
            return
    gauges[DRAFT_ENDS_S] = np.inf


@njit(cache=True)
def _take_windows(
    slots: Ints, drafts: Ints, times: Floats, counters: Ints, gauges: Floats, limits: Limits, d: Decoding
) -> bool:
    """The verifier is free: what is ready goes into the pass to come. Returns whether there is anything to compute."""
    works = admissible(slots, drafts, counters, limits, limits.max_num_batched_tokens) > 0
    for i in range(counters[N_RUNNING]):
        slot = slots[RUNNING, i]
        generated, computed = slots[GENERATED, slot], slots[COMPUTED, slot]
        decodes = generated > 0 and known_tokens(slots, drafts, slot) - computed == 1
        drafts[DECODES, slot] = decodes
        drafts[PROPOSED, slot] = 0
        drafts[DRAFTED, slot] = 0
        drafts[ACCEPTED, slot] = 0
        window = drafts[WINDOW, slot]
        if not decodes or drafts[SOURCE, slot] == NONE:
            works = True
        elif drafts[AHEAD, slot] < window:
            drafts[DRAFTED, slot] = -1  # waits for its drafter
        else:
            works = True
            coupled = drafts[COUPLED, slot] == 1
            hardness = times[HARDNESS, slot] * gauges[DRIFT]
            _, right = draft(
                drafts[SOURCE, slot], drafts[AT, slot], generated, window, hardness, d.runs, d.log_acceptances[0]
            )
            # The token known last is computed with all drafted ones; decoupled, without the last, which nobody asks about.
            most = limits.kv_blocks * limits.block_size - computed - 1  # else it could not even run alone
            drafts[DRAFTED, slot] = min(window if coupled else window - 1, most)
            drafts[ACCEPTED, slot] = min(right, drafts[DRAFTED, slot])
            drafts[PROPOSED, slot] = 1
            drafts[IN_VERIFICATION, slot] = window
            drafts[RIGHT, slot] = right
            drafts[LEFT, slot] = slots[STOP_AT, slot] - generated
            drafts[AHEAD, slot] -= window
            if coupled:  # what was drafted beyond may contradict the bonus token
                drafts[AHEAD, slot] = 0
                drafts[DRAFTING, slot] = 0
    return works


@njit(cache=True)
def _put_back(slots: Ints, drafts: Ints, counters: Ints) -> None:
    """Windows for which the pass had no room wait for the next one."""
    for i in range(counters[N_RUNNING]):
        slot = slots[RUNNING, i]
        if drafts[IN_VERIFICATION, slot] > 0 and drafts[PROPOSED, slot] == 0:
            drafts[AHEAD, slot] += drafts[IN_VERIFICATION, slot]
            drafts[IN_VERIFICATION, slot] = 0


@njit(cache=True)
def _verified(slots: Ints, drafts: Ints, counters: Ints, gauges: Floats, d: Decoding) -> None:
    """A verification has ended: what is thrown away, what it says of the drafter, who drafts otherwise from now on."""
    drafted_of_pass, accepted_of_pass = 0, 0
    for i in range(counters[N_RUNNING]):
        slot = slots[RUNNING, i]
        window = drafts[IN_VERIFICATION, slot]
        if window == 0:
            continue
        drafts[IN_VERIFICATION, slot] = 0
        left = drafts[LEFT, slot]
        right = drafts[RIGHT, slot]
        if drafts[DRAFTED, slot] < (
            window if drafts[COUPLED, slot] == 1 else window - 1
        ):  # the pass had room for a part
            right = min(right, drafts[DRAFTED, slot])
        accepted = min(right, left)
        missed = right < min(window, left)
        drafts[UNVERIFIED_TOTAL, slot] -= window
        drafts[ACCEPTED_TOTAL, slot] += accepted
        drafts[MISSES_TOTAL, slot] += missed
        drafts[VERIFICATIONS, slot] += 1
        drafts[VERIFIED_TOTAL, slot] += slots[GENERATED, slot] - (slots[STOP_AT, slot] - left)
        drafted_of_pass += window
        accepted_of_pass += accepted
        before, generated = slots[STOP_AT, slot] - left, slots[GENERATED, slot]
        if missed or generated >= slots[STOP_AT, slot]:
            drafts[AHEAD, slot] = 0
            drafts[DRAFTING, slot] = 0
        every = d.rule[RECONFIGURE_EVERY]
        if every > 0 and before // every < generated // every:
            window, coupled = reconfigured(
                token_acceptance(drafts[ACCEPTED_TOTAL, slot], drafts[MISSES_TOTAL, slot]),
                _mean_acceptance(slots, drafts, counters),
                d.rule[WINDOW_START],
                d.best_window,
                d.best_coupled,
            )
            drafts[WINDOW, slot] = window
            drafts[COUPLED, slot] = coupled
    if drafted_of_pass > 0:
        remember(gauges, drafted_of_pass, accepted_of_pass)


@njit(cache=True)
def _mean_acceptance(slots: Ints, drafts: Ints, counters: Ints) -> float:
    """Over the running requests of which it is known."""
    total, known = 0.0, 0
    for i in range(counters[N_RUNNING]):
        slot = slots[RUNNING, i]
        acceptance = token_acceptance(drafts[ACCEPTED_TOTAL, slot], drafts[MISSES_TOTAL, slot])
        if not np.isnan(acceptance):
            total += acceptance
            known += 1
    return total / known if known > 0 else 0.0


@njit(cache=True)
def run_decoupled(
    slots: Ints,
    drafts: Ints,
    times: Floats,
    counters: Ints,
    spent: Floats,
    gauges: Floats,
    flags: Ints,
    now_s: float,
    dense_tokens: Floats,
    dense_s: Floats,
    sampled_sequences: Floats,
    sampled_s: Floats,
    prefill_tokens: Floats,
    prefill_kv_tokens: Floats,
    decode_sequences: Floats,
    decode_kv_tokens: Floats,
    attention_s: Floats,
    between_passes_s: float,
    straggler_sequences: Floats,
    straggler_seconds: Floats,
    least_pass_s: float,
    bounds: Ints,
    slowdown: float,
    until_s: float,
    to_first_stop: bool,
    d: Decoding,
) -> float:
    """`simrl.engine.passes.run_speculative` for decoupled drafting. A boundary is where a verification ends, or a drafter pass
    for which the verifier has waited."""
    tables = Tables(
        dense_tokens,
        dense_s,
        sampled_sequences,
        sampled_s,
        prefill_tokens,
        prefill_kv_tokens,
        decode_sequences,
        decode_kv_tokens,
        attention_s,
        between_passes_s,
        straggler_sequences,
        straggler_seconds,
        least_pass_s,
    )
    limits = Limits(bounds[0], bounds[1], bounds[2], bounds[3], bounds[4] == 1)
    counters[N_STOPPED] = 0
    while now_s <= until_s and (counters[N_RUNNING] > 0 or (counters[N_WAITING] > 0 and counters[ADMITTING] == 1)):
        _abandon(slots, drafts, counters, gauges)
        if gauges[DRAFT_ENDS_S] <= now_s:
            _end_draft(slots, drafts, counters, gauges)
        works = _take_windows(slots, drafts, times, counters, gauges, limits, d)
        _abandon(slots, drafts, counters, gauges)
        if gauges[DRAFT_ENDS_S] == np.inf:
            _start_draft(slots, drafts, counters, gauges, d, slowdown, now_s)
        if not works:
            assert gauges[DRAFT_ENDS_S] < np.inf, "neither the verifier nor the drafter has anything to do"
            wait_s = gauges[DRAFT_ENDS_S] - now_s
            share = gauges[LATE_ACCEPTED] / gauges[LATE_DRAFTED] if gauges[LATE_DRAFTED] > 0 else 0.0
            spent[STOOD_S] += share * wait_s
            spent[WASTED_S] += (1.0 - share) * wait_s
            now_s = gauges[DRAFT_ENDS_S]
            continue
        now_s = iterate(slots, drafts, times, counters, spent, now_s, tables, limits, slowdown, 0.0)
        _put_back(slots, drafts, counters)
        while gauges[DRAFT_ENDS_S] < now_s:
            ended_s = gauges[DRAFT_ENDS_S]
            _end_draft(slots, drafts, counters, gauges)
            _start_draft(slots, drafts, counters, gauges, d, slowdown, ended_s)
        _verified(slots, drafts, counters, gauges, d)
        stop(slots, times, counters, limits, now_s)
        if to_first_stop and counters[N_STOPPED] > 0:
            break
    return now_s
