"""Drafts: what a request brings to a pass, what the pass teaches, and when an engine drafts at all.

Invariant: what is drafted depends on a request, its tokens and its engine's memory, never on time.

A drafter on GPUs of its own (decoupled: SpecActor, arXiv 2511.16193, §4.1) is a second loop. A
request takes part in a pass of the verifier only when a window of drafted tokens is there. The
drafter works in passes of its own, one token for every request that may draft. A decoupled request
may draft while fewer than two windows of its tokens are unverified; a coupled one until it has a
window, and only while none of its tokens is in verification. A window that is right to the end
yields its tokens (decoupled) or one more (coupled). Any other yields the right ones and the
correction, and all that was drafted ahead is thrown away. The request then drafts again from the
drafter's next boundary; at once if the running drafter pass serves nobody else.

At one instant, the order is: a verification ends, a drafter pass ends, a verification starts, a
drafter pass starts. A token counts as drafted when the drafter's pass for it begins, so tokens that
are thrown away count. A drafter pass in which a window begins for a request also takes `round_s`,
the window's messages included. The first drafter pass for a request prefills what the drafter has
not: prompt and response when the request comes, later what its environment adds; its GPUs share
these requests. The drafter keeps its cache where the verifier loses its own (a preemption, new
weights). `tests/references/decoupled.py` is the rule, an event at a time.
"""

from __future__ import annotations

import numpy as np

from simrl.engine.leaving import drop_caches
from simrl.engine.requests import is_resting, known_tokens
from simrl.engine.state import REDRAFTED, Engines, Request, Requests, Totals
from simrl.profile.compiled import inlined, lean
from simrl.profile.interpolation import interpolate
from simrl.profile.profile import Tables, attention_alone_s, with_attention_s
from simrl.speculation.acceptance import levels_accepted
from simrl.speculation.bandit import BanditState, choose, observe
from simrl.speculation.decoding import (
    BATCH,
    ELASTIC,
    MODEL,
    NONE,
    RUNS,
    Decoding,
    Floats,
    Ints,
    Runs,
    draft,
    gate_opens,
    remember,
)
from simrl.speculation.draws import uniform
from simrl.speculation.gates import ELASTIC_ON, next_elastic
from simrl.speculation.passes import next_window
from simrl.speculation.siblings import drawn_source, sibling_draft
from simrl.speculation.specactor import reconfigured, token_acceptance
from simrl.speculation.toggle import ARMED, next_toggle
from simrl.speculation.windows import WindowRule


@lean
def drafts_now(r: Requests, t: Totals, d: Decoding) -> bool:
    """Return whether running requests have drafts, and the engine speculates."""
    return gate_opens(d.rule, d.gate_batch, t, t.n_running) and any_source(r, t, NONE)


@lean
def any_source(r: Requests, t: Totals, source: int) -> bool:
    """Return whether a running request drafts from this source (`NONE`: from any)."""
    for i in range(t.n_running):
        other = r[r[i].running].source
        if other != NONE and (other == source or source == NONE):
            return True
    return False


@inlined
def will_draft(q: Request) -> bool:
    """Return whether a running request decodes, and so drafts if its engine speculates."""
    one_token = is_resting(q) or known_tokens(q) - q.computed == 1
    return bool(q.source != NONE and q.complete == 1 and one_token)


@inlined
def bandit_of(e: Engines, row: int) -> BanditState:
    """Return the bandit of an engine."""
    bandits = e.drafting.bandits
    return BanditState(
        bandits.arrived[row],
        bandits.ordered[row],
        bandits.accepted[row],
        bandits.medians[row],
        bandits.counts[row],
    )


@lean
def choose_arm(e: Engines, row: int, d: Decoding) -> int:
    """Return the arm of the trees of the pass to come; 0 where no request has one."""
    r, t, modelled = e.requests[row], e.totals[row], 0
    for i in range(t.n_running):
        q = r[r[i].running]
        modelled += q.source == MODEL and will_draft(q)
    return choose(d.bandit, bandit_of(e, row), t.bandit_key, modelled) if modelled > 0 else 0


@inlined
def propose(
    q: Request, t: Totals, most: int, runs: Runs, logs: Floats, tree_levels: int, tree_nodes: int
) -> None:
    """Let a request that decodes draft for the pass to come, of `most` tokens at most. A model
    drafts a tree if `tree_levels` are not 0; `logs` are its acceptances."""
    trees = tree_levels > 0 and q.source == MODEL
    window = min(q.window, most)
    levels = tree_levels if trees else window
    drafted, accepted = window, 0
    if q.once_more == 1:  # nobody knows yet that it gains nothing
        pass
    elif q.source == MODEL:
        drafted = min(tree_nodes, most) if trees else window
        luck = -np.log(uniform(q.at, q.generated))
        accepted = min(levels_accepted(luck, q.hardness * t.drift, logs, levels), drafted)
    elif q.source == RUNS:
        run = int(runs[q.at + q.generated])
        drafted = min(run & 255, window)
        accepted = min(run >> 8, drafted)
        levels = drafted
    _bring(q, t, drafted, accepted, levels)


@inlined
def _bring(q: Request, t: Totals, drafted: int, accepted: int, levels: int) -> None:
    """Let a request bring a draft to the pass to come."""
    t.proposing += 1
    t.levels = max(t.levels, levels)
    q.proposed = q.once_more == 0
    q.drafted = drafted
    q.accepted = accepted


@lean
def propose_from_siblings(
    e: Engines, row: int, q: Request, t: Totals, d: Decoding, most: int
) -> None:
    """Do as `propose`, for a request that drafts from its siblings."""
    window = min(q.window, most)
    drafted, accepted = (window, 0) if q.once_more == 1 else _from_siblings(e, row, q, d, window)
    _bring(q, t, drafted, accepted, drafted)


@inlined
def _from_siblings(e: Engines, row: int, q: Request, d: Decoding, window: int) -> tuple[int, int]:
    """Return the tokens that a request drafts from its siblings, and how many are accepted."""
    index, first = d.siblings, d.siblings.group_first[q.at]
    if q.runs_at >= 0:
        reads_own = d.rule.own_text and _readable(e, row, q.at) > 0
        member, tokens = drawn_source(index, q.at, q.generated, reads_own)
        if member < 0 or _readable(e, row, first + member) <= tokens:
            return 0, 0
        return draft(RUNS, q.runs_at, q.generated, window, 1.0, d.runs, d.log_acceptances[0])
    for i in range(index.group_end[q.at] - first):
        e.drafting.readable[i] = _readable(e, row, first + i)
    if not d.rule.own_text:
        e.drafting.readable[q.at - first] = 0
    return sibling_draft(index, q.at, q.generated, e.drafting.readable, window)


@lean
def _readable(e: Engines, row: int, sibling: int) -> int:
    """Return how many tokens of a row of the trace a rank has generated and knows."""
    of = e.drafting.siblings[row, sibling]
    return int(e.requests[row, of.slot].generated if of.slot >= 0 else of.tokens)


@inlined
def round_s(t: Totals, d: Decoding, arm: int) -> float:
    """Return the seconds of the round in which the requests have drafted."""
    if t.proposing == 0:
        return 0.0
    n = float(t.proposing)
    step_s = interpolate(d.draft_sequences, d.step_s[arm], n)
    return interpolate(d.draft_sequences, d.round_s[arm], n) + t.levels * step_s


@inlined
def learn(q: Request, t: Totals, window_rule: WindowRule, trees: bool) -> None:
    """Count a verified draft, and set the window of the next; a tree's moves no window."""
    if trees and q.source == MODEL:
        t.modelled += 1
        t.modelled_accepted += q.accepted
    else:
        q.window = next_window(window_rule, q.window, q.drafted, q.accepted)
    verified = q.drafted > 0
    q.drafted_total += q.drafted
    q.accepted_total += min(q.accepted, q.left)
    q.verifications += verified
    q.verified_total += verified * min(1 + q.accepted, q.left)
    t.proposed += 1
    t.proposed_drafted += q.drafted
    t.proposed_accepted += q.accepted
    t.rollout_drafts += verified
    t.rollout_accepted += q.accepted


@lean
def end_round(e: Engines, row: int, d: Decoding, seconds: float, most_prefill: int) -> None:
    """Remember what a pass of `seconds` has verified, and let the drafter prefill what it has, while
    another rank's may have `most_prefill` tokens."""
    t = e.totals[row]
    if t.proposed > 0:
        remember(t, t.proposed_drafted, t.proposed_accepted)
    if t.modelled > 0:
        tokens = 1.0 + t.modelled_accepted / t.modelled
        observe(d.bandit, bandit_of(e, row), t.bandit_key, t.arm, tokens, t.modelled, seconds)
    prefills = d.prefill_s > 0.0 and not d.rule.decoupled
    if prefills and (d.rule.gate != ELASTIC or t.speculates == 1):
        prefill_s, own_s = d.prefill_s * most_prefill, d.prefill_s * t.prefill
        share = recent_share(t)
        t.drafts_accepted_s += share * own_s
        t.drafts_rejected_s += (1.0 - share) * own_s
        t.lock_step_s += prefill_s - own_s
        t.slowed_s += (t.slowdown - 1.0) * prefill_s
        t.slot_s += t.n_running * t.slowdown * prefill_s
        t.now_s += t.slowdown * prefill_s


@inlined
def recent_share(t: Totals) -> float:
    """Return the accepted share of the recent drafts."""
    return t.recent_accepted / t.recent_drafted if t.recent_drafted > 0 else 0.0


@lean
def heed_gate(
    r: Requests, t: Totals, d: Decoding, passes: int, batch: int, speculates: bool
) -> None:
    """Let the gate see `passes` over `batch` requests, which are over."""
    if d.rule.gate == BATCH and not speculates:
        for _ in range(passes):
            remember(t, 0, 0)
    if d.rule.gate != ELASTIC or t.elastic_state == ELASTIC_ON or t.prefill > 0:
        return
    for _ in range(passes):
        t.elastic_state = next_elastic(t.elastic_state, batch, d.rule.threshold, d.rule.patience)
    if t.elastic_state == ELASTIC_ON and any_source(r, t, MODEL):
        drop_caches(r, t, REDRAFTED)  # a model needs the hidden states of all that runs


@lean
def attention_over_s(tables: Tables, d: Decoding, n: float, kv_tokens: float) -> float:
    """Return what the attention of a drafter that reads the target's cache takes beyond its times,
    for `n` sequences of `kv_tokens`."""
    return attention_alone_s(tables, 0.0, 0.0, n, n * kv_tokens) - attention_alone_s(
        tables, 0.0, 0.0, n, n * d.own_kv_tokens
    )


@lean
def look(r: Requests, t: Totals, tables: Tables, d: Decoding) -> None:
    """Let a toggle look at the engine before a pass: at the tokens that a round of drafts is taken
    to yield, over the plain passes that the round takes the time of."""
    n, tokens, known, gain = float(t.n_running), float(d.rule.window.start_tokens), 0, 0.0
    if t.elastic_state == ARMED and t.n_running > 0:
        for i in range(t.n_running):
            known += r[r[i].running].prompt + r[r[i].running].generated
        kv_tokens, positions = float(known // t.n_running), n * (tokens + 1.0)
        attention_s = attention_alone_s(tables, 0.0, 0.0, n, n * kv_tokens)
        round_s = with_attention_s(tables, positions, positions, n, attention_s, 0.0)
        round_s += tokens * interpolate(d.draft_sequences, d.step_s[0], n)
        round_s += tokens * attention_over_s(tables, d, n, kv_tokens)
        gain = t.accept_length * with_attention_s(tables, n, n, n, attention_s, 0.0) / round_s
    t.elastic_state = next_toggle(
        t.elastic_state, t.n_running, d.rule.threshold, gain, d.rule.margin
    )


# Decoupled drafting. From one verification to the next, a request drafts in every drafter pass
# until it has all it may. `meanwhile` has, by the number of passes, how many requests then have it,
# and for how many a window begins in the next pass.
HAVING, BEGINS = np.arange(2)


@inlined
def begin_verification(q: Request, right: int, most: int) -> None:
    """Put a window of drafted tokens into verification, the first `right` of which are right; at
    most `most` of them are computed."""
    # Computed are the token known last and all drafted ones; decoupled, the last is not: nobody
    # asks what follows it.
    q.drafted = min(q.window if q.coupled == 1 else q.window - 1, most)
    q.accepted = min(right, q.drafted)
    q.proposed = 1
    q.in_verification = q.window
    q.right = right
    q.ahead -= q.window
    if q.coupled == 1:  # what was drafted beyond may contradict the bonus token
        q.ahead = 0
        q.drafting = 0


@inlined
def most_unverified(q: Request) -> int:
    """Return how many drafted tokens of a request may be unverified."""
    bound = 2 * q.window
    if q.coupled == 1:
        bound = q.window if q.in_verification == 0 else 0
    return bound


@inlined
def take_window(
    q: Request, t: Totals, most: int, runs: Runs, logs: Floats, landed: bool, meanwhile: Ints
) -> bool:
    """Put a window into the pass to come, of which at most `most` tokens are computed, and plan
    what is drafted until its end. Return whether the request takes part in the pass."""
    if landed:
        q.ahead += q.drafting
        q.drafting = 0
    q.may = 0
    q.waits_for_drafts = 0
    if q.generated == 0 or known_tokens(q) - q.computed != 1 or q.source == NONE:
        return True
    window, ready = q.window, q.ahead >= q.window
    if ready:
        if q.source == MODEL:
            luck = -np.log(uniform(q.at, q.generated))
            right = levels_accepted(luck, q.hardness * t.drift, logs, window)
        else:
            _, right = draft(q.source, q.at, q.generated, window, 1.0, runs, logs)
        begin_verification(q, right, most)
    else:
        q.waits_for_drafts = 1
    bound = most_unverified(q)
    unverified = q.in_verification + q.ahead + q.drafting
    q.may = max(bound - unverified, 0)
    t.flying += q.drafting
    t.proposing += q.may > 0
    count_lacking(q, t, int(q.may > 0))
    meanwhile[HAVING, q.may] += 1
    for begin in (0, window):
        if unverified <= begin < bound:
            meanwhile[BEGINS, begin - unverified] += 1
    return ready


@inlined
def count_lacking(q: Request, t: Totals, number: int) -> None:
    """Count a request `number` times among those that the drafter has yet to prefill, if it is
    one. The last known token is computed by the pass that drafts."""
    tokens = max(q.prompt - q.drafter_prompt, 0)
    tokens += (q.generated - 1) * (q.drafter_prompt == 0)
    t.lacking += number * (tokens > 0)
    t.lacking_tokens += number * tokens


@lean
def draft_meanwhile(t: Totals, d: Decoding, began_s: float, rests: bool, meanwhile: Ints) -> int:
    """Start the drafter's passes that begin from `began_s` to now, at least one if it rests. Return
    their number; `t.draft_ends_s` is when the last one ends, infinity if the drafter rests then."""
    passes, free_s, until_s = 0, began_s if rests else t.draft_ends_s, t.now_s
    while t.proposing > 0 and (free_s < until_s or (rests and passes == 0)):
        n = float(t.proposing)
        seconds = interpolate(d.draft_sequences, d.step_s[0], n)
        if meanwhile[BEGINS, passes] > 0:
            seconds += interpolate(d.draft_sequences, d.round_s[0], n)
        if passes == 0 and t.lacking > 0:
            seconds += d.prefill_s * t.lacking_tokens / min(t.lacking, d.draft_gpus)
        t.draft_tokens += t.proposing
        free_s += t.slowdown * seconds
        passes += 1
        t.proposing -= meanwhile[HAVING, passes]
    t.draft_ends_s = np.inf if free_s < until_s or (rests and passes == 0) else free_s
    return passes


@inlined
def land(q: Request, t: Totals, passes: int) -> None:
    """Give a request what the drafter began for it in `passes` passes: all but the last landed."""
    if passes > 0 or t.draft_ends_s == np.inf:
        drafted, flies = min(q.may, passes), t.draft_ends_s < np.inf and q.may >= passes
        q.ahead += q.drafting + drafted - flies
        q.drafting = flies
        q.drafted_total += drafted
        q.unverified_total += drafted
        if drafted > 0:
            q.drafter_prompt = max(q.prompt, q.drafter_prompt)


@inlined
def judge(q: Request, t: Totals) -> None:
    """End the verification of a window: count it, and throw away what was drafted after a miss."""
    window, right = q.in_verification, q.right
    if q.drafted < (window if q.coupled == 1 else window - 1):  # the pass had room for a part
        right = min(right, q.drafted)
    accepted = min(right, q.left)
    missed = right < min(window, q.left)
    q.in_verification = 0
    q.unverified_total -= window
    q.accepted_total += accepted
    q.misses_total += missed
    q.verifications += 1
    q.verified_total += q.generated - (q.stop_at - q.left)
    if missed or q.generated >= q.stop_at:
        q.ahead = 0
        q.drafting = 0
    t.proposed += 1
    t.proposed_drafted += window
    t.proposed_accepted += accepted


@inlined
def is_due(q: Request, every: int) -> bool:
    """Return whether a request passed a multiple of `every` tokens in this verification."""
    return bool(every > 0 and (q.stop_at - q.left) // every < q.generated // every)


@inlined
def reconfigure(r: Requests, t: Totals, d: Decoding, q: Request) -> None:
    """Give a request the window and the mode that suit its acceptance beside the others'."""
    total, known = 0.0, 0
    for i in range(t.n_running):
        other = r[r[i].running]
        acceptance = token_acceptance(other.accepted_total, other.misses_total)
        if not np.isnan(acceptance):
            total += acceptance
            known += 1
    q.window, q.coupled = reconfigured(
        token_acceptance(q.accepted_total, q.misses_total),
        total / known if known > 0 else 0.0,
        d.rule.window.start_tokens,
        d.best_window,
        d.best_coupled,
    )
