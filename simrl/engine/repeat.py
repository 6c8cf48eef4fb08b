"""Many passes at once, in which the batch of an engine only decodes, without drafts.

Invariant: `repeat` equals that many `step`s, to the last token; only the lengths grow.
"""

from __future__ import annotations

import numpy as np

from simrl.engine.cost import end_of_stretch
from simrl.engine.drafts import drafts_now, heed_gate
from simrl.engine.leaving import stop
from simrl.engine.requests import admissible, make_room, more_blocks
from simrl.engine.state import NEVER, PREEMPTED, Engines, Limits, Requests, Totals
from simrl.profile.compiled import inlined, lean
from simrl.profile.profile import Tables
from simrl.speculation.decoding import (
    BATCH,
    ELASTIC,
    TOGGLE,
    Decoding,
    Ints,
    gate_opens,
    passes_to_next_try,
)

LARGEST_COUNTED_BLOCK = 4096  # tokens; with larger ones, passes are counted one by one if need be


@lean
def has_work(t: Totals) -> bool:
    """Return whether a next pass would do something for this rank."""
    return t.n_running > 0 or (t.n_waiting > t.n_once_more and t.admitting == 1)


@lean
def busy(e: Engines, first: int, limits: Limits) -> bool:
    """Return whether a next pass would do something."""
    working = 0
    for k in range(limits.dp):
        working += has_work(e.totals[first + k])
    return working > 0


@lean
def plan(
    e: Engines, first: int, tables: Tables, limits: Limits, d: Decoding | None
) -> tuple[int, float]:
    """Return for how many passes an engine that is busy surely only decodes, without drafts, and
    the boundary after them. 0 passes: the next one may be of any kind."""
    t, passes = e.totals[first], NEVER
    if e.record.shape[1] > 0:  # it has each pass
        return 0, t.now_s
    for k in range(limits.dp):
        t = e.totals[first + k]
        if d is not None and (d.rule.decoupled or drafts_now(e.requests[first + k], t, d)):
            return 0, t.now_s
        if limits.dp == 1 or has_work(t) or t.n_leaving + t.n_once_more > 0:
            passes = min(passes, _sure_passes(e.requests[first + k], t, limits, e.scratch))
        if d is not None and passes > 0 and t.n_running > 0:
            if d.rule.gate == ELASTIC and t.n_running <= d.rule.threshold:
                passes = min(passes, max(d.rule.patience - t.elastic_state, 1))
            elif d.rule.gate == TOGGLE and (t.elastic_state > 0 or t.n_running > d.rule.threshold):
                passes = 0  # it looks before each
            elif d.rule.gate == BATCH and not gate_opens(d.rule, d.gate_batch, t, t.n_running):
                passes = passes_to_next_try(t, passes)
    if passes == 0 or passes == NEVER:
        return 0, t.now_s
    return end_of_stretch(e, first, tables, limits, passes, np.inf)


@inlined
def _sure_passes(r: Requests, t: Totals, limits: Limits, scratch: Ints) -> int:
    """Return for how many passes a rank surely only decodes, up to the first stop. Sets the
    `lengths` in the first of them."""
    n = t.n_running
    if n == 0 or n > limits.max_num_batched_tokens or t.n_leaving + t.n_once_more > 0:
        return 0
    if limits.prefill_interval > 1 and t.n_waiting + t.crowded > 0:
        return 0  # which pass may start it changes from pass to pass
    late = limits.async_scheduling and t.n_waiting > 0
    if late and r[r[t.waiting_head].waiting].seen_at > t.passes:
        return 0  # the first came too late for the pass to come, but not for the one after
    if admissible(r, t, limits, limits.max_num_batched_tokens - n) > 0:
        return 0
    if limits.window_groups > 0 and t.n_waiting > 0 and n < limits.max_num_seqs:
        return 0  # what leaves the windows may let it start
    passes, lengths = NEVER, n
    for i in range(n):
        q = r[r[i].running]
        decodes = q.prompt + q.generated - q.computed == 1 and (
            q.complete == 1 or (not limits.sglang and limits.prefill_interval == 1)
        )
        if q.generated == 0 or not decodes or q.rejected > 0:
            return 0
        passes = min(passes, min(q.stop_at, q.watch_at) - q.generated)
        lengths += q.computed
    t.lengths = lengths
    return min(passes, _passes_with_room(r, t, limits, passes, scratch))


@lean
def _passes_with_room(r: Requests, t: Totals, limits: Limits, enough: int, needs: Ints) -> int:
    """Return for how many passes of pure decoding there are blocks, at least; `enough` or more
    where that is clear at once."""
    n, size = t.n_running, limits.block_size
    # In block_size passes, a request needs one new block in each group, at most; what leaves
    # windows is not counted.
    room = (t.free_blocks + t.held_blocks) // (limits.full_groups + limits.window_groups)
    passes = room // n * size
    if passes >= enough or size > LARGEST_COUNTED_BLOCK:
        return passes
    room -= room // n * n
    for k in range(size):  # requests that need a block in the first pass, the second …
        needs[k] = 0
    for i in range(n):
        needs[-r[r[i].running].computed % size] += 1
    for k in range(size):
        room -= needs[k]
        if room < 0:
            return passes + k
    return passes


@inlined
def repeat(
    e: Engines, first: int, limits: Limits, d: Decoding | None, passes: int, end_s: float
) -> None:
    """Do the passes that `plan`, or `end_of_stretch`, has found last for this engine, and list what
    stops in the last one."""
    for k in range(limits.dp):
        r, t = e.requests[first + k], e.totals[first + k]
        batch = t.n_running
        _repeat(r, t, limits, passes, end_s)
        stop(r, t)
        if d is not None:
            speculates = gate_opens(d.rule, d.gate_batch, t, batch)
            heed_gate(r, t, d, passes, batch, speculates)


@inlined
def _repeat(r: Requests, t: Totals, limits: Limits, passes: int, end_s: float) -> None:
    """Give a rank's requests what they gain in passes up to `end_s`."""
    n, grown = t.n_running, 0
    flying = 1 if limits.async_scheduling and limits.window_groups > 0 else 0
    for i in range(n):
        q = r[r[i].running]
        if flying > 0 and passes > 1:
            q.in_flight = flying
        q.computed += passes - 1
        more = more_blocks(q, q.computed + 1, limits)
        q.in_flight = flying
        q.computed += 1
        q.generated += passes
        q.complete = 1
        q.gained = 1
        q.rejected = 0
        q.blocks += more
        grown += more
    make_room(r, t, grown, PREEMPTED)
    t.free_blocks -= grown
    t.passes += passes
    t.decays += passes
    t.generated_tokens += n * passes
    t.decodes += n * passes
    t.prefill = 0
    slowed_s, unslowed_s = end_s - t.now_s, (end_s - t.now_s) / t.slowdown
    own_s = t.own_s / t.slowdown if limits.dp > 1 else unslowed_s
    t.decode_s += own_s
    t.lock_step_s += unslowed_s - own_s
    t.slowed_s += slowed_s - unslowed_s
    t.slot_s += n * slowed_s
    t.now_s = end_s
