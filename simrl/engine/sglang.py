"""SGLang's scheduler (0.5.23, `schedule_policy.py` and `retract_decode`): who starts, who is
retracted, and how much of the KV cache it holds back.

Invariant: a pass computes prompts or decodes, not both, and prompts go first. A request starts if
its known tokens and the tokens that it and the running ones are taken to generate fit the cache.
Its own count whole, those of running ones by a ratio that decays with each pass that decodes; both
are clipped. Once one does not fit, nobody starts until a request leaves. Where the next tokens of
all do not fit, the request with the fewest generated tokens is retracted: it queues up last.
"""

from __future__ import annotations

from simrl.engine.leaving import preempt_last
from simrl.engine.prefix_cache import evict, find
from simrl.engine.requests import (
    known_tokens,
    more_blocks,
    places,
    queue_up,
    reserved_alone,
    waiting_at,
)
from simrl.engine.state import PREEMPTED, Limits, Requests, Totals
from simrl.profile.compiled import inlined, lean
from simrl.speculation.decoding import Ints

# SGLang's environment variables SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR, SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS and
# SGLANG_RETRACT_DECODE_STEPS, and the longest queue that is sorted by prefixes
LEAST_OF_RATIO, DECAY_PASSES, TOKENS_AFTER_RETRACTION, MOST_SORTED = 0.14, 600, 20, 128


@lean
def may_prefill(r: Requests, t: Totals, limits: Limits) -> bool:
    """Return whether the pass to come looks for prompts to compute."""
    if is_partial(r, t):
        return True
    if t.n_waiting == 0 or t.admitting == 0 or places(t) >= limits.max_num_seqs:
        return False
    return t.full_at == 0 or places(t) < t.full_at


@inlined
def is_partial(r: Requests, t: Totals) -> bool:
    """Return whether the youngest running request is in the middle of its context."""
    return bool(t.n_running > 0 and r[r[t.n_running - 1].running].complete == 0)


@lean
def reserved_blocks(r: Requests, t: Totals, limits: Limits, n: int) -> float:
    """Return the blocks that the first `n` running requests are taken to need."""
    least, tokens = LEAST_OF_RATIO * limits.start_ratio, 0.0
    ratio = t.token_ratio
    if t.decays > 0:
        ratio = max(ratio - t.decays * (limits.start_ratio - least) / DECAY_PASSES, least)
    for i in range(n):
        tokens += reserved_alone(r[r[i].running], limits)
    return ratio * tokens


@lean
def keep_room(r: Requests, t: Totals, limits: Limits, drafts: bool) -> None:
    """Retract requests until the others can decode. They draft no more than their windows."""
    if t.n_running == 0:
        return
    t.decays += 1
    retracted = 0
    while t.n_running > 1 and _next_blocks(r, t, limits, drafts) > t.free_blocks + t.held_blocks:
        _retract(r, t)
        retracted += 1
    if retracted > 0:
        generated = TOKENS_AFTER_RETRACTION * t.n_running
        for i in range(t.n_running):
            generated += r[r[i].running].generated
        t.token_ratio = min(generated / (limits.max_new_tokens * t.n_running + 1), 1.0)
        t.decays = 0


@inlined
def _next_blocks(r: Requests, t: Totals, limits: Limits, drafts: bool) -> int:
    """Return the blocks that the running requests take in the next pass, if all decode."""
    blocks = 0
    for i in range(t.n_running):
        q = r[r[i].running]
        tokens = 1 + q.window if drafts else 1
        blocks += more_blocks(q, q.computed + q.rejected + tokens, limits)
    return blocks


@inlined
def _retract(r: Requests, t: Totals) -> None:
    """Retract the running request with the fewest tokens, of equals the one with the longest
    prompt. Of its cache, what it had when it started can be found again."""
    t.preemptions += 1
    n, waiting, best = t.n_running, t.n_waiting, 0
    for i in range(n):
        q, other = r[r[i].running], r[r[best].running]
        fewer = q.generated - other.generated
        if fewer < 0 or (fewer == 0 and q.prompt >= other.prompt):
            best = i
    slot = r[best].running
    for i in range(best, n - 1):
        r[i].running = r[i + 1].running
    r[n - 1].running = slot
    q = r[slot]
    q.reached = max(q.reached, q.computed)
    q.computed = min(q.computed, q.kept)
    preempt_last(r, t, PREEMPTED)
    if t.n_waiting > waiting:  # it waits first in line: it shall be the last
        t.waiting_head = waiting_at(r, t, 1)
        t.n_waiting -= 1
        queue_up(r, t, slot)


@lean
def sort_by_prefix(r: Requests, t: Totals, found: Ints) -> None:
    """Sort the waiting requests by the tokens that each finds (schedule_policy lpm), unless they
    are too many."""
    if t.prefix_caching == 0 or t.n_waiting > MOST_SORTED:
        return
    evict(r, t)
    for i in range(t.n_waiting):
        slot = r[waiting_at(r, t, i)].waiting
        found[slot] = find(r, t, slot, known_tokens(r[slot]))[0]
        place = i
        while place > 0 and found[r[waiting_at(r, t, place - 1)].waiting] < found[slot]:
            r[waiting_at(r, t, place)].waiting = r[waiting_at(r, t, place - 1)].waiting
            place -= 1
        r[waiting_at(r, t, place)].waiting = slot


@inlined
def rest(t: Totals, limits: Limits) -> None:
    """Take the ratio of the start again if an engine is idle."""
    if t.n_running + t.n_waiting == 0:
        t.token_ratio = limits.start_ratio
        t.decays = 0
