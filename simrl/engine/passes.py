"""Forward passes: the schedule of each as in vLLM V1, its duration, and the tokens that every request gains.

Invariant: `iterate` is the rule, one pass, request by request. The stretches (`engine.stretches`) give its result to the last
token, faster.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simrl.engine.leaving import know_all, let_leave, preempt_last, stop
from simrl.engine.prefix_cache import cover, find, held_alone, take_found
from simrl.engine.requests import (
    MOVED,
    PREEMPTED,
    REDRAFTED,
    RELOADED,
    Limits,
    Request,
    Requests,
    Totals,
    Until,
    admissible,
    admit,
    blocks_to_start,
    busy,
    capacity_tokens,
    known_tokens,
    make_room,
    more_blocks,
)
from simrl.engine.stretches import decode_stretch, stretch_length
from simrl.profile.compiled import inlined, kernel, part
from simrl.profile.profile import Tables, pass_s, straggler_beside_prefill_s, straggler_s
from simrl.speculation.decoding import Draft, Drafts, Records


@kernel
def run(r: Requests, drafts: Drafts, totals: Records, tables: Tables, limits: Limits, until: Until) -> float:
    """Run passes without drafts. Returns the boundary reached.

    `r.stopped` and `r.stopped_kind` have what stopped in the last pass; `r.last_token_s` has when each request ended, so no end
    is lost by a run beyond the first stop.
    """
    t = totals[0]
    t.n_stopped = 0
    while t.now_s <= until.time_s and busy(t):
        passes = stretch_length(r, drafts, t, limits)
        if passes > 0:
            decode_stretch(r, t, tables, limits, passes, until.time_s)
        else:
            iterate(r, drafts, t, tables, limits, 0.0)
        stop(r, t)
        if until.first_stop and t.n_stopped > 0:
            break
    return t.now_s


@part
def iterate(r: Requests, drafts: Drafts, t: Totals, tables: Tables, limits: Limits, draft_s: float) -> None:
    """Run one pass with the drafts of `drafts.drafted` tokens, which took `draft_s`; where it is -1, a request waits for its
    draft and takes no part."""
    if t.async_scheduling == 0:
        schedule(r, drafts, t, limits)
    else:
        _schedule_ahead(r, drafts, t, limits)
    work = work_of(r, drafts, t, tables)
    seconds = pass_s(
        tables,
        float(work.query),
        float(work.sampled),
        float(work.prefill),
        work.prefill_work,
        float(work.decoding),
        float(work.decode_kv),
        work.straggler_of_all_s,
    )
    end_pass(r, drafts, t, tables, work, seconds, seconds, draft_s)


@part
def end_pass(
    r: Requests,
    drafts: Drafts,
    t: Totals,
    tables: Tables,
    work: PassWork,
    seconds: float,
    own_s: float,
    draft_s: float,
) -> None:
    """End the scheduled pass, which took `seconds`; `own_s` of them without other ranks."""
    t.now_s += t.slowdown * draft_s + t.slowdown * seconds
    t.slowed_s += (t.slowdown - 1.0) * (seconds + draft_s)
    t.slot_s += t.n_running * t.slowdown * (seconds + draft_s)
    t.lock_step_s += seconds - own_s
    t.decodes += work.decoding
    if work.query == work.decoding:
        t.decode_s += own_s
        t.drafts_rejected_s += draft_s
    else:
        _account(r, drafts, t, tables, work, own_s, draft_s)
    _advance(r, drafts, t)
    let_leave(r, t)
    t.passes += 1
    t.prefill_tokens += work.prefill


@inlined
def one_pass(r: Requests, drafts: Drafts, totals: Records, tables: Tables, limits: Limits) -> None:
    """Run one pass without drafts, and list what stops in it."""
    iterate(r, drafts, totals[0], tables, limits, 0.0)
    stop(r, totals[0])


@inlined
def _schedule_ahead(r: Requests, drafts: Drafts, t: Totals, limits: Limits) -> None:
    """Schedule a pass as of when the one before it starts; if there is nothing to do then, as of its end."""
    if t.ahead == 0:
        know_all(r, t)
    t.ahead = 1
    if schedule(r, drafts, t, limits) == 0:
        know_all(r, t)
        t.ahead = 1
        schedule(r, drafts, t, limits)


@part
def schedule(r: Requests, drafts: Drafts, t: Totals, limits: Limits) -> int:
    """Set the tokens that each running request has in the pass to come (`r.scheduled`, 0 before); vLLM's `schedule()`. Returns
    their sum."""
    budget, counts_flying = limits.max_num_batched_tokens, limits.async_scheduling and limits.window_groups > 0
    preempted = False

    # First, the running requests.
    i = 0
    while i < t.n_running and budget > 0:
        slot = r[i].running
        if drafts[slot].drafted < 0:
            i += 1
            continue
        left = 1 if r[slot].going == 2 else known_tokens(r[slot], drafts[slot]) - r[slot].computed
        new = min(left + drafts[slot].drafted, budget)
        need = more_blocks(r[slot], r[slot].computed + r[slot].rejected + new, limits)
        if need > t.free_blocks:  # rare, and the call is dear in a loop over all requests
            make_room(r, t, need, PREEMPTED)
        while need > t.free_blocks and i < t.n_running:
            preempted = True
            t.preemptions += 1
            preempt_last(r, t, PREEMPTED)
        if i == t.n_running:  # it had to preempt itself
            break
        t.free_blocks -= need
        r[slot].blocks += need
        r[slot].scheduled = new
        if counts_flying:
            r[slot].in_flight = new
        if r[slot].covering == 1:
            cover(r, t, slot, min(r[slot].computed + new, known_tokens(r[slot], drafts[slot])))
        if drafts[slot].drafted > 0:
            drafts[slot].drafted = min(drafts[slot].drafted, new - 1)
            drafts[slot].accepted = min(drafts[slot].accepted, new - 1)
        budget -= new
        i += 1

    # Next, the waiting requests.
    scheduled_running = i
    while not preempted and budget > 0:
        new = admissible(r, drafts, t, limits, budget)
        if new == 0:
            break
        padding = _padding(r, drafts, t, limits, scheduled_running) if t.padding > 0 else 0
        if padding > 0 and (new + padding > budget or not _fits(r, drafts, t, limits, padding)):
            break
        new += padding
        slot = admit(r, t)
        if r[slot].blocks == 0:
            t.lookup_tokens += known_tokens(r[slot], drafts[slot])
        if t.prefix_caching == 1 and r[slot].blocks == 0:
            take_found(r, t, slot, known_tokens(r[slot], drafts[slot]))
        need = more_blocks(r[slot], r[slot].computed + new, limits)
        make_room(r, t, need, PREEMPTED)
        t.free_blocks -= need
        r[slot].blocks += need
        r[slot].scheduled = new
        r[slot].in_flight = new if counts_flying else 0
        r[slot].gained = -1
        if r[slot].covering == 1:
            cover(r, t, slot, r[slot].computed + new)
        drafts[slot].proposed = 0
        drafts[slot].drafted = padding
        drafts[slot].accepted = 0
        drafts[slot].ahead = 0
        drafts[slot].in_verification = 0
        drafts[slot].drafting = 0
        drafts[slot].decodes = 0
        budget -= new
    return int(limits.max_num_batched_tokens - budget)


@inlined
def _padding(r: Requests, drafts: Drafts, t: Totals, limits: Limits, scheduled_running: int) -> int:
    """Return the draft tokens that vLLM gives the first waiting request, which may start: where it has one token to compute, so
    that a CUDA graph of decoding still fits the pass. They are rejected."""
    slot = r[t.waiting_head].waiting
    known, computed = known_tokens(r[slot], drafts[slot]), r[slot].computed
    if t.prefix_caching == 1 and r[slot].blocks == 0:
        computed = max(find(r, t, slot, known)[0] * limits.block_size, computed)
    if known - computed != 1 or (scheduled_running == 0 and computed == 0):
        return 0
    for i in range(scheduled_running):
        if r[r[i].running].gained < 0:  # computes its prompt
            return 0
    fits_alone = known + t.padding < capacity_tokens(limits) and t.padding < limits.max_num_batched_tokens
    return t.padding if fits_alone else 0


@inlined
def _fits(r: Requests, drafts: Drafts, t: Totals, limits: Limits, padding: int) -> bool:
    """Return whether there is room for `padding` tokens more than the known ones of the first waiting request, which may
    start."""
    slot = r[t.waiting_head].waiting
    known, found, free_ones = known_tokens(r[slot], drafts[slot]), 0, 0
    if t.prefix_caching == 1 and r[slot].blocks == 0:
        found, free_ones = find(r, t, slot, known)
    elif t.prefix_caching == 1:
        found, free_ones = r[slot].blocks, held_alone(r, slot)
    return blocks_to_start(known + padding, limits) - found <= t.free_blocks + t.held_blocks - free_ones


class PassWork(NamedTuple):
    """The work of a pass: query tokens in all, positions that need logits, prefill tokens and their attention work, decoding
    sequences and the tokens that they attend to."""

    query: int
    sampled: int
    prefill: int
    prefill_work: float
    decoding: int
    decode_kv: int
    straggler_s: float  # what decoding alone waits for its longest sequences …
    straggler_of_all_s: float  # … and the pass


@inlined
def work_of(r: Requests, drafts: Drafts, t: Totals, tables: Tables) -> PassWork:
    """Return what the scheduled pass computes."""
    query, sampled, prefill, prefill_work, decoding, decode_kv = 0, 0, 0, 0.0, 0, 0
    for i in range(t.n_running):
        slot = r[i].running
        new, computed = r[slot].scheduled, r[slot].computed
        if new == 0:
            continue
        query += new
        sampled += 1
        if _decodes(r[slot], drafts[slot]):
            decoding += 1
            decode_kv += computed + new
            sampled += new - 1
        else:
            prefill += new
            prefill_work += new * (computed + 0.5 * new)
            sampled += _old_tokens(r[slot], drafts[slot])
    straggler, straggler_of_all = 0.0, 0.0
    if decoding > 0 and tables.straggler_sequences.shape[0] > 0:  # most profiles have no use for it
        straggler, straggler_of_all = _stragglers(r, drafts, t, tables)
    return PassWork(query, sampled, prefill, prefill_work, decoding, decode_kv, straggler, straggler_of_all)


@inlined
def _decodes(request: Request, draft: Draft) -> bool:
    """Return whether a request decodes in the scheduled pass, with drafts or without."""
    new = request.scheduled
    return bool(new > 0 and request.computed > 0 and new == 1 + draft.drafted)


@inlined
def _old_tokens(request: Request, draft: Draft) -> int:
    """Return how many tokens of an old response are verified in the scheduled chunk."""
    if draft.old_tokens == 0:
        return 0
    computed = request.computed
    return max(computed + request.scheduled - max(computed, request.prompt), 0)


@part
def _stragglers(r: Requests, drafts: Drafts, t: Totals, tables: Tables) -> tuple[float, float]:
    """Return `straggler_s` and `straggler_of_all_s` of a pass that decodes."""
    decoding, lengths, longest_prefill = 0, np.empty(t.n_running), 0
    longest, summed = 0, 0
    for i in range(t.n_running):
        slot = r[i].running
        new, computed = r[slot].scheduled, r[slot].computed
        if _decodes(r[slot], drafts[slot]):
            lengths[decoding] = computed
            longest = max(longest, computed)
            summed += computed
            decoding += 1
        elif new > 0:
            longest_prefill = max(longest_prefill, computed + new)
    alone_s = straggler_s(tables, lengths[:decoding])
    if longest_prefill == 0:
        return alone_s, alone_s
    ahead = longest - max(summed / decoding, float(longest_prefill))
    return alone_s, straggler_beside_prefill_s(tables, float(decoding), ahead)


@part
def _account(
    r: Requests, drafts: Drafts, t: Totals, tables: Tables, work: PassWork, seconds: float, draft_s: float
) -> None:
    """Split the seconds of a pass that did more than decode, before its requests advance."""
    drafted, accepted = 0, 0
    for i in range(t.n_running):
        slot = r[i].running
        if _decodes(r[slot], drafts[slot]):
            drafted += r[slot].scheduled - 1
            accepted += drafts[slot].accepted
    decode_s, drafts_s = 0.0, draft_s
    if work.decoding > 0:
        n, kv = float(work.decoding), float(work.decode_kv)
        decode_s = pass_s(tables, n, n, 0.0, 0.0, n, kv, work.straggler_s)
        if drafted > 0:
            positions = n + drafted
            drafts_s += pass_s(tables, positions, positions, 0.0, 0.0, n, kv, work.straggler_s) - decode_s
    t.decode_s += decode_s
    share = accepted / drafted if drafted > 0 else 0.0
    t.drafts_accepted_s += share * drafts_s
    t.drafts_rejected_s += (1.0 - share) * drafts_s
    if work.prefill == 0:
        return
    token_s = (seconds + draft_s - decode_s - drafts_s) / work.prefill
    for i in range(t.n_running):
        slot = r[i].running
        new, computed, reached = r[slot].scheduled, r[slot].computed, r[slot].reached
        if new == 0 or _decodes(r[slot], drafts[slot]):
            continue
        old, old_accepted = _old_tokens(r[slot], drafts[slot]), 0.0
        if drafts[slot].old_tokens > 0:
            old_accepted = old * drafts[slot].old_accepted / drafts[slot].old_tokens
        again = min(reached + 1 - computed, new - old) if reached > computed else 0  # with the token that was to decode
        _recomputed(t, r[slot].lost_by, again * token_s)
        t.prefill_s += (new - again - old) * token_s
        t.drafts_accepted_s += old_accepted * token_s
        t.drafts_rejected_s += (old - old_accepted) * token_s


@inlined
def _recomputed(t: Totals, cause: int, seconds: float) -> None:
    """Add the seconds in which a lost cache was computed again."""
    if cause == MOVED:
        t.recompute_moved_s += seconds
    elif cause == PREEMPTED:
        t.recompute_preempted_s += seconds
    elif cause == RELOADED:
        t.recompute_reloaded_s += seconds
    elif cause == REDRAFTED:
        t.recompute_redrafted_s += seconds


@inlined
def _advance(r: Requests, drafts: Drafts, t: Totals) -> None:
    """Give the requests what they gain in the scheduled pass, which is over."""
    for i in range(t.n_running):
        slot = r[i].running
        new = r[slot].scheduled
        r[slot].scheduled = 0
        if new == 0:
            drafts[slot].proposed = 0
            if t.async_scheduling == 1:
                r[slot].gained = min(r[slot].gained, 0)
                r[slot].rejected = 0
                r[slot].in_flight = 0
            continue
        decodes = new == 1 + drafts[slot].drafted and r[slot].computed > 0
        if r[slot].going > 0:
            r[slot].computed += 0 if decodes else new
            continue
        decoded = r[slot].gained >= 0  # else it has just been admitted, or its context was not complete
        r[slot].gained = -1
        r[slot].rejected = 0
        r[slot].computed += new
        if r[slot].computed == known_tokens(r[slot], drafts[slot]) + drafts[slot].drafted:
            accepted = drafts[slot].accepted if drafts[slot].drafted > 0 else drafts[slot].old_accepted
            gain = min(1 + accepted, r[slot].stop_at - r[slot].generated)
            if r[slot].generated == 0:
                r[slot].first_token_s = t.now_s
            r[slot].generated += gain
            r[slot].gained = gain if decoded else 0
            if t.async_scheduling == 1 and drafts[slot].drafted > 0:
                r[slot].rejected = new - gain
            r[slot].computed = r[slot].prompt + r[slot].generated - 1
            if drafts[slot].old_tokens > 0:
                drafts[slot].drafted_total += drafts[slot].old_tokens
                drafts[slot].accepted_total += min(accepted, gain)
                drafts[slot].verifications += 1
                drafts[slot].verified_total += gain
            drafts[slot].old_tokens = 0
            drafts[slot].old_accepted = 0
            t.generated_tokens += gain
