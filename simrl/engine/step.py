"""One forward pass of an engine: who computes how much, as in vLLM V1, and what each request gains.

Invariant: `step` is the rule, one pass of any kind. It walks over the running requests twice:
first each proposes its draft and is scheduled, then each advances, learns and may stop. What is
rare (admission, preemption, prefill, stops) takes walks of its own.
`engine.repeat` gives the result of many steps that only decode without drafts, faster.

Data-parallel ranks are rows that make their passes together, as vLLM runs a mixture of experts with
`--data-parallel-size`; a rank without work makes a dummy pass while another has work. Each rank has
a drafter, a gate and a bandit of its own; all wait for the one that drafts longest.
"""

from __future__ import annotations

import numpy as np

from simrl.engine.cost import follow_record, pass_seconds, wait_for_stragglers
from simrl.engine.drafts import (
    BEGINS,
    HAVING,
    attention_over_s,
    choose_arm,
    count_lacking,
    draft_meanwhile,
    end_round,
    heed_gate,
    is_due,
    judge,
    land,
    learn,
    look,
    propose,
    propose_from_siblings,
    recent_share,
    reconfigure,
    round_s,
    take_window,
    will_draft,
)
from simrl.engine.leaving import keep_room, know_all, let_leave, preempt_last, stop
from simrl.engine.prefix_cache import cover, find, held_alone, share, take_found
from simrl.engine.requests import (
    admissible,
    admit,
    blocks_to_start,
    capacity_tokens,
    is_resting,
    known_tokens,
    make_room,
    more_blocks,
)
from simrl.engine.state import (
    MOVED,
    NEVER,
    PREEMPTED,
    REDRAFTED,
    RELOADED,
    Engines,
    Limits,
    Request,
    Requests,
    Totals,
)
from simrl.profile.compiled import inlined, lean
from simrl.profile.profile import Tables
from simrl.speculation.decoding import SIBLINGS, TOGGLE, Decoding, Ints, gate_opens


@inlined
def step(e: Engines, first: int, tables: Tables, limits: Limits, d: Decoding | None) -> None:
    """Do one pass of all ranks, behind a round of drafts, and list what stops in it. With a decoupled
    drafter it may be a drafter's pass that the verifier waits for."""
    began_s = e.totals[first].now_s
    works, tries, tokens, drafts_s, most_prefill = True, 0, 0, 0.0, 0
    if d is not None:
        for k in range(limits.dp):
            t = e.totals[first + k]
            if d.rule.gate == TOGGLE:
                look(e.requests[first + k], t, tables, d)
            t.speculates = not d.rule.decoupled and gate_opens(d.rule, d.gate_batch, t, t.n_running)
            t.arm = choose_arm(e, first + k, d) if d.rule.trees and t.speculates == 1 else 0
    ranks = e.totals[first : first + limits.dp]
    idle = not (np.any(ranks["n_running"]) or np.any(ranks["leaving_places"]))
    for k in range(limits.dp if idle else 0):
        e.totals[first + k].wave = e.totals[first + k].passes
    while tries == 0 or (tries == 1 and tokens == 0 and limits.async_scheduling):
        for k in range(limits.dp):
            r, t = e.requests[first + k], e.totals[first + k]
            if limits.async_scheduling:
                # As of when the pass before starts; if nothing is to do then, as of its end.
                if t.ahead == 0 or tries == 1:
                    know_all(r, t)
                t.ahead = 1
            works = _schedule(e, first + k, tables, limits, d)
            tokens += t.query
        tries += 1
    seconds = pass_seconds(e, first, tables, limits) if works else 0.0
    if d is not None:
        for k in range(limits.dp):
            t = e.totals[first + k]
            t.draft_s = round_s(t, d, t.arm) if t.speculates == 1 else 0.0
            if d.own_kv_tokens > 0.0 and t.draft_s > 0.0 and t.decoding > 0:
                n, kv_tokens = float(t.proposing), t.decode_kv / t.decoding
                t.draft_s += t.levels * attention_over_s(tables, d, n, kv_tokens)
            drafts_s, most_prefill = max(drafts_s, t.draft_s), max(most_prefill, t.prefill)
    if works and e.record.shape[1] > 0:
        follow_record(e, first, seconds + drafts_s)
    for k in range(limits.dp):
        r, t = e.requests[first + k], e.totals[first + k]
        drafted = 0
        if d is not None:
            rests = t.draft_ends_s <= began_s or t.flying == 0
            if works:
                _account(r, t, seconds, drafts_s)
            if d.rule.decoupled:
                drafted = draft_meanwhile(t, d, began_s, rests, e.drafting.meanwhile)
                if not works:
                    _wait_for_drafter(t)
        else:
            _account(r, t, seconds, 0.0)
        stopping = _advance(r, t, d, drafted)
        let_leave(r, t)
        passes = int(works)
        t.passes += passes
        if d is not None:
            end_round(e, first + k, d, t.now_s - began_s, most_prefill)
        t.n_stopped, batch = 0, t.n_running
        if stopping or t.n_once_more > 0:
            stop(r, t)
        if d is not None and not d.rule.decoupled:
            heed_gate(r, t, d, passes, batch, t.speculates == 1)


@lean
def _schedule(
    e: Engines,
    row: int,
    tables: Tables,
    limits: Limits,
    d: Decoding | None,
) -> bool:
    """Set the tokens that each request has in the pass to come, and its work; vLLM's `schedule()`.
    Return whether there is anything to compute: decoupled, all may wait for the drafter."""
    r, t = e.requests[row], e.totals[row]
    i, budget, closed = 0, limits.max_num_batched_tokens, False
    counts_flying = limits.async_scheduling and limits.window_groups > 0
    _start_counting(t)
    t.decodes_alone = limits.prefill_interval > 1 and _decodes_alone(r, t, limits)
    if limits.sglang and t.n_running > 0 and r[r[t.n_running - 1].running].complete == 0:
        i = t.n_running - 1  # the rest of its context, alone
    elif limits.sglang:
        _admit_waiting(r, t, limits, budget, 0)
        if t.query > 0:
            return True
        keep_room(r, t, limits, d is not None)
        budget, closed = NEVER, True
    works, all_draft, n, drafting = d is None, False, t.n_running, t.n_running
    arm, speculates = t.arm, t.speculates == 1
    if d is not None:
        # Arrays of the loop, by name: each use of a tuple's array counts its references.
        drafting, capacity, runs, logs = 0, capacity_tokens(limits), d.runs, d.log_acceptances[arm]
        decoupled, landed = d.rule.decoupled, t.draft_ends_s <= t.now_s
        works, tree_levels = not decoupled, d.arm_levels[arm] if d.rule.trees else 0
        tree_nodes, meanwhile = d.arm_nodes[arm], e.drafting.meanwhile
        if decoupled:
            for k in range(2 * logs.shape[0] + 2):
                meanwhile[HAVING, k] = 0
                meanwhile[BEGINS, k] = 0

    # First, the running requests. All draft before any is preempted, or lacks room.
    drafting = max(drafting, i)
    while i < t.n_running and (budget > 0 or drafting < n):
        if d is not None and drafting < n and (drafting == i or all_draft or budget == 0):
            q = r[r[drafting].running]
            drafting += 1
            q.proposed = 0
            q.drafted = 0
            q.accepted = 0
            q.left = q.stop_at - q.generated
            most = max(capacity - q.computed - q.rejected - 1, 0)  # else it fits not even alone
            if decoupled:
                works |= take_window(q, t, most, runs, logs, landed, meanwhile)
            elif speculates and will_draft(q):
                if q.source == SIBLINGS:
                    propose_from_siblings(e, row, q, t, d, most)
                else:
                    propose(q, t, most, runs, logs, tree_levels, tree_nodes)
            if all_draft or budget == 0:
                continue
        slot = r[i].running
        q = r[slot]
        put_off = t.decodes_alone == 1 and q.complete == 0
        if put_off or (d is not None and q.waits_for_drafts == 1):
            i += 1
            continue
        if q.complete == 0:
            t.next_prefill = t.passes + limits.prefill_interval
        left = 1 if is_resting(q) else known_tokens(q) - q.computed
        new = min(left + q.drafted, budget)
        need = more_blocks(q, q.computed + q.rejected + new, limits)
        if need > t.free_blocks:
            make_room(r, t, need, PREEMPTED)
            if need > t.free_blocks and drafting < n:
                all_draft = True
                continue
            while need > t.free_blocks and i < t.n_running:
                closed = True
                t.preemptions += 1
                if d is not None and decoupled:
                    _draft_no_more(r[r[t.n_running - 1].running], t, meanwhile)
                preempt_last(r, t, PREEMPTED)
            if i == t.n_running:  # it had to preempt itself
                break
        t.free_blocks -= need
        q.blocks += need
        q.scheduled = new
        if counts_flying:
            q.in_flight = new
        if q.covering == 1 and not limits.sglang:
            cover(r, t, slot, min(q.computed + new, known_tokens(q)))
        if q.drafted >= new and q.drafted > 0:
            q.drafted = min(q.drafted, new - 1)
            q.accepted = min(q.accepted, new - 1)
        _count(q, t)
        budget -= new
        i += 1

    # Next, the waiting requests.
    if not closed and budget > 0 and t.n_waiting > 0:
        _admit_waiting(r, t, limits, budget, i)
    if limits.prefill_interval > 1 and not closed and t.decodes_alone == 0:
        is_there = not limits.async_scheduling or r[r[t.waiting_head].waiting].seen_at <= t.passes
        t.crowded = t.n_waiting > 0 and is_there
    if t.decoding > 0 and tables.straggler_sequences.shape[0] > 0:  # few profiles have it
        wait_for_stragglers(r, t, tables, e.scratch)
    return works or t.query > 0


@lean
def _decodes_alone(r: Requests, t: Totals, limits: Limits) -> bool:
    """Return whether the pass to come puts contexts off, as vLLM 0.33 does with a
    `prefill_schedule_interval` (v1/core/sched/scheduler.py, v1/engine/core.py): while a request
    decodes, contexts are computed an interval after the last ones; ranks have them in the same
    passes, multiples of the interval since all were idle. One token alone is no context. Where
    requests are left waiting all the same, none is put off until none waits."""
    late = t.passes < t.next_prefill
    if limits.dp > 1:
        late = (t.passes - t.wave) % limits.prefill_interval > 0
    decoding = t.leaving_places
    for i in range(t.n_running if late and t.crowded == 0 else 0):
        decoding += r[r[i].running].complete
    return bool(late and t.crowded == 0 and decoding > 0)


@inlined
def _start_counting(t: Totals) -> None:
    """Set the work of the pass to none."""
    t.query = t.sampled = t.prefill = t.decoding = t.decode_kv = 0
    t.drafted = t.accepted = t.proposing = t.levels = t.flying = 0
    t.lacking = t.lacking_tokens = 0
    t.proposed = t.proposed_drafted = t.proposed_accepted = 0
    t.modelled = t.modelled_accepted = 0
    t.prefill_work = t.draft_s = t.straggler_s = t.straggler_of_all_s = 0.0


@lean
def _decodes(q: Request) -> bool:
    """Return whether a request decodes in the scheduled pass, with drafts or without."""
    return bool(q.scheduled > 0 and q.computed > 0 and q.scheduled == 1 + q.drafted)


@lean
def _old_tokens(q: Request) -> int:
    """Return how many tokens of an old response are verified in the scheduled chunk."""
    if q.old_tokens == 0:
        return 0
    return max(q.computed + q.scheduled - max(q.computed, q.prompt), 0)


@lean
def _count(q: Request, t: Totals) -> None:
    """Count the work of a scheduled request."""
    new = q.scheduled
    t.query += new
    if _decodes(q):
        t.decoding += 1
        t.decode_kv += q.computed + new
        t.sampled += new
        t.drafted += q.drafted
        t.accepted += q.accepted
    else:
        t.prefill += new
        t.prefill_work += new * (q.computed + 0.5 * new)
        t.sampled += 1 + _old_tokens(q)


@inlined
def _draft_no_more(q: Request, t: Totals, meanwhile: Ints) -> None:
    """Let the drafter draft no more for a request that is about to be preempted, but in a pass
    that begins now."""
    begun = min(q.may, int(t.draft_ends_s <= t.now_s or t.flying == 0))
    if q.may > begun:
        bound = 2 * q.window if q.coupled == 0 else q.window
        unverified = bound - q.may
        for begin in (0, q.window):
            if unverified + begun <= begin < bound:
                meanwhile[BEGINS, begin - unverified] -= 1
        meanwhile[HAVING, q.may] -= 1
        meanwhile[HAVING, begun] += 1
        t.proposing -= begun == 0
        count_lacking(q, t, -int(begun == 0))
    q.drafted_total += begun
    q.unverified_total += begun
    if begun > 0:
        q.drafter_prompt = max(q.prompt, q.drafter_prompt)
    q.may = begun


@lean
def _admit_waiting(r: Requests, t: Totals, limits: Limits, budget: int, scheduled: int) -> None:
    """Start waiting requests, behind the `scheduled` running ones, within the budget of tokens."""
    while budget > 0:
        new = admissible(r, t, limits, budget)
        if new == 0:
            return
        padding = _padding(r, t, limits, scheduled) if t.padding > 0 else 0
        if padding > 0 and (new + padding > budget or not _fits(r, t, limits, padding)):
            return
        new += padding
        slot = admit(r, t)
        q = r[slot]
        if q.blocks == 0:
            t.lookup_tokens += known_tokens(q)
        if t.prefix_caching == 1 and q.blocks == 0:
            take_found(r, t, slot, known_tokens(q))
        if q.computed < known_tokens(q) - 1:
            t.next_prefill = t.passes + limits.prefill_interval
        need = more_blocks(q, q.computed + new, limits)
        make_room(r, t, need, PREEMPTED)
        t.free_blocks -= need
        q.blocks += need
        q.scheduled = new
        q.in_flight = new if limits.async_scheduling and limits.window_groups > 0 else 0
        q.complete = q.gained = 0
        if q.covering == 1 and not limits.sglang:
            cover(r, t, slot, q.computed + new)
        q.drafted = padding
        q.proposed = q.accepted = q.ahead = q.in_verification = q.drafting = q.may = 0
        _count(q, t)
        budget -= new


@inlined
def _padding(r: Requests, t: Totals, limits: Limits, scheduled: int) -> int:
    """Return the draft tokens that vLLM gives the first waiting request, which may start: where it
    has one token to compute, so that a CUDA graph of decoding still fits. They are rejected."""
    slot = r[t.waiting_head].waiting
    known, computed = known_tokens(r[slot]), r[slot].computed
    if t.prefix_caching == 1 and r[slot].blocks == 0:
        computed = max(find(r, t, slot, known)[0] * limits.block_size, computed)
    if known - computed != 1 or (scheduled == 0 and computed == 0):
        return 0
    for i in range(scheduled):
        q = r[r[i].running]
        if q.complete == 0 and q.scheduled > 0:  # computes its prompt
            return 0
    fits_alone = known + t.padding < capacity_tokens(limits)
    return t.padding if fits_alone and t.padding < limits.max_num_batched_tokens else 0


@inlined
def _fits(r: Requests, t: Totals, limits: Limits, padding: int) -> bool:
    """Return whether there is room for `padding` tokens more than the known ones of the first
    waiting request, which may start."""
    slot = r[t.waiting_head].waiting
    known, cached, free_ones = known_tokens(r[slot]), 0, 0
    if t.prefix_caching == 1 and r[slot].blocks == 0:
        cached, free_ones = find(r, t, slot, known)
    elif t.prefix_caching == 1:
        cached, free_ones = r[slot].blocks, held_alone(r, slot)
    need = blocks_to_start(known + padding, limits) - cached
    need += limits.watermark_blocks * (t.n_running + t.leaving_places > 0)
    return need <= t.free_blocks + t.held_blocks - free_ones


@inlined
def _account(r: Requests, t: Totals, seconds: float, round_s: float) -> None:
    """End the scheduled pass, which took `seconds` behind the `round_s` of the rank that drafted
    longest, and split them by what they went to."""
    drafts_s, slowed_s = t.draft_s + t.verifying_s, t.slowdown * (seconds + round_s)
    t.now_s += t.slowdown * round_s + t.slowdown * seconds
    t.slowed_s += (t.slowdown - 1.0) * (seconds + round_s)
    t.slot_s += t.n_running * slowed_s
    t.lock_step_s += seconds - t.own_s + (round_s - t.draft_s)
    t.decodes += t.decoding
    t.prefill_tokens += t.prefill
    t.decode_s += t.decoding_s
    share = t.accepted / t.drafted if t.drafted > 0 else 0.0
    t.drafts_accepted_s += share * drafts_s
    t.drafts_rejected_s += (1.0 - share) * drafts_s
    if t.prefill > 0:
        _account_prefill(r, t, (t.own_s - t.decoding_s - t.verifying_s) / t.prefill)


@lean
def _account_prefill(r: Requests, t: Totals, token_s: float) -> None:
    """Split the seconds of prefill by why its tokens are computed."""
    for i in range(t.n_running):
        q = r[r[i].running]
        if q.scheduled == 0 or _decodes(q):
            continue
        old, old_accepted = _old_tokens(q), 0.0
        if q.old_tokens > 0:
            old_accepted = old * q.old_accepted / q.old_tokens
        again = 0
        if q.reached > q.computed:  # with the token that was to decode
            again = min(q.reached + 1 - q.computed, q.scheduled - old)
        if q.lost_by == MOVED:
            t.recompute_moved_s += again * token_s
        elif q.lost_by == PREEMPTED:
            t.recompute_preempted_s += again * token_s
        elif q.lost_by == RELOADED:
            t.recompute_reloaded_s += again * token_s
        elif q.lost_by == REDRAFTED:
            t.recompute_redrafted_s += again * token_s
        t.prefill_s += (q.scheduled - again - old) * token_s
        t.drafts_accepted_s += old_accepted * token_s
        t.drafts_rejected_s += (old - old_accepted) * token_s


@inlined
def _wait_for_drafter(t: Totals) -> None:
    """Wait until the drafter's pass ends."""
    assert t.draft_ends_s < np.inf, "neither the verifier nor the drafter has anything to do"
    share, wait_s = recent_share(t), t.draft_ends_s - t.now_s
    t.drafts_accepted_s += share * wait_s
    t.drafts_rejected_s += (1.0 - share) * wait_s
    t.slot_s += t.n_running * wait_s
    t.now_s = t.draft_ends_s


@lean
def _advance(r: Requests, t: Totals, d: Decoding | None, drafted: int) -> bool:
    """Give the requests what they gain in the scheduled pass, which is over, and learn from their
    drafts. Return whether one has reached a stop."""
    stopping = 0
    if d is not None:
        decoupled, trees, window_rule = d.rule.decoupled, d.rule.trees, d.rule.window
        every = d.rule.reconfigure_every
    for i in range(t.n_running):
        q = r[r[i].running]
        new = q.scheduled
        q.scheduled = 0
        if d is not None and decoupled:
            land(q, t, drafted)
        if new == 0:
            q.proposed = 0
            if t.async_scheduling == 1:
                q.gained = 0
                q.rejected = 0
                q.in_flight = 0
            if d is not None and decoupled and q.in_verification > 0:  # it waits on
                q.ahead += q.in_verification
                q.in_verification = 0
            continue
        decodes = new == 1 + q.drafted and q.computed > 0
        if q.once_more == 1:
            q.computed += 0 if decodes else new
            continue
        decoded = q.complete == 1  # else it was just admitted, or its context was not complete
        q.complete = 0
        q.gained = 0
        q.rejected = 0
        q.computed += new
        if t.last_apart == 0 and q.covering == 1:
            share(r, t, r[i].running)
        if q.computed == known_tokens(q) + q.drafted:
            accepted = q.accepted
            if q.old_tokens > 0 and q.drafted == 0:
                accepted = q.old_accepted
            gain = min(1 + accepted, q.stop_at - q.generated)
            if q.generated == 0:
                q.first_token_s = t.now_s
            q.generated += gain
            q.complete = 1
            q.gained = gain if decoded else 0
            q.computed = q.prompt + q.generated - 1
            t.generated_tokens += gain
            if q.old_tokens > 0:
                _end_old(q, accepted, gain)
            if t.async_scheduling == 1 and q.drafted > 0:  # padding of a prompt of one token, too
                q.rejected = new - gain
            stopping |= q.generated >= min(q.stop_at, q.watch_at)
        if d is not None and q.proposed == 1:
            if decoupled:
                judge(q, t)
                if is_due(q, every):
                    reconfigure(r, t, d, q)
            else:
                learn(q, t, window_rule, trees)
    return stopping > 0


@inlined
def _end_old(q: Request, accepted: int, gain: int) -> None:
    """End the verification of an old response."""
    q.drafted_total += q.old_tokens
    q.accepted_total += min(accepted, gain)
    q.verifications += 1
    q.verified_total += gain
    q.old_tokens = 0
    q.old_accepted = 0
