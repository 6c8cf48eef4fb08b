"""TEMPORARY adapter: the contract of a pass over today's kernels."""

from __future__ import annotations

import numpy as np

from simrl.engine.decoupled import (
    _abandon,
    _end_draft,
    _put_back,
    _start_draft,
    _take_windows,
    _verified,
)
from simrl.engine.leaving import drop_caches, stop
from simrl.engine.lock_step import Ranks, _pass, any_busy
from simrl.engine.passes import iterate
from simrl.engine.requests import REDRAFTED
from simrl.engine.requests import busy as row_busy
from simrl.engine.speculative import _any_source, _prefill_drafter, _unsure, learn, propose
from simrl.engine.stretches import Memory, end_of_stretch, go_to_end, stretch_length
from simrl.profile.compiled import part
from simrl.speculation.bandit import BanditState
from simrl.speculation.decoding import BATCH, ELASTIC, MODEL, NONE, gate_opens, passes_to_next_try, remember
from simrl.speculation.gates import ELASTIC_ON, next_elastic


@part
def ranks(e, first, dp):
    return Ranks(
        e.requests[first : first + dp],
        e.totals[first : first + dp].reshape(dp, 1),
        e.words,
        e.words,
        e.drafts[first],
    )


@part
def busy(e, first, limits) -> bool:
    if limits.dp > 1:
        return any_busy(ranks(e, first, limits.dp))
    return row_busy(e.totals[first])


@part
def plan(e, first, tables, limits, d):
    r, t, drafts = e.requests[first], e.totals[first], e.drafts[first]
    if limits.dp > 1:
        return 0
    if d is None:
        return stretch_length(r, drafts, t, limits)
    rule = d.rule
    if rule.decoupled:
        return 0
    n = t.n_running
    speculates = gate_opens(rule, d.gate_batch, t, n)
    passes = stretch_length(r, drafts, t, limits)
    plain = passes > 0 and not (speculates and _any_source(r, drafts, t, NONE))
    if not plain or _unsure(r, t):
        return 0
    if rule.gate == ELASTIC and n <= rule.threshold:
        passes = min(passes, max(rule.patience - t.elastic_state, 1))
    elif rule.gate == BATCH and not speculates:
        passes = passes_to_next_try(t, passes)
    return passes


@part
def end_of_repeat(e, first, tables, limits, passes, until_s):
    """Return (done, boundary) of a repeat."""
    return end_of_stretch(e.requests[first], e.totals[first], tables, passes, until_s)


@part
def _after(e, first, d, passes_before, prefill_before, speculates):
    r, t, drafts, rule = e.requests[first], e.totals[first], e.drafts[first], d.rule
    batch = t.n_running
    stop(r, t)
    if rule.gate == BATCH and not speculates:
        for _ in range(t.passes - passes_before):
            remember(t, 0, 0)
    if rule.gate == ELASTIC and t.elastic_state != ELASTIC_ON and t.prefill_tokens == prefill_before:
        for _ in range(t.passes - passes_before):
            t.elastic_state = next_elastic(t.elastic_state, batch, rule.threshold, rule.patience)
        if t.elastic_state == ELASTIC_ON and _any_source(r, drafts, t, MODEL):
            drop_caches(r, t, REDRAFTED)


@part
def repeat(e, first, tables, limits, d, passes, end_s):
    r, t, drafts = e.requests[first], e.totals[first], e.drafts[first]
    if d is None:
        go_to_end(r, t, limits, passes, end_s)
        stop(r, t)
    else:
        speculates = gate_opens(d.rule, d.gate_batch, t, t.n_running)
        passes_before, prefill_before = t.passes, t.prefill_tokens
        go_to_end(r, t, limits, passes, end_s)
        _after(e, first, d, passes_before, prefill_before, speculates)


@part
def step(e, first, tables, limits, d):
    r, t, drafts = e.requests[first], e.totals[first], e.drafts[first]
    if limits.dp > 1:
        k = ranks(e, first, limits.dp)
        _pass(k, tables, limits)
        for i in range(limits.dp):
            stop(k.requests[i], k.totals[i, 0])
    elif d is None:
        iterate(r, drafts, t, tables, limits, 0.0)
        stop(r, t)
    elif d.rule.decoupled:
        t.n_stopped = 0
        _abandon(r, drafts, t)
        if t.draft_ends_s <= t.now_s:
            _end_draft(r, drafts, t)
        works = _take_windows(r, drafts, t, limits, d)
        _abandon(r, drafts, t)
        if t.draft_ends_s == np.inf:
            _start_draft(r, drafts, t, d, t.now_s)
        if not works:
            wait_s = t.draft_ends_s - t.now_s
            share = t.recent_accepted / t.recent_drafted if t.recent_drafted > 0 else 0.0
            t.drafts_accepted_s += share * wait_s
            t.drafts_rejected_s += (1.0 - share) * wait_s
            t.slot_s += t.n_running * wait_s
            t.now_s = t.draft_ends_s
            return
        iterate(r, drafts, t, tables, limits, 0.0)
        _put_back(r, drafts, t)
        while t.draft_ends_s < t.now_s:
            ended_s = t.draft_ends_s
            _end_draft(r, drafts, t)
            _start_draft(r, drafts, t, d, ended_s)
        _verified(r, drafts, t, d)
        stop(r, t)
    else:
        memory = Memory(
            BanditState(e.bandit.arrived[first], e.bandit.ordered[first], e.bandit.counts[first]),
            e.places[first],
            e.readable,
        )
        rule, n = d.rule, t.n_running
        speculates = gate_opens(rule, d.gate_batch, t, n)
        passes_before, prefill_before = t.passes, t.prefill_tokens
        draft_s, arm = propose(r, drafts, t, limits, d, memory, speculates)
        before_s = t.now_s
        iterate(r, drafts, t, tables, limits, draft_s)
        learn(r, drafts, t, d, memory, arm, t.now_s - before_s)
        if d.prefill_s > 0.0 and t.prefill_tokens > prefill_before and (rule.gate != ELASTIC or speculates):
            _prefill_drafter(t, d, t.prefill_tokens - prefill_before)
        _after(e, first, d, passes_before, prefill_before, speculates)
