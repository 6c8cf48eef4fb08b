"""Passes with drafts: which requests draft how much, what a pass teaches, and when none drafts at all."""

from __future__ import annotations

from simrl.engine.leaving import drop_caches, stop
from simrl.engine.passes import iterate
from simrl.engine.requests import (
    REDRAFTED,
    Limits,
    Requests,
    Totals,
    Until,
    blocks_of,
    busy,
    capacity_tokens,
    is_plain,
    known_tokens,
)
from simrl.engine.stretches import (
    Memory,
    count_draft,
    decode_stretch,
    draft_from_siblings,
    most_drafted,
    speculative_stretch,
    stretch_length,
)
from simrl.profile.compiled import kernel, part
from simrl.profile.interpolation import interpolate
from simrl.profile.profile import Tables
from simrl.speculation.bandit import choose, observe
from simrl.speculation.decoding import (
    BATCH,
    ELASTIC,
    MODEL,
    NONE,
    RUNS,
    SIBLINGS,
    Decoding,
    Drafts,
    Records,
    draft,
    gate_opens,
    passes_to_next_try,
    remember,
)
from simrl.speculation.gates import ELASTIC_ON, next_elastic


@kernel
def run_speculative(
    r: Requests,
    drafts: Drafts,
    totals: Records,
    tables: Tables,
    limits: Limits,
    d: Decoding,
    memory: Memory,
    until: Until,
) -> float:
    """Do as `passes.run`, with drafts."""
    t, rule = totals[0], d.rule
    most = most_drafted(d)
    t.n_stopped = 0
    while t.now_s <= until.time_s and busy(t):
        n = t.n_running
        speculates = gate_opens(rule, d.gate_batch, t, n)
        passes = stretch_length(r, drafts, t, limits)
        passes_before, prefill_before = t.passes, t.prefill_tokens
        plain = passes > 0 and not (speculates and _any_source(r, drafts, t, NONE))
        if plain and not _unsure(r, t):
            if rule.gate == ELASTIC and n <= rule.threshold:
                passes = min(passes, max(rule.patience - t.elastic_state, 1))
            elif rule.gate == BATCH and not speculates:
                passes = passes_to_next_try(t, passes)
            decode_stretch(r, t, tables, limits, passes, until.time_s)
        elif (
            passes > 0
            and not plain
            and _all_may_draft(r, t)
            and n * (1 + most) <= limits.max_num_batched_tokens
            and is_plain(limits)
            and t.free_blocks >= n * (blocks_of((1 + t.async_scheduling) * most + 1, limits.block_size) + 1)
        ):
            speculative_stretch(r, drafts, t, tables, limits, d, memory, until.time_s)
        else:
            draft_s, arm = propose(r, drafts, t, limits, d, memory, speculates)
            before_s = t.now_s
            iterate(r, drafts, t, tables, limits, draft_s)
            learn(r, drafts, t, d, memory, arm, t.now_s - before_s)
            if d.prefill_s > 0.0 and t.prefill_tokens > prefill_before and (rule.gate != ELASTIC or speculates):
                _prefill_drafter(t, d, t.prefill_tokens - prefill_before)
        batch = t.n_running
        stop(r, t)
        if rule.gate == BATCH and not speculates:
            for _ in range(t.passes - passes_before):
                remember(t, 0, 0)
        if rule.gate == ELASTIC and t.elastic_state != ELASTIC_ON and t.prefill_tokens == prefill_before:
            for _ in range(t.passes - passes_before):
                t.elastic_state = next_elastic(t.elastic_state, batch, rule.threshold, rule.patience)
            if t.elastic_state == ELASTIC_ON and _any_source(r, drafts, t, MODEL):
                drop_caches(r, t, REDRAFTED)  # a drafter that is a model needs the hidden states of all that runs
        if until.first_stop and t.n_stopped > 0:
            break
    return t.now_s


@part
def propose(
    r: Requests, drafts: Drafts, t: Totals, limits: Limits, d: Decoding, memory: Memory, speculates: bool
) -> tuple[float, int]:
    """Let every running request that decodes draft, if the engine speculates. Returns the seconds of the round, and the arm of
    its trees (0 where there are none)."""
    proposing, modelled, levels = 0, 0, 0
    for i in range(t.n_running):
        slot = r[i].running
        drafts[slot].drafted = 0
        drafts[slot].accepted = 0
        one_token = r[slot].going == 2 or known_tokens(r[slot], drafts[slot]) - r[slot].computed == 1
        decodes = r[slot].gained >= 0 and one_token
        drafts[slot].proposed = speculates and decodes and drafts[slot].source != NONE
        drafts[slot].left = r[slot].stop_at - r[slot].generated
        proposing += drafts[slot].proposed
        modelled += drafts[slot].proposed == 1 and drafts[slot].source == MODEL
    trees = d.rule.trees and modelled > 0
    arm = choose(d.bandit, memory.bandit, t.bandit_key, modelled) if trees else 0
    for i in range(t.n_running):
        slot = r[i].running
        if drafts[slot].proposed == 0:
            continue
        room = capacity_tokens(limits) - r[slot].computed - r[slot].rejected - 1
        most = max(room, 0)  # else it could not even run alone
        window = min(drafts[slot].window, most)
        if r[slot].going > 0:  # it drafts, and gains nothing
            drafts[slot].proposed = 0
            drafted, accepted = max(window, 0), 0
            levels = max(levels, d.arm_levels[arm] if trees and drafts[slot].source == MODEL else drafted)
        elif drafts[slot].source == MODEL:
            depth = d.arm_levels[arm] if trees else window
            drafted = min(d.arm_nodes[arm], most) if trees else window
            at, hardness = drafts[slot].at, drafts[slot].hardness * t.drift
            _, right = draft(MODEL, at, r[slot].generated, depth, hardness, d.runs, d.log_acceptances[arm])
            accepted = min(right, drafted)
            levels = max(levels, depth)
        elif drafts[slot].source == SIBLINGS:
            drafted, accepted = draft_from_siblings(r, drafts[slot], r[slot].generated, d, memory, window)
            levels = max(levels, drafted)
        else:
            drafted, accepted = draft(
                RUNS, drafts[slot].at, r[slot].generated, window, 1.0, d.runs, d.log_acceptances[arm]
            )
            levels = max(levels, drafted)
        drafts[slot].drafted = drafted
        drafts[slot].accepted = accepted
    if proposing == 0:
        return 0.0, arm
    round_s = interpolate(d.draft_sequences, d.round_s[arm], float(proposing))
    return round_s + levels * interpolate(d.draft_sequences, d.step_s[arm], float(proposing)), arm


@part
def learn(r: Requests, drafts: Drafts, t: Totals, d: Decoding, memory: Memory, arm: int, seconds: float) -> None:
    """Count the drafts of the pass that is over: windows, totals, gauges; what it yielded in `seconds`, for the bandit."""
    proposed, drafted_of_pass, accepted_of_pass, modelled, accepted_of_model = 0, 0, 0, 0, 0
    for i in range(t.n_running):
        slot = r[i].running
        if drafts[slot].proposed == 0:
            continue
        drafted, accepted = drafts[slot].drafted, drafts[slot].accepted
        in_tree = d.rule.trees and drafts[slot].source == MODEL
        count_draft(drafts[slot], d.rule.window, not in_tree, drafted, accepted, drafts[slot].left)
        if in_tree:
            modelled += 1
            accepted_of_model += accepted
        proposed += 1
        drafted_of_pass += drafted
        accepted_of_pass += accepted
    if proposed > 0:
        remember(t, drafted_of_pass, accepted_of_pass)
    if modelled > 0:
        observe(d.bandit, memory.bandit, arm, 1.0 + accepted_of_model / modelled, modelled, seconds)


@part
def _prefill_drafter(t: Totals, d: Decoding, tokens: int) -> None:
    """Let the drafter compute the tokens that the pass has prefilled, after it."""
    seconds = d.prefill_s * tokens
    share = t.recent_accepted / t.recent_drafted if t.recent_drafted > 0 else 0.0
    t.drafts_accepted_s += share * seconds
    t.drafts_rejected_s += (1.0 - share) * seconds
    t.slowed_s += (t.slowdown - 1.0) * seconds
    t.slot_s += t.n_running * t.slowdown * seconds
    t.now_s += t.slowdown * seconds


@part
def _all_may_draft(r: Requests, t: Totals) -> bool:
    """Return whether all running requests gained something in their last pass: a drafter follows what was sampled."""
    drafting = 0
    for i in range(t.n_running):
        drafting += r[r[i].running].gained >= 0
    return bool(drafting == t.n_running)


@part
def _unsure(r: Requests, t: Totals) -> bool:
    """Return whether an async scheduler has blocks for draft tokens of a running request that were rejected just now."""
    rejected = 0
    for i in range(t.n_running):
        rejected += r[r[i].running].rejected
    return bool(rejected > 0)


@part
def _any_source(r: Requests, drafts: Drafts, t: Totals, source: int) -> bool:
    """Return whether a running request drafts from this source (`NONE`: from any)."""
    for i in range(t.n_running):
        own = drafts[r[i].running].source
        if own != NONE and (own == source or source == NONE):
            return True
    return False
