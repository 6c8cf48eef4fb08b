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
`tests/references/decoupled.py` is the rule, an event at a time; a stretch gives the result of single passes to the last bit.

A drafter pass in which a window begins for a request takes the time of a round more: the host starts it, with the verdicts that
have come, and hands the window before over. (Other drafters start a round once a window, too.)

The verifier's passes are never scheduled ahead (`Limits.async_scheduling` is off here): a pass takes the windows that are ready
when it starts. So a verifier that has nothing to compute waits for a drafter pass that is under way, and for nothing else.

Not modelled: the drafter's own prefill, and the messages between the loops, which are small beside a pass.
"""

from __future__ import annotations

import numpy as np

from simrl.engine.leaving import stop
from simrl.engine.passes import iterate
from simrl.engine.requests import (
    NEVER,
    Limits,
    Request,
    Requests,
    Totals,
    Until,
    admissible,
    blocks_of,
    busy,
    capacity_tokens,
    is_plain,
    known_tokens,
)
from simrl.engine.stretches import Chances, accepted_by, fill_chances
from simrl.profile.compiled import inlined, kernel, part
from simrl.profile.interpolation import interpolate, interpolate4
from simrl.profile.profile import Tables, straggler_s
from simrl.speculation.decoding import MODEL, NONE, Decoding, Draft, Drafts, Floats, Ints, Records, draft, remember
from simrl.speculation.specactor import reconfigured, token_acceptance


@part
def _end_draft(r: Requests, drafts: Drafts, t: Totals) -> None:
    """End the drafter's pass: the requests that it was for have one more token."""
    for i in range(t.n_running):
        slot = r[i].running
        drafts[slot].ahead += drafts[slot].drafting
        drafts[slot].drafting = 0
    t.draft_ends_s = np.inf


@part
def _start_draft(r: Requests, drafts: Drafts, t: Totals, d: Decoding, now_s: float) -> None:
    """Start a drafter pass for the requests that may draft now, if there are any."""
    n, begins = 0, False
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
        begins |= may and unverified % window == 0
    if n > 0:
        t.draft_ends_s = now_s + _draft_s(t, d, n, begins)
        t.draft_tokens += n


@part
def _draft_s(t: Totals, d: Decoding, n: int, begins: bool) -> float:
    """Return the seconds of a drafter pass for n requests, in which a window begins or none does."""
    seconds = interpolate(d.draft_sequences, d.step_s[0], float(n))
    if begins:
        seconds += interpolate(d.draft_sequences, d.round_s[0], float(n))
    return float(t.slowdown * seconds)


@part
def _abandon(r: Requests, drafts: Drafts, t: Totals) -> None:
    """End a drafter pass that drafts for no request any more."""
    if t.draft_ends_s == np.inf:
        return
    for i in range(t.n_running):
        if drafts[r[i].running].drafting == 1:
            return
    t.draft_ends_s = np.inf


@part
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
            hardness = drafts[slot].hardness * t.drift
            _, right = draft(
                drafts[slot].source, drafts[slot].at, generated, window, hardness, d.runs, d.log_acceptances[0]
            )
            _take_window(r[slot], drafts[slot], right, capacity_tokens(limits))
    return works


@inlined
def _take_window(request: Request, draft: Draft, right: int, kv_capacity: int) -> None:
    """Put a window, of which the first `right` tokens are right, into the pass to come."""
    window, coupled = draft.window, draft.coupled == 1
    # The token known last is computed with all drafted ones; decoupled, without the last, which nobody asks about.
    most = kv_capacity - request.computed - 1  # else it could not even run alone
    draft.drafted = min(window if coupled else window - 1, most)
    draft.accepted = min(right, draft.drafted)
    draft.proposed = 1
    draft.in_verification = window
    draft.right = right
    draft.left = request.stop_at - request.generated
    draft.ahead -= window
    if coupled:  # what was drafted beyond may contradict the bonus token
        draft.ahead = 0
        draft.drafting = 0


@part
def _put_back(r: Requests, drafts: Drafts, t: Totals) -> None:
    """Put back the windows for which the pass had no room: they wait for the next one."""
    for i in range(t.n_running):
        slot = r[i].running
        if drafts[slot].in_verification > 0 and drafts[slot].proposed == 0:
            drafts[slot].ahead += drafts[slot].in_verification
            drafts[slot].in_verification = 0


@part
def _verified(r: Requests, drafts: Drafts, t: Totals, d: Decoding) -> None:
    """End a verification."""
    drafted_of_pass, accepted_of_pass = 0, 0
    for i in range(t.n_running):
        slot = r[i].running
        if drafts[slot].in_verification > 0:
            drafted_of_pass += drafts[slot].in_verification
            accepted_of_pass += _judge(r[slot], drafts[slot])
            if _is_due(r[slot], drafts[slot], d.rule.reconfigure_every):
                _reconfigure(r, drafts, t, d, slot)
    if drafted_of_pass > 0:
        remember(t, drafted_of_pass, accepted_of_pass)


@inlined
def _judge(request: Request, draft: Draft) -> int:
    """End the verification of a window: count it, and throw away what was drafted after a miss. Returns the accepted tokens."""
    window, right, left = draft.in_verification, draft.right, draft.left
    if draft.drafted < (window if draft.coupled == 1 else window - 1):  # the pass had room for a part
        right = min(right, draft.drafted)
    accepted = min(right, left)
    missed = right < min(window, left)
    draft.in_verification = 0
    draft.unverified_total -= window
    draft.accepted_total += accepted
    draft.misses_total += missed
    draft.verifications += 1
    draft.verified_total += request.generated - (request.stop_at - left)
    if missed or request.generated >= request.stop_at:
        draft.ahead = 0
        draft.drafting = 0
    return accepted


@inlined
def _is_due(request: Request, draft: Draft, every: int) -> bool:
    """Return whether a request passed a multiple of `every` tokens in the verification that is over."""
    return bool(every > 0 and (request.stop_at - draft.left) // every < request.generated // every)


@part
def _reconfigure(r: Requests, drafts: Drafts, t: Totals, d: Decoding, slot: int) -> None:
    """Give a request the window and the mode that suit its acceptance."""
    drafts[slot].window, drafts[slot].coupled = reconfigured(
        token_acceptance(drafts[slot].accepted_total, drafts[slot].misses_total),
        _mean_acceptance(r, drafts, t),
        d.rule.window.start_tokens,
        d.best_window,
        d.best_coupled,
    )


@part
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


@part
def _only_decodes(r: Requests, drafts: Drafts, t: Totals, limits: Limits, d: Decoding) -> bool:
    """Return whether the batch decodes with a model's drafts, nothing else happens, and there surely is room for a pass."""
    n, levels = t.n_running, d.log_acceptances.shape[1]
    if n == 0 or n * (1 + levels) > limits.max_num_batched_tokens or t.free_blocks < _surely_enough(n, limits, d):
        return False
    for i in range(n):
        slot = r[i].running
        generated = r[slot].generated
        if drafts[slot].source != MODEL or generated == 0:
            return False
        if known_tokens(r[slot], drafts[slot]) - r[slot].computed != 1:
            return False
    return admissible(r, drafts, t, limits, limits.max_num_batched_tokens) == 0


@part
def _surely_enough(n: int, limits: Limits, d: Decoding) -> int:
    """Return the blocks that suffice for a pass of n requests, whatever they draft."""
    return n * (blocks_of(d.log_acceptances.shape[1] + 1, limits.block_size) + 1) if is_plain(limits) else NEVER


@part
def _stretch(
    r: Requests, drafts: Drafts, t: Totals, tables: Tables, limits: Limits, d: Decoding, until_s: float
) -> None:
    """Run passes of both loops for a batch that only decodes, to the first stop or boundary after `until_s`, while it has room.

    From one verification to the next, a request drafts in every drafter pass until it has all it may: `having[k]` have after
    k passes more, and `begins[k]` says whether a window begins in the pass after those.
    """
    n, size, kv_capacity = t.n_running, limits.block_size, capacity_tokens(limits)
    chances = Chances(np.empty((1, n, d.log_acceptances.shape[1])), np.zeros(1, dtype=np.bool_))
    fill_chances(chances, 0, r, drafts, t, d)
    likely = chances.accepted[0]
    pass_s = np.empty((2, n + 1))
    for k in range(n + 1):
        pass_s[0, k], pass_s[1, k] = _draft_s(t, d, k, False), _draft_s(t, d, k, True)
    begins = np.zeros(2 * d.log_acceptances.shape[1] + 1, dtype=np.int64)
    may, having = np.empty(n, dtype=np.int64), np.empty(2 * d.log_acceptances.shape[1] + 1, dtype=np.int64)
    every, enough, stopped = d.rule.reconfigure_every, _surely_enough(n, limits, d), False
    # Arrays of the loop, by name: each use of a tuple's array counts its references.
    grids = tables.prefill_tokens, tables.prefill_kv_tokens, tables.decode_sequences, tables.decode_kv_tokens
    attention_s, dense_tokens, dense_s = tables.attention_s, tables.dense_tokens, tables.dense_s
    sampled_sequences, sampled_s = tables.sampled_sequences, tables.sampled_s
    between_s, least_s = tables.between_passes_s, tables.least_pass_s + tables.between_passes_s
    uneven, lengths = tables.straggler_sequences.shape[0] > 0, np.empty(n)
    while not stopped and t.now_s <= until_s and t.free_blocks >= enough:
        landed = t.draft_ends_s <= t.now_s
        having[:] = 0
        begins[:] = 0
        flying, lacking = 0, NEVER  # requests in the drafter's pass; passes until a window is ready
        verifying, query, cached, accepted = 0, 0, 0, 0
        for i in range(n):
            slot = r[i].running
            if landed:
                drafts[slot].ahead += drafts[slot].drafting
                drafts[slot].drafting = 0
            window = drafts[slot].window
            if drafts[slot].ahead < window:
                lacking = min(lacking, window - drafts[slot].ahead - drafts[slot].drafting)
            else:
                right = accepted_by(drafts[slot].at, r[slot].generated, likely, i, window)
                _take_window(r[slot], drafts[slot], right, kv_capacity)
                computed, new = r[slot].computed, 1 + drafts[slot].drafted
                blocks = max(blocks_of(computed + new, size) - r[slot].blocks, 0)
                t.free_blocks -= blocks
                r[slot].blocks += blocks
                lengths[verifying] = computed
                verifying += 1
                query += new
                cached += computed
                accepted += drafts[slot].accepted
            most = 2 * window
            if drafts[slot].coupled == 1:
                most = window if drafts[slot].in_verification == 0 else 0
            unverified = drafts[slot].in_verification + drafts[slot].ahead + drafts[slot].drafting
            may[i] = max(most - unverified, 0)
            having[may[i]] += 1
            for begin in (0, window):
                if unverified <= begin < most:
                    begins[begin - unverified] = 1
            flying += drafts[slot].drafting
        passes, drafting, ends_s = 0, n - having[0], t.draft_ends_s
        if flying == 0:
            ends_s, passes, drafting = _next_pass(t, pass_s, having, begins, passes, drafting, t.now_s)
        if verifying == 0:
            share = t.recent_accepted / t.recent_drafted if t.recent_drafted > 0 else 0.0
            lacking += flying > 0
            while True:
                t.drafts_accepted_s += share * (ends_s - t.now_s)
                t.drafts_rejected_s += (1.0 - share) * (ends_s - t.now_s)
                t.slot_s += n * (ends_s - t.now_s)
                t.now_s = ends_s
                lacking -= 1
                if lacking == 0 or t.now_s > until_s:
                    break
                ends_s, passes, drafting = _next_pass(t, pass_s, having, begins, passes, drafting, t.now_s)
        else:
            decoding, tokens, kv = float(verifying), float(query), float(cached + query)
            attended_s = interpolate4(*grids, attention_s, (0.0, 0.0, decoding, kv / decoding))
            straggler = straggler_s(tables, lengths[:verifying]) if uneven else 0.0
            undrafted_s = interpolate(dense_tokens, dense_s, decoding) + attended_s
            undrafted_s += interpolate(sampled_sequences, sampled_s, decoding)
            decode_s = max(undrafted_s + between_s + straggler, least_s)
            drafted_s = interpolate(dense_tokens, dense_s, tokens) + attended_s
            drafted_s += interpolate(sampled_sequences, sampled_s, tokens)
            seconds = max(drafted_s + between_s + straggler, least_s)
            share = accepted / (query - verifying) if query > verifying else 0.0
            t.decode_s += decode_s
            t.drafts_accepted_s += share * (seconds - decode_s)
            t.drafts_rejected_s += (1.0 - share) * (seconds - decode_s)
            t.slowed_s += (t.slowdown - 1.0) * seconds
            t.slot_s += n * t.slowdown * seconds
            t.now_s += t.slowdown * seconds
            t.decodes += verifying
            t.passes += 1
            while ends_s < t.now_s:
                ends_s, passes, drafting = _next_pass(t, pass_s, having, begins, passes, drafting, ends_s)
        landed = passes > 0 or ends_s == np.inf
        drafted_of_pass, accepted_of_pass = 0, 0
        for i in range(n):
            slot = r[i].running
            if landed:
                drafted, flies = min(may[i], passes), ends_s < np.inf and may[i] >= passes
                drafts[slot].ahead += drafts[slot].drafting + drafted - flies
                drafts[slot].drafting = flies
                drafts[slot].drafted_total += drafted
                drafts[slot].unverified_total += drafted
            if drafts[slot].in_verification > 0:
                gain = min(1 + drafts[slot].accepted, drafts[slot].left)
                r[slot].computed += gain
                r[slot].generated += gain
                r[slot].gained = gain
                t.generated_tokens += gain
                drafted_of_pass += drafts[slot].in_verification
                accepted_of_pass += _judge(r[slot], drafts[slot])
                if _is_due(r[slot], drafts[slot], every):
                    _reconfigure(r, drafts, t, d, slot)
                stopped |= r[slot].generated >= min(r[slot].stop_at, r[slot].watch_at)
        t.draft_ends_s = ends_s
        if verifying > 0:
            remember(t, drafted_of_pass, accepted_of_pass)


@inlined
def _next_pass(
    t: Totals, pass_s: Floats, having: Ints, begins: Ints, passes: int, drafting: int, now_s: float
) -> tuple[float, int, int]:
    """Start the drafter's next pass, for `drafting` requests. Returns when it ends (infinity: it rests), the passes so far, and
    for how many requests the one after would be."""
    if drafting == 0:
        return np.inf, passes, 0
    t.draft_tokens += drafting
    return now_s + pass_s[begins[passes], drafting], passes + 1, drafting - having[passes + 1]


@kernel
def run_decoupled(
    r: Requests, drafts: Drafts, totals: Records, tables: Tables, limits: Limits, d: Decoding, until: Until
) -> float:
    """Do as `passes.run`, with decoupled drafting. A boundary is where a verification ends, or a drafter pass for which the
    verifier has waited."""
    t = totals[0]
    t.n_stopped = 0
    while t.now_s <= until.time_s and busy(t):
        if _only_decodes(r, drafts, t, limits, d):
            _stretch(r, drafts, t, tables, limits, d, until.time_s)
            stop(r, t)
            if until.first_stop and t.n_stopped > 0:
                break
            continue
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
            t.slot_s += t.n_running * wait_s
            t.now_s = t.draft_ends_s
            continue
        iterate(r, drafts, t, tables, limits, 0.0)
        _put_back(r, drafts, t)
        while t.draft_ends_s < t.now_s:
            ended_s = t.draft_ends_s
            _end_draft(r, drafts, t)
            _start_draft(r, drafts, t, d, ended_s)
        _verified(r, drafts, t, d)
        stop(r, t)
        if until.first_stop and t.n_stopped > 0:
            break
    return t.now_s
